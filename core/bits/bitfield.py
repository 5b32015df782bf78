"""The bits of one group: which of its items are resolved, and which of those are failed. It doesn't use the database.

A bitfield is a `bitarray(endian="little")`: bit i of the group is `bytes[i // 8] >> (i % 8) & 1`, which is also the
order of Spark's `bitmap_construct_agg`, so masks travel as they are.

A stored group consists of two nullable blobs and two counts. If `resolved` is NULL, *the first resolved_count items are
resolved*: a group that is full, or was acked in order, needs no blob. If `failed` is NULL, no item is failed. A blob is
as wide as the issued part of its group, so that a batch of ten items doesn't store 8,192 bits.

Bits are never cleared in `resolved`, and failed is a subset of resolved. So an item has one of three states: pending
(neither), acked (resolved only) or failed (both).

The counts are updated with the bits, and compared with them when a group is read and before it is written. A group
whose counts and bits disagree, or that has bits beyond its issued part, is never stored (`Inconsistent`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bitarray import bitarray
from bitarray.util import ones, zeros

ENDIAN = "little"
PATCHES = 8
"""The maximum number of bytes of a blob that are written one by one."""


class Inconsistent(Exception):
    """A group's counts disagree with its bits, or bits are set beyond its issued part: a bug or a broken row."""


class Change(NamedTuple):
    """The effect of one mask on a group, as masks: `resolved` items were pending, `redriven` items were failed and are
    acked now. `gained` is the number of resolved items."""

    resolved: bitarray
    gained: int
    redriven: bitarray | None


