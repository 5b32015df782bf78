"""Item ids and lazy sequences of them."""

from __future__ import annotations

import contextlib
import sys
import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit.ids import INTEGER_LIMIT, InvalidItemId, ItemId, ItemIds, item_id, valid_group_size

integers = st.integers(0, INTEGER_LIMIT - 1)
group_sizes = st.integers(8, 4096).map(lambda eighths: eighths * 8)


@st.composite
def runs(draw: st.DrawFn) -> ItemIds:
    start = draw(st.integers(0, 300_000))
    step = draw(st.sampled_from([1, 1, 1, 2, 7, -1, -3]))
    length = draw(st.integers(0, 60))
    numbers = range(start, start + length) if step == 1 else range(400)[:: abs(step)][:: 1 if step > 0 else -1]
    return ItemIds(draw(st.integers(0, 10**6)), draw(st.sampled_from([64, 72, 8192, 32768])), numbers)


@given(integers, integers, integers)
def test_an_id_equals_its_parsed_text(batch: int, group: int, index: int) -> None:
    """Parsing gives back what was written."""
    item = ItemId(batch, group, index)
    assert ItemId.parse(str(item)) == item


@given(st.integers(0, 10**12), group_sizes)
def test_an_id_contains_its_number(number: int, group_size: int) -> None:
    """Number to id and back is the identity for every group size."""
    assert ItemId.parse(item_id(7, number, group_size)).number(group_size) == number


@given(st.text())
def test_each_id_has_one_spelling_and_any_other_text_is_malformed(text: str) -> None:
    """No two texts denote the same item."""
    with contextlib.suppress(InvalidItemId):
        assert str(ItemId.parse(text)) == text


one_text = st.one_of(
    st.builds("{}:{}:{}".format, *[st.integers(0, 2**54)] * 3),
    st.text("0123456789:\n", max_size=30),
    st.sampled_from(["1:2:3\n4:5:6", "1:2:3\n", "1:2:03", "", "1:2", "1:2:3:4", "\u0661:2:3"]),
)


@given(st.one_of(one_text, st.builds("{}:{}:{}".format, *[integers] * 3)))
def test_a_quick_check_refuses_what_parsing_refuses(text: str) -> None:
    """It skips the values of short integers."""

    def refuses(accept: Callable[[str], object]) -> bool:
        try:
            accept(text)
        except InvalidItemId:
            return True
        return False

    assert refuses(ItemId.check) == refuses(ItemId.parse)


@given(st.lists(st.builds("{}:{}:{}".format, *[integers] * 3), min_size=1), st.lists(one_text, max_size=3))
def test_many_ids_are_parsed_like_single_ones(valid_ids: list[str], other_texts: list[str]) -> None:
    """All of them, or none if one is invalid."""
    assert ItemId.parse_all(valid_ids) == [ItemId.parse(text) for text in valid_ids]
    expected: list[ItemId] | None = []
    try:
        expected = [ItemId.parse(text) for text in valid_ids + other_texts]
    except InvalidItemId:
        expected = None
    assert ItemId.parse_all(valid_ids + other_texts) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "7:0",
        "7:0:1:2",
        "07:0:1",
        "7:00:1",
        "7:0:01",
        "7:0:-1",
        "+7:0:1",
        " 7:0:1",
        "7:0:1 ",
        "7:0:1\n",
        "7::1",
        "7:0:",
        "7:0:1.0",
        "7:0:1_0",
        "7:0:٣",
        "７:0:1",
        "7:0:²",
        f"{10**30}:0:0",
        f"7:{2**53}:0",
        f"7:0:{2**53}",
        None,
        7,
        b"7:0:1",
        ("7", "0", "1"),
    ],
)
def test_a_value_that_is_not_exactly_an_id_is_malformed(text: object) -> None:
    """Signs, blanks, leading zeros, other digits and integers from 2^53 on are not ids, and the error shows the
    text."""
    with pytest.raises(InvalidItemId) as excinfo:
        ItemId.parse(text)  # type: ignore[arg-type]
    assert excinfo.value.text == text
    assert len(str(excinfo.value)) < 300


