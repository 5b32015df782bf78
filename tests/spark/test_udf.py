"""`ack_udf`: the answer next to the row."""

from __future__ import annotations

from typing import Any

import pytest

from lastbit import Client, InvalidArgument
from lastbit.spark import ack_udf, item_id

pytestmark = pytest.mark.xdist_group("spark")


def test_each_row_has_its_answer(spark: Any, client: Client) -> None:
    """Accepted, rejected with the reason, malformed; a repeat is accepted as well."""
    batch = client.open(items=2, sealed=True)
    texts = [f"{batch.id}:0:0", f"{batch.id}:0:1", f"{batch.id}:0:0", f"{batch.id}:0:2", "999999999:0:0", "x", None]
    frame = spark.createDataFrame([(text,) for text in texts], "item_id string").coalesce(1)
    answered = frame.select(ack_udf(client.url)("item_id"))
    expected = ["accepted"] * 3 + ["rejected: unknown_item", "rejected: unknown_batch", "malformed", "malformed"]
    assert [row[0] for row in answered.collect()] == expected
    assert batch.refresh().succeeded
    assert [row[0] for row in answered.collect()] == expected, "Spark may compute it twice"


def test_calls_have_at_most_ten_thousand_ids(spark: Any, client: Client) -> None:
    """However large Spark's record batches are."""
    batch = client.open(items=25_000, sealed=True)
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "30000")
    try:
        ids = spark.range(0, 25_000, 1, 1).select(item_id(batch.id, "id").alias("item_id"))
        counts = ids.select(ack_udf(client.url)("item_id").alias("ack")).groupBy("ack").count().collect()
    finally:
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    assert [tuple(row) for row in counts] == [("accepted", 25_000)]
    assert batch.refresh().succeeded


def test_items_can_be_failed(spark: Any, client: Client) -> None:
    """With a reason, which acks don't have."""
    batch = client.open(items=1)
    frame = spark.createDataFrame([(f"{batch.id}:0:0",)], "item_id string")
    assert frame.select(ack_udf(client.url, fail=True, reason="empty")("item_id")).first()[0] == "accepted"
    assert [dict(failed.reasons) for failed in batch.failed()] == [{f"{batch.id}:0:0": "empty"}]
    with pytest.raises(InvalidArgument, match="only with fail=True"):
        ack_udf(client.url, reason="because")
