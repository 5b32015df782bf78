"""One call of `POST /v1/acks` or `/v1/failures`, taken apart into units that can be merged with those of others.

A call names items by id and by mask; what counts are its *distinct* items. A `Call` holds them by batch and group, each
once: an id that a mask of the call has too counts as the mask's bit. A `Unit` is the part of a call in one batch; units
are what the combiner queues and what a flush applies. A large unit is applied in pieces, each a `Unit` too, so that no
flush takes long. An `AckResult` gathers the outcomes of a call's units.
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
from lastbit.ids import MAX_GROUP_SIZE, ItemId

UNIT_GROUPS: Final = 512
"""The most groups that one flush locks."""
FLUSH_COST: Final = 4096
"""The most that one flush may cost, in units of about 10 µs: a row of `failures` with a short reason takes that long. A
flush of this cost ends within some 50 ms, and so does the wait of all who aren't in it."""
_REASON_BYTES: Final = 500
"""Bytes of a reason that cost as much as its row."""
_IDS: Final = 64
"""Ids that cost as much as one row of `failures`."""
_MASK_BYTES: Final = 200
"""Bytes of masks that do."""

SMALL: Final = 4096
"""Bytes below which a unit's size is not worth counting."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An item, or `count` bits of a group's mask, that was not counted: `unknown_batch`, `unknown_item`, `expired`,
    `cancelled`."""

    reason: str
    item: ItemId | None = None
    group: tuple[int, int] | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class Completed:
    """A complete batch of which the call brought an issued item."""

    batch: int
    key: str | None
    newly: bool
    succeeded: bool
    newly_succeeded: bool


@dataclass(slots=True)
class Outcome:
    """What became of one unit. `wanted` is what was admitted, by group: indexes, or a mask of group_size bits."""

    applied: int = 0
    repeated: int = 0
    rejected: list[Rejected] = field(default_factory=list)
    completed: Completed | None = None
    admitted: dict[int, list[int] | bitarray] = field(default_factory=dict)
    rest: Unit | None = None
    """The part of the unit that was left for another transaction: this one would have taken too long."""
    paid: Future[None] | None = None
    """The unit ended a nested batch. Done once its parent's item is resolved, or that is left to the sweep."""


@dataclass(slots=True)
class AckResult:
    applied: int = 0
    repeated: int = 0
    completed: dict[int, Completed] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    _masks: dict[tuple[str, tuple[int, int]], int] = field(default_factory=dict, compare=False)
    """(reason, group) of a rejected mask → its place in `rejected`."""

    def add(self, outcome: Outcome) -> None:
        self.applied += outcome.applied
        self.repeated += outcome.repeated
        if outcome.rejected:
            self._reject(outcome.rejected)
        told = outcome.completed
        if told is None:
            return
        before = self.completed.get(told.batch)
        if before is not None:
            # A call of several chunks is told once, and it is news if it was to any of them.
            told = Completed(
                told.batch,
                told.key,
                told.newly or before.newly,
                told.succeeded,
                told.newly_succeeded or before.newly_succeeded,
            )
        self.completed[told.batch] = told

    def _reject(self, rejected: Iterable[Rejected]) -> None:
        """A mask that came in several pieces has one entry for each reason."""
        for each in rejected:
            if each.group is not None:
                place = self._masks.setdefault((each.reason, each.group), len(self.rejected))
                if place < len(self.rejected):
                    self.rejected[place] = replace(each, count=each.count + self.rejected[place].count)
                    continue
            self.rejected.append(each)


