"""Run by spark-submit, or a client of Connect, with a master that retries tasks: every writing task fails at its end on
its first attempt."""

from __future__ import annotations

import argparse

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType

from lastbit.spark import item_id, register
from lastbit.spark.arguments import add_connect, send_artifact


def passes(last: bool) -> bool:
    context = TaskContext.get()
    assert context is not None
    if last and context.attemptNumber() == 0:
        raise RuntimeError("the writer fails on its first attempt")
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("batch", type=int)
    parser.add_argument("count", type=int)
    add_connect(parser)
    options = parser.parse_args()
    count = options.count
    spark = SparkSession.builder.getOrCreate()
    send_artifact(spark, options.artifact)
    register(spark)
    numbers = spark.range(0, count, 1, 2).withColumn("last", (sf.col("id") + 1) % (count // 2) == 0)
    # A function made earlier would be one of a classic session.
    passing = sf.udf(passes, BooleanType(), useArrow=False)
    ids = numbers.where(passing("last")).select(item_id(options.batch, "id").alias("item_id"))
    ids.write.mode("append").format("lastbit").options(url=options.url, chunk=10_000).save()


if __name__ == "__main__":
    main()
