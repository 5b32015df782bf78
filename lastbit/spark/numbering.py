"""Giving each row of a DataFrame an item id that stays its own.

Spark computes a row as often as it likes: a task is retried, an executor is lost, a frame is used twice, and the second
time its partitions may be others. An id that depends on where a row was computed (its partition, its place in it) then
moves to another row, and an ack resolves the wrong item. So here the number is a fact of the *content*: a row's rank
among all rows in the order of a hash of its columns, then of the columns themselves. That order knows no partitions.
Rows that are equal in everything stand next to each other in it and are interchangeable.

The hash's first 12 bits are the row's *bucket*. One pass counts the buckets; the sums over the smaller ones are where
each bucket begins; the rank within the bucket is a window function. The frame is shuffled once by bucket, and sorted.

It cannot stabilize an unstable frame: with `rand()`, `uuid()`, the clock or a changed source, rows have different
content the second time. Then the count of a bucket no longer fits, mostly, and the job fails rather than hand out ids
that are another row's; but a change that keeps all counts is not seen. Write such a frame down first, and number what
was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from lastbit import _calls
from lastbit._urllib import Connection
from lastbit.errors import InvalidArgument
from lastbit.ids import ItemIds
from lastbit.retry import Retry
from lastbit.spark.columns import item_id

BUCKET_BITS = 12
_BUCKET, _HASH, _RANK, _START, _COUNT = (f"__lastbit_{name}" for name in ("bucket", "hash", "rank", "start", "count"))


class Extends(Protocol):
    """A `BatchHandle`."""

    def extend(self, count: int, *, idempotency_key: str | None = None) -> ItemIds: ...


def with_item_ids(
    df: DataFrame,
    batch: int | Extends,
    column: str = "item_id",
    url: str | None = None,
    token: str | None = None,
    *,
    by: Sequence[str] | None = None,
    idempotency_key: str | None = None,
    timeout: float = 30.0,
    retry: Retry | None = None,
) -> DataFrame:
    """`df` with one more column: each row's item id, fresh in `batch`, which is extended by the number of rows, now.

    The ids stay with their rows whenever and however the frame is computed again, because a row's number is its rank by
    content: by a hash of its columns, then the columns; no checkpoint is needed. The price is one more pass over the
    frame, here, and one shuffle and sort where it is used. The frame must be deterministic: a row that has another
    content the second time (`rand()`, the clock) has another id, and the job fails where that shows.

    `batch`: a handle of a `Client`, or a batch's id with `url` and `token`. `by`: the columns that tell the rows apart;
    without it all that can be compared. Rows that are equal in them, and in all else that can be compared, may swap
    their ids. `idempotency_key`: the extend's; with the same key and the same rows a program that is run again gives
    them the same ids.

    Raises `InvalidArgument`, `ServiceError` (the batch is sealed, the key was used for another number of rows) and
    `ServiceUnreachable`.
    """
    if column in df.columns:
        raise InvalidArgument(f"the frame has a column {column!r} already; name another one")
    keys = _keys(df, by)
    hashed = df.withColumn(_HASH, sf.xxhash64(*(_name(name) for name in keys)))
    # Unsigned, so that the buckets are 0 .. 4095; their order is of no matter, only that it is fixed.
    hashed = hashed.withColumn(_BUCKET, sf.shiftrightunsigned(_HASH, 64 - BUCKET_BITS))
    counts = sorted((row[0], row[1]) for row in hashed.groupBy(_BUCKET).count().collect())
    total = sum(count for _, count in counts)
    ids = _extend(batch, total, idempotency_key, Connection.named(url, token, timeout, retry))
    starts, start = [], ids.numbers.start
    for bucket, count in counts:
        starts.append((bucket, start, count))
        start += count
    begins = df.sparkSession.createDataFrame(starts, f"{_BUCKET} bigint, {_START} bigint, {_COUNT} bigint")
    order = [*keys, *(name for name in _comparable(df) if name not in keys)]
    window = Window.partitionBy(_BUCKET).orderBy(_HASH, *(_name(name) for name in order))
    ranked = hashed.withColumn(_RANK, sf.row_number().over(window) - 1).join(sf.broadcast(begins), _BUCKET, "left")
    error = sf.raise_error(
        sf.lit(
            "with_item_ids: the frame's rows are not those that were counted, so their ids would not be stable. It is "
            "not deterministic or its source has changed: write it down first, and number what was written"
        )
    ).cast("string")
    fits = sf.col(_RANK) < sf.col(_COUNT)
    found = sf.when(fits, item_id(ids.batch, sf.col(_START) + sf.col(_RANK), ids.group_size)).otherwise(error)
    return ranked.select(*(_name(name) for name in df.columns), found.alias(column))


def _extend(batch: int | Extends, count: int, idempotency_key: str | None, connection: Connection) -> ItemIds:
    if isinstance(batch, int):
        return connection.driver().run(_calls.extend, batch, count, idempotency_key).ids
    return batch.extend(count, idempotency_key=idempotency_key)


def _keys(df: DataFrame, by: Sequence[str] | None) -> list[str]:
    if by is None:
        keys = _comparable(df)
        if not keys:
            raise InvalidArgument("no column of the frame can be compared, so nothing tells its rows apart")
        return keys
    names = [by] if isinstance(by, str) else list(by)
    for name in names:
        if name not in _comparable(df):
            raise InvalidArgument(f"{name!r} is no column of the frame that can be compared; {_comparable(df)} are")
    if not names:
        raise InvalidArgument("by names at least one column")
    return names


def _comparable(df: DataFrame) -> list[str]:
    if len(set(df.columns)) < len(df.columns):
        raise InvalidArgument(f"the frame has two columns of one name: {', '.join(df.columns)}")
    return [field.name for field in df.schema.fields if _has_order(field.dataType)]


def _has_order(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_order(kind.elementType)
    if isinstance(kind, StructType):
        return all(_has_order(field.dataType) for field in kind.fields)
    return not isinstance(kind, MapType) and kind.typeName() not in {
        "variant",
        "calendarinterval",
        "geometry",
        "geography",
    }


def _name(name: str) -> Column:
    """A column by its whole name, dots and all."""
    return sf.col("`" + name.replace("`", "``") + "`")
