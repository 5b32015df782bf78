"""The data source `lastbit`: writing a frame acks its items, and reading a batch returns its pending or failed items.

Options for both: `url`, `token`, `timeout`. Reading: `batch`, `state` (`pending` or `failed`), `partitions` (8).
Writing, in batch and in streams: `column` (`item_id`), `failed_column` (a boolean), `reason`, `strict`,
`chunk` (262144, the number of rows that are combined into masks at a time).

A Python writer can't change Spark's query plan. So the rows are passed to Python as Arrow columns and combined into
masks there, which costs several times as much as `lastbit.spark.ack`, which does this in the JVM. If ids come in random
order from a large batch, each chunk of rows has items of most of its groups. In that case use `ack`, or sort first.
Spark refuses to write to a Python data source without `mode("append")`.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from lastbit import _calls, errors
from lastbit._urllib import Connection
from lastbit.spark import _arrow
from lastbit.spark.posting import Posted, Poster, Posting

CHUNK = 2**18
"""Rows converted to masks at a time."""
PAGE = 1000
"""Ranges per response."""

log = logging.getLogger("lastbit.spark")


class NotClean(errors.LastbitError):
    """A strict write contained ids that were rejected or malformed. The other items are acked."""

    def __init__(self, report: str) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return f"the valid items are acked; these are not: {self.report}"


class LastbitSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        return "lastbit"

    def schema(self) -> str:
        return "item_id string"

    def reader(self, schema: StructType) -> DataSourceReader:
        _arrow.require('reading from "lastbit"')
        batch = self._whole("batch", None)
        state = self.options.get("state", "pending")
        if state not in {"pending", "failed"}:
            raise errors.InvalidArgument(f"the option state is pending or failed, not {state!r}")
        return _Reader(self._connection(), batch, state, max(1, self._whole("partitions", 8)))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer(self._writing(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802  # PySpark's name
        return _StreamWriter(self._writing(schema, overwrite))

    def _connection(self) -> Connection:
        timeout = self.options.get("timeout")
        return Connection.named(self.options.get("url"), self.options.get("token"), float(timeout) if timeout else 30.0)

    def _whole(self, name: str, default: int | None) -> int:
        text = self.options.get(name, None if default is None else str(default))
        if text is None or not (text.isascii() and text.isdigit()):
            raise errors.InvalidArgument(f"the option {name} is a whole number, not {text!r}")
        return int(text)

    def _writing(self, schema: StructType, overwrite: bool) -> _Writing:
        _arrow.require('writing to "lastbit"')
        if overwrite:
            raise errors.InvalidArgument("acks are added to a batch and never overwrite it: use mode('append')")
        column, failed = self.options.get("column", "item_id"), self.options.get("failed_column")
        for name, kind in ((column, "string"), (failed, "boolean")):
            if name is None:
                continue
            if name not in schema.names:
                raise errors.InvalidArgument(f"there is no column {name!r}; the columns are {', '.join(schema.names)}")
            if (found := schema[name].dataType.simpleString()) != kind:
                raise errors.InvalidArgument(f"the column {name} has the type {found}, not {kind}")
        strict = self.options.get("strict", "false").lower()
        if strict not in {"true", "false"}:
            raise errors.InvalidArgument(f"the option strict is true or false, not {strict!r}")
        posting = Posting(self._connection(), uuid.uuid4().hex, self.options.get("reason"))
        return _Writing(posting, column, failed, strict == "true", max(1, self._whole("chunk", CHUNK)))


@dataclass
class _Range(InputPartition):
    """The numbers start .. end-1, whole groups."""

    start: int
    end: int
    group_size: int


@dataclass
class _Reader(DataSourceReader):
    connection: Connection
    batch: int
    state: str
    most: int

    def partitions(self) -> Sequence[InputPartition]:
        batch = self.connection.driver().run(_calls.get, self.batch)
        groups = -(-batch.items // batch.group_size)
        count = max(1, min(self.most, groups))
        edges = [groups * number // count * batch.group_size for number in range(count)] + [batch.items]
        return [_Range(start, end, batch.group_size) for start, end in pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa

        assert isinstance(partition, _Range)
        driver = self.connection.driver()
        for start, end in driver.iterate(_calls.ranges_from, self.batch, self.state, partition.start, PAGE):
            if start >= partition.end:
                return
            for first in range(start, min(end, partition.end), CHUNK):
                ids = _ids(self.batch, range(first, min(first + CHUNK, end, partition.end)), partition.group_size)
                yield pa.record_batch([ids], names=["item_id"])


def _ids(batch: int, numbers: range, group_size: int) -> Any:
    """The ids of a run of numbers as an Arrow array. The computation is vectorised."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    group, index = np.divmod(np.arange(numbers.start, numbers.stop, dtype=np.int64), group_size)
    parts = [pa.array(part).cast(pa.string()) for part in (group, index)]
    return pc.binary_join_element_wise(str(batch), *parts, ":")


@dataclass
class _Message(WriterCommitMessage):
    posted: Posted


@dataclass
class _Writing:
    """Shared by both writers: posts a task's rows, and reports problems at the end."""

    posting: Posting
    column: str
    failed: str | None
    strict: bool
    chunk: int

    def write(self, batches: Iterator[Any]) -> WriterCommitMessage:
        from lastbit.spark import _arrow_masks

        poster = Poster(self.posting)
        for table in _chunks(batches, self.chunk):
            failed = None if self.failed is None else _whole_column(table, self.failed)
            for mask in _arrow_masks.masks(_whole_column(table, self.column), failed):
                poster.add(mask)
        poster.flush()
        return _Message(poster.posted)

    def commit(self, messages: Iterable[WriterCommitMessage | None]) -> None:
        total = Posted()
        for message in messages:
            if isinstance(message, _Message):
                total.add(message.posted)
        if total.malformed or total.rejected:
            report = json.dumps({"rejected": dict(sorted(total.rejected.items())), "malformed": total.malformed})
            if self.strict:
                raise NotClean(report)
            log.warning("lastbit: %s", report)


class _Writer(DataSourceArrowWriter):
    def __init__(self, writing: _Writing) -> None:
        self._writing = writing

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._writing.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writing.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: acks stay, as these items are done even if other tasks fail."""


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, writing: _Writing) -> None:
        self._writing = writing

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._writing.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # PySpark's name
        self._writing.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing; see `_Writer.abort`."""


def _chunks(batches: Iterator[Any], most: int) -> Iterator[Any]:
    """Record batches, combined to about `most` rows each."""
    import pyarrow as pa

    waiting: list[Any] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= most:
            yield pa.Table.from_batches(waiting)
            waiting, rows = [], 0
    if rows:
        yield pa.Table.from_batches(waiting)


def _whole_column(table: Any, name: str) -> Any:
    import pyarrow as pa

    chunks = table.column(name).chunks
    return pa.concat_arrays(chunks)
