"""What a flush does in memory, between its locks and its writes: which items of a unit may be acked, which bits that
flips, and what is to be written of it. Nothing here asks the database (see `flush`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bitarray import bitarray
from bitarray.util import zeros

from core.acks.call import Outcome, Rejected, Unit
from core.acks.completion import BatchDelta, Row
from core.batches.lifecycle import TAKES_ACKS, State, Verb
from core.bits import bitfield, journal
from core.bits.cache import Key
from lastbit.ids import ItemId

UNKNOWN_ITEM: Final = "unknown_item"
"""The reason of a rejection: the item was never issued."""


class Seen(NamedTuple):
    """A batch at the first look."""

    state: str
    group_size: int
    items: int
    journal_next: int


@dataclass(slots=True)
class FlushState:
    """The state of one attempt; thrown away when it is rolled back."""

    seen: dict[int, Seen]
    groups: dict[Key, bitfield.Group] = field(default_factory=dict)
    """Those that are wanted, locked where they have a row."""
    missing: set[Key] = field(default_factory=set)
    """Groups without a row yet."""
    changed: set[Key] = field(default_factory=set)
    touched: dict[int, BatchDelta] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    """(batch, number) → why it failed, to be written."""
    redriven: list[tuple[int, int]] = field(default_factory=list)
    locked: dict[int, Row] = field(default_factory=dict)
    """The rows of batches that are locked already: of those that are journaled, or of all."""
    known: dict[int, journal.JournalState] = field(default_factory=dict)
    """Of those that are journaled, their bits."""
    acked: dict[int, list[int]] = field(default_factory=dict)
    """Of these, the numbers that were pending and are acked now, while nothing else happened to the batch: what an
    entry can hold."""

    def take(self, rows: Mapping[int, Row]) -> None:
        """These rows are locked."""
        for id, row in rows.items():
            if row.state != State.DELETING:
                self.locked[id] = row
                self.seen[id] = Seen(row.state, row.group_size, row.items, row.journal_next)

    def issued(self, batch: int, group: int) -> int:
        """How many items of the group have been issued."""
        _, size, items, _ = self.seen[batch]
        left = items - group * size
        return size if left >= size else left if left > 0 else 0

    def untouched(self, units: Sequence[Unit], outcomes: Sequence[Outcome]) -> set[int]:
        """Batches of which all items were repeats."""
        wanted = {unit.batch for unit, outcome in zip(units, outcomes, strict=True) if outcome.wanted}
        return wanted - self.touched.keys()

    def refused(self, units: Sequence[Unit], outcomes: Sequence[Outcome]) -> dict[int, int]:
        """Batches of which items were rejected as never issued, with the number of items that this was judged by."""
        return {
            unit.batch: self.seen[unit.batch].items
            for unit, outcome in zip(units, outcomes, strict=True)
            if outcome.rejected and any(each.reason == UNKNOWN_ITEM for each in outcome.rejected)
        }


def admit(work: FlushState, unit: Unit) -> Outcome:
    """Reject what was never issued or whose batch is gone or withheld; remember which groups are wanted."""
    row = None if unit.batch in unit.call.withheld else work.seen.get(unit.batch)
    if row is None or row.state not in TAKES_ACKS:
        reason = "unknown_batch" if row is None else str(row.state)
        rejected = [Rejected(reason, item=ItemId(unit.batch, g, i)) for g, i in unit.ids()]
        rejected += [
            Rejected(reason, group=(unit.batch, g), count=mask.count()) for g, mask in unit.masks.items() if mask.any()
        ]
        return Outcome(rejected=rejected)
    outcome = Outcome()
    size = row.group_size
    for group, indexes in unit.indexes.items():
        issued = work.issued(unit.batch, group)
        good = indexes if max(indexes) < issued else [i for i in indexes if i < issued]
        if len(good) < len(indexes):
            outcome.rejected += [
                Rejected(UNKNOWN_ITEM, item=ItemId(unit.batch, group, i)) for i in indexes if i >= issued
            ]
        if good:
            outcome.wanted[group] = good
            work.missing.add((unit.batch, group))
    for group, mask in unit.masks.items():
        issued = work.issued(unit.batch, group)
        beyond = mask.count(1, issued) if len(mask) > issued else 0
        if beyond:
            outcome.rejected.append(Rejected(UNKNOWN_ITEM, group=(unit.batch, group), count=beyond))
        good_mask = mask if len(mask) == size and not beyond else mask[:issued]
        if not good_mask.any():
            continue
        if len(good_mask) < size:
            good_mask = good_mask + zeros(size - len(good_mask), bitfield.ENDIAN)
        alone = outcome.wanted.get(group)
        if isinstance(alone, list):
            good_mask = good_mask | bitfield.mask_of(alone, size)
        outcome.wanted[group] = good_mask
        work.missing.add((unit.batch, group))
    return outcome


def apply(work: FlushState, unit: Unit, outcome: Outcome) -> None:
    """Flip one unit's bits, and count what really changed. What of a journaled batch can't be in an entry ends
    `acked`."""
    size = work.seen[unit.batch].group_size
    resolved_now = redriven_now = 0
    # One by one where that is cheaper than a mask; or where each number is wanted, for an entry.
    few = 64 if unit.batch in work.acked else 8
    for number, wanted in outcome.wanted.items():
        group = work.groups[unit.batch, number]
        if isinstance(wanted, list) and len(wanted) <= few:
            resolved, redriven, sent = _apply_few(work, unit, number, group, wanted)
        else:
            mask = bitfield.mask_of(wanted, size) if isinstance(wanted, list) else wanted
            resolved, redriven, sent = _apply_mask(work, unit, number, group, mask)
        outcome.applied += resolved + redriven
        outcome.repeated += sent - resolved - redriven
        if resolved or redriven:
            work.changed.add((unit.batch, number))
        resolved_now += resolved
        redriven_now += redriven
    if not resolved_now and not redriven_now:
        return
    touched = work.touched.setdefault(unit.batch, BatchDelta())
    touched.last_changer = unit
    if resolved_now:
        touched.last_resolver = unit
    if unit.verb is Verb.ACK:
        touched.acked += resolved_now + redriven_now
        touched.failed -= redriven_now
    else:
        touched.failed += resolved_now
    if resolved_now:
        touched.filled |= any(work.groups[unit.batch, g].resolved_count == size for g in outcome.wanted)


def _apply_few(
    work: FlushState, unit: Unit, number: int, group: bitfield.Group, wanted: list[int]
) -> tuple[int, int, int]:
    resolved = redriven = 0
    first = number * work.seen[unit.batch].group_size
    acked = work.acked.get(unit.batch)
    for index in wanted:
        if unit.verb is Verb.ACK:
            was_pending, was_failed = group.ack_one(index)
            if was_pending:
                resolved += 1
                if acked is not None:
                    acked.append(first + index)
            elif was_failed:
                redriven += 1
                work.acked.pop(unit.batch, None)
                _forget_reason(work, unit.batch, first + index)
        elif group.fail_one(index):
            resolved += 1
            work.acked.pop(unit.batch, None)
            if unit.reason is not None:
                work.reasons[unit.batch, first + index] = unit.reason
    return resolved, redriven, len(wanted)


def _apply_mask(
    work: FlushState, unit: Unit, number: int, group: bitfield.Group, mask: bitarray
) -> tuple[int, int, int]:
    work.acked.pop(unit.batch, None)
    change = group.ack(mask) if unit.verb is Verb.ACK else group.fail(mask)
    first = number * work.seen[unit.batch].group_size
    redriven = 0
    if change.redriven is not None:
        for index in change.redriven.search(1):
            redriven += 1
            _forget_reason(work, unit.batch, first + index)
    if unit.verb is Verb.FAIL and unit.reason is not None:
        for index in change.resolved.search(1):
            work.reasons[unit.batch, first + index] = unit.reason
    return change.gained, redriven, mask.count()


def _forget_reason(work: FlushState, batch: int, number: int) -> None:
    """An acked item has no reason any more: neither one that this flush was to write nor one from before."""
    if work.reasons.pop((batch, number), None) is None:
        work.redriven.append((batch, number))
