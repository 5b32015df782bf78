"""`job`: a program that is run again works on the rows that are left."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lastbit import BatchEnded, Client, IdempotencyKeyReused
from lastbit.spark import Job, job
from lastbit.spark.jobs import _masks
from tests.mutants import mutant

pytestmark = pytest.mark.xdist_group("spark")

ROWS = 20_000
"""More than two groups."""


def products(run: Job) -> set[int]:
    return {row.product for row in run.todo.collect()}


@mutant("a-run-forgets-failed-rows", "lastbit.spark.jobs:_left", '("pending", "failed")', '("pending",)')
@mutant(
    "a-run-has-failed-rows-always",
    "lastbit.spark.jobs:_left",
    '("pending", "failed") if with_failed else ("pending",)',
    '("pending", "failed")',
)
@mutant("a-group-is-whole-or-nothing", "lastbit.spark.jobs:_among", "sf.isnull(_BITS) | is_set", "sf.lit(True)")
def test_a_program_that_is_run_again_gets_the_rows_that_are_left(spark: Any, client: Client) -> None:
    """With the ids that they had: those without an ack, and those that failed."""
    rows = spark.range(ROWS).withColumnRenamed("id", "product")
    run = job(rows, client.url, key="catalog-42")
    ids = {row.product: row.item_id for row in run.todo.collect()}
    assert set(ids) == set(range(ROWS))
    assert (run.batch.items, run.batch.state) == (ROWS, "sealed")
    output = run.todo.where("product % 10 > 2")
    run.ack(output, failed="product % 10 = 3", skipped="product % 10 = 4", reason="no picture")
    left = {product for product in range(ROWS) if product % 10 <= 3}

    again = job(rows.repartition(5), client.url, key="catalog-42")
    assert again.batch.id == run.batch.id
    assert {row.product: row.item_id for row in again.todo.collect()} == {product: ids[product] for product in left}
    pending = job(rows, client.url, key="catalog-42", with_failed=False)
    assert products(pending) == {product for product in left if product % 10 < 3}
    report = again.ack(again.todo)
    assert (report.applied, report.completed) == (len(left), (run.batch.id,))
    assert products(again) == left  # as it was when the run began
    done = job(rows, client.url, key="catalog-42")
    assert (products(done), done.batch.succeeded) == (set(), True)


@mutant("a-rerun-takes-any-rows", "lastbit.spark.jobs:_extend", "digest", "None")
def test_other_rows_under_the_same_key_are_refused(spark: Any, client: Client) -> None:
    """Though there are as many: their ids would be those of the earlier ones, and be taken for done."""
    batch = job(spark.range(100), client.url, key="other-rows").batch
    sentence = f"the key 'other-rows' is that of batch {batch.id}, whose 100 rows were others than these 100: give each"
    with pytest.raises(IdempotencyKeyReused, match=sentence):
        job(spark.range(1, 101), client.url, key="other-rows")


def test_columns_that_identify_no_row_may_change(spark: Any, client: Client) -> None:
    """As when what made a row fail is corrected in the input."""
    run = job(spark.sql("SELECT id, 'no address' AS email FROM range(3)"), client.url, key="corrected", by=["id"])
    ids = {row.id: row.item_id for row in run.todo.collect()}
    run.ack(run.todo, failed="id = 1")
    corrected = job(spark.sql("SELECT id, 'a@b' AS email FROM range(3)"), client.url, key="corrected", by=["id"])
    assert [tuple(row) for row in corrected.todo.collect()] == [(1, "a@b", ids[1])]


def test_a_run_whose_batch_was_cancelled_says_what_to_do(spark: Any, client: Client) -> None:
    run = job(spark.range(3), client.url, key="cancelled-job")
    client.batch(run.batch.id).cancel(reason="wrong prices")
    with pytest.raises(BatchEnded, match=f"was cancelled: 'wrong prices'; `lastbit reopen {run.batch.id}`"):
        job(spark.range(3), client.url, key="cancelled-job")


@pytest.mark.parametrize("seed", range(20))
def test_the_masks_have_the_numbers_of_the_ranges(seed: int) -> None:
    """Of groups of any size; a group that is whole has none."""
    chance = random.Random(seed)
    group_size = chance.choice([1, 7, 8, 9, 64])
    numbers = {number for number in range(200) if chance.random() < chance.choice([0.05, 0.5, 0.99])}
    starts = [number for number in sorted(numbers) if number - 1 not in numbers]
    ends = [number + 1 for number in sorted(numbers) if number + 1 not in numbers]
    found = set()
    for group, bits in _masks(list(zip(starts, ends, strict=True)), group_size):
        for index in range(group_size):
            if bits is None or bits[index // 8] >> index % 8 & 1:
                found.add(group * group_size + index)
    assert found == numbers