@dataclass(slots=True, eq=False)
class Unit:
    """The part of a call in one batch: distinct indexes by group, and masks by group; no item is in both."""

    call: Call
    batch: int
    indexes: dict[int, list[int]] = field(default_factory=dict)
    masks: dict[int, bitarray] = field(default_factory=dict)
    size: int = 0
    """About how many bytes it takes; 0 of a small one."""
    cost: int = 1
    """About how long a flush takes for it, in units of `FLUSH_COST`."""

    @property
    def verb(self) -> Verb:
        return self.call.verb

    @property
    def reason(self) -> str | None:
        return self.call.reason

    def groups(self) -> Set[int]:
        return self.indexes.keys() | self.masks.keys() if self.masks else self.indexes.keys()

    def count(self, group: int) -> int:
        """Items of the group."""
        mask = self.masks.get(group)
        return len(self.indexes.get(group, ())) + (0 if mask is None else mask.count())

    def part(self, weights: Mapping[int, int], most: int, *, at_least: bool) -> tuple[Unit, Unit | None]:
        """The unit in two: the first groups, whose weights are `most` at most together, and the rest. With `at_least`
        the first part has one group that weighs something, in any case."""
        first, rest = Unit(self.call, self.batch), Unit(self.call, self.batch)
        spent = 0
        for group in sorted(self.groups()):
            weight = weights[group]
            fits = not rest.groups() and (spent + weight <= most or (at_least and not spent))
            spent += weight if fits else 0
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
        """(group, index) of what was named by id."""
        for group, indexes in self.indexes.items():
            for index in indexes:
                yield group, index

    def measure(self) -> None:
        """Set `size` and `cost`."""
        ids = sum(map(len, self.indexes.values()))
        mask_bytes = sum(mask.nbytes for mask in self.masks.values())
        size = 40 * ids + 200 * (len(self.indexes) + len(self.masks)) + mask_bytes
        self.size = size if size >= SMALL else 0
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
        """Of each item that fails with the call's reason."""
        return 0 if self.reason is None else 1 + len(self.reason) // _REASON_BYTES

    @property
    def divisible(self) -> bool:
        """Whether it takes more than half of a flush: only such units are ever divided."""
        return self.cost > FLUSH_COST // 2 or len(self.indexes) + len(self.masks) > UNIT_GROUPS // 2

    def copy(self) -> Unit:
        """The same unit, from which `take` may take pieces; the call keeps its own."""
        groups = sorted(self.groups(), reverse=True)
        made = Unit(self.call, self.batch, {}, {}, self.size, self.cost)
        for group in groups:
            if group in self.indexes:
                made.indexes[group] = self.indexes[group]
            if group in self.masks:
                made.masks[group] = self.masks[group]
        return made

    def take(self, groups: int, cost: int) -> Unit:
        """Take the first piece off a `copy`, of at most this many groups and this cost but of one item at least. A
        group is divided only where its reasons alone cost more."""
        piece = Unit(self.call, self.batch)
        left, count = cost, 0
        while (self.indexes or self.masks) and count < groups and left > 0:
            group = min(next(reversed(each)) for each in (self.indexes, self.masks) if each)
            wanted = self._cost_of(group)
            if wanted > left and (count or self.reason is not None):
                if not count:
                    self._divide(piece, group, max(1, cost // self._row_cost))
                break
            left, count = left - wanted, count + 1
            if group in self.indexes:
                piece.indexes[group] = self.indexes.pop(group)
            if group in self.masks:
                piece.masks[group] = self.masks.pop(group)
        piece.measure()
        self.size -= min(piece.size, self.size)
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
            # The group's mask counts in both.
            self.cost += 1 + mask.nbytes // _MASK_BYTES

    def chunks(self) -> Iterator[Unit]:
        """The unit in ascending pieces, each for a flush of its own."""
        self.measure()
        if len(self.groups()) <= UNIT_GROUPS and self.cost <= FLUSH_COST:
            yield self
            return
        rest = self.copy()
        while rest.indexes or rest.masks:
            yield rest.take(UNIT_GROUPS, FLUSH_COST)


@dataclass(slots=True, eq=False)
class Call:
    """What one request wants. Build it with `of`."""

    verb: Verb
    reason: str | None = None
    idempotency_key: str | None = None
    units: dict[int, Unit] = field(default_factory=dict)
    withheld: Set[int] = frozenset()
    """Batches that this caller must not touch: to him they are unknown, whatever they are."""
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
        """From parsed ids and (batch, group, bits); repeats among them are folded."""
        call = cls(verb, reason, idempotency_key)
        if not masks and isinstance(items, list) and len(items) == 1:
            # Nearly every call of a consumer.
            ((batch, group, index),) = items
            call.units[batch] = Unit(call, batch, {group: [index]})
            return call
        for batch, group, bits in masks:
            mask = widen(bits, 0)
            known = call.unit(batch).masks
            if group in known:
                size = max(len(mask), len(known[group]))
                mask = widen(bits, size) | widen(known[group].tobytes(), size)
            known[group] = mask
        # What is acked together mostly stands together: the unit and the group of the item before are at hand.
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
        """The call's units, each with its size and cost; of large ones a copy, from which pieces may be taken."""
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
        """The call's units, in pieces that a flush can take."""
        return [chunk for unit in self.units.values() for chunk in unit.chunks()]

    def unit(self, batch: int) -> Unit:
        found = self.units.get(batch)
        if found is None:
            found = self.units[batch] = Unit(self, batch)
        return found

    @property
    def items(self) -> int:
        """Distinct ones that it names."""
        return sum(
            sum(map(len, unit.indexes.values())) + sum(mask.count() for mask in unit.masks.values())
            for unit in self.units.values()
        )

    @property
    def may_be_retry(self) -> bool:
        """Whether an earlier attempt of this very request may have been committed: it has a name that was kept then."""
        return self._fingerprint is not None or self.idempotency_key is not None

    def fingerprint(self) -> bytes:
        """32 bytes that name this request, to be kept with what it completed. With an Idempotency-Key they are those
        of its retry too; without, they are random, and stay the same while we ourselves repeat it inside."""
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
                # Trailing zero bytes say nothing.
                bits = b"" if mask is None else mask.tobytes().rstrip(b"\0")
                digest.update(repr((batch, group, sorted(unit.indexes.get(group, ())), bits)).encode())
        return digest.digest()


def request_fingerprint(verb: str, idempotency_key: str | None, content: bytes = b"") -> bytes:
    """A name for a request: equal for equal verb, key and content; random where there is no key."""
    if idempotency_key is None:
        return os.urandom(32)
    return hashlib.sha256(b"\0".join((verb.encode(), idempotency_key.encode(), content))).digest()


def check_width(place: str, bits: bytes, group_size: int | None) -> None:
    """Raise `errors.InvalidRequest` for a mask that is longer than its group (None: of a batch that isn't known)."""
    limit = (group_size or MAX_GROUP_SIZE) // 8
    if len(bits) > limit:
        known = f"the batch's group_size {group_size} / 8" if group_size else "the largest group_size / 8"
        raise errors.InvalidRequest(place, f"expected at most {limit:,} bytes ({known}), got {len(bits):,}")
