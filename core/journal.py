"""The journal: acks that came in no order, kept beside the groups until it pays to write those.

A hundred acks at random meet a hundred groups, and each is a row to lock, to read and to write, a kilobyte logged for
one bit. So of a batch that is acked so, the numbers that an ack transaction resolved are one row here, and the groups
are written when some thousands have come together: *folding*. The bits of a group are those of its row and those that
the journal names. What could go wrong, and why it can't:

*Two transactions flip the same bit.* Group locks don't keep them apart any more, as an entry writes no group. So a
journaled batch changes under the lock of its own row alone, taken first: all its ack transactions are one after the
other. `batches.journal_next` says that it is journaled; 0: it isn't, and its groups are locked as described in `acks`.

*A batch becomes journaled while others have locked its groups.* They lock the batch row last, find `journal_next`
moved, roll back and begin again, in the other order. Where that meets the fold of the same groups, the database ends
one of the two as a deadlock, and it is run again.

*Bits in memory are not the batch's any more.* Each transaction that changes a journaled batch, with an entry or
without, moves `journal_next` under the lock. What is held in memory is exact as of one value of it (`Known`), and is
brought up to date by reading the entries in between; where one of these is missing, since that transaction wrote groups
or folded, it is read anew.

*A reader sees neither the entry nor the group.* Folding writes the groups and removes the entries in one transaction.
Whoever reads reads the journal first and the groups then, so he sees a folded item at least once; twice is once, as
bits are only ever set.

An entry holds nothing but acks of items that were pending. Failures, redriven items and masks are written to the groups
at once, under the same lock. The transaction that completes a batch folds it.

Source: a log of changes beside a page that is rewritten when the log has grown, as in O'Neil et al., The Log-Structured
Merge-Tree (1996); that of one batch never has more than `MOST` numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import statements, tables
from core.bitfield import Group

SINCE: Final = "0008"
"""The revision of the schema that brought it."""
GROUPS: Final = 4096
"""Batches of more groups aren't journaled: between two folds few of their groups would be met twice."""
WIDE: Final = 2048
"""Batches of smaller groups aren't journaled: their rows are small, too."""
SCATTERED: Final = 24
"""A flush that changes so many groups of a batch, or more, makes it journaled, if"""
DENSE: Final = 8
"""it changes fewer items than this of each, on the average."""
FEW: Final = 3
"""Changes of fewer groups are written to the groups."""
ENTRY: Final = 8192
"""Numbers of one entry at the most: 32 kB."""
LEAST: Final = 4096
MOST: Final = 65_536
"""Numbers that a journal holds at the most, before it is folded: 256 kB."""

_journal = tables.ack_journal.c

Recent = Mapping[int, list[int]]
"""By group, the indexes that the journal names."""


def limit(groups: int) -> int:
    """How many numbers the journal of a batch of so many groups holds before it is folded: so many that a group is
    written for sixteen of them."""
    return min(max(16 * groups, LEAST), MOST)


def pays(group_size: int, groups: int, changed: int, items: int) -> bool:
    """Whether a batch of `groups` groups should be journaled, since a flush has changed so many items of so many."""
    return group_size >= WIDE and groups <= GROUPS and changed >= SCATTERED and items < DENSE * changed


def holds(groups: int, changed: int, items: int) -> bool:
    """Whether so many acks, in so many groups, are an entry of a batch of `groups` groups, which may have grown."""
    return groups <= GROUPS and changed >= FEW and items <= ENTRY


def encode(numbers: Iterable[int]) -> bytes:
    """Little-endian integers of four bytes: a journaled batch has fewer than 2^27 items."""
    values = array("I", numbers)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def decode(entry: bytes) -> array[int]:
    values = array("I")
    values.frombytes(entry)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def recent(tx: Connection, batch: int, group_size: int) -> dict[int, list[int]]:
    """What the journal of a batch names, by group. Read it before the groups."""
    found: dict[int, list[int]] = {}
    query = sa.select(_journal.numbers).where(_journal.batch_id == batch)
    for (entry,) in tx.execute(query):
        _sort_in(found, entry, group_size)
    return found


