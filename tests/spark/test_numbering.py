"""`with_item_ids`: ids that stay with their rows."""

from __future__ import annotations

from typing import Any

import pytest

from lastbit import Client, IdempotencyKeyReused, InvalidArgument
from lastbit.ids import item_id
from lastbit.spark import with_item_ids
from tests.mutants import mutant

pytestmark = pytest.mark.xdist_group("spark")


def test_each_row_keeps_its_id_when_the_frame_is_computed_again(spark: Any, client: Client) -> None:
    """From scratch, in other partitions and another order: each number stays with its row's content."""
    batch = client.open()
    rows = spark.range(0, 20_000, 1, 4).selectExpr("id", "concat('row ', id % 977) AS text", "id % 7 = 0 AS odd")
    numbered = with_item_ids(rows, batch)
    partitions = {"count": 4}

    def computed() -> dict[int, str]:
        return {row.id: row.item_id for row in numbered.repartition(partitions["count"]).collect()}

    first = computed()
    before = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        spark.conf.set("spark.sql.shuffle.partitions", "11")
        recomputed = with_item_ids(rows.repartition(7, "text").sort("text"), client.open())
        second = {row.id: row.item_id for row in recomputed.collect()}
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    assert first == computed()
    assert sorted(first.values()) == sorted(item_id(batch.id, n) for n in range(20_000))
    assert {n: text.partition(":")[2] for n, text in first.items()} == {
        n: text.partition(":")[2] for n, text in second.items()
    }


def test_a_repeated_producer_gives_the_same_ids(spark: Any, client: Client) -> None:
    """With its idempotency key: unpublished rows get the ids that were reserved for them."""
    batch = client.open(items=5)
    rows = spark.range(1000)
    first = with_item_ids(rows, batch, idempotency_key="monday").collect()
    repeat = with_item_ids(rows.repartition(5), batch.id, url=client.url, idempotency_key="monday").collect()
    assert {row.id: row.item_id for row in first} == {row.id: row.item_id for row in repeat}
    assert batch.refresh().items == 1005
    with pytest.raises(IdempotencyKeyReused):
        with_item_ids(rows.limit(9), batch, idempotency_key="monday")


def test_equal_rows_have_separate_ids(spark: Any, client: Client) -> None:
    """They are interchangeable but separate; nulls and nested columns are ordinary content."""
    batch = client.open()
    rows = spark.createDataFrame([("a", None)] * 5 + [(None, [1, 2])] * 3, "t string, l array<int>")
    ids_ = sorted(row.item_id for row in with_item_ids(rows, batch).collect())
    assert ids_ == [f"{batch.id}:0:{n}" for n in range(8)]


def test_an_empty_frame_extends_by_nothing(spark: Any, client: Client) -> None:
    """And the result is still a frame with the column."""
    batch = client.open()
    empty = with_item_ids(spark.range(0), batch, "work")
    assert (empty.columns, empty.collect(), batch.refresh().items) == (["id", "work"], [], 0)


def test_a_frame_that_changes_between_computations_fails(spark: Any, client: Client, tmp_path: Any) -> None:
    """Instead of giving one row's id to another."""
    batch = client.open()
    source = tmp_path / "rows.txt"
    source.write_text("".join(f"{n:03}\n" for n in range(100)))
    numbered = with_item_ids(spark.read.text(str(source)), batch)
    assert numbered.count() == 100
    source.write_text("".join(f"{n:03}\n" for n in range(100, 200)))
    with pytest.raises(Exception, match="store the frame first"):
        numbered.collect()


def test_a_frame_that_loses_rows_between_computations_fails(spark: Any, client: Client, tmp_path: Any) -> None:
    """The rows behind a lost one, in its bucket, would move to the ids before theirs."""
    batch = client.open()
    source = tmp_path / "rows.txt"
    source.write_text("".join(f"{n:04}\n" for n in range(9000)))
    numbered = with_item_ids(spark.read.text(str(source)), batch)
    source.write_text("".join(f"{n:04}\n" for n in range(9000) if n % 7))
    with pytest.raises(Exception, match="store the frame first"):
        numbered.collect()


@mutant("rows-alike-in-by", "lastbit.spark.numbering:numbered", "by is not None", "False")
def test_rows_that_are_alike_in_by_are_refused(spark: Any, client: Client) -> None:
    """Before the batch is extended. Once one of the two was corrected, they could swap their ids, and one be lost."""
    batch = client.open()
    rows = [("A", None, 1), ("A", 7, 1), ("B", 7, 1), ("A", None, 2)]
    lines = spark.createDataFrame(rows, "shop string, `no.` int, line int")
    with pytest.raises(InvalidArgument, match=r"^2 rows have shop='A', no.=None: `by` must name"):
        with_item_ids(lines, batch, by=["shop", "no."])
    assert batch.refresh().items == 0
    assert len({row.item_id for row in with_item_ids(lines, batch, by=["no.", "line", "shop"]).collect()}) == 4


def test_a_frame_that_cannot_be_numbered_is_refused(spark: Any, client: Client) -> None:
    """Before the batch is extended."""
    batch = client.open()
    maps = spark.sql("SELECT map('a', 1) AS m")
    for frame, options in (
        (maps, {}),
        (spark.range(3), {"column": "id"}),
        (spark.range(3), {"by": ["name"]}),
        (spark.range(3).selectExpr("id", "id"), {}),
    ):
        with pytest.raises(InvalidArgument):
            with_item_ids(frame, batch, **options)
    assert batch.refresh().items == 0
    with_other_column = spark.sql("SELECT map('a', 1) AS m, 1 AS id")
    assert with_item_ids(with_other_column, batch, by=["id"]).count() == 1
