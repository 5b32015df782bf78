"""Registers the data source. `lastbit.spark.source` itself can be imported only with PySpark 4.1 or later."""

from __future__ import annotations

from pyspark.sql import SparkSession

from lastbit.spark import _arrow, versions


def register(spark: SparkSession) -> None:
    """Register `format("lastbit")` with the session. Raises `MissingExtra` if pyarrow or pandas is missing, and
    `PySparkTooOld` before PySpark 4.1, which brought data sources in Python that write streams of Arrow batches."""
    purpose = 'the data source "lastbit"'
    versions.require(purpose, 4, 1)
    _arrow.require(purpose)
    from lastbit.spark.source import LastbitSource

    spark.dataSource.register(LastbitSource)
