"""One call of `POST /v1/acks` or `/v1/failures`, divided into units that can be merged with those of other calls.

A call names items by id and by mask, and counts each *distinct* item once. A `Call` has its items by batch and group;
an id that is also in a mask counts as the bit of the mask. A `Unit` is the part of a call in one batch. The combiner
queues units, and a flush applies them. A large unit is applied in pieces, which are `Unit`s too, so that no flush takes
long. An `AckResult` combines the outcomes of a call's units.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final

from bitarray import bitarray

from core import errors
from core.batches.lifecycle import Verb
from core.bits.bitfield import widen
from core.commits.lanes import FLUSH_COST, UNIT_GROUPS
from core.traces import TraceContext
from lastbit.ids import MAX_GROUP_SIZE, ItemId

MAX_REASON: Final = 4_000
"""Maximum characters of a reason."""
_REASON_BYTES: Final = 500
"""Bytes of a reason that cost as much as its row."""
_IDS: Final = 64
"""Ids that cost as much as one row of `failures`."""
_MASK_BYTES: Final = 200
"""Bytes of masks that cost as much as one row of `failures`."""

HELD: Final = "held"
"""The reason for rejecting an item that a child batch resolves."""
SMALL: Final = 4096
"""Bytes below which the size of a unit counts as 0."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item, or `count` bits of a group's mask, that was rejected. Reasons: `unknown_batch`, `unknown_item`,
    `expired`, `cancelled`, `held`."""

    reason: str
    item: ItemId | None = None
    group: tuple[int, int] | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Completed:
    """A complete batch for which the call named an issued item."""

    batch: int
    key: str | None
    newly: bool
    succeeded: bool
    newly_succeeded: bool


@dataclass(slots=True)
class Outcome:
    """The outcome of one unit. `admitted` has its accepted items by group: indexes, or a mask of group_size bits."""

    applied: int = 0
    repeated: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    completed: Completed | None = None
    admitted: dict[int, list[int] | bitarray] = field(default_factory=dict)
    rest: Unit | None = None
    """The part of the unit for another transaction. With it, this transaction would have taken too long."""
    paid: Future[None] | None = None
    """Set only if the unit ended a nested batch. Done when the parent's item is resolved, or left to the sweep."""
    error: Exception | None = None


@dataclass(slots=True)
class AckResult:
    applied: int = 0
    repeated: int = 0
    completed: dict[int, Completed] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    _masks: dict[tuple[str, tuple[int, int]], int] = field(default_factory=dict, compare=False)
    """(reason, group) of a rejected mask → its index in `rejected`."""

    def add(self, outcome: Outcome) -> None:
        self.applied += outcome.applied
        self.repeated += outcome.repeated
        if outcome.rejected:
            self._reject(outcome.rejected)
        completed = outcome.completed
        if completed is None:
            return
        before = self.completed.get(completed.batch)
        if before is not None:
            # A call of several chunks has one entry, which is new if it was new for any of them.
            completed = Completed(
                completed.batch,
                completed.key,
                completed.newly or before.newly,
                completed.succeeded,
                completed.newly_succeeded or before.newly_succeeded,
            )
        self.completed[completed.batch] = completed

    def _reject(self, rejected: Iterable[Rejected]) -> None:
        """Add rejections; a mask in several pieces gets one entry for each reason."""
        for rejection in rejected:
            if rejection.group is not None:
                place = self._masks.setdefault((rejection.reason, rejection.group), len(self.rejected))
                if place < len(self.rejected):
                    self.rejected[place] = replace(rejection, count=rejection.count + self.rejected[place].count)
                    continue
            self.rejected.append(rejection)


