"""The data source `lastbit`: writing a frame acks its items, and reading a batch returns its pending, failed or
skipped items.

Options for both: `url`, `token`, `timeout`. Reading: `batch`, `state` (`pending`, `failed` or `skipped`), `partitions`
(8). Writing, in batch and in streams: `column` (`item_id`), `failed_column` and `skipped_column` (booleans), `reason`,
`strict`, `chunk` (262144, the number of rows that are combined into masks at a time).

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
from lastbit.models import HELD
from lastbit.spark import _arrow
from lastbit.spark.posting import Posted, Poster, Posting

CHUNK = 2**18
"""Rows converted to masks at a time."""
PAGE = 1000
"""Ranges per response."""

log = logging.getLogger("lastbit.spark")


class NotClean(errors.LastbitError):
    """A strict write contained ids that were malformed, or rejected for another reason than `held`. The other items are
    acked."""

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
        if state not in {"pending", "failed", "skipped"}:
            raise errors.InvalidArgument(f"the option state is pending, failed or skipped, not {state!r}")
        return _Reader(self._connection(), batch, state, max(1, self._whole("partitions", 8)))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer(self._writing(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802  # PySpark's name
        return _StreamWriter(self._writing(schema, overwrite))

    def _connection(self) -> Connection:
        timeout = self.options.get("timeout", "30")
        try:
            seconds = float(timeout)
        except ValueError:
            raise errors.InvalidArgument(f"the option timeout is a number of seconds, not {timeout!r}") from None
        return Connection.named(self.options.get("url"), self.options.get("token"), seconds)

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
        skipped = self.options.get("skipped_column")
        for name, kind in ((column, "string"), (failed, "boolean"), (skipped, "boolean")):
            if name is None:
                continue
            if name not in schema.names:
                raise errors.InvalidArgument(f"there is no column {name!r}; the columns are {', '.join(schema.names)}")
            if (found := schema[name].dataType.simpleString()) != kind:
                raise errors.InvalidArgument(f"the column {name} has the type {found}, not {kind}")
        strict = self.options.get("strict", "false").lower()
        if strict not in {"true", "false"}:
            raise errors.InvalidArgument(f"the option strict is true or false, not {strict!r}")
        reason = self.options.get("reason")
        if reason is not None and failed is None and skipped is None:
            raise errors.InvalidArgument(
                "the option reason is for failed or skipped items: it needs the option failed_column or skipped_column"
            )
        posting = Posting(self._connection(), uuid.uuid4().hex, reason)
        return _Writing(posting, column, failed, skipped, strict == "true", max(1, self._whole("chunk", CHUNK)))


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
        ranges = self.connection.driver().iterate(_calls.ranges_from, self.batch, self.state, partition.start, PAGE)
        for runs in _chunks_of_ranges(ranges, partition.end, CHUNK):
            yield pa.record_batch([_ids(self.batch, runs, partition.group_size)], names=["item_id"])


def _chunks_of_ranges(ranges: Iterable[tuple[int, int]], limit: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """The ranges below `limit`, in lists of at most `most` numbers. Many ranges have one number only, and a record
    batch for each would cost several hundred times as much as its id."""
    waiting: list[tuple[int, int]] = []
    room = most
    for start, end in ranges:
        if start >= limit:
            break
        end = min(end, limit)
        while start < end:
            taken = min(end - start, room)
            waiting.append((start, start + taken))
            start += taken
            room -= taken
            if not room:
                yield waiting
                waiting, room = [], most
    if waiting:
        yield waiting


def _ids(batch: int, runs: Sequence[tuple[int, int]], group_size: int) -> Any:
    """The ids of runs of numbers as an Arrow array. The computation is vectorised."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    starts, ends = np.array(runs, dtype=np.int64).T
    lengths = ends - starts
    places = np.cumsum(lengths)
    group, index = np.divmod(np.arange(places[-1]) + np.repeat(ends - places, lengths), group_size)
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
    skipped: str | None
    strict: bool
    chunk: int

    def write(self, batches: Iterator[Any]) -> WriterCommitMessage:
        from lastbit.spark import _arrow_masks

        poster = Poster(self.posting)
        conditions = {"failed": self.failed, "skipped": self.skipped}
        names = {outcome: name for outcome, name in conditions.items() if name is not None}
        for ids, *flags in _chunks(batches, [self.column, *names.values()], self.chunk):
            for mask in _arrow_masks.masks(ids, **dict(zip(names, flags, strict=True))):
                poster.add(mask)
        poster.flush()
        return _Message(poster.posted)

    def commit(self, messages: Iterable[WriterCommitMessage | None]) -> None:
        total = Posted()
        for message in messages:
            if isinstance(message, _Message):
                total.add(message.posted)
        if total.malformed or total.rejected.keys() - {HELD}:
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


def _chunks(batches: Iterable[Any], names: Sequence[str], most: int) -> Iterator[list[Any]]:
    """These columns of the record batches, combined to about `most` rows each. They are copied, as the columns of a
    batch share its memory: otherwise all columns of all these rows would stay in it."""
    import numpy as np
    import pyarrow as pa

    waiting: list[Any] = []
    rows = 0

    def combined() -> list[Any]:
        return [pa.concat_arrays([batch.column(name) for batch in waiting]) for name in names]

    for batch in batches:
        waiting.append(batch.select(list(names)).take(pa.array(np.arange(batch.num_rows))))
        rows += batch.num_rows
        if rows >= most:
            yield combined()
            waiting, rows = [], 0
    if rows:
        yield combined()
