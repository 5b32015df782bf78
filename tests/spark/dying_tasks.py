"""Acks a batch, or counts rows into a tally, with tasks that die when an answer is lost. Run by spark-submit, or a
client of Connect, with a master that retries tasks; the report is one line of JSON."""

from __future__ import annotations

import argparse
import json

from pyspark import TaskContext
from pyspark.sql import SparkSession

from lastbit.retry import Retry
from lastbit.spark import ack, apply_tally, item_id
from lastbit.spark.arguments import add_connect, send_artifact
from lastbit.spark.driver_output import keep_standard_output_clean

GROUP_SIZE = 64


class Dies(Retry):
    """Raises instead of retrying, on the first attempt of a task."""

    def pause(self, attempt: int, elapsed: float, retry_after: float | None, chance: float) -> float | None:
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("the task dies")
        return 0.01


if __name__ == "__main__":
    keep_standard_output_clean()
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("count", type=int)
    parser.add_argument("--batch", type=int, help="ack this batch instead of counting")
    add_connect(parser)
    options = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    send_artifact(spark, options.artifact)
    frame = spark.range(options.count)
    if options.batch is not None:
        ids = frame.select(item_id(options.batch, "id", GROUP_SIZE).alias("item_id"))
        print(json.dumps(ack(ids, url=options.url, parallel=2, groups=3, retry=Dies()).to_dict()))
    else:
        report = apply_tally(
            frame,
            "retried",
            options.url,
            key="concat('k', id % 7)",
            delta="id % 5",
            topic="'t'",
            partition="id % 2",
            offset="id",
            parallel=2,
            entries=50,
            retry=Dies(),
        )
        print(json.dumps(report.to_dict()))