def test_an_index_beyond_its_group_belongs_to_no_item() -> None:
    """It is not an alias for an item in the next group."""
    assert ItemId(7, 0, 63).number(64) == 63
    assert ItemId(7, 0, 64).number(64) is None


@pytest.mark.parametrize(("size", "valid"), [(0, False), (8, False), (63, False), (64, True), (65, False), (72, True)])
def test_a_group_size_is_a_multiple_of_8_in_bounds(size: int, valid: bool) -> None:
    """64 to 32768."""
    assert valid_group_size(size) is valid
    assert valid_group_size(32768)
    assert not valid_group_size(32776)


@given(runs())
def test_a_run_of_ids_is_the_tuple_of_its_ids(ids: ItemIds) -> None:
    """Length, iteration, reversal, membership and positions agree with the tuple."""
    plain = tuple(item_id(ids.batch, number, ids.group_size) for number in ids.numbers)
    assert len(ids) == len(plain)
    assert tuple(ids) == plain
    assert tuple(reversed(ids)) == plain[::-1]
    assert all(text in ids and ids.index(text) == position for position, text in enumerate(plain))
    assert all(ids[position] == plain[position] for position in range(-len(plain), len(plain)))
    assert bool(ids) is bool(plain)


slice_ends = st.none() | st.integers(-80, 80)


@given(runs(), slice_ends, slice_ends, st.none() | st.integers(-9, 9).filter(bool))
def test_a_slice_of_a_run_is_the_slice_of_the_tuple(
    ids: ItemIds, start: int | None, stop: int | None, step: int | None
) -> None:
    """And it is lazy too."""
    part = ids[start:stop:step]
    assert isinstance(part, ItemIds)
    assert tuple(part) == tuple(ids)[start:stop:step]


@given(runs(), runs())
def test_equal_runs_have_equal_ids_and_hashes(run: ItemIds, other: ItemIds) -> None:
    """Equality is that of the batch, the grouping and the numbers; empty runs are all equal."""
    assert run == ItemIds(run.batch, run.group_size, run.numbers)
    assert hash(run) == hash(ItemIds(run.batch, run.group_size, run.numbers))
    if run == other:
        assert tuple(run) == tuple(other)
        assert hash(run) == hash(other)
    assert run != tuple(run)


@pytest.mark.parametrize(
    "value", ["8:0:0", "7:1:0", "7:0:64", "7:0:10", "07:0:0", "7:0", "", None, 7, 7.0, ItemId(7, 0, 0)]
)
def test_other_values_are_not_among_the_ids(value: object) -> None:
    """Another batch's item, an alias and a value that is not an id are all absent."""
    ids = ItemIds(7, 64, range(10))
    assert value not in ids
    with pytest.raises(ValueError, match="not among"):
        ids.index(value)  # type: ignore[arg-type]


def test_a_position_outside_of_the_run_is_an_index_error() -> None:
    """As with a tuple; the message says how many ids there are."""
    with pytest.raises(IndexError, match="outside of 10 item ids"):
        ItemIds(7, 64, range(10))[10]


def test_a_billion_ids_take_constant_memory_and_time() -> None:
    """Length, slices, positions, membership and the start of the iteration do not expand anything."""
    tracemalloc.start()
    start = time.perf_counter()
    ids = ItemIds(7, 8192, range(10**9))
    assert len(ids) == 10**9
    assert ids[-1] == "7:122070:2559"
    assert len(ids[10:-10:3]) == 333_333_327
    assert "7:122070:2559" in ids
    assert "7:122070:2560" not in ids
    assert ids.index("7:122070:2559") == 10**9 - 1
    assert next(iter(ids[500_000_000:])) == item_id(7, 500_000_000)
    assert next(reversed(ids)) == ids[-1]
    assert "1,000,000,000 items" in repr(ids)
    seconds = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 1024
    assert sys.getsizeof(ids) < 200
    assert seconds < 1
