"""Item ids as Columns, compared with the pure functions of `lastbit.ids`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastbit import InvalidArgument, InvalidItemId, ItemId
from lastbit.ids import INTEGER_LIMIT, item_id

pytestmark = pytest.mark.xdist_group("spark")

GOOD = ["7:0:0", "7:1:8191", "1:9007199254740991:9007199254740991", "0:0:0", "7:0:32768"]
MALFORMED = [
    *("", ":", "::", "7", "7:0", "7:0:", ":0:0", "7::0", "7:0:0:0", "07:0:0", "7:00:0", "7:0:01", "+7:0:0", "7:0:+1"),
    *(
        "-7:0:0",
        "7:0:-1",
        "7:0:-0",
        " 7:0:0",
        "7:0:0 ",
        "7: 0:0",
        "7:0:\t1",
        "7:0:0\n",
        "7:0:0\x00",
        "7:0:1.0",
        "7:0:1e1",
    ),
    *("7:0:1_0", "٧:0:0", "7:0:٣", "７:0:0", "9007199254740992:0:0", "7:9007199254740992:0", "7:0:9007199254740992"),
    *("7:0:99999999999999999999", "99999999999999999999:0:0", "7;0;0", "batch:group:index", "7:0:0x1", "NaN:0:0"),
]


def parsed(text: str | None) -> ItemId | None:
    try:
        return None if text is None else ItemId.parse(text)
    except InvalidItemId:
        return None


def parsed_by_spark(spark: Any, texts: list[str | None]) -> list[ItemId | None]:
    from lastbit.spark import is_item_id, item_batch, item_group, item_index

    frame = spark.createDataFrame([(n, text) for n, text in enumerate(texts)], "n int, id string")
    rows = frame.select(
        "n", item_batch("id"), item_group("id"), item_index("id"), is_item_id("id").alias("good")
    ).collect()
    found: list[ItemId | None] = []
    for _, batch, group, index, good in sorted(rows):
        assert good is (batch is not None) is (group is not None) is (index is not None)
        found.append(ItemId(batch, group, index) if good else None)
    return found


def test_an_id_is_parsed_as_by_the_sdk(spark: Any) -> None:
    """The JVM's result is Python's, for every text that was ever mistaken for an id."""
    texts: list[str | None] = [*GOOD, *MALFORMED, None]
    assert parsed_by_spark(spark, texts) == [parsed(text) for text in texts]
    assert all(parsed(text) is not None for text in GOOD)
    assert all(parsed(text) is None for text in MALFORMED)


@settings(max_examples=2)
@given(texts=st.lists(st.one_of(st.none(), st.text(":0123456789+- \n", max_size=9)), min_size=40, max_size=200))
def test_spark_and_the_sdk_accept_the_same_texts(spark: Any, texts: list[str | None]) -> None:
    """Random texts of the relevant characters."""
    assert parsed_by_spark(spark, texts) == [parsed(text) for text in texts]


def test_an_id_is_built_from_its_number(spark: Any) -> None:
    """As `lastbit.item_id` builds it; null stays null, and a negative number belongs to no item."""
    from lastbit.spark import item_id as column

    numbers = [0, 1, 63, 64, 8191, 8192, 10**12 - 1]
    frame = spark.createDataFrame([(n,) for n in [*numbers, None, -1]], "n bigint")
    for size in (64, 8192, 32768):
        ids_ = [row[0] for row in frame.select(column(7, "n", size)).collect()]
        assert ids_ == [*(item_id(7, n, size) for n in numbers), None, None]
    mixed = spark.createDataFrame([(7, 9000), (8, 0)], "b bigint, n bigint").select(column("b", "n"))
    assert [row[0] for row in mixed.collect()] == ["7:1:808", "8:0:0"]


def test_an_id_gives_its_number_and_never_another_groups(spark: Any) -> None:
    """An index beyond the group has no number, as that number belongs to an item of the next group."""
    from lastbit.spark import item_number

    frame = spark.createDataFrame([("7:2:5",), ("7:2:63",), ("7:2:64",), ("x",), (None,)], "id string")
    assert [row[0] for row in frame.select(item_number("id", 64)).collect()] == [133, 191, None, None, None]


@pytest.mark.parametrize("size", [64, 8192, 32768])
@pytest.mark.parametrize("ansi", [True, False])
def test_the_number_of_a_far_group_is_no_other_items(spark: Any, size: int, ansi: bool) -> None:
    """Group times size would exceed a bigint, which wraps or fails the query."""
    from lastbit.spark import item_number

    last = INTEGER_LIMIT // size - 1
    texts = [f"7:{last}:{size - 1}", *(f"7:{group}:5" for group in (last + 1, 2**51, 2**50, INTEGER_LIMIT - 1))]
    frame = spark.createDataFrame([(text,) for text in texts], "id string")
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", str(ansi).lower())
    try:
        numbers = [row[0] for row in frame.select(item_number("id", size)).collect()]
    finally:
        spark.conf.set("spark.sql.ansi.enabled", before)
    assert numbers == [INTEGER_LIMIT - 1, None, None, None, None]


@pytest.mark.parametrize("size", [0, 63, 65, 32776, 65536])
def test_a_group_size_that_no_batch_has_is_refused(spark: Any, size: int) -> None:
    """Before anything is numbered wrongly."""
    from lastbit.spark import item_id as column

    with pytest.raises(InvalidArgument, match="group size"):
        column(7, "n", size)


def test_the_limit_is_the_contracts(spark: Any) -> None:
    """2^53 - 1 is the last integer."""
    last = INTEGER_LIMIT - 1
    assert parsed_by_spark(spark, [f"{last}:{last}:{last}"]) == [ItemId(last, last, last)]
