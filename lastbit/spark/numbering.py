"""Assigns each row of a DataFrame a stable item id.

Spark may compute a row several times: a task is retried, an executor is lost, or a frame is used twice. The second
time, its partitions may differ. If an id depended on the row's partition and place, it would move to another row, and
an ack would resolve the wrong item. So the number depends on the *content*: it is the row's rank among all rows,
ordered by a hash of its columns, then by the columns themselves. That order is independent of partitions. Equal rows
are next to each other in it and are interchangeable. If only some columns identify a row, no two rows may be alike in
them: which of the two comes first would depend on the columns that may change.

The hash's first 12 bits are the row's *bucket*. One pass counts the rows of each bucket. The sum of the counts of all
smaller buckets is the first number of a bucket. The rank within a bucket is a window function. The frame is shuffled
once by bucket, and sorted.

This can't make an unstable frame stable: with `rand()`, `uuid()`, the clock or a changed source, rows have different
content the second time. Then the number of rows in a bucket usually differs, and the job fails instead of assigning ids
of other rows. A change that keeps these numbers is not detected. Store such a frame first, and number the stored rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from lastbit import _calls
from lastbit._urllib import Connection
from lastbit.errors import InvalidArgument
from lastbit.ids import ItemIds
from lastbit.retry import Retry
from lastbit.spark.columns import item_id, named

BUCKET_BITS = 12
_BUCKET, _HASH, _RANK, _SIZE, _START, _COUNT = (
    f"__lastbit_{name}" for name in ("bucket", "hash", "rank", "size", "start", "count")
)


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
    """`df` with one more column: each row's new item id in `batch`. This call extends the batch by the number of rows.

    A row keeps its id when Spark computes the frame again, because the row's number is its rank by content: by a hash
    of its columns, then by the columns. No checkpoint is needed. The cost is one more pass over the frame in this call
    (two with `by`), and one shuffle and sort when the result is used. The frame must be deterministic: a row with
    different content the second time (`rand()`, the clock) has another id, and the job fails if it detects that.

    `batch`: a handle of a `Client`, or a batch's id with `url` and `token`. `by`: the columns that identify a row; by
    default all comparable columns, and equal rows may swap their ids. `idempotency_key`: the key of the extend; if a
    program is run again with the same key and the same rows, they get the same ids.

    Raises `InvalidArgument` (also if two rows are alike in the columns of `by`), `ServiceError` (the batch is sealed,
    the key was used for another number of rows) and `ServiceUnreachable`.
    """
    connection = Connection.named(url, token, timeout, retry)
    return numbered(df, lambda count, _: _extend(batch, count, idempotency_key, connection), column, by)


def numbered(
    df: DataFrame, extend: Callable[[int, str], ItemIds], column: str = "item_id", by: Sequence[str] | None = None
) -> DataFrame:
    """`df` with one more column: each row's id among those that `extend` returns for a number of rows. It also gets a
    digest of their content. Raises `InvalidArgument`, and what `extend` raises."""
    if column in df.columns:
        raise InvalidArgument(f"the frame already has a column {column!r}; choose another name")
    keys = _keys(df, by)
    hashed = df.withColumn(_HASH, sf.xxhash64(*(named(name) for name in keys)))
    # Unsigned, so that the buckets are 0 .. 4095. Any fixed order would do.
    hashed = hashed.withColumn(_BUCKET, sf.shiftrightunsigned(_HASH, 64 - BUCKET_BITS))
    if by is not None:
        _refuse_repeated(df, keys)
    hashes = sf.sum(sf.col(_HASH).cast("decimal(20)"))  # a bigint would overflow
    buckets = sorted(tuple(row) for row in hashed.groupBy(_BUCKET).agg(sf.count(sf.lit(1)), hashes).collect())
    digest = hashlib.blake2b(repr(buckets).encode(), digest_size=16).hexdigest()
    ids = extend(sum(count for _, count, _ in buckets), digest)
    starts, start = [], ids.numbers.start
    for bucket, count, _ in buckets:
        starts.append((bucket, start, count))
        start += count
    begins = df.sparkSession.createDataFrame(starts, f"{_BUCKET} bigint, {_START} bigint, {_COUNT} bigint")
    window = Window.partitionBy(_BUCKET).orderBy(_HASH, *(named(name) for name in keys))
    # With the same order, Spark computes both in one pass over a bucket's rows.
    whole = window.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    ranked = hashed.select(
        "*", (sf.row_number().over(window) - 1).alias(_RANK), sf.count(sf.lit(1)).over(whole).alias(_SIZE)
    ).join(sf.broadcast(begins), _BUCKET, "left")
    error = sf.raise_error(
        sf.lit(
            "with_item_ids: the frame's rows differ from those that were counted, so their ids would not be stable. It "
            "is not deterministic, or its source has changed: store the frame first, and number the stored rows"
        )
    ).cast("string")
    is_same = sf.col(_SIZE) == sf.col(_COUNT)
    number = sf.when(is_same, item_id(ids.batch, sf.col(_START) + sf.col(_RANK), ids.group_size)).otherwise(error)
    return ranked.select(*(named(name) for name in df.columns), number.alias(column))


def _extend(batch: int | Extends, count: int, idempotency_key: str | None, connection: Connection) -> ItemIds:
    if isinstance(batch, int):
        return connection.driver().run(_calls.extend, batch, count, idempotency_key).ids
    return batch.extend(count, idempotency_key=idempotency_key)


def _keys(df: DataFrame, by: Sequence[str] | None) -> list[str]:
    if by is None:
        keys = _comparable(df)
        if not keys:
            raise InvalidArgument("no column of the frame can be compared, so its rows can't be distinguished")
        return keys
    names = [by] if isinstance(by, str) else list(by)
    for name in names:
        if name not in _comparable(df):
            raise InvalidArgument(f"{name!r} is not a comparable column of the frame; these are: {_comparable(df)}")
    if not names:
        raise InvalidArgument("by must name at least one column")
    return names


def _refuse_repeated(df: DataFrame, names: list[str]) -> None:
    counted = df.groupBy(*(named(name) for name in names)).agg(sf.count(sf.lit(1)).alias(_COUNT))
    repeated = counted.where(sf.col(_COUNT) > 1).first()
    if repeated is not None:
        *values, count = repeated
        example = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        raise InvalidArgument(
            f"{count} rows have {example}: `by` must name columns in which no two rows are alike; without `by`, all "
            "columns count"
        )


def _comparable(df: DataFrame) -> list[str]:
    if len(set(df.columns)) < len(df.columns):
        raise InvalidArgument(f"the frame has two columns with the same name: {', '.join(df.columns)}")
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
