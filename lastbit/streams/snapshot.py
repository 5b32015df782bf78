"""A window's state as a value and as bytes: the floor, and the outstanding offsets above it.

After a restart, a snapshot shows whether an offset was done. If it wrongly showed an offset as done, the record would
silently be skipped forever. So in every unclear case an offset counts as not done, and the record is replayed:

* Nothing is known above `high`. To fit a size limit, `high` is lowered.
* If the bytes are damaged, only the floor is used, which has its own checksum. A damaged floor is an error, as any
  guess could be too high.

Two snapshots of one stream can be merged: an offset is done if it is done in either of them, and known if either of
them knows it. So merging is commutative, associative and idempotent (a join semilattice), and a commit may be retried,
repeated and reordered.

    version (1 byte), floor (8, signed), CRC-32 of these (4)
    and if anything is outstanding: codec (1), high − floor (varint), payload, CRC-32 of all before it (4)

Integers are big-endian, varints are LEB128. The first outstanding offset is always floor + 1. The payload is the
shortest of three: the distances between outstanding offsets; their bits, from floor + 1 on, bit i in byte i // 8; or
the lengths of alternating runs of outstanding and other offsets.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from lastbit.streams.errors import CorruptSnapshot

MAX_OFFSET: Final = 2**63 - 1
MAX_OUTSTANDING: Final = 65_536
"""Maximum outstanding offsets of one snapshot, so that decoding a malicious one takes little memory."""
MAX_BYTES: Final = 1 << 20
"""Maximum bytes of a snapshot. 65,536 distances of at most nine bytes are shorter."""
MIN_BYTES: Final = 13
"""Bytes of a snapshot with only a floor."""

_VERSION: Final = 1
_HEAD: Final = struct.Struct(">Bq")
_SUM: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All offsets up to `floor` are done. From there up to `high`, all are done except those in `outstanding`, which
    ascend. Nothing is known above `high`. Offsets are 0 to 2^63 - 1; a floor of -1 means none yet.

    The constructor raises `floor` as far as possible: to one before the first outstanding offset, or to `high` if there
    is none. Raises `ValueError`.
    """

    floor: int = -1
    high: int = -1
    outstanding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not -1 <= self.floor <= self.high <= MAX_OFFSET:
            raise ValueError(f"floor {self.floor} and high {self.high} are not -1 <= floor <= high < 2^63")
        if len(self.outstanding) > MAX_OUTSTANDING:
            raise ValueError(f"{len(self.outstanding)} offsets are outstanding, more than {MAX_OUTSTANDING}")
        before = self.floor
        for offset in self.outstanding:
            if offset <= before:
                raise ValueError(f"outstanding offset {offset} does not ascend from {before}")
            before = offset
        if before > self.high:
            raise ValueError(f"outstanding offset {before} is above high, {self.high}")
        object.__setattr__(self, "floor", self.outstanding[0] - 1 if self.outstanding else self.high)

    def done(self, offset: int) -> bool:
        """Whether this offset is known to be resolved."""
        if offset > self.high:
            return False
        place = bisect_left(self.outstanding, offset)
        return place == len(self.outstanding) or self.outstanding[place] != offset

    def merge(self, other: Snapshot) -> Snapshot:
        """The combined knowledge of two snapshots of the same stream."""
        low, top = (self, other) if self.high <= other.high else (other, self)
        low_outstanding = set(low.outstanding)
        outstanding = tuple(offset for offset in top.outstanding if offset > low.high or offset in low_outstanding)
        return Snapshot(max(self.floor, other.floor), top.high, outstanding)

    def within(self, limit: int) -> Snapshot:
        """A copy that fits `limit` bytes when encoded: `high` is lowered, and records above it will replay. Raises
        `ValueError` for a limit below 13 bytes."""
        if limit < MIN_BYTES:
            raise ValueError(f"a snapshot takes at least {MIN_BYTES} bytes, not {limit}")
        if not self.outstanding:
            return self
        _, _, count = _payload(self, limit - MIN_BYTES - 1 - len(_varint(self.high - self.floor)) - _SUM.size)
        if count == len(self.outstanding):
            return self
        return Snapshot(self.floor, self.outstanding[count] - 1, self.outstanding[:count])

    def encode(self, limit: int | None = None) -> bytes:
        """Encode to bytes; with `limit`, those of `within(limit)`."""
        if limit is not None:
            return self.within(limit).encode()
        head = _HEAD.pack(_VERSION, self.floor)
        head += _SUM.pack(zlib.crc32(head))
        if not self.outstanding:
            return head
        codec, payload, _ = _payload(self, MAX_BYTES)
        body = head + bytes([codec]) + _varint(self.high - self.floor) + payload
        return body + _SUM.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode bytes; if the part after the floor is damaged, only the floor is used. Raises `CorruptSnapshot`."""
        floor = _decode_floor(data)
        if len(data) == MIN_BYTES:
            return cls(floor, floor)
        try:
            return cls(floor, *_decode_rest(data, floor))
        except _Damaged:
            return cls(floor, floor)


class _Damaged(Exception):
    """The bytes after the floor are damaged."""


def _decode_floor(data: bytes) -> int:
    if len(data) < MIN_BYTES:
        raise CorruptSnapshot(f"a snapshot has at least {MIN_BYTES} bytes, not {len(data)}")
    version, floor = _HEAD.unpack_from(data)
    if _SUM.unpack_from(data, _HEAD.size)[0] != zlib.crc32(data[: _HEAD.size]):
        raise CorruptSnapshot("the checksum of the snapshot's floor is wrong")
    if version != _VERSION:
        raise CorruptSnapshot(f"the snapshot has version {version}, but this release reads version {_VERSION}")
    if floor < -1:
        raise CorruptSnapshot(f"the snapshot's floor is {floor}")
    return int(floor)


def _decode_rest(data: bytes, floor: int) -> tuple[int, tuple[int, ...]]:
    """The snapshot's `high` and `outstanding`."""
    end = len(data) - _SUM.size
    if end <= MIN_BYTES or len(data) > MAX_BYTES or _SUM.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        raise _Damaged
    span, place = _read_varint(data, MIN_BYTES + 1, end)
    high = floor + span
    decode = _DECODERS.get(data[MIN_BYTES])
    if decode is None or high > MAX_OFFSET:
        raise _Damaged
    # The checksum is right, so only bytes that this encoder never wrote can fail below. They must not use much memory.
    outstanding: list[int] = []
    for offset in decode(data[place:end], floor + 1):
        if offset > high or len(outstanding) == MAX_OUTSTANDING:
            raise _Damaged
        outstanding.append(offset)
    if not outstanding or outstanding[0] != floor + 1:
        raise _Damaged
    return high, tuple(outstanding)


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """A value of at most ten bytes (2^63: from floor -1 to the last offset), and the index after it."""
    value = shift = 0
    while place < end and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise _Damaged


