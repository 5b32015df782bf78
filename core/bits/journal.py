"""The journal: acks that came in no order, kept beside the groups until it pays to write those.

A hundred acks at random meet a hundred groups, and each is a row to lock, to read and to write, a kilobyte logged for
one bit. So of a batch that is acked so, the numbers that an ack transaction resolved are one row here, an entry, and
the groups are written when some thousands have come together: *folding*. The bits of a group are those of its row and
those that the journal names. What could go wrong, and why it can't:

*Two transactions flip the same bit.* Group locks don't keep them apart any more, as an entry writes no group. So a
journaled batch changes under the lock of its own row alone, taken first: all its ack transactions are one after the
other. `batches.journal_next` says that it is journaled; 0: it isn't, and its groups are locked as described in `flush`.

*A batch becomes journaled while others have locked its groups.* They lock the batch row last, find `journal_next`
moved, roll back and begin again, in the other order. Where that meets the fold of the same groups, the database ends
one of the two as a deadlock, and it is run again.

*Bits in memory are not the batch's any more.* Each transaction that changes a journaled batch moves `journal_next`
under the lock, and its entry says what it did: which pending items it acked, and which groups it wrote. A
`JournalState` is exact as of one value of `journal_next`. Under the lock it is brought up to date by the entries since
then; if one of them is missing, everything is read again.

*An item is in the journal and in its group.* Twice is once: bits are only ever set, and an item that an entry names was
acked then, for good. So folding a group removes nothing: its mark in the entry of the fold says that its row has all
that was named before. The oldest entries are removed when all groups that they name have been folded.

*A reader sees neither the entry nor the group.* Entries are removed by the transaction that folds the last of their
groups, or by a later one. Whoever reads reads the journal first and the groups then, so he sees a folded item at least
once.

*The acks of a thousand consumers wait for a fold.* When the journal is full a round begins: each flush folds `PORTION`
of the groups that were named until then, in their order, as rows that are born in order fill their pages.

An entry names nothing but items that were pending. Failures, redriven items and masks are written to the groups at
once, under the same lock. The transaction that completes a batch folds all of it.

Source: a log of changes beside pages that are rewritten when the log has grown, as in O'Neil et al., The Log-Structured
Merge-Tree (1996); that of one batch has some `MOST` numbers at the most.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy.engine import Connection

from core import tables
from core.bits.bitfield import Group
from core.storage import statements

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
"""Changes of fewer groups are written to the groups where they are dense."""
ENTRY: Final = 8192
"""Numbers of one entry at the most: 32 kB."""
LEAST: Final = 4096
MOST: Final = 65_536
"""What the entries of a journal may hold before groups are folded: 256 kB. The newest quarter of `LEAST` stays, folded
or not, as other processes learn from it what was done."""
PORTION: Final = 64
"""Groups that are folded at once, more where many numbers come at once."""

_FOLDED: Final = 1 << 31
"""Beside numbers, entries have marks. A group with this one: its row has all that was named up to here."""
_WRITTEN: Final = 1 << 30
"""A group with both: its row has more than that, and is to be read again. (Its number is smaller: see `GROUPS`.)"""

_journal = tables.ack_journal.c


def limit(groups: int) -> int:
    """How much the journal of a batch of so many groups holds before it is folded: so much that a group is written for
    sixteen of its items."""
    return min(max(16 * groups, LEAST), MOST)


def pays(group_size: int, groups: int, changed: int, items: int) -> bool:
    """Whether a batch of `groups` groups should be journaled, since a flush has changed so many items of so many."""
    return group_size >= WIDE and groups <= GROUPS and changed >= SCATTERED and items < DENSE * changed


def encode(values: Iterable[int]) -> bytes:
    """Little-endian integers of four bytes: a journaled batch has fewer than 2^27 items."""
    encoded = array("I", values)
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def decode(entry: bytes) -> array[int]:
    values = array("I")
    values.frombytes(entry)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def recent(tx: Connection, batch: int, group_size: int) -> dict[int, Sequence[int]]:
    """What the journal of a batch names and its groups may lack, by group. Read it before the groups."""
    known = JournalState(0)
    for _, entry, numbers in statements.run(tx, select({batch: None}))[0]:
        known.take_in(entry, numbers, group_size)
    return {group: named.indexes for group, named in known.unfolded.items()}


def union(group: Group, indexes: Iterable[int]) -> Group:
    """Set these bits in the group, which is a row's; some may be set. (A failed one isn't set here: it is failed.)"""
    for index in indexes:
        if not group.resolved[index]:
            group.ack_one(index)
    return group


@dataclass(slots=True)
class Named:
    """What the journal says of a group since its row was written."""

    since: int
    """The first entry that names it."""
    indexes: list[int] = field(default_factory=list)
    """Only of a group that isn't held."""