@dataclass(slots=True)
class Group:
    """One group's bits in memory. `resolved` and `failed` are group_size bits long. `failed` is None until an item
    fails."""

    resolved: bitarray
    failed: bitarray | None
    resolved_count: int
    failed_count: int
    stored: int | None = None
    """Bytes of the stored blob of resolved bits. None: there is no blob."""
    changed: set[int] | None = None
    """The positions of the bytes that have changed since the blob was stored. None: write the whole blob."""

    @classmethod
    def empty(cls, group_size: int) -> Group:
        return cls(zeros(group_size, ENDIAN), None, 0, 0)

    @classmethod
    def full(cls, group_size: int) -> Group:
        """A group whose items are all acked."""
        return cls(ones(group_size, ENDIAN), None, group_size, 0)

    @classmethod
    def load(
        cls, resolved: bytes | None, failed: bytes | None, resolved_count: int, failed_count: int, group_size: int
    ) -> Group:
        """The group of a row with these columns."""
        failed_bits = None if failed is None else widen(failed, group_size)
        if resolved is None:
            bits = zeros(group_size, ENDIAN)
            bits[:resolved_count] = True
            return cls(bits, failed_bits, resolved_count, failed_count)
        return cls(widen(resolved, group_size), failed_bits, resolved_count, failed_count, len(resolved), set())

    def check(self, issued: int) -> None:
        """Raise `Inconsistent` if bits and counts disagree, or if bits beyond the first `issued` are set."""
        resolved = self.resolved.count()
        failed = 0 if self.failed is None else self.failed.count()
        if (resolved, failed) != (self.resolved_count, self.failed_count):
            raise Inconsistent(
                f"{resolved} bits are resolved and {failed} failed, but its counts are {self.resolved_count} and "
                f"{self.failed_count}"
            )
        if self.resolved.find(1, issued) >= 0:
            raise Inconsistent(f"items are resolved beyond the {issued} that were issued")
        if failed and self.failed is not None and self.failed.find(1, issued) >= 0:
            raise Inconsistent(f"items are failed beyond the {issued} that were issued")

    def dump(self, issued: int) -> tuple[bytes | None, bytes | None, int, int]:
        """The columns of the group's row. `issued`: the number of its issued items. Raises `Inconsistent`."""
        self.check(issued)
        width = -(-issued // 8) * 8
        resolved = None if self._is_prefix() else self.resolved[:width].tobytes()
        failed = self.failed[:width].tobytes() if self.failed is not None and self.failed_count else None
        return resolved, failed, self.resolved_count, self.failed_count

    def patches(self, issued: int) -> list[tuple[int, bytes]] | None:
        """The changed bytes of the stored blob as (position, byte). None if the whole row must be written, or if
        writing it is cheaper."""
        if self.changed is None or len(self.changed) > PATCHES or self.stored != -(-issued // 8) or self._is_prefix():
            return None
        return [(byte, self.resolved[8 * byte : 8 * byte + 8].tobytes()) for byte in sorted(self.changed)]

    def mark_stored(self, issued: int) -> None:
        """Record that the result of `dump` or `patches` has been stored."""
        self.stored = None if self._is_prefix() else -(-issued // 8)
        self.changed = None if self.stored is None else set()

    def _is_prefix(self) -> bool:
        return self.resolved.find(0) in (-1, self.resolved_count)

    def ack_one(self, index: int) -> tuple[bool, bool]:
        """Ack one item. Returns (was pending, was failed). An item that was neither was already acked."""
        if not self.resolved[index]:
            self.resolved[index] = 1
            self.resolved_count += 1
            if self.changed is not None:
                self.changed.add(index >> 3)
            return True, False
        if self.failed is not None and self.failed[index]:
            self.failed[index] = 0
            self.failed_count -= 1
            self.changed = None
            return False, True
        return False, False

    def fail_one(self, index: int) -> bool:
        """Fail one item. Returns whether it was pending; an acked item stays acked."""
        if self.resolved[index]:
            return False
        self.resolved[index] = 1
        self.resolved_count += 1
        self.changed = None
        if self.failed is None:
            self.failed = zeros(len(self.resolved), ENDIAN)
        self.failed[index] = 1
        self.failed_count += 1
        return True

    def ack(self, mask: bitarray) -> Change:
        """Ack every item of `mask` (group_size bits). Ack wins over fail."""
        pending, count = self._resolve(mask)
        redriven = None
        if self.failed is not None and self.failed_count:
            redriven = mask & self.failed
            self.failed &= ~mask
            self.failed_count -= redriven.count()
        return Change(pending, count, redriven)

    def fail(self, mask: bitarray) -> Change:
        """Fail every item of `mask` (group_size bits) that is pending."""
        pending, count = self._resolve(mask)
        if count:
            if self.failed is None:
                self.failed = pending.copy()
            else:
                self.failed |= pending
            self.failed_count += count
        return Change(pending, count, None)

    def _resolve(self, mask: bitarray) -> tuple[bitarray, int]:
        """Resolve the pending items of `mask`. Returns them as a mask, and their number."""
        self.changed = None
        if not self.resolved_count:
            self.resolved |= mask
            self.resolved_count = mask.count()
            return mask, self.resolved_count
        pending = ~self.resolved
        pending &= mask
        self.resolved |= mask
        count = pending.count()
        self.resolved_count += count
        return pending, count


def widen(blob: bytes, bits: int) -> bitarray:
    """A stored or received blob, extended with zeros to `bits` bits. A longer blob is not truncated."""
    field = bitarray(endian=ENDIAN)
    field.frombytes(blob)
    if len(field) < bits:
        field.extend(zeros(bits - len(field), ENDIAN))
    return field


def mask_of(indexes: list[int], bits: int) -> bitarray:
    """A mask of `bits` bits in which `indexes` are set."""
    mask = zeros(bits, ENDIAN)
    mask[indexes] = True
    return mask


def runs(field: bitarray, value: bool, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The maximal runs [first, end) of `value` within field[start:stop], ascending."""
    position = start
    while position < stop:
        first = field.find(value, position, stop)
        if first < 0:
            return
        end = field.find(not value, first, stop)
        if end < 0:
            end = stop
        yield first, end
        position = end
