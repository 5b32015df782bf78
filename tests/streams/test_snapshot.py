"""Snapshots: every codec path in both directions, damage, limits, and merging."""

from __future__ import annotations

import itertools
import random
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastbit.streams import CorruptSnapshot, Snapshot
from lastbit.streams.snapshot import MAX_OFFSET, MAX_OUTSTANDING, MIN_BYTES
from tests.mutants import mutant

KAFKA_METADATA = 4096
"""Bytes next to a committed offset, at the broker's default."""
GAPS, BITS, RUNS = 1, 2, 3

bases = st.sampled_from([-1, 0, 1, 127, 2**31 - 2, 2**31, 2**32 - 1, 2**53, MAX_OFFSET - 10_000]) | st.integers(
    -1, MAX_OFFSET - 10_000
)
steps = st.one_of(
    st.lists(st.integers(1, 3), max_size=60),
    st.lists(st.just(1), max_size=200),
    st.lists(st.integers(1, 150), max_size=60),
    st.lists(st.sampled_from([1, 1, 1, 1, 1, 40]), max_size=100),
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    floor = draw(bases)
    outstanding = tuple(itertools.accumulate(draw(steps), initial=floor))[1:]
    return Snapshot(floor, (outstanding or (floor,))[-1] + draw(st.integers(0, 20)), outstanding)


@st.composite
def of_one_stream(draw: st.DrawFn) -> Snapshot:
    """A snapshot of a stream with the offsets 0 .. 11, in any state, so that snapshots overlap in all ways."""
    high = draw(st.integers(-1, 11))
    return Snapshot(-1, high, tuple(sorted(draw(st.sets(st.integers(0, high))) if high >= 0 else ())))


def done(snapshot: Snapshot, offsets: range = range(-1, 13)) -> set[int]:
    return {offset for offset in offsets if snapshot.done(offset)}


@settings(max_examples=200)
@given(snapshots())
@example(Snapshot())
@example(Snapshot(MAX_OFFSET, MAX_OFFSET))
@example(Snapshot(MAX_OFFSET - 1, MAX_OFFSET, (MAX_OFFSET,)))
@example(Snapshot(-1, MAX_OFFSET, (0, MAX_OFFSET)))
def test_a_snapshot_equals_its_decoded_encoding(snapshot: Snapshot) -> None:
    """Outstanding offsets are anywhere in the 64 bits."""
    assert Snapshot.decode(snapshot.encode()) == snapshot


@pytest.mark.parametrize(
    ("codec", "outstanding"),
    [
        (GAPS, (0,)),
        (GAPS, (0, 100, 5000, 5001)),
        (BITS, tuple(sorted(random.Random(6).sample(range(1, 4000), 2000)))),
        (RUNS, tuple(range(10_000))),
        (RUNS, tuple(offset for offset in range(20_000) if offset % 5000 > 10)),
    ],
)
def test_the_shortest_codec_is_chosen(codec: int, outstanding: tuple[int, ...]) -> None:
    """Few offsets as distances, a random half as bits, long runs as runs."""
    snapshot = Snapshot(-1, 30_000, outstanding)
    data = snapshot.encode()
    assert data[MIN_BYTES] == codec
    assert Snapshot.decode(data) == snapshot
    assert len(data) <= MIN_BYTES + 10 + min(2 * len(outstanding), outstanding[-1] // 8 + 1)


def test_a_snapshot_without_outstanding_offsets_is_only_a_floor() -> None:
    """Thirteen bytes, whatever the offset."""
    for floor in (-1, 0, 2**40, MAX_OFFSET):
        data = Snapshot(floor, floor).encode()
        assert len(data) == MIN_BYTES
        assert Snapshot.decode(data) == Snapshot(floor, floor)


def test_the_largest_snapshots_stay_small_and_decode() -> None:
    """65,536 offsets: all of them, every second one, and as far apart as 64 bits allow."""
    for step, size in ((1, 30), (2, MAX_OUTSTANDING // 4 + 30), (2**46, 8 * MAX_OUTSTANDING)):
        outstanding = tuple(range(0, step * MAX_OUTSTANDING, step))
        data = Snapshot(-1, outstanding[-1], outstanding).encode()
        assert len(data) < size
        assert Snapshot.decode(data).outstanding == outstanding


@mutant(
    "a-damaged-snapshot-skips-a-record",
    "lastbit.streams.snapshot:Snapshot.decode",
    """
        try:
            return cls(floor, *_decode_rest(data, floor))
        except _Damaged:
            return cls(floor, floor)
    """,
    """
        try:
            return cls(floor, *_decode_rest(data, floor))
        except _Damaged:
            return cls(floor, floor + 1)
    """,
)
@mutant(
    "a-damaged-snapshot-is-believed",
    "lastbit.streams.snapshot:_decode_rest",
    "end <= MIN_BYTES or len(data) > MAX_BYTES or _SUM.unpack_from(data, end)[0] != zlib.crc32(data[:end])",
    "end <= MIN_BYTES or len(data) > MAX_BYTES",
)
@settings(max_examples=25)
@given(snapshots(), st.integers(1, 255))
@example(Snapshot(9, 40, (11, 12, 30)), 1)
def test_a_damaged_snapshot_replays_and_never_skips(snapshot: Snapshot, flip: int) -> None:
    """At every byte. Damage to the head is refused; damage after it falls back to the floor, and records handled above
    the floor replay. (No record may be lost by damage: parallel-consumer #875, where metadata that didn't decode made
    the record at the committed offset count as done.)"""
    data = snapshot.encode()
    for place in range(len(data)):
        damaged_bytes = bytearray(data)
        damaged_bytes[place] ^= flip
        if place < MIN_BYTES:
            with pytest.raises(CorruptSnapshot):
                Snapshot.decode(bytes(damaged_bytes))
        else:
            assert Snapshot.decode(bytes(damaged_bytes)) == Snapshot(snapshot.floor, snapshot.floor)


@settings(max_examples=25)
@given(snapshots(), st.binary(min_size=1, max_size=20))
def test_a_truncated_or_extended_snapshot_falls_back_to_its_floor(snapshot: Snapshot, suffix: bytes) -> None:
    """As a column that is too short would leave it."""
    data = snapshot.encode()
    for length in range(len(data)):
        if length < MIN_BYTES:
            with pytest.raises(CorruptSnapshot):
                Snapshot.decode(data[:length])
        else:
            assert Snapshot.decode(data[:length]) == Snapshot(snapshot.floor, snapshot.floor)
    assert Snapshot.decode(data + suffix) == Snapshot(snapshot.floor, snapshot.floor)


@settings(max_examples=100)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    """With a Lastbit error, whatever the bytes are."""
    with pytest.raises(CorruptSnapshot):
        Snapshot.decode(data)


SPAN = b"\xff" * 7 + b"\x7f"
"""high, 2^56 - 1 above the floor"""


def sealed(floor: int, body: bytes, version: int = 1) -> bytes:
    """As an attacker would build it: with valid checksums."""
    head = struct.pack(">Bq", version, floor)
    head += zlib.crc32(head).to_bytes(4, "big")
    return head + body + zlib.crc32(head + body).to_bytes(4, "big")


@mutant(
    "a-hostile-snapshot-is-not-bounded",
    "lastbit.streams.snapshot:_decode_rest",
    "len(outstanding) == MAX_OUTSTANDING",
    "len(outstanding) == 100 * MAX_OUTSTANDING",
)
@pytest.mark.parametrize(
    "body",
    [
        b"\x03" + SPAN + SPAN,  # one run of 2^56 offsets
        b"\x03" + SPAN + b"\xff\xff\x03\x00" * 1000,  # a thousand runs of 65,536
        b"\x01" + SPAN + bytes(1_000_000),  # a million distances
        b"\x02" + SPAN + b"\xff" * 1_000_000,  # eight million bits
        b"\x02" + SPAN + b"\x01" + bytes(8_000_000),  # longer than any
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",  # a varint without an end
        b"\x01\x05\x09",  # an offset above high
        b"\x02\x05\x02",  # whose first offset is not above the floor
        b"\x02\x05",  # nothing outstanding, though high is above the floor
        b"\x04\x05\x01",  # an unknown codec
        b"\x01",  # no high
        b"\x03\x05\x00\x01",  # a run without a start
    ],
)
def test_a_hostile_snapshot_costs_no_memory_and_falls_back_to_its_floor(body: bytes) -> None:
    """Its checksums are valid, but its claims are bounded."""
    data = sealed(7, body)
    tracemalloc.start()
    try:
        assert Snapshot.decode(data) == Snapshot(7, 7)
        assert tracemalloc.get_traced_memory()[1] < len(data) + 8_000_000
    finally:
        tracemalloc.stop()


def test_an_invalid_floor_is_refused() -> None:
    """Below -1, or of an unknown version."""
    for data in (struct.pack(">Bq", 1, -2), struct.pack(">Bq", 2, 5), struct.pack(">Bq", 1, -(2**63))):
        with pytest.raises(CorruptSnapshot):
            Snapshot.decode(data + zlib.crc32(data).to_bytes(4, "big"))


def test_offsets_beyond_64_bits_are_refused() -> None:
    """high = floor + span must not overflow."""
    assert Snapshot.decode(sealed(MAX_OFFSET - 1, b"\x01\x02")) == Snapshot(MAX_OFFSET - 1, MAX_OFFSET - 1)


@settings(max_examples=100)
@given(snapshots(), st.integers(MIN_BYTES, 90))
def test_a_limit_holds_and_omitted_offsets_replay(snapshot: Snapshot, limit: int) -> None:
    """pulsar #25540 and parallel-consumer #647: gaps that don't fit are omitted. The kept part is correct up to a lower
    `high`; nothing above that counts as done."""
    data = snapshot.encode(limit)
    assert len(data) <= limit
    shortened = Snapshot.decode(data)
    assert shortened == snapshot.within(limit)
    assert shortened.floor == snapshot.floor
    assert shortened.high <= snapshot.high
    for offset in {*snapshot.outstanding, *(o + d for o in snapshot.outstanding for d in (-1, 1)), shortened.high}:
        assert shortened.done(offset) == (snapshot.done(offset) and offset <= shortened.high)
    if len(snapshot.encode()) <= limit:
        assert shortened == snapshot
    assert shortened.merge(snapshot) == snapshot


def test_parallel_consumer_647_metadata_over_its_limit_keeps_as_much_as_fits() -> None:
    """parallel-consumer #647: offset metadata over Kafka's 4,096 bytes was omitted completely, and consumption stopped.
    Of 60,000 random outstanding offsets, as many as fit are kept, and each larger limit keeps more."""
    outstanding = tuple(sorted(random.Random(647).sample(range(1, 10**6), 60_000)))
    snapshot = Snapshot(-1, 10**6, outstanding)
    shortened = Snapshot.decode(snapshot.encode(KAFKA_METADATA))
    assert len(snapshot.encode()) > KAFKA_METADATA >= len(shortened.encode()) > KAFKA_METADATA - 30
    assert shortened.outstanding == outstanding[: len(shortened.outstanding)]
    assert len(shortened.outstanding) > 4000
    highs = [snapshot.within(limit).high for limit in range(MIN_BYTES, 200)]
    assert highs == sorted(highs)
    assert highs[0] == snapshot.floor


@mutant(
    "an-offset-is-narrowed-to-32-bits",
    "lastbit.streams.snapshot:_read_varint",
    "(byte & 127) << shift",
    "(byte & 127) << shift & 0xFFFFFFFF",
)
def test_rocketmq_11180_no_offset_is_narrowed() -> None:
    """rocketmq #11180: a 64-bit offset went through 32 bits. Around each power of two, one outstanding offset between
    two acked ones stays unchanged."""
    for power in range(1, 64):
        for offset in (2**power - 2, 2**power - 1, 2**power):
            if offset > MAX_OFFSET:
                continue
            far_offsets = (offset + 2**power // 2,) if offset + 2**power // 2 <= MAX_OFFSET else ()
            decoded = Snapshot.decode(Snapshot(-1, MAX_OFFSET, (offset, *far_offsets)).encode())
            assert decoded.outstanding == (offset, *far_offsets)
            assert (decoded.floor, decoded.high) == (offset - 1, MAX_OFFSET)


@mutant(
    "a-merge-takes-the-bits-of-the-lower-one",
    "lastbit.streams.snapshot:Snapshot.merge",
    'def merge(self, other: Snapshot) -> Snapshot:\n    """The combined knowledge of two snapshots of '
    'the same stream."""\n    low, top = (self, other) if self.high <= other.high else (other, self)\n   '
    " low_outstanding = set(low.outstanding)\n    outstanding = tuple((offset for offset in "
    "top.outstanding if offset > low.high or offset in low_outstanding))\n    return Snapshot(max("
    "self.floor, other.floor), top.high, outstanding)",
    """
        def merge(self, other: Snapshot) -> Snapshot:
            \"\"\"The combined knowledge of two snapshots of the same stream.\"\"\"
            low, top = (self, other) if self.high <= other.high else (other, self)
            low_outstanding = set(low.outstanding)
            outstanding = tuple((offset for offset in low.outstanding))
            return Snapshot(max(self.floor, other.floor), top.high, outstanding)
    """,
)
@settings(max_examples=200)
@given(of_one_stream(), of_one_stream(), of_one_stream())
def test_merging_is_a_join(a: Snapshot, b: Snapshot, c: Snapshot) -> None:
    """Commutative, associative, idempotent; an offset is done if and only if either snapshot has it as done; no floor
    goes back."""
    assert a.merge(b) == b.merge(a)
    assert a.merge(b).merge(c) == a.merge(b.merge(c))
    assert a.merge(a) == a
    assert a.merge(a.merge(b)) == a.merge(b)
    assert done(a.merge(b)) == done(a) | done(b)
    assert a.merge(b).high == max(a.high, b.high)
    assert a.merge(b).floor >= max(a.floor, b.floor)


@given(st.lists(of_one_stream(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_commits_may_be_lost_repeated_and_reordered(commits: list[Snapshot], chance: random.Random) -> None:
    """The stored snapshot is the same in the end, and its floor never goes back in between."""
    arrivals = [*commits, *chance.choices(commits, k=3)]
    chance.shuffle(arrivals)
    stored_snapshot = Snapshot()
    for snapshot in arrivals:
        merged = Snapshot.decode(stored_snapshot.encode()).merge(Snapshot.decode(snapshot.encode()))
        assert merged.floor >= stored_snapshot.floor
        stored_snapshot = merged
    in_order = Snapshot()
    for snapshot in commits:
        in_order = in_order.merge(snapshot)
    assert stored_snapshot == in_order


@pytest.mark.parametrize(
    "given_values",
    [(-2, 0), (3, 2), (0, MAX_OFFSET + 1), (0, 5, (0,)), (0, 5, (6,)), (0, 5, (3, 3)), (0, 5, (4, 2))],
)
def test_contradictory_values_are_refused(given_values: tuple[int, int]) -> None:
    """A floor above high, or offsets between them that don't ascend."""
    with pytest.raises(ValueError):
        Snapshot(*given_values)


def test_too_many_outstanding_offsets_are_refused() -> None:
    """And a limit below the size of the floor is invalid."""
    with pytest.raises(ValueError, match="more than 65536"):
        Snapshot(-1, 10**6, tuple(range(MAX_OUTSTANDING + 1)))
    with pytest.raises(ValueError, match="at least 13"):
        Snapshot(5, 5).encode(MIN_BYTES - 1)


def test_the_floor_is_as_high_as_possible() -> None:
    """One before the first outstanding offset, or high."""
    assert Snapshot(3, 20, (9, 12)).floor == 8
    assert Snapshot(3, 20).floor == 20
