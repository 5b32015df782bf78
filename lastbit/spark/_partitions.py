"""Runs a function on each partition of a frame, and collects the results, in a classic session or over Spark Connect.

A classic session uses an RDD of pickled rows, as Arrow needs pyarrow, which a bare cluster does not have. Connect has
no RDD. It always has Arrow, so there the rows go through `mapInArrow`, and the results return in a binary column.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import DataFrame, Row


def is_connect(frame_or_session: Any) -> bool:
    """Whether this is a frame or a session of Spark Connect."""
    return type(frame_or_session).__module__.startswith("pyspark.sql.connect")


def on_partitions(df: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]]) -> list[Any]:
    """The function's results for the rows of each partition. The driver receives all of them."""
    if not is_connect(df):
        return list(df.rdd.mapPartitions(function).collect())
    names = df.columns

    def in_arrow(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        results = [pickle.dumps(result) for result in function(_rows(batches, names))]
        yield pa.RecordBatch.from_arrays([pa.array(results, pa.binary())], ["result"])

    results = df.mapInArrow(in_arrow, "result binary").collect()
    return [pickle.loads(bytes(row[0])) for row in results]  # noqa: S301


def _rows(batches: Iterator[Any], names: list[str]) -> Iterator[Any]:
    row_of = Row(*names)
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield row_of(*values)
