"""Runs a function on each partition of a frame, and collects the results, in a classic session or over Spark Connect.

A classic session uses an RDD of pickled rows, as Arrow needs pyarrow, which a bare cluster does not have. Connect has
no RDD. It always has Arrow, so there the rows go through `mapInArrow`, and the results return in a binary column.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.accumulators import AccumulatorParam
from pyspark.sql import DataFrame, Row


def is_connect(frame_or_session: Any) -> bool:
    """Whether this is a frame or a session of Spark Connect."""
    return type(frame_or_session).__module__.startswith("pyspark.sql.connect")


class _Results(AccumulatorParam[list[Any]]):
    """Passes results to the driver when their tasks end. Spark adds those of one copy of each task."""

    def __init__(self, receive: Callable[[Any], object] | None = None) -> None:
        self._receive = receive

    def zero(self, value: list[Any]) -> list[Any]:
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802  # Spark's name
        if self._receive is None:  # in a task
            return [*value1, *value2]
        for result in value2:
            self._receive(result)
        return value1

    def __reduce__(self) -> tuple[Any, ...]:
        return _Results, ()


def on_partitions(
    df: DataFrame,
    function: Callable[[Iterator[Any]], Iterator[Any]],
    receive: Callable[[Any], object] | None = None,
) -> list[Any]:
    """The function's results for the rows of each partition. The driver receives all of them at the end, and `receive`
    is called with each of them once its task has ended, possibly by another thread."""
    if not is_connect(df):
        return _in_rdd(df, function, receive)
    names = df.columns

    def in_arrow(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        results = [pickle.dumps(result) for result in function(_rows(batches, names))]
        yield pa.RecordBatch.from_arrays([pa.array(results, pa.binary())], ["result"])

    results = []
    # One query, like `collect`, whose results arrive while it runs.
    for row in df.mapInArrow(in_arrow, "result binary").toLocalIterator():
        results.append(pickle.loads(bytes(row[0])))  # noqa: S301
        if receive is not None:
            receive(results[-1])
    return results


def _in_rdd(
    df: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]], receive: Callable[[Any], object] | None
) -> list[Any]:
    if receive is None:
        return list(df.rdd.mapPartitions(function).collect())
    accumulator = df.sparkSession.sparkContext.accumulator([], _Results(receive))

    def reported(rows: Iterator[Any]) -> Iterator[Any]:
        for result in function(rows):
            accumulator.add([result])
            yield result

    return list(df.rdd.mapPartitions(reported).collect())


def _rows(batches: Iterator[Any], names: list[str]) -> Iterator[Any]:
    row_of = Row(*names)
    for batch in batches:
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield row_of(*values)