def _sort_in(found: dict[int, list[int]], entry: bytes, group_size: int) -> int:
    numbers = decode(entry)
    for number in numbers:
        group, index = divmod(number, group_size)
        found.setdefault(group, []).append(index)
    return len(numbers)


def union(group: Group, indexes: Iterable[int]) -> Group:
    """Set these bits in the group, which is a row's; some may be set. (A failed one isn't set here: it is failed.)"""
    for index in indexes:
        if not group.resolved[index]:
            group.ack_one(index)
    return group


@dataclass(slots=True)
class Known:
    """A journaled batch as it was when its `journal_next` was `next`: some of its groups, bit for bit; `unfolded` are
    the groups that the journal names, `numbers` counts what it holds."""

    next: int
    groups: dict[int, Group] = field(default_factory=dict)
    unfolded: set[int] = field(default_factory=set)
    numbers: int = 0


def load(tx: Connection, batch: int, group_size: int, known: Known | None, next: int, wanted: Collection[int]) -> Known:
    """The batch whose row is locked with this `journal_next`, with at least the `wanted` groups. `known` is what is
    held of it, and is changed."""
    if next == 0:
        # Not journaled yet: others change its groups, and nothing here would tell.
        known = None
    elif known is not None and known.next != next:
        known = known if _catch_up(tx, batch, group_size, known, next) else None
    if known is None:
        known = Known(next)
        indexes = _read(tx, batch, group_size, known)
    else:
        indexes = None
    absent = [group for group in wanted if group not in known.groups]
    if absent:
        if indexes is None:
            indexes = recent(tx, batch, group_size) if not known.unfolded.isdisjoint(absent) else {}
        fetch(tx, batch, group_size, known, absent, indexes)
    return known


def _read(tx: Connection, batch: int, group_size: int, known: Known) -> dict[int, list[int]]:
    indexes = recent(tx, batch, group_size)
    known.unfolded = set(indexes)
    known.numbers = sum(map(len, indexes.values()))
    return indexes


def _catch_up(tx: Connection, batch: int, group_size: int, known: Known, next: int) -> bool:
    """Take in the entries since; False where one is missing."""
    if known.next > next:
        return False
    query = (
        sa.select(_journal.numbers)
        .where(_journal.batch_id == batch, _journal.entry_no >= known.next)
        .order_by(_journal.entry_no)
    )
    entries = tx.execute(query).all()
    if len(entries) != next - known.next:
        return False
    came: dict[int, list[int]] = {}
    for (entry,) in entries:
        known.numbers += _sort_in(came, entry, group_size)
    for group, indexes in came.items():
        known.unfolded.add(group)
        if group in known.groups:
            union(known.groups[group], indexes)
    known.next = next
    return True


def fetch(tx: Connection, batch: int, group_size: int, known: Known, absent: list[int], indexes: Recent) -> None:
    """Read groups that aren't held, with what the journal names of them."""
    rows = {}
    for part in statements.chunks(sorted(absent), statements.LIST):
        listed = ",".join(map(str, part))
        text = (
            "SELECT group_no, resolved, failed, resolved_count, failed_count FROM item_groups "  # noqa: S608
            f"WHERE batch_id = {batch} AND group_no IN ({listed})"
        )
        for number, resolved, failed, resolved_count, failed_count in statements.run(tx, text)[0]:
            rows[number] = Group.load(resolved, failed, resolved_count, failed_count, group_size)
    for number in absent:
        group = rows.get(number) or Group.empty(group_size)
        group.changed = None
        known.groups[number] = union(group, indexes.get(number, ()))


def complete_groups(tx: Connection, batch: int, group_size: int, known: Known) -> None:
    """Have all groups that the journal names, so that it can be folded."""
    absent = [group for group in known.unfolded if group not in known.groups]
    if absent:
        fetch(tx, batch, group_size, known, absent, recent(tx, batch, group_size))


def append(batch: int, entry: int, numbers: Iterable[int]) -> str:
    """The statement that adds an entry."""
    return (
        "INSERT INTO ack_journal (batch_id, entry_no, numbers) VALUES "  # noqa: S608
        f"({batch},{entry},x'{encode(numbers).hex()}')"
    )


def clear(batch: int) -> str:
    """The statement that removes all entries."""
    return f"DELETE FROM ack_journal WHERE batch_id = {batch}"  # noqa: S608