def _payload(snapshot: Snapshot, room: int) -> tuple[int, bytes, int]:
    """(codec, payload, number of offsets) of the codec that fits the most offsets into `room` bytes; on a tie the
    shortest."""
    best = (0, b"", 0)
    for codec, encode in _ENCODERS.items():
        payload, count = encode(snapshot.outstanding, room)
        if (count, -len(payload)) > (best[2], -len(best[1])):
            best = (codec, payload, count)
    return best


def _encode_gaps(outstanding: Sequence[int], room: int) -> tuple[bytes, int]:
    if room < 0:
        return b"", 0
    payload = bytearray()
    count = 1
    before = outstanding[0]
    for offset in outstanding[1:]:
        step = _varint(offset - before - 1)
        if len(payload) + len(step) > room:
            break
        payload += step
        before = offset
        count += 1
    return bytes(payload), count


def _decode_gaps(payload: bytes, first: int) -> Iterator[int]:
    yield first
    place, end = 0, len(payload)
    while place < end:
        step, place = _read_varint(payload, place, end)
        first += step + 1
        yield first


def _encode_bits(outstanding: Sequence[int], room: int) -> tuple[bytes, int]:
    first = outstanding[0]
    count = bisect_left(outstanding, first + 8 * max(room, 0))
    if not count:
        return b"", 0
    field = bytearray((outstanding[count - 1] - first) // 8 + 1)
    for offset in outstanding[:count]:
        bit = offset - first
        field[bit >> 3] |= 1 << (bit & 7)
    return bytes(field), count


def _decode_bits(payload: bytes, first: int) -> Iterator[int]:
    for place, byte in enumerate(payload):
        while byte:
            lowest = byte & -byte
            yield first + 8 * place + lowest.bit_length() - 1
            byte ^= lowest


def _encode_runs(outstanding: Sequence[int], room: int) -> tuple[bytes, int]:
    payload = bytearray()
    count = 0
    while count < len(outstanding):
        end = count + 1
        while end < len(outstanding) and outstanding[end] == outstanding[end - 1] + 1:
            end += 1
        step = _varint(end - count - 1)
        if count:
            step = _varint(outstanding[count] - outstanding[count - 1] - 2) + step
        if len(payload) + len(step) > room:
            break
        payload += step
        count = end
    return bytes(payload), count


def _decode_runs(payload: bytes, first: int) -> Iterator[int]:
    place, end = 0, len(payload)
    while True:
        length, place = _read_varint(payload, place, end)
        yield from range(first, first + length + 1)  # the caller stops at its maximum
        if place == end:
            return
        gap, place = _read_varint(payload, place, end)
        first += length + gap + 2


_ENCODERS: Final[dict[int, Callable[[Sequence[int], int], tuple[bytes, int]]]] = {
    1: _encode_gaps,
    2: _encode_bits,
    3: _encode_runs,
}
_DECODERS: Final[dict[int, Callable[[bytes, int], Iterator[int]]]] = {1: _decode_gaps, 2: _decode_bits, 3: _decode_runs}
