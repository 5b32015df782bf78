"""The part of a flush between its locks and its writes, in memory: which items of a unit may be acked, which bits they
flip, and which changes must be written. Nothing here queries the database (see `flush`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bitarray import bitarray
from bitarray.util import zeros

from core.acks.call import HELD, Outcome, Rejected, Unit
from core.acks.completion import Row
from core.acks.delta import BatchDelta
from core.batches.lifecycle import TAKES_ACKS, State, Verb
from core.bits import bitfield, journal
from core.bits.bitfield import ItemState
from core.bits.cache import Key
from lastbit.ids import ItemId

UNKNOWN_ITEM: Final = "unknown_item"
"""The reason for rejecting an item that was never issued."""


class Seen(NamedTuple):
    """A batch as first read by the transaction."""

    state: str
    group_size: int
    items: int
    journal_next: int
    no_journal: bool
    children: int
    owes: bool
    """It has ended, and owes its parent's item an ack or a failure."""

    @property
    def has_ended(self) -> bool:
        """Whether it ended without its pending items."""
        return self.state not in TAKES_ACKS


@dataclass(slots=True)
class Reasons:
    """Changes of the stored reasons. Each item is (batch, number)."""

    new: dict[tuple[int, int], str] = field(default_factory=dict)
    removed: list[tuple[int, int]] = field(default_factory=list)

    def forget(self, batch: int, number: int) -> None:
        """Remove the reason of an item, whether stored or about to be written by this flush."""
        if self.new.pop((batch, number), None) is None:
            self.removed.append((batch, number))


@dataclass(slots=True)
class FlushState:
    """The state of one attempt of a flush. It is discarded if the attempt is rolled back."""

    seen: dict[int, Seen]
    groups: dict[Key, bitfield.Group] = field(default_factory=dict)
    """The groups of admitted items; their rows, if any, are locked."""
    missing: set[Key] = field(default_factory=set)
    """The groups of admitted items that are not loaded yet; once all are loaded, the groups without a row."""
    changed: dict[int, set[int]] = field(default_factory=dict)
    """By batch, the numbers of the groups with flipped bits."""
    deltas: dict[int, BatchDelta] = field(default_factory=dict)
    reasons: dict[Verb, Reasons] = field(default_factory=lambda: {Verb.FAIL: Reasons(), Verb.SKIP: Reasons()})
    """Of failures, and of skips."""
    locked_rows: dict[int, Row] = field(default_factory=dict)
    """Batch rows that are already locked: those of journaled batches, or all. They include all parents."""
    held: dict[Key, dict[int, str]] = field(default_factory=dict)
    """The indexes that children hold, by group; with the debt of a child that has ended, or the state of a live one."""
    journal_states: dict[int, journal.JournalState] = field(default_factory=dict)
    """The bits of journaled batches."""
    acked: dict[int, list[int]] = field(default_factory=dict)
    """By journaled batch, the numbers of the pending items that this flush acked. A batch is removed when anything else
    in it changes, as a journal entry can hold only such items."""

    def take(self, rows: Mapping[int, Row]) -> None:
        """Add locked rows."""
        for id, row in rows.items():
            if row.state != State.DELETING:
                self.locked_rows[id] = row
                self.seen[id] = Seen(
                    row.state, row.group_size, row.items, row.journal_next, row.no_journal, row.children, row.owes
                )

    def issued(self, batch: int, group: int) -> int:
        """The number of items of the group that have been issued."""
        size, items = self.seen[batch].group_size, self.seen[batch].items
        remaining = items - group * size
        return size if remaining >= size else remaining if remaining > 0 else 0

    def unchanged_batches(self, units: Sequence[Unit], outcomes: Sequence[Outcome]) -> set[int]:
        """Batches in which all items were repeats."""
        batches = {unit.batch for unit, outcome in zip(units, outcomes, strict=True) if outcome.admitted}
        return batches - self.deltas.keys()

    def refused_batches(self, units: Sequence[Unit], outcomes: Sequence[Outcome]) -> dict[int, int]:
        """Batches with items that were rejected as never issued → the number of issued items at that time."""
        return {
            unit.batch: self.seen[unit.batch].items
            for unit, outcome in zip(units, outcomes, strict=True)
            if outcome.rejected and any(rejection.reason == UNKNOWN_ITEM for rejection in outcome.rejected)
        }


