"""Masks compared with a model in Python: a dictionary of sets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastbit import InvalidArgument
from tests.mutants import mutant
from tests.spark.test_columns import GOOD, MALFORMED, parsed

pytestmark = pytest.mark.xdist_group("spark")

Row = tuple[str | None, bool | None, bool | None]
"""An id, and whether it failed and is skipped."""
Masks = dict[tuple[int, int] | None, tuple[set[int], set[int], set[int], int, int, int]]
"""(batch, group), or None → acked, failed, skipped, items, beyond, rows."""


def modelled(rows: Iterable[Row]) -> Masks:
    acked: dict[tuple[int, int], set[int]] = defaultdict(set)
    failed: dict[tuple[int, int], set[int]] = defaultdict(set)
    skipped: dict[tuple[int, int], set[int]] = defaultdict(set)
    count: dict[tuple[int, int] | None, int] = defaultdict(int)
    for text, is_failed, is_skipped in rows:
        item = parsed(text)
        count[None if item is None else (item.batch, item.group)] += 1
        if item is not None:
            (skipped if is_skipped else failed if is_failed else acked)[item.batch, item.group].add(item.index)
    masks: Masks = {}
    for key, row_count in count.items():
        by_outcome = [set(), set(), set()] if key is None else [acked[key], failed[key], skipped[key]]
        everything = set().union(*by_outcome)
        beyond = {index for index in everything if index >= 32768}
        acked_indexes, failed_indexes, skipped_indexes = (indexes - beyond for indexes in by_outcome)
        masks[key] = (
            acked_indexes,
            failed_indexes - skipped_indexes - acked_indexes,
            skipped_indexes - acked_indexes,
            len(everything),
            len(beyond),
            row_count,
        )
    return masks


def bits_of(mask: bytes | None) -> set[int]:
    number = int.from_bytes(mask or b"", "little")
    return {index for index in range(number.bit_length()) if number >> index & 1}


def found(masks: Iterable[Any]) -> Masks:
    masks_by_group: Masks = {}
    for batch, group, bits, failed, skipped_bits, items, beyond, rows in masks:
        key = None if batch is None else (batch, group)
        before = masks_by_group.get(key)
        assert before is None or key is None, "each group has one row"
        masks_by_group[key] = (bits_of(bits), bits_of(failed), bits_of(skipped_bits), items, beyond, rows)
    return masks_by_group


def frame(spark: Any, rows: Iterable[Row]) -> Any:
    return spark.createDataFrame(list(rows), "item_id string, failed boolean, skipped boolean")


items = st.builds(
    lambda batch, group, index: f"{batch}:{group}:{index}",
    st.sampled_from([0, 7, 2**53 - 1]),
    st.sampled_from([0, 1, 12]),
    st.one_of(st.integers(0, 130), st.sampled_from([511, 512, 4096, 32767, 32768, 99999, 100000, 2**53 - 1])),
)
texts = st.one_of(items, items, items, st.sampled_from(GOOD), st.sampled_from(MALFORMED), st.none())
flags = st.sampled_from([True, False, None])
rows_of = st.lists(st.tuples(texts, flags, flags), min_size=1, max_size=300)


@mutant(
    "a-skipped-item-that-is-done-is-skipped",
    "lastbit.spark.masks:_longs_of",
    "for name in better:\n    result = sf.zip_with(result, longs(name), lambda ours, theirs: "
    "ours.bitwiseAND(sf.bitwise_not(theirs)))",
    "",
)
@settings(max_examples=2)
@given(rows=rows_of)
@example(rows=[("7:0:1", False, True), ("7:0:1", False, False), ("7:0:2", True, False), ("7:0:2", False, True)])
def test_masks_match_the_sets_of_items(spark: Any, rows: list[Row]) -> None:
    """Acked, failed and skipped rows, repeats, malformed ones and indexes beyond any group, in any mixture."""
    from lastbit.spark import item_masks

    given_rows = frame(spark, rows).repartition(3)
    assert found(item_masks(given_rows, failed="failed", skipped="skipped").collect()) == modelled(rows)
    without_skips = [(text, is_failed, False) for text, is_failed, _ in rows]
    assert found(item_masks(given_rows, failed="failed").collect()) == modelled(without_skips)


@settings(max_examples=60)
@given(rows=rows_of)
def test_masks_of_arrow_columns_are_the_same(rows: list[Row]) -> None:
    """The data source computes them in Python, vectorized; both computations must agree."""
    import pyarrow as pa

    from lastbit.spark import _arrow_masks

    texts_of_rows, failed, skipped = zip(*rows, strict=True)
    ids = pa.array(texts_of_rows, pa.string())
    conditions = {"failed": pa.array(failed, pa.bool_()), "skipped": pa.array(skipped, pa.bool_())}
    assert found(_arrow_masks.masks(ids, **conditions)) == modelled(rows)
    assert found(_arrow_masks.masks(ids)) == modelled((text, False, False) for text in texts_of_rows)


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
    """And no row for nothing."""
    from lastbit.spark import item_masks

    assert item_masks(frame(spark, [])).collect() == []


def test_a_missing_column_is_named(spark: Any) -> None:
    """Before anything is computed, with the existing columns listed; and a column that is not text has no ids."""
    from lastbit.spark import item_masks

    with pytest.raises(InvalidArgument, match="the columns are item_id, failed") as error_info:
        item_masks(frame(spark, []), "item")
    assert "`item`" in str(error_info.value)
    with pytest.raises(InvalidArgument, match="type boolean, not string"):
        item_masks(frame(spark, []), "failed")
    with pytest.raises(InvalidArgument, match="type string, not boolean"):
        item_masks(frame(spark, []), failed="item_id")


def test_a_name_may_have_dots(spark: Any) -> None:
    """As columns of flattened documents have. And an ambiguous name is an error of the caller like others."""
    from lastbit.spark import item_masks, malformed_rows

    flattened = spark.sql("SELECT '7:0:3' AS `event.item` UNION ALL SELECT 'x'")
    assert found(item_masks(flattened, "event.item").where("batch = 7").collect()) == {
        (7, 0): ({3}, set(), set(), 1, 0, 1)
    }
    assert [tuple(row) for row in malformed_rows(flattened, "event.item").collect()] == [("x",)]
    with pytest.raises(InvalidArgument, match="ambiguous"):
        item_masks(spark.sql("SELECT '7:0:3' AS item, '7:0:4' AS ITEM"), "item")


def test_nested_columns_and_expressions_are_accepted(spark: Any) -> None:
    """`event.item` is a column like any other."""
    from pyspark.sql import functions as sf

    from lastbit.spark import item_masks

    nested = spark.sql("SELECT named_struct('item', '7:0:3') AS event, 4 AS n")
    assert found(item_masks(nested, "event.item").collect()) == {(7, 0): ({3}, set(), set(), 1, 0, 1)}
    built = sf.concat(sf.lit("7:0:"), "n")
    assert found(item_masks(nested, built).collect()) == {(7, 0): ({4}, set(), set(), 1, 0, 1)}
