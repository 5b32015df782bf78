"""A group's bits compared with two plain sets, and its columns with the rules of storage."""

from __future__ import annotations

import itertools

from bitarray.util import zeros
from hypothesis import given
from hypothesis import strategies as st

from core.bits import bitfield
from core.bits.bitfield import Group
from tests.mutants import mutant

SIZE = 128
indexes = st.sets(st.integers(0, SIZE - 1))
steps = st.lists(st.tuples(st.sampled_from(["ack", "fail", "ack one", "fail one"]), indexes), max_size=12)


def bits_of(field: object) -> set[int]:
    return set() if field is None else {i for i in range(SIZE) if field[i]}


@mutant(
    "a-group-without-holes-in-front-is-full",
    "core.bits.bitfield:Group._is_prefix",
    "self.resolved.find(0) in (-1, self.resolved_count)",
    "self.resolved.find(0) != 0",
)
@given(steps, st.integers(1, SIZE))
def test_bits_behave_as_two_sets(steps: list[tuple[str, set[int]]], issued: int) -> None:
    """An ack overrides a failure, bits are never cleared, counts are exact, and a row read back is the same group."""
    group = Group.empty(SIZE)
    acked: set[int] = set()
    failed: set[int] = set()
    for verb, indexes in steps:
        indexes = {i for i in indexes if i < issued}
        resolved = acked | failed
        if verb == "ack":
            change = group.ack(bitfield.mask_of(sorted(indexes), SIZE))
            assert bits_of(change.resolved) == indexes - resolved
            assert bits_of(change.redriven) == indexes & failed
        elif verb == "fail":
            change = group.fail(bitfield.mask_of(sorted(indexes), SIZE))
            assert bits_of(change.resolved) == indexes - resolved
        else:
            for index in sorted(indexes):
                if verb == "ack one":
                    assert group.ack_one(index) == (index not in resolved, index in failed)
                else:
                    assert group.fail_one(index) == (index not in resolved)
        if verb.startswith("ack"):
            acked |= indexes
            failed -= indexes
        else:
            failed |= indexes - resolved
        row = group.dump(issued)
        group = Group.load(*row, SIZE)
        assert bits_of(group.resolved) == acked | failed
        assert bits_of(group.failed) == failed
        assert (group.resolved_count, group.failed_count) == (len(acked | failed), len(failed))
        assert (row[0] is None) == (acked | failed == set(range(len(acked | failed))))
        assert (row[1] is None) == (not failed)
        assert all(len(blob) == -(-issued // 8) for blob in row[:2] if blob is not None)


@given(indexes, st.integers(0, SIZE), st.integers(0, SIZE), st.booleans())
def test_runs_are_maximal(wanted: set[int], start: int, stop: int, value: bool) -> None:
    """Each number in the range is in exactly one run if its bit has the value, and neighbours are not split."""
    field = bitfield.mask_of(sorted(wanted), SIZE)
    runs = list(bitfield.runs(field, value, start, stop))
    covered_indexes = [i for first, end in runs for i in range(first, end)]
    assert covered_indexes == [i for i in range(start, stop) if (i in wanted) == value]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))


def test_the_order_of_bits_is_the_contracts() -> None:
    """Bit i of the group is bytes[i // 8] >> (i % 8) & 1."""
    blob = bytes([0b0000_0001, 0b1000_0000])
    assert bits_of(bitfield.widen(blob, SIZE)) == {0, 15}
    assert zeros(8, bitfield.ENDIAN).endian == "little"