def admit(state: FlushState, unit: Unit) -> Outcome:
    """Reject items that were never issued, or whose batch is unknown or withheld. Record the groups of the others."""
    row = None if unit.batch in unit.call.withheld else state.seen.get(unit.batch)
    if row is None:
        reason = "unknown_batch"
        rejected = [Rejected(reason, item=ItemId(unit.batch, g, i)) for g, i in unit.ids()]
        rejected += [
            Rejected(reason, group=(unit.batch, g), count=mask.count()) for g, mask in unit.masks.items() if mask.any()
        ]
        return Outcome(rejected=rejected)
    outcome = Outcome()
    batch, size = unit.batch, row.group_size
    admitted, missing = outcome.admitted, state.missing
    for group, indexes in unit.indexes.items():
        issued = state.issued(batch, group)
        if max(indexes) < issued:
            admitted[group] = indexes
            missing.add((batch, group))
            continue
        outcome.rejected += [Rejected(UNKNOWN_ITEM, item=ItemId(batch, group, i)) for i in indexes if i >= issued]
        if good := [i for i in indexes if i < issued]:
            admitted[group] = good
            missing.add((batch, group))
    for group, mask in unit.masks.items():
        issued = state.issued(unit.batch, group)
        excess = mask.count(1, issued) if len(mask) > issued else 0
        if excess:
            outcome.rejected.append(Rejected(UNKNOWN_ITEM, group=(unit.batch, group), count=excess))
        good_mask = mask if len(mask) == size and not excess else mask[:issued]
        if not good_mask.any():
            continue
        if len(good_mask) < size:
            good_mask = good_mask + zeros(size - len(good_mask), bitfield.ENDIAN)
        indexes_too = outcome.admitted.get(group)
        if isinstance(indexes_too, list):
            good_mask = good_mask | bitfield.mask_of(indexes_too, size)
        outcome.admitted[group] = good_mask
        state.missing.add((unit.batch, group))
    return outcome


def withhold(state: FlushState, unit: Unit, outcome: Outcome) -> None:
    """Reject the items that children hold. Their groups stay admitted, without them: the call names issued items, and
    is told if their batch is complete."""
    for number, selection in outcome.admitted.items():
        holders = state.held.get((unit.batch, number))
        if holders is None:
            continue
        group = state.groups[unit.batch, number]
        chosen = set(selection) if isinstance(selection, list) else set(selection.search(1))
        held = [index for index in sorted(chosen & holders.keys()) if not _is_final(group, index, holders[index])]
        ids = set(unit.indexes.get(number, ())).intersection(held)
        outcome.rejected += [Rejected(HELD, item=ItemId(unit.batch, number, index)) for index in sorted(ids)]
        if bits := len(held) - len(ids):
            outcome.rejected.append(Rejected(HELD, group=(unit.batch, number), count=bits))
        if isinstance(selection, list):
            outcome.admitted[number] = [index for index in selection if index not in held]
        else:
            outcome.admitted[number] = selection & ~bitfield.mask_of(held, len(selection))


def _is_final(group: bitfield.Group, index: int, holder: str) -> bool:
    """Whether nothing can change the item, or its child has failed it, perhaps before it was skipped, and owes nothing
    else: only the debt is not removed yet."""
    if any(bits is not None and bits[index] for bits in (group.failed, group.skipped)):
        return holder == Verb.FAIL
    return bool(group.resolved[index])


