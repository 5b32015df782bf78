"""Rows of `item_groups` as text of statements: to find some among all, to write them whole, to patch them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from sqlalchemy.engine import Connection

from core.bits import bitfield
from core.bits.cache import Key
from core.storage import dialects
from core.storage.statements import LIST, chunks

_INSERT: Final = "INSERT INTO item_groups (batch_id, group_no, resolved, failed, resolved_count, failed_count) VALUES "
_KEY: Final = ("batch_id", "group_no")
_VALUES: Final = ("resolved", "failed", "resolved_count", "failed_count")
_PATCHED: Final = 64
"""Rows of one patching UPDATE; the server looks for each among the others, so the work grows with the square."""
TEXT: Final = 500_000
"""About how many characters of rows go into one statement: half of the smallest limit that a server has by default."""

Patch = tuple[Key, bitfield.Group, list[tuple[int, bytes]]]
"""A group as it is to be, and the bytes of `resolved`, by place, in which its row differs."""


def among(by_batch: Mapping[int, Collection[int]]) -> str:
    """The condition that holds of these groups, by batch. Batches of which the same groups are wanted, as the first one
    of each, share their part: the server makes a plan for each, and takes as long for that as for the rows."""
    by_groups: dict[tuple[int, ...], list[int]] = {}
    for batch, groups in by_batch.items():
        by_groups.setdefault(tuple(sorted(groups)), []).append(batch)
    return " OR ".join(
        f"(batch_id IN ({','.join(map(str, some))}) AND group_no IN ({','.join(map(str, part))}))"
        for groups, batches in by_groups.items()
        for some in chunks(sorted(batches), LIST)
        for part in chunks(list(groups), LIST)
    )


def row(key: Key, group: bitfield.Group, issued: int) -> str:
    """All that is stored of a group of which so many items are issued. Hexadecimal digits, as a driver takes ten times
    as long to quote a kilobyte."""
    resolved, failed, resolved_count, failed_count = group.dump(issued)
    bits = "NULL" if resolved is None else f"x'{resolved.hex()}'"
    failed_bits = "NULL" if failed is None else f"x'{failed.hex()}'"
    return f"({key[0]},{key[1]},{bits},{failed_bits},{resolved_count},{failed_count})"


def insert(rows: Sequence[str]) -> list[str]:
    """Of rows that aren't there."""
    return [_INSERT + part for part in _lists(rows)]


def upsert(tx: Connection, rows: Sequence[str]) -> list[str]:
    """Of rows that nobody else writes, there or not."""
    replace = dialects.of(tx).upsert(_KEY, _VALUES)
    return [_INSERT + part + replace for part in _lists(rows)]


def patch(wanted: list[Patch]) -> list[str]:
    """UPDATEs that change a few bytes of each row's blob: to send and parse whole ones costs several times that. Not
    on SQLite."""
    return [_patch(part) for part in chunks(wanted, _PATCHED)]


def _patch(wanted: Sequence[Patch]) -> str:
    bits, counts = [], []
    by_batch: dict[int, list[int]] = {}
    # One value is looked up sooner than a pair, and nearly always all rows are of one batch.
    one = wanted[0][0][0] == wanted[-1][0][0]
    for (batch, number), group, patches in wanted:
        blob = "resolved"
        for byte, value in patches:
            blob = f"INSERT({blob},{byte + 1},1,x'{value.hex()}')"
        this = f"WHEN {number} THEN" if one else f"WHEN batch_id={batch} AND group_no={number} THEN"
        bits.append(f"{this} {blob}")
        counts.append(f"{this} {group.resolved_count}")
        by_batch.setdefault(batch, []).append(number)
    of = "group_no " if one else ""
    return (
        f"UPDATE item_groups SET resolved = CASE {of}{' '.join(bits)} ELSE resolved END, "  # noqa: S608
        f"resolved_count = CASE {of}{' '.join(counts)} ELSE resolved_count END WHERE {among(by_batch)}"
    )


def _lists(rows: Sequence[str]) -> Iterator[str]:
    """The rows, in lists of about `TEXT` characters."""
    first = size = 0
    for position, text in enumerate(rows):
        size += len(text)
        if size >= TEXT:
            yield ",".join(rows[first : position + 1])
            first, size = position + 1, 0
    if first < len(rows):
        yield ",".join(rows[first:])
