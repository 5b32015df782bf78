"""Submitted to a cluster by a test: every writing task fails at its end on its first attempt."""

from __future__ import annotations

import sys

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType

from lastbit.spark import item_id, register


@sf.udf(returnType=BooleanType(), useArrow=False)
def passes(last: bool) -> bool:
    context = TaskContext.get()
    assert context is not None
    if last and context.attemptNumber() == 0:
        raise RuntimeError("the writer fails on its first attempt")
    return True


def main(url: str, batch: int, count: int) -> None:
    spark = SparkSession.builder.getOrCreate()
    register(spark)
    numbers = spark.range(0, count, 1, 2).withColumn("last", (sf.col("id") + 1) % (count // 2) == 0)
    ids = numbers.where(passes("last")).select(item_id(batch, "id").alias("item_id"))
    ids.write.mode("append").format("lastbit").options(url=url, chunk=10_000).save()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