def apply(state: FlushState, unit: Unit, outcome: Outcome) -> None:
    """Flip the bits of one unit, and count the bits that really changed. The first change that a journal entry can't
    hold removes the batch from `acked`."""
    batch = unit.batch
    size = state.seen[batch].group_size
    resolved_now = redriven_now = unskipped_now = 0
    changed: set[int] = set()
    filled = 0
    # Apply items one by one if that is cheaper than a mask, or if a journal entry needs their numbers.
    threshold = 64 if batch in state.acked else 8
    apply_few = _ack_few if unit.verb is Verb.ACK else _give_up_few
    for number, selection in outcome.admitted.items():
        group = state.groups[batch, number]
        if isinstance(selection, list) and len(selection) <= threshold:
            count = len(selection)
            resolved, redriven, from_skipped = apply_few(state, unit, number * size, group, selection)
        else:
            mask = bitfield.mask_of(selection, size) if isinstance(selection, list) else selection
            count = mask.count()
            resolved, redriven, from_skipped = _apply_mask(state, unit, number, group, mask)
        applied = resolved + redriven + from_skipped
        outcome.applied += applied
        outcome.repeated += count - applied
        if applied:
            changed.add(number)
            filled += group.resolved_count == size
        resolved_now += resolved
        redriven_now += redriven
        unskipped_now += from_skipped
    if not changed:
        return
    state.changed.setdefault(batch, set()).update(changed)
    delta = state.deltas.setdefault(batch, BatchDelta())
    delta.last_changer = unit
    if resolved_now:
        delta.last_resolver = unit
    delta.overrides |= bool(redriven_now or unskipped_now)
    delta.failed -= redriven_now
    delta.skipped -= unskipped_now
    if unit.verb is Verb.ACK:
        delta.acked += resolved_now + redriven_now + unskipped_now
    elif unit.verb is Verb.SKIP:
        delta.skipped += resolved_now + redriven_now
    else:
        delta.failed += resolved_now
    delta.filled += filled


Moved = tuple[int, int, int]
"""How many items a unit has changed: of those that were pending, failed, and skipped."""


def _ack_few(state: FlushState, unit: Unit, first: int, group: bitfield.Group, indexes: list[int]) -> Moved:
    """Ack these items of the group whose first item is `first`."""
    resolved = redriven = from_skipped = 0
    acked = state.acked.get(unit.batch)
    for index in indexes:
        before = group.ack_one(index)
        if before is ItemState.PENDING:
            resolved += 1
            if acked is not None:
                acked.append(first + index)
        elif before is not None:
            was_failed = before is ItemState.FAILED
            redriven += was_failed
            from_skipped += not was_failed
            state.acked.pop(unit.batch, None)
            state.reasons[Verb.FAIL if was_failed else Verb.SKIP].forget(unit.batch, first + index)
    return resolved, redriven, from_skipped


def _give_up_few(state: FlushState, unit: Unit, first: int, group: bitfield.Group, indexes: list[int]) -> Moved:
    """`_ack_few` for a call of failures or skips."""
    resolved = redriven = 0
    give_up_one = group.fail_one if unit.verb is Verb.FAIL else group.skip_one
    for index in indexes:
        before = give_up_one(index)
        if before is None:
            continue
        state.acked.pop(unit.batch, None)
        if before is ItemState.PENDING:
            resolved += 1
        else:
            redriven += 1
            state.reasons[Verb.FAIL].forget(unit.batch, first + index)
        if unit.reason is not None:
            state.reasons[unit.verb].new[unit.batch, first + index] = unit.reason
    return resolved, redriven, 0


def _apply_mask(state: FlushState, unit: Unit, number: int, group: bitfield.Group, mask: bitarray) -> Moved:
    state.acked.pop(unit.batch, None)
    change = {Verb.ACK: group.ack, Verb.SKIP: group.skip, Verb.FAIL: group.fail}[unit.verb](mask)
    first = number * state.seen[unit.batch].group_size
    counts: dict[Verb, int] = {}
    for verb, bits in ((Verb.FAIL, change.redriven), (Verb.SKIP, change.unskipped)):
        counts[verb] = 0 if bits is None else bits.count()
        if bits is not None and counts[verb]:
            for index in bits.search(1):
                state.reasons[verb].forget(unit.batch, first + index)
    if unit.verb is not Verb.ACK and unit.reason is not None:
        new = state.reasons[unit.verb].new
        for bits in (change.resolved, change.redriven):
            if bits is not None:
                new.update(dict.fromkeys([(unit.batch, first + index) for index in bits.search(1)], unit.reason))
    return change.gained, counts[Verb.FAIL], counts[Verb.SKIP]