@dataclass(slots=True, eq=False)
class Unit:
    """The part of a call in one batch: distinct indexes by group, and masks by group; no item is in both."""

    call: Call
    batch: int
    indexes: dict[int, list[int]] = field(default_factory=dict)
    masks: dict[int, bitarray] = field(default_factory=dict)
    size: int = 0
    """Approximate bytes in memory; 0 for a small unit."""
    cost: int = 1
    """Approximate duration of its flush, in the unit of `FLUSH_COST`."""

    @property
    def verb(self) -> Verb:
        return self.call.verb

    @property
    def reason(self) -> str | None:
        return self.call.reason

    def groups(self) -> Set[int]:
        return self.indexes.keys() | self.masks.keys() if self.masks else self.indexes.keys()

    def is_empty(self) -> bool:
        """Whether the unit has no items, or `take` has removed them all."""
        return not (self.indexes or self.masks)

    def count(self, group: int) -> int:
        """The number of items in the group."""
        mask = self.masks.get(group)
        return len(self.indexes.get(group, ())) + (0 if mask is None else mask.count())

    def part(self, weights: Mapping[int, int], limit: int, *, at_least: bool) -> tuple[Unit, Unit | None]:
        """Divide the unit into the first groups, with a total weight of at most `limit`, and the rest. With `at_least`,
        the first part always has one group with a weight above 0."""
        first, rest = Unit(self.call, self.batch), Unit(self.call, self.batch)
        total = 0
        for group in sorted(self.groups()):
            weight = weights[group]
            fits = not rest.groups() and (total + weight <= limit or (at_least and not total))
            total += weight if fits else 0
            part = first if fits else rest
            if group in self.indexes:
                part.indexes[group] = self.indexes[group]
            if group in self.masks:
                part.masks[group] = self.masks[group]
        if not rest.groups():
            return self, None
        first.measure()
        rest.measure()
        return first, rest.copy() if rest.divisible else rest

    def ids(self) -> Iterator[tuple[int, int]]:
        """(group, index) of the items that were named by id."""
        for group, indexes in self.indexes.items():
            for index in indexes:
                yield group, index

    def measure(self) -> None:
        """Set `size` and `cost`."""
        ids = sum(map(len, self.indexes.values()))
        mask_bytes = sum(mask.nbytes for mask in self.masks.values())
        size = 40 * ids + 200 * (len(self.indexes) + len(self.masks)) + mask_bytes
        self.size = size if size >= SMALL else 0
        if self.reason is None:
            # The sum of `_cost_of` over all groups, which would take several times as long.
            cost = sum([len(indexes) // _IDS for indexes in self.indexes.values()])
            self.cost = max(1, cost + sum([1 + mask.nbytes // _MASK_BYTES for mask in self.masks.values()]))
        else:
            self.cost = max(1, sum(self._cost_of(group) for group in self.groups()))

    def _cost_of(self, group: int) -> int:
        cost, items = 0, 0
        indexes = self.indexes.get(group)
        if indexes is not None:
            cost, items = len(indexes) // _IDS, len(indexes)
        mask = self.masks.get(group)
        if mask is not None:
            cost += 1 + mask.nbytes // _MASK_BYTES
            items += mask.count() if self.reason is not None else 0
        return cost + items * self._row_cost

    @property
    def _row_cost(self) -> int:
        """The cost of each item that fails with the call's reason."""
        return 0 if self.reason is None else 1 + len(self.reason) // _REASON_BYTES

    @property
    def divisible(self) -> bool:
        """Whether the unit needs more than half of a flush: only such units are ever divided."""
        return self.cost > FLUSH_COST // 2 or len(self.indexes) + len(self.masks) > UNIT_GROUPS // 2

    def copy(self) -> Unit:
        """A copy from which `take` may remove pieces, while the call's own unit stays whole."""
        groups = sorted(self.groups(), reverse=True)
        unit = Unit(self.call, self.batch, {}, {}, self.size, self.cost)
        for group in groups:
            if group in self.indexes:
                unit.indexes[group] = self.indexes[group]
            if group in self.masks:
                unit.masks[group] = self.masks[group]
        return unit

    def take(self, groups: int, cost: int) -> Unit:
        """Remove the first piece from a `copy`: at most this many groups and this cost, but at least one item. A group
        is divided only if its reasons alone cost more."""
        piece = Unit(self.call, self.batch)
        remaining, count = cost, 0
        while (self.indexes or self.masks) and count < groups and remaining > 0:
            group = min(next(reversed(part)) for part in (self.indexes, self.masks) if part)
            group_cost = self._cost_of(group)
            if group_cost > remaining and (count or self.reason is not None):
                if not count:
                    self._divide(piece, group, max(1, cost // self._row_cost))
                break
            remaining, count = remaining - group_cost, count + 1
            if group in self.indexes:
                piece.indexes[group] = self.indexes.pop(group)
            if group in self.masks:
                piece.masks[group] = self.masks.pop(group)
        piece.measure()
        # The sizes of all pieces add up to that of the unit; a small piece has none of its own.
        piece.size = self.size if self.is_empty() else min(piece.size, self.size)
        self.size -= piece.size
        self.cost = max(1, self.cost - piece.cost)
        return piece

    def _divide(self, piece: Unit, group: int, items: int) -> None:
        """Move the first items of a group to `piece`."""
        indexes = self.indexes.get(group)
        if indexes is not None:
            piece.indexes[group] = indexes[:items]
            if len(indexes) > items:
                self.indexes[group] = indexes[items:]
                return
            del self.indexes[group]
            items -= len(indexes)
        mask = self.masks.get(group)
        if mask is None or not items:
            return
        end = next(itertools.islice(mask.search(1), items, None), None)
        if end is None:
            piece.masks[group] = self.masks.pop(group)
        else:
            piece.masks[group] = mask[:end]
            rest = mask.copy()
            rest[:end] = 0
            self.masks[group] = rest
            # The mask of this group is part of both units.
            self.cost += 1 + mask.nbytes // _MASK_BYTES

    def chunks(self) -> Iterator[Unit]:
        """The unit in ascending pieces, each for a separate flush."""
        self.measure()
        if len(self.groups()) <= UNIT_GROUPS and self.cost <= FLUSH_COST:
            yield self
            return
        rest = self.copy()
        while rest.indexes or rest.masks:
            yield rest.take(UNIT_GROUPS, FLUSH_COST)


@dataclass(slots=True, eq=False)
class Call:
    """The content of one request. Create it with `of`."""

    verb: Verb
    reason: str | None = None
    idempotency_key: str | None = None
    units: dict[int, Unit] = field(default_factory=dict)
    withheld: Set[int] = frozenset()
    """Batches that the caller has no access to. They are reported as unknown."""
    pays: bool = False
    """Whether it pays the debt of a child batch, which doesn't hold its item against it."""
    trace: TraceContext | None = None
    """The context of the request, for links of spans."""
    _fingerprint: bytes | None = None

    @classmethod
    def of(
        cls,
        verb: Verb,
        items: Iterable[ItemId | tuple[int, int, int]] = (),
        masks: Iterable[tuple[int, int, bytes]] = (),
        *,
        reason: str | None = None,
        idempotency_key: str | None = None,
    ) -> Call:
        """A call from parsed ids and (batch, group, bits). Repeated items are merged."""
        call = cls(verb, reason, idempotency_key)
        if not masks and isinstance(items, list) and len(items) == 1:
            # Nearly all calls of consumers have one item.
            ((batch, group, index),) = items
            call.units[batch] = Unit(call, batch, {group: [index]})
            return call
        for batch, group, bits in masks:
            mask = widen(bits, 0)
            unit_masks = call.unit(batch).masks
            if group in unit_masks:
                size = max(len(mask), len(unit_masks[group]))
                mask = widen(bits, size) | widen(unit_masks[group].tobytes(), size)
            unit_masks[group] = mask
        # Successive items are mostly in the same group, so the last item's unit and group are kept for the next one.
        unit: Unit | None = None
        in_mask: bitarray | None = None
        indexes: list[int] | None = None
        last_group = -1
        for batch, group, index in dict.fromkeys(items):
            if unit is None or batch != unit.batch:
                unit, last_group = call.unit(batch), -1
            if group != last_group:
                in_mask, indexes, last_group = unit.masks.get(group), unit.indexes.get(group), group
            if in_mask is not None and index < len(in_mask) and in_mask[index]:
                continue
            if indexes is None:
                indexes = unit.indexes[group] = []
            indexes.append(index)
        return call

    def measured(self) -> list[Unit]:
        """The call's units with sizes and costs. Large units are copies, from which pieces may be removed."""
        if len(self.units) == 1:
            (unit,) = self.units.values()
            if len(unit.indexes) == 1 and not unit.masks and self.reason is None:
                (indexes,) = unit.indexes.values()
                if len(indexes) == 1:
                    return [unit]
        for unit in self.units.values():
            unit.measure()
        return [unit.copy() if unit.divisible else unit for unit in self.units.values()]

    def chunks(self) -> list[Unit]:
        """The call's units, in pieces that fit into a flush."""
        return [chunk for unit in self.units.values() for chunk in unit.chunks()]

    def new_answer(self) -> AckResult:
        return AckResult()

    def add(self, answer: AckResult, outcome: Outcome) -> AckResult:
        answer.add(outcome)
        return answer

    def unit(self, batch: int) -> Unit:
        unit = self.units.get(batch)
        if unit is None:
            unit = self.units[batch] = Unit(self, batch)
        return unit

    @property
    def items(self) -> int:
        """The number of distinct items."""
        return sum(
            sum(map(len, unit.indexes.values())) + sum(mask.count() for mask in unit.masks.values())
            for unit in self.units.values()
        )

    @property
    def may_be_retry(self) -> bool:
        """Whether an earlier attempt of the same request may have been committed, and left its fingerprint."""
        return self._fingerprint is not None or self.idempotency_key is not None

    def fingerprint(self) -> bytes:
        """32 bytes that identify this request. They are stored with the batches that it completes. With an
        Idempotency-Key, a client's retry has the same bytes. Without one they are random, and only internal retries
        have the same bytes."""
        if self._fingerprint is None:
            if self.idempotency_key is None:
                self._fingerprint = os.urandom(32)
            else:
                self._fingerprint = request_fingerprint(self.verb, self.idempotency_key, self._content())
        return self._fingerprint

    def _content(self) -> bytes:
        digest = hashlib.sha256(repr(self.reason).encode())
        for batch, unit in sorted(self.units.items()):
            for group in sorted(unit.groups()):
                mask = unit.masks.get(group)
                # Trailing zero bytes have no meaning.
                bits = b"" if mask is None else mask.tobytes().rstrip(b"\0")
                digest.update(repr((batch, group, sorted(unit.indexes.get(group, ())), bits)).encode())
        return digest.digest()


def request_fingerprint(verb: str, idempotency_key: str | None, content: bytes = b"") -> bytes:
    """Identifies a request: equal for equal verb, key and content; random without a key."""
    if idempotency_key is None:
        return os.urandom(32)
    return hashlib.sha256(b"\0".join((verb.encode(), idempotency_key.encode(), content))).digest()


def check_width(place: str, bits: bytes, group_size: int | None) -> None:
    """Raise `errors.InvalidRequest` for a mask that is longer than its group (None: the batch is unknown)."""
    limit = (group_size or MAX_GROUP_SIZE) // 8
    if len(bits) > limit:
        explanation = f"the batch's group_size {group_size} / 8" if group_size else "the largest group_size / 8"
        raise errors.InvalidRequest(place, f"expected at most {limit:,} bytes ({explanation}), got {len(bits):,}")
