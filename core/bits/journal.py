"""The journal: acks that arrived out of order, stored apart from the groups until writing the groups is worthwhile.

A hundred acks in random order change a hundred groups. Each group is a row to lock, read and write, and the database
logs a kilobyte for one bit. So for a batch that is acked in this way, each ack transaction stores the numbers of the
items that it acked as one row, an *entry*. After some thousands of numbers the journal is *folded*: its items are
written to their groups. Until then, the bits of a group are those of its row and those of the journal. What could go
wrong, and why it can't:

*Two transactions flip the same bit.* Group locks don't prevent it, as an entry writes no group. So a journaled batch
changes only under the lock of its own row, which is acquired first: its ack transactions run one after the other.
`batches.journal_next` is above 0 for a journaled batch; if it is 0, groups are locked as described in `flush`.

*A batch becomes journaled while other transactions have locked its groups.* These lock the batch row last, find that
`journal_next` has changed, roll back and begin again, in the other order. If such a transaction and a fold wait for
each other's locks, the database ends one of the two as a deadlock, and it is run again.

*Bits in memory are outdated.* Each transaction that changes a journaled batch advances `journal_next` under the lock,
and its entry records which pending items it acked and which groups it wrote. A `JournalState` is exact as of one value
of `journal_next`. Under the lock it is brought up to date by the entries since then; if one of them is missing,
everything is read again.

*An item is in the journal and in its group.* That does no harm: bits are never cleared, and an item of an entry stays
acked. So folding a group deletes nothing. The fold's own entry marks each folded group: its row now includes every
earlier entry. The oldest entries are deleted when all their groups have been folded.

*A reader sees neither the entry nor the group.* Entries are deleted by the transaction that folds the last of their
groups, or by a later one. Readers read the journal first and the groups second, so they see a folded item at least
once.

*The acks of a thousand consumers wait for a fold.* When the journal is full, a round begins: each flush folds `PORTION`
of the groups that are named in it. It folds them in ascending order, since rows that are inserted in order fill their
pages.

An entry names only items that were pending. Failures, redriven items and masks are written to the groups immediately,
under the same lock. The transaction that completes a batch folds its whole journal.

Source: a log of changes beside pages that are rewritten when the log has grown, as in O'Neil et al., The Log-Structured
Merge-Tree (1996). The log of one batch has at most about `MOST` numbers.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy.engine import Connection

from core.bits.bitfield import Columns, Group
from core.storage import dialects, statements, tables

SINCE: Final = "0008"
"""The revision of the schema that introduced the journal."""
GROUPS: Final = 4096
"""Batches with more groups aren't journaled: few of their groups would change twice between two folds."""
WIDE: Final = 2048
"""Batches with smaller groups aren't journaled, as their rows are small."""
SCATTERED: Final = 24
"""A flush makes a batch journaled if it changes at least this many of its groups, and few items of each (`DENSE`)."""
DENSE: Final = 8
"""A flush writes the groups if it changes at least this number of items per group on average."""
FEW: Final = 3
"""Dense changes of fewer groups than this are written to the groups even if the batch is journaled."""
ENTRY: Final = 8192
"""The maximum number of items in one entry: 32 kB."""
LEAST: Final = 6144
"""The minimum of `limit`. A quarter of this number of values, the newest ones, stays in the journal even after a fold:
other processes catch up from them."""
MOST: Final = 65_536
"""The maximum of `limit`: 256 kB."""
PORTION: Final = 64
"""Groups that are folded at once; more if a flush has many numbers."""
ALONE: Final = 16
"""After this number of flushes without an entry of another process, entries are read only if there are any: the query
takes a twentieth of a flush of a hundred ids."""

_FOLDED: Final = 1 << 31
"""Besides numbers of items, entries contain numbers of groups with marks. This mark means that the group's row includes
all entries so far."""
_WRITTEN: Final = 1 << 30
"""With both marks, the row includes more than the entries and must be read again. (Group numbers are smaller than the
marks: see `GROUPS`.)"""

_journal = tables.ack_journal.c


def limit(groups: int) -> int:
    """The number of values at which the journal of a batch is folded: on average, 24 items per written group.

    Larger limits save few writes, but the journal takes more space: with 32, a batch takes a tenth more."""
    return min(max(24 * groups, LEAST), MOST)


def is_worthwhile(group_size: int, groups: int, changed_groups: int, items: int) -> bool:
    """Whether to journal a batch of which one flush has changed `items` items in `changed_groups` of its groups."""
    return group_size >= WIDE and groups <= GROUPS and changed_groups >= SCATTERED and items < DENSE * changed_groups


def encode(values: Iterable[int]) -> bytes:
    """Little-endian integers of four bytes: a journaled batch has fewer than 2^27 items."""
    integers = array("I", values)
    if sys.byteorder == "big":
        integers.byteswap()
    return integers.tobytes()


