"""One call of `POST /v1/acks` or `/v1/failures`, taken apart into units that can be merged with those of others.

A call names items by id and by mask; what counts are its *distinct* items. A `Call` holds them by batch and group, each
once: an id that a mask of the call has too counts as the mask's bit. A `Unit` is the part of a call in one batch (or
a chunk of that part, where it is large); units are what the combiner queues and what a flush applies. A `Call`
gathers the outcomes of its units into one `Answer`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bitarray import bitarray

from core import errors
from core.bitfield import widen
from lastbit.ids import MAX_GROUP_SIZE, ItemId

UNIT_GROUPS: Final = 512
"""The most groups that one flush locks."""
REASON_ITEMS: Final = 20_000
"""About how many items with a reason one unit may bear: each is a row to write."""


SMALL: Final = 4096
"""Bytes below which a unit's size is not worth counting."""


class Verb(StrEnum):
    ACK = "ack"
    FAIL = "fail"


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
    wanted: dict[int, list[int] | bitarray] = field(default_factory=dict)


@dataclass(slots=True)
class Answer:
    applied: int = 0
    repeated: int = 0
    completed: dict[int, Completed] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.applied += outcome.applied
        self.repeated += outcome.repeated
        self.rejected += outcome.rejected
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


@dataclass(slots=True, eq=False)
class Unit:
    """The part of a call in one batch: distinct indexes by group, and masks by group; no item is in both."""

    call: Call
    batch: int
    indexes: dict[int, list[int]] = field(default_factory=dict)
    masks: dict[int, bitarray] = field(default_factory=dict)
    size: int = 0
    """About how many bytes it takes; 0 of a small one."""

    @property
    def verb(self) -> Verb:
        return self.call.verb

    @property
    def reason(self) -> str | None:
        return self.call.reason

    def groups(self) -> Set[int]:
        return self.indexes.keys() | self.masks.keys() if self.masks else self.indexes.keys()

    def ids(self) -> Iterator[tuple[int, int]]:
        """(group, index) of what was named by id."""
        for group, indexes in self.indexes.items():
            for index in indexes:
                yield group, index

    def measure(self) -> None:
        """Set `size`."""
        ids = sum(map(len, self.indexes.values()))
        size = 40 * ids + 200 * (len(self.indexes) + len(self.masks)) + sum(m.nbytes for m in self.masks.values())
        self.size = size if size >= SMALL else 0

    def chunks(self) -> Iterator[Unit]:
        """The same in ascending chunks of at most `UNIT_GROUPS` groups, fewer where many reasons are to be written."""
        if len(self.indexes) + len(self.masks) <= UNIT_GROUPS and self.reason is None:
            yield self
            return
        chunk, weight = Unit(self.call, self.batch), 0
        for count, group in enumerate(sorted(self.groups())):
            if count and (len(chunk.groups()) == UNIT_GROUPS or weight >= REASON_ITEMS):
                yield chunk
                chunk, weight = Unit(self.call, self.batch), 0
            if group in self.indexes:
                chunk.indexes[group] = self.indexes[group]
                weight += len(self.indexes[group]) if self.reason is not None else 0
            if group in self.masks:
                chunk.masks[group] = self.masks[group]
                weight += self.masks[group].count() if self.reason is not None else 0
        yield chunk


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

    def chunks(self) -> list[Unit]:
        """The call's units, in chunks that a flush can take."""
        if len(self.units) == 1:
            (unit,) = self.units.values()
            if len(unit.indexes) == 1 and not unit.masks and self.reason is None:
                return [unit]
        chunks = [chunk for unit in self.units.values() for chunk in unit.chunks()]
        for chunk in chunks:
            chunk.measure()
        return chunks

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
