"""Spark: acks the output of a pipeline, reads the items of a batch, and counts a stream into a tally.

The cluster provides PySpark (3.5 or later; the data source needs 4.1). Executors need only this package, as a zip, and
the standard library. The data source, `ack_udf` and Spark Connect, which use Arrow, also need pyarrow and pandas.
"""

from __future__ import annotations

from lastbit.spark.acks import AckReport, MalformedRows, ack, ack_stream, malformed_rows
from lastbit.spark.columns import is_item_id, item_batch, item_group, item_id, item_index, item_number
from lastbit.spark.jobs import Job, job
from lastbit.spark.masks import item_masks
from lastbit.spark.numbering import with_item_ids
from lastbit.spark.progress import AckProgress
from lastbit.spark.ranges import explain
from lastbit.spark.registration import register
from lastbit.spark.tables import delta_rows, iceberg_rows
from lastbit.spark.tallies import TallyReport, apply_tally, tally_stream
from lastbit.spark.udf import ack_udf
from lastbit.spark.versions import PySparkTooOld

__all__ = [
    "AckProgress",
    "AckReport",
    "Job",
    "MalformedRows",
    "PySparkTooOld",
    "TallyReport",
    "ack",
    "ack_stream",
    "ack_udf",
    "apply_tally",
    "delta_rows",
    "explain",
    "iceberg_rows",
    "is_item_id",
    "item_batch",
    "item_group",
    "item_id",
    "item_index",
    "item_masks",
    "item_number",
    "job",
    "malformed_rows",
    "register",
    "tally_stream",
    "with_item_ids",
]
