"""The bits of one group: which of its items are resolved, and which of those are failed. It doesn't use the database.

A bitfield is a `bitarray(endian="little")`: bit i of the group is `bytes[i // 8] >> (i % 8) & 1`, which is also the
order of Spark's `bitmap_construct_agg`, so masks travel as they are.

A stored group consists of three nullable blobs and three counts. If `resolved` is NULL, *the first resolved_count items
are resolved*: a group that is full, or was acked in order, needs no blob. If `failed` or `skipped` is NULL, no item is.
A blob is as wide as the issued part of its group, so that a batch of ten items doesn't store 8,192 bits. Of skipped
items, the count too is NULL if there are none: such a group takes no byte for them.

Bits are never cleared in `resolved`; failed and skipped are disjoint subsets of it. So an item has one of four states:
pending, failed, skipped, or acked (resolved only). An item only moves to the right in this order, so the same calls in
any order end in the same state.

The counts are updated with the bits, and compared with them when a group is read and before it is written. A group
whose counts and bits disagree, or that has bits beyond its issued part, is never stored (`Inconsistent`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from bitarray import bitarray
from bitarray.util import ones, zeros

ENDIAN = "little"
PATCHES = 8
"""The maximum number of bytes of a blob that are written one by one."""


class Inconsistent(Exception):
    """A group's counts disagree with its bits, or bits are set beyond its issued part: a bug or a broken row."""


class Columns(NamedTuple):
    """The columns of a group's row that have its bits."""

    resolved: bytes | None
    resolved_count: int
    failed: bytes | None = None
    failed_count: int = 0
    skipped: bytes | None = None
    skipped_count: int | None = None
    """None: no item is skipped."""


class Change(NamedTuple):
    """The effect of one mask on a group, as masks: `resolved` items were pending, `redriven` items were failed, and
    `unskipped` items were skipped. `gained` is the number of resolved items."""

    resolved: bitarray
    gained: int
    redriven: bitarray | None = None
    unskipped: bitarray | None = None


class ItemState(IntEnum):
    """The state of an item before it is acked, in the order in which it moves."""

    PENDING = 0
    FAILED = 1
    SKIPPED = 2