@dataclass(slots=True)
class JournalState:
    """A journaled batch as it was when its `journal_next` was `next`: some of its groups, bit for bit."""

    next: int
    groups: dict[int, Group] = field(default_factory=dict)
    unfolded: dict[int, Named] = field(default_factory=dict)
    """Groups whose rows lack what the journal names; the first one was named first."""
    entries: deque[tuple[int, int]] = field(default_factory=deque)
    """(entry, how many values it has) of those that are stored."""
    values: int = 0
    """Of all these."""
    round: int | None = None
    """The last entry before the round of folding that is under way."""

    def take_in(self, entry: int, numbers: bytes, group_size: int) -> None:
        """Another transaction's entry."""
        values = decode(numbers)
        for value in values:
            if value < _FOLDED:
                group, index = divmod(value, group_size)
                held = self.groups.get(group)
                named = self.unfolded.get(group)
                if named is None:
                    named = self.unfolded[group] = Named(entry)
                if held is None:
                    named.indexes.append(index)
                elif not held.resolved[index]:
                    held.ack_one(index)
            elif value & _WRITTEN:
                group = value ^ _FOLDED ^ _WRITTEN
                self.unfolded.pop(group, None)
                self.groups.pop(group, None)
            else:
                self.unfolded.pop(value ^ _FOLDED, None)
        self.add(entry, len(values))
        if values and values[-1] & _FOLDED:
            self.trim()

    def add(self, entry: int, values: int) -> None:
        self.entries.append((entry, values))
        self.values += values
        self.next = entry + 1

    def named(self, groups: Iterable[int], entry: int) -> None:
        """An entry of our own names these, which are held."""
        for group in groups:
            if group not in self.unfolded:
                self.unfolded[group] = Named(entry)

    def due(self, entry: int, most: int) -> list[int]:
        """The next groups to be folded by this entry, as the journal is full."""
        oldest = self._oldest()
        if self.round is None or oldest > self.round:
            self.round = entry
        until = self.round
        return sorted(group for group, named in self.unfolded.items() if named.since <= until)[:most]

    def _oldest(self) -> int:
        """The first entry that must stay."""
        first = next(iter(self.unfolded.values()), None)
        return self.next - 1 if first is None else first.since

    def trim(self) -> int | None:
        """The first entry that must stay; None where that is the oldest."""
        oldest = self._oldest()
        kept = self.values
        found = None
        while self.entries[0][0] < oldest and kept - self.entries[0][1] >= LEAST // 4:
            kept -= self.entries.popleft()[1]
            found = self.entries[0][0]
        self.values = kept
        return found


def select(batches: Mapping[int, JournalState | None]) -> str:
    """The entries (batch, entry, numbers) that are missing to what is known of each, in their order."""
    wanted = " OR ".join(
        f"(batch_id = {batch}{'' if known is None else f' AND entry_no >= {known.next}'})"
        for batch, known in sorted(batches.items())
    )
    return f"SELECT batch_id, entry_no, numbers FROM ack_journal WHERE {wanted} ORDER BY batch_id, entry_no"  # noqa: S608


