"""Counts rows into a tally with a task that dies once, after its first call was applied and the answer lost. Run by
spark-submit, or a client of Connect, with a master that retries tasks; the report is one line of JSON."""

from __future__ import annotations

import argparse
import json

from pyspark import TaskContext
from pyspark.sql import SparkSession

from lastbit.retry import Retry
from lastbit.spark import apply_tally
from lastbit.spark.arguments import add_connect, send_artifact
from lastbit.spark.driver_output import keep_standard_output_clean


class DiesOnce(Retry):
    """Raises instead of retrying a lost answer, on the first attempt of a task."""

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
    add_connect(parser)
    options = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    send_artifact(spark, options.artifact)
    url, frame = options.url, spark.range(options.count)
    report = apply_tally(
        frame,
        "retried",
        url,
        key="concat('k', id % 7)",
        delta="id % 5",
        topic="'t'",
        partition="id % 2",
        offset="id",
        parallel=2,
        entries=50,
        retry=DiesOnce(),
    )
    print(json.dumps(report.to_dict()))