@dataclass(slots=True)
class Group:
    """One group's bits in memory, each group_size bits long. `failed` is None until an item fails, `skipped` until one
    is skipped."""

    resolved: bitarray
    failed: bitarray | None
    resolved_count: int
    failed_count: int
    stored: int | None = None
    """Bytes of the stored blob of resolved bits. None: there is no blob."""
    changed: set[int] | None = None
    """The positions of the bytes that have changed since the blob was stored. None: write the whole blob."""
    skipped: bitarray | None = None
    skipped_count: int = 0

    @classmethod
    def empty(cls, group_size: int) -> Group:
        return cls(zeros(group_size, ENDIAN), None, 0, 0)

    @classmethod
    def full(cls, group_size: int) -> Group:
        """A group whose items are all acked."""
        return cls(ones(group_size, ENDIAN), None, group_size, 0)

    @classmethod
    def load(cls, row: Columns, group_size: int) -> Group:
        """The group of a row with these columns."""
        failed = None if row.failed is None else widen(row.failed, group_size)
        if row.resolved is None:
            bits = zeros(group_size, ENDIAN)
            bits[: row.resolved_count] = True
            group = cls(bits, failed, row.resolved_count, row.failed_count)
        else:
            bits = widen(row.resolved, group_size)
            group = cls(bits, failed, row.resolved_count, row.failed_count, len(row.resolved), set())
        if row.skipped is not None:
            group.skipped = widen(row.skipped, group_size)
        group.skipped_count = row.skipped_count or 0
        return group

    @property
    def version(self) -> tuple[int, int, int]:
        """The counts, which determine the bits (see `cache`)."""
        return self.resolved_count, self.failed_count, self.skipped_count

    def check(self, issued: int) -> None:
        """Raise `Inconsistent` if bits and counts disagree, or if bits beyond the first `issued` are set."""
        resolved = self.resolved.count()
        failed = 0 if self.failed is None else self.failed.count()
        skipped_count = 0 if self.skipped is None else self.skipped.count()
        if (resolved, failed, skipped_count) != self.version:
            raise Inconsistent(
                f"{resolved} bits are resolved, {failed} failed and {skipped_count} skipped, but its counts are "
                f"{self.resolved_count}, {self.failed_count} and {self.skipped_count}"
            )
        if self.resolved.find(1, issued) >= 0:
            raise Inconsistent(f"items are resolved beyond the {issued} that were issued")
        if failed and self.failed is not None and self.failed.find(1, issued) >= 0:
            raise Inconsistent(f"items are failed beyond the {issued} that were issued")
        if skipped_count and self.skipped is not None and self.skipped.find(1, issued) >= 0:
            raise Inconsistent(f"items are skipped beyond the {issued} that were issued")

    def dump(self, issued: int) -> Columns:
        """The columns of the group's row. `issued`: the number of its issued items. Raises `Inconsistent`."""
        self.check(issued)
        width = -(-issued // 8) * 8
        resolved = None if self._is_prefix() else self.resolved[:width].tobytes()
        failed = self.failed[:width].tobytes() if self.failed is not None and self.failed_count else None
        if self.skipped is None or not self.skipped_count:
            return Columns(resolved, self.resolved_count, failed, self.failed_count)
        skipped_bits = self.skipped[:width].tobytes()
        return Columns(resolved, self.resolved_count, failed, self.failed_count, skipped_bits, self.skipped_count)

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

    def ack_one(self, index: int) -> ItemState | None:
        """Ack one item. Returns the state that it had; None if it was acked."""
        if not self.resolved[index]:
            self.resolved[index] = 1
            self.resolved_count += 1
            if self.changed is not None:
                self.changed.add(index >> 3)
            return ItemState.PENDING
        if self.failed is not None and self.failed[index]:
            self.failed[index] = 0
            self.failed_count -= 1
            self.changed = None
            return ItemState.FAILED
        if self.skipped is not None and self.skipped[index]:
            self.skipped[index] = 0
            self.skipped_count -= 1
            self.changed = None
            return ItemState.SKIPPED
        return None

    def skip_one(self, index: int) -> ItemState | None:
        """Skip one item, unless it is skipped or acked. Returns the state that it had; None if it stays as it is."""
        if self.resolved[index] and (self.failed is None or not self.failed[index]):
            return None
        before = self.ack_one(index)
        if self.skipped is None:
            self.skipped = zeros(len(self.resolved), ENDIAN)
        self.skipped[index] = 1
        self.skipped_count += 1
        self.changed = None
        return before

    def fail_one(self, index: int) -> ItemState | None:
        """Fail one item that is pending. Returns the state that it had; None if it stays as it is."""
        if self.resolved[index]:
            return None
        self.resolved[index] = 1
        self.resolved_count += 1
        self.changed = None
        if self.failed is None:
            self.failed = zeros(len(self.resolved), ENDIAN)
        self.failed[index] = 1
        self.failed_count += 1
        return ItemState.PENDING

    def ack(self, mask: bitarray) -> Change:
        """Ack every item of `mask` (group_size bits)."""
        pending, count = self._resolve(mask)
        redriven = self._unfail(mask)
        unskipped = None
        if self.skipped is not None and self.skipped_count:
            unskipped = mask & self.skipped
            self.skipped &= ~mask
            self.skipped_count -= unskipped.count()
        return Change(pending, count, redriven, unskipped)

    def skip(self, mask: bitarray) -> Change:
        """Skip every item of `mask` (group_size bits) that is pending or failed."""
        pending, count = self._resolve(mask)
        redriven = self._unfail(mask)
        skipped = pending if redriven is None else pending | redriven
        if skipped.any():
            self.skipped = skipped.copy() if self.skipped is None else self.skipped | skipped
            self.skipped_count += skipped.count()
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
        return Change(pending, count)

    def acked(self) -> bitarray:
        """The acked items."""
        bits = self.resolved.copy()
        for others in (self.failed, self.skipped):
            if others is not None:
                bits &= ~others
        return bits

    def _unfail(self, mask: bitarray) -> bitarray | None:
        """Remove the items of `mask` from the failed ones. Returns those that were failed, if any could be."""
        if self.failed is None or not self.failed_count:
            return None
        redriven = mask & self.failed
        self.failed &= ~mask
        self.failed_count -= redriven.count()
        return redriven

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
