"""A group's bits compared with plain sets, and its columns with the rules of storage."""

from __future__ import annotations

import itertools
from random import Random

from bitarray.util import zeros
from hypothesis import given
from hypothesis import strategies as st

from core.bits import bitfield
from core.bits.bitfield import Group, ItemState
from tests.mutants import mutant

SIZE = 128
indexes = st.sets(st.integers(0, SIZE - 1))
shared_indexes = st.sets(st.integers(0, 9)) | indexes
"""Mostly such that several steps change the same items."""
steps = st.lists(
    st.tuples(st.sampled_from(["ack", "fail", "skip", "ack one", "fail one", "skip one"]), shared_indexes), max_size=12
)


def bits_of(field: object) -> set[int]:
    return set() if field is None else {i for i in range(SIZE) if field[i]}


@mutant(
    "a-group-without-holes-in-front-is-full",
    "core.bits.bitfield:Group._is_prefix",
    "self.resolved.find(0) in (-1, self.resolved_count)",
    "self.resolved.find(0) != 0",
)
@mutant(
    "a-failed-item-is-not-skipped", "core.bits.bitfield:Group.skip", "redriven = self._unfail(mask)", "redriven = None"
)
@mutant(
    "a-skip-undoes-an-ack",
    "core.bits.bitfield:Group.skip_one",
    "self.resolved[index] and (self.failed is None or not self.failed[index])",
    "False",
)
@mutant(
    "an-ack-leaves-an-item-skipped",
    "core.bits.bitfield:Group.ack",
    "self.skipped &= ~mask",
    "pass",
)
@given(steps, st.integers(1, SIZE))
def test_bits_behave_as_three_sets(steps: list[tuple[str, set[int]]], issued: int) -> None:
    """An ack overrides a skip, and that a failure; bits are never cleared, counts are exact, and a row read back is the
    same group."""
    group = Group.empty(SIZE)
    levels = {"fail": ItemState.FAILED, "skip": ItemState.SKIPPED, "ack": len(ItemState)}
    states: dict[int, int] = dict.fromkeys(range(SIZE), ItemState.PENDING)
    for step, indexes in steps:
        indexes = {i for i in indexes if i < issued}
        verb = step.removesuffix(" one")
        lower = {i: states[i] for i in indexes if states[i] < levels[verb]}
        if step == verb:
            change = getattr(group, verb)(bitfield.mask_of(sorted(indexes), SIZE))
            assert change.gained == len(bits_of(change.resolved))
            moved = change.resolved, change.redriven, change.unskipped
            assert {i: state for state, bits in zip(ItemState, moved, strict=True) for i in bits_of(bits)} == lower
        else:
            for index in sorted(indexes):
                assert getattr(group, f"{verb}_one")(index) == lower.get(index)
        states |= dict.fromkeys(lower, levels[verb])
        row = group.dump(issued)
        group = Group.load(row, SIZE)
        by_state = [{i for i, state in states.items() if state == wanted} for wanted in range(4)]
        resolved = set(range(SIZE)) - by_state[0]
        found = [bits_of(bits) for bits in (group.resolved, group.failed, group.skipped, group.acked())]
        assert found == [resolved, *by_state[1:]]
        assert group.version == tuple(map(len, (resolved, *by_state[1:3])))
        assert (row.resolved is None) == (resolved == set(range(len(resolved))))
        assert (row.failed is None) == (not by_state[ItemState.FAILED])
        assert (row.skipped is None) == (row.skipped_count is None) == (not by_state[ItemState.SKIPPED])
        blobs = row.resolved, row.failed, row.skipped
        assert all(len(blob) == -(-issued // 8) for blob in blobs if blob is not None)


@given(st.lists(st.tuples(st.sampled_from(["ack", "fail", "skip"]), shared_indexes), max_size=6), st.randoms())
def test_redelivery_in_any_order_ends_in_the_same_state(calls: list[tuple[str, set[int]]], random: Random) -> None:
    """A queue may deliver what it has delivered before, at any time."""
    repeated = calls + calls
    random.shuffle(repeated)
    groups = [Group.empty(SIZE), Group.empty(SIZE)]
    for group, order in zip(groups, (calls, repeated), strict=True):
        for verb, chosen in order:
            getattr(group, verb)(bitfield.mask_of(sorted(chosen), SIZE))
    assert groups[0].dump(SIZE) == groups[1].dump(SIZE)


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
