"""The SQL statements that find, write and patch rows of `item_groups`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from sqlalchemy.engine import Connection

from core.bits import bitfield
from core.bits.cache import Key
from core.storage import dialects
from core.storage.statements import LIST, UPDATED, chunks, inserts

_KEY: Final = ("batch_id", "group_no")
_VALUES: Final = bitfield.Columns._fields
_COLUMNS: Final = ", ".join([*_KEY, *_VALUES])

Patch = tuple[Key, bitfield.Group, list[tuple[int, bytes]]]
"""The new state of a group, and the bytes of `resolved` that its row lacks, as (position, byte)."""


def among(by_batch: Mapping[int, Collection[int]]) -> str:
    """The SQL condition that selects these groups. Batches with the same group numbers (often only the first group)
    share a part of it: the server plans each part separately, which takes as long as reading the rows."""
    by_groups: dict[tuple[int, ...], list[int]] = {}
    for batch, groups in by_batch.items():
        by_groups.setdefault(tuple(sorted(groups)), []).append(batch)
    return " OR ".join(
        f"(batch_id IN ({','.join(map(str, ids))}) AND group_no IN ({','.join(map(str, part))}))"
        for groups, batches in by_groups.items()
        for ids in chunks(sorted(batches), LIST)
        for part in chunks(list(groups), LIST)
    )


def count_full(batch: int, size: int, start: int, stop: int) -> str:
    """The query for the number of full groups among start .. stop-1. It is at most stop - start, and reads no blob."""
    return (
        "SELECT COUNT(*) FROM item_groups "  # noqa: S608
        f"WHERE batch_id = {batch} AND group_no >= {start} AND group_no < {stop} AND resolved_count = {size}"
    )


def row(tx: Connection, key: Key, group: bitfield.Group, issued: int) -> str:
    """The VALUES of a group with `issued` items. Blobs are hexadecimal, as a driver takes ten times as long to quote a
    kilobyte."""
    columns = group.dump(issued)
    blob = dialects.of(tx).blob
    resolved = "NULL" if columns.resolved is None else blob(columns.resolved.hex())
    failed = "NULL" if columns.failed is None else blob(columns.failed.hex())
    skipped = "NULL,NULL" if columns.skipped is None else f"{blob(columns.skipped.hex())},{columns.skipped_count}"
    return f"({key[0]},{key[1]},{resolved},{columns.resolved_count},{failed},{columns.failed_count},{skipped})"


def insert(rows: Sequence[str], table: str = "item_groups") -> list[str]:
    """INSERTs of rows that don't exist. `table`: its name, if it needs a longer one."""
    return inserts(table, _COLUMNS, rows)


def upsert(tx: Connection, rows: Sequence[str]) -> list[str]:
    """INSERTs of rows that may exist, and that no other transaction may write now."""
    dialect = dialects.of(tx)
    return inserts(dialect.name(tx, "item_groups"), _COLUMNS, rows, dialect.upsert(_KEY, _VALUES)) if rows else []


def patch(tx: Connection, patches: list[Patch]) -> list[str]:
    """UPDATEs that change a few bytes of each row's blob, as sending and parsing whole blobs costs several times as
    much. Not for SQLite."""
    return [_patch(dialects.of(tx), part) for part in chunks(patches, UPDATED)]


def _patch(dialect: dialects.Dialect, patches: Sequence[Patch]) -> str:
    bits, counts = [], []
    by_batch: dict[int, list[int]] = {}
    # A single value is faster to look up than a pair, and nearly always all rows are of the same batch.
    same_batch = patches[0][0][0] == patches[-1][0][0]
    for (batch, number), group, changes in patches:
        blob = dialect.patch("resolved", changes)
        case = f"WHEN {number} THEN" if same_batch else f"WHEN batch_id={batch} AND group_no={number} THEN"
        bits.append(f"{case} {blob}")
        counts.append(f"{case} {group.resolved_count}")
        by_batch.setdefault(batch, []).append(number)
    subject = "group_no " if same_batch else ""
    return (
        f"UPDATE item_groups SET resolved = CASE {subject}{' '.join(bits)} ELSE resolved END, "  # noqa: S608
        f"resolved_count = CASE {subject}{' '.join(counts)} ELSE resolved_count END WHERE {among(by_batch)}"
    )
