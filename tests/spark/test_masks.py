"""Masks against a model in Python: a dictionary of sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastbit import InvalidArgument
from tests.spark.test_columns import GOOD, MALFORMED, parsed

pytestmark = pytest.mark.xdist_group("spark")

Row = tuple[str | None, bool | None]
Found = dict[tuple[int, int] | None, tuple[set[int], set[int], int, int, int]]
"""(batch, group), or None → acked, failed, items, beyond, rows."""


def modelled(rows: Iterable[Row]) -> Found:
    acked: dict[tuple[int, int], set[int]] = defaultdict(set)
    failed: dict[tuple[int, int], set[int]] = defaultdict(set)
    count: dict[tuple[int, int] | None, int] = defaultdict(int)
    for text, fails in rows:
        item = parsed(text)
        count[None if item is None else (item.batch, item.group)] += 1
        if item is not None:
            (failed if fails else acked)[item.batch, item.group].add(item.index)
    found: Found = {}
    for key, many in count.items():
        good, bad = (acked[key], failed[key]) if key is not None else (set(), set())
        everything = good | bad
        beyond = {index for index in everything if index >= 32768}
        found[key] = (good - beyond, bad - good - beyond, len(everything), len(beyond), many)
    return found


def bits_of(mask: bytes | None) -> set[int]:
    number = int.from_bytes(mask or b"", "little")
    return {index for index in range(number.bit_length()) if number >> index & 1}


def found(masks: Iterable[Any]) -> Found:
    said: Found = {}
    for batch, group, bits, failed, items, beyond, rows in masks:
        key = None if batch is None else (batch, group)
        before = said.get(key)
        assert before is None or key is None, "one row a group"
        said[key] = (bits_of(bits), bits_of(failed), items, beyond, rows)
    return said


def frame(spark: Any, rows: Iterable[Row]) -> Any:
    return spark.createDataFrame(list(rows), "item_id string, failed boolean")


items = st.builds(
    lambda batch, group, index: f"{batch}:{group}:{index}",
    st.sampled_from([0, 7, 2**53 - 1]),
    st.sampled_from([0, 1, 12]),
    st.one_of(st.integers(0, 130), st.sampled_from([511, 512, 4096, 32767, 32768, 99999, 100000, 2**53 - 1])),
)
texts = st.one_of(items, items, items, st.sampled_from(GOOD), st.sampled_from(MALFORMED), st.none())
rows_of = st.lists(st.tuples(texts, st.sampled_from([True, False, None])), min_size=1, max_size=300)


@settings(max_examples=2)
@given(rows=rows_of)
def test_masks_are_the_sets_of_the_items(spark: Any, rows: list[Row]) -> None:
    """Good rows, failed rows, repeats, malformed ones and indexes beyond any group, in any mixture."""
    from lastbit.spark import item_masks

    given_rows = frame(spark, rows).repartition(3)
    assert found(item_masks(given_rows, failed="failed").collect()) == modelled(rows)


@settings(max_examples=60)
@given(rows=rows_of)
def test_masks_of_arrow_columns_are_the_same(rows: list[Row]) -> None:
    """The data source makes them in Python, vectorised; one meaning, two places."""
    import pyarrow as pa

    from lastbit.spark import _arrow_masks

    ids = pa.array([text for text, _ in rows], pa.string())
    failed = pa.array([fails for _, fails in rows], pa.bool_())
    assert found(_arrow_masks.masks(ids, failed)) == modelled(rows)
    assert found(_arrow_masks.masks(ids, None)) == modelled((text, False) for text, _ in rows)


def test_every_bit_has_its_place(spark: Any) -> None:
    """Bit i is `bytes[i // 8] >> (i % 8) & 1`, for each i of the largest group."""
    from pyspark.sql import functions as sf

    from lastbit.spark import item_masks

    ids = spark.range(32768).where("id % 3 = 1").select(sf.format_string("7:5:%d", "id").alias("item_id"))
    (mask,) = item_masks(ids).collect()
    assert len(mask.bits) == 4096
    assert bits_of(mask.bits) == set(range(1, 32768, 3))
    assert (mask.batch, mask.group, mask["items"], mask.beyond) == (7, 5, 10923, 0)


def test_an_empty_frame_has_no_masks(spark: Any) -> None:
    """And no row that counts nothing."""
    from lastbit.spark import item_masks

    assert item_masks(frame(spark, [])).collect() == []


def test_a_column_that_is_not_there_is_named(spark: Any) -> None:
    """Before anything is computed, beside those that are there; and what is no text is no id."""
    from lastbit.spark import item_masks

    with pytest.raises(InvalidArgument, match="the columns are item_id, failed") as caught:
        item_masks(frame(spark, []), "item")
    assert "`item`" in str(caught.value)
    with pytest.raises(InvalidArgument, match="of type boolean, not string"):
        item_masks(frame(spark, []), "failed")
    with pytest.raises(InvalidArgument, match="of type string, not boolean"):
        item_masks(frame(spark, []), failed="item_id")


def test_a_nested_column_and_an_expression_will_do(spark: Any) -> None:
    """`event.item` is a column as good as any."""
    from pyspark.sql import functions as sf

    from lastbit.spark import item_masks

    nested = spark.sql("SELECT named_struct('item', '7:0:3') AS event, 4 AS n")
    assert found(item_masks(nested, "event.item").collect()) == {(7, 0): ({3}, set(), 1, 0, 1)}
    built = sf.concat(sf.lit("7:0:"), "n")
    assert found(item_masks(nested, built).collect()) == {(7, 0): ({4}, set(), 1, 0, 1)}