def catch_up(
    tx: Connection, batch: int, group_size: int, known: JournalState | None, next: int, entries: Sequence[Sequence[Any]]
) -> JournalState:
    """The batch whose row is locked with this `journal_next`. `known` is what is held of it, and is changed; `entries`
    is what was found, under the lock, for `select`."""
    # With 0 it isn't journaled yet: others change its groups, and nothing here would tell.
    whole = next != 0 and known is not None and known.next <= next and len(entries) == next - known.next
    if known is None or not whole:
        if known is not None:
            entries = statements.run(tx, select({batch: None}))[0]
        known = JournalState(next)
    for _, entry, numbers in entries:
        known.take_in(entry, numbers, group_size)
    known.next = next
    return known


def fetch(tx: Connection, batch: int, group_size: int, known: JournalState, wanted: Iterable[int]) -> None:
    """Have these groups, with what the journal names of them."""
    absent = sorted(group for group in wanted if group not in known.groups)
    rows = {}
    for part in statements.chunks(absent, statements.LIST):
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
        named = known.unfolded.get(number)
        if named is not None:
            union(group, named.indexes)
            named.indexes.clear()
        known.groups[number] = group


@dataclass(slots=True)
class Change:
    """What a flush did to a journaled batch, whose row is locked."""

    batch: int
    group_size: int
    groups: int
    """That the batch has."""
    changed: set[int]
    """Groups; all are held."""
    acked: list[int] | None
    """The numbers, if it did nothing but to ack items that were pending."""
    ends: bool
    """The batch is complete now."""


def write(tx: Connection, known: JournalState, change: Change) -> tuple[list[str], list[int]]:
    """Statements to execute, and the groups whose rows are to be written; `known` is as it is after that."""
    entry = max(known.next, 1)
    if change.ends or change.groups > GROUPS:
        # There will be no more acks; or it has grown so large that its numbers don't fit into an entry.
        written = known.unfolded.keys() | change.changed
        fetch(tx, change.batch, change.group_size, known, written)
        known.unfolded.clear()
        known.next = entry + 1
        stored = change.ends or bool(known.entries)
        known.entries.clear()
        known.values = 0
        return [_remove(change.batch, entry)] if stored else [], sorted(written)
    values = _deferred(change)
    direct = values is None
    if values is None:
        values = [_FOLDED | _WRITTEN | group for group in change.changed]
        for group in change.changed:
            known.unfolded.pop(group, None)
    else:
        known.named(change.changed, entry)
    folded: list[int] = []
    full = known.values + len(values) >= limit(change.groups)
    if full:
        folded = known.due(entry, max(PORTION, len(values) // 16))
        fetch(tx, change.batch, change.group_size, known, folded)
        for group in folded:
            del known.unfolded[group]
        values += [_FOLDED | group for group in folded]
    known.add(entry, len(values))
    texts = [_append(change.batch, entry, values)]
    if full and (first := known.trim()):
        texts.append(_remove(change.batch, first))
    return texts, sorted({*folded, *change.changed} if direct else folded)


def _deferred(change: Change) -> list[int] | None:
    """The numbers for an entry, where it pays to leave the groups as they are."""
    acked = change.acked
    if acked is None or len(acked) > ENTRY:
        return None
    few = len(change.changed) < FEW and len(acked) >= DENSE * len(change.changed)
    return None if few else list(acked)


def _append(batch: int, entry: int, values: Iterable[int]) -> str:
    return (
        "INSERT INTO ack_journal (batch_id, entry_no, numbers) VALUES "  # noqa: S608
        f"({batch},{entry},x'{encode(values).hex()}')"
    )


def _remove(batch: int, before: int) -> str:
    return f"DELETE FROM ack_journal WHERE batch_id = {batch} AND entry_no < {before}"  # noqa: S608