def decode(entry: bytes) -> array[int]:
    values = array("I")
    values.frombytes(entry)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def recent(tx: Connection, batch: int, group_size: int) -> dict[int, Sequence[int]]:
    """The items in the journal that the rows of the groups may lack, by group. Read it before the groups."""
    return recent_by_batch(tx, {batch: group_size})[batch]


def recent_by_batch(tx: Connection, group_sizes: Mapping[int, int]) -> dict[int, dict[int, Sequence[int]]]:
    """`recent` of each of these batches, given with their group sizes."""
    states = {batch: JournalState(0) for batch in group_sizes}
    if states:
        for batch, entry, numbers in statements.run(tx, select(dict.fromkeys(states)))[0]:
            states[batch].take_in(entry, numbers, group_sizes[batch])
    return {
        batch: {group: unfolded_items.indexes for group, unfolded_items in state.unfolded.items()}
        for batch, state in states.items()
    }


def acked(tx: Connection, numbers: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
    """Those of the numbers, by batch, that an entry names: these items are acked."""
    hits: dict[int, set[int]] = {batch: set() for batch in numbers}
    if numbers:
        for batch, _, entry in statements.run(tx, select(dict.fromkeys(numbers)))[0]:
            hits[batch].update(set(numbers[batch]).intersection(decode(entry)))
    return hits


def union(group: Group, indexes: Iterable[int]) -> Group:
    """Set these bits in a group loaded from its row. Bits that are already set, even of failed items, don't change."""
    for index in indexes:
        if not group.resolved[index]:
            group.ack_one(index)
    return group


@dataclass(slots=True)
class UnfoldedItems:
    """The items of a group that the journal has and its row may lack."""

    since: int
    """The first entry that names the group."""
    indexes: list[int] = field(default_factory=list)
    """The items' indexes; empty if the group is in memory."""


@dataclass(slots=True)
class JournalState:
    """The exact bits of some groups of a journaled batch, as of `journal_next` = `next`."""

    next: int
    groups: dict[int, Group] = field(default_factory=dict)
    unfolded: dict[int, UnfoldedItems] = field(default_factory=dict)
    """Groups whose rows lack items of the journal, in the order of their first entries."""
    entries: deque[tuple[int, int]] = field(default_factory=deque)
    """(entry, number of its values) of each stored entry."""
    values: int = 0
    """The number of values of all these entries."""
    alone: int = 0
    """The number of successive flushes that found no entry of another process."""
    round: int | None = None
    """The entry at which the current round of folding began: groups named up to it are folded in this round."""

    def take_in(self, entry: int, numbers: bytes, group_size: int) -> None:
        """Apply the entry of another transaction."""
        values = decode(numbers)
        for value in values:
            if value < _FOLDED:
                group, index = divmod(value, group_size)
                bits = self.groups.get(group)
                unfolded_items = self.unfolded.get(group)
                if unfolded_items is None:
                    unfolded_items = self.unfolded[group] = UnfoldedItems(entry)
                if bits is None:
                    unfolded_items.indexes.append(index)
                elif not bits.resolved[index]:
                    bits.ack_one(index)
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

    def name_groups(self, groups: Iterable[int], entry: int) -> None:
        """Record that this transaction's entry names these groups, which are in memory."""
        for group in groups:
            if group not in self.unfolded:
                self.unfolded[group] = UnfoldedItems(entry)

    def due(self, entry: int, limit: int) -> list[int]:
        """At most `limit` groups to fold next. Call it when the journal is full."""
        oldest = self._oldest()
        if self.round is None or oldest > self.round:
            self.round = entry
        until = self.round
        return sorted(group for group, unfolded_items in self.unfolded.items() if unfolded_items.since <= until)[:limit]

    def _oldest(self) -> int:
        """The first entry that must be kept."""
        first = next(iter(self.unfolded.values()), None)
        return self.next - 1 if first is None else first.since

    def trim(self) -> int | None:
        """Forget entries that are no longer needed. Returns the first entry to keep; None if all must be kept."""
        oldest = self._oldest()
        remaining = self.values
        first = None
        while self.entries[0][0] < oldest and remaining - self.entries[0][1] >= LEAST // 4:
            remaining -= self.entries.popleft()[1]
            first = self.entries[0][0]
        self.values = remaining
        return first


def select(batches: Mapping[int, JournalState | None]) -> str:
    """A SELECT of the entries (batch, entry, numbers) that the states lack, in their order."""
    condition = " OR ".join(
        f"(batch_id = {batch}{'' if state is None else f' AND entry_no >= {state.next}'})"
        for batch, state in sorted(batches.items())
    )
    return f"SELECT batch_id, entry_no, numbers FROM ack_journal WHERE {condition} ORDER BY batch_id, entry_no"  # noqa: S608


def reads_ahead(state: JournalState | None) -> bool:
    """Whether to send `select` together with the query that locks the batch row: entries of other processes are
    likely."""
    return state is None or state.alone < ALONE


def catch_up(
    tx: Connection,
    batch: int,
    group_size: int,
    state: JournalState | None,
    next: int,
    entries: Sequence[Sequence[Any]] | None,
) -> JournalState:
    """Bring `state` up to date with a batch, whose row is locked and whose `journal_next` is `next`. `entries` are the
    rows that `select` returned under the lock; None: not read yet."""
    if entries is None:
        is_current = state is not None and state.next == next
        entries = () if is_current else statements.run(tx, select({batch: state}))[0]
    # With 0 the batch isn't journaled yet, and other transactions change its groups without an entry.
    is_complete = next != 0 and state is not None and state.next <= next and len(entries) == next - state.next
    if state is None or not is_complete:
        if state is not None:
            entries = statements.run(tx, select({batch: None}))[0]
        state = JournalState(next)
    for _, entry, numbers in entries:
        state.take_in(entry, numbers, group_size)
    state.alone = 0 if entries else state.alone + 1
    state.next = next
    return state


def fetch(tx: Connection, batch: int, group_size: int, state: JournalState, numbers: Iterable[int]) -> list[int]:
    """Load these groups and apply the journal to them. Returns those that were not in memory."""
    absent = sorted(group for group in numbers if group not in state.groups)
    rows = {}
    for part in statements.chunks(absent, statements.LIST):
        id_list = ",".join(map(str, part))
        text = (
            f"SELECT group_no, {', '.join(Columns._fields)} FROM item_groups "  # noqa: S608
            f"WHERE batch_id = {batch} AND group_no IN ({id_list})"
        )
        for number, *columns in statements.run(tx, text)[0]:
            rows[number] = Group.load(Columns(*columns), group_size)
    for number in absent:
        group = rows.get(number) or Group.empty(group_size)
        group.changed = None
        unfolded_items = state.unfolded.get(number)
        if unfolded_items is not None:
            union(group, unfolded_items.indexes)
            unfolded_items.indexes.clear()
        state.groups[number] = group
    return absent


@dataclass(slots=True)
class Change:
    """The changes of a flush to a journaled batch, whose row is locked."""

    batch: int
    group_size: int
    groups: int
    """The number of groups of the batch."""
    changed: set[int]
    """The changed groups; all are in memory."""
    acked: list[int] | None
    """The numbers of the acked items, if all were pending and nothing else has changed."""
    ends: bool
    """The batch is complete now."""


def write(tx: Connection, state: JournalState, change: Change) -> tuple[list[str], list[int]]:
    """Update `state`. Returns the statements to execute, and the groups whose rows must be written."""
    entry = max(state.next, 1)
    if change.ends or change.groups > GROUPS:
        # No more acks will follow, or the batch has grown so large that its numbers don't fit into an entry.
        numbers = state.unfolded.keys() | change.changed
        fetch(tx, change.batch, change.group_size, state, numbers)
        state.unfolded.clear()
        state.next = entry + 1
        may_have_entries = change.ends or bool(state.entries)
        state.entries.clear()
        state.values = 0
        return [_remove(change.batch, entry)] if may_have_entries else [], sorted(numbers)
    values = _deferred(change)
    direct = values is None
    if values is None:
        values = [_FOLDED | _WRITTEN | group for group in change.changed]
        for group in change.changed:
            state.unfolded.pop(group, None)
    else:
        state.name_groups(change.changed, entry)
    due: list[int] = []
    full = state.values + len(values) >= limit(change.groups)
    if full:
        due = state.due(entry, max(PORTION, len(values) // 16))
        fetch(tx, change.batch, change.group_size, state, due)
        for group in due:
            del state.unfolded[group]
        values += [_FOLDED | group for group in due]
    state.add(entry, len(values))
    texts = [_append(tx, change.batch, entry, values)]
    if full and (first := state.trim()):
        texts.append(_remove(change.batch, first))
    return texts, sorted({*due, *change.changed} if direct else due)


def _deferred(change: Change) -> list[int] | None:
    """The numbers for an entry; None if the groups must be written, or if that is cheaper."""
    acked = change.acked
    if acked is None or len(acked) > ENTRY:
        return None
    is_dense = len(change.changed) < FEW and len(acked) >= DENSE * len(change.changed)
    return None if is_dense else list(acked)


def _append(tx: Connection, batch: int, entry: int, values: Iterable[int]) -> str:
    return (
        "INSERT INTO ack_journal (batch_id, entry_no, numbers) VALUES "  # noqa: S608
        f"({batch},{entry},{dialects.of(tx).literal(encode(values))})"
    )


def _remove(batch: int, before: int) -> str:
    return f"DELETE FROM ack_journal WHERE batch_id = {batch} AND entry_no < {before}"  # noqa: S608
