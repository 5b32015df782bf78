"""A job that can be run again: its rows are the items of one batch, and each run works on those that are left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from lastbit import _calls, errors
from lastbit._drivers import Driver
from lastbit._urllib import Connection
from lastbit.ids import ItemIds
from lastbit.models import Batch
from lastbit.retry import Retry
from lastbit.spark.acks import AckReport, ack
from lastbit.spark.columns import item_group, item_index, named
from lastbit.spark.numbering import numbered

_PAGE = 1000
_GROUP, _BITS = "__lastbit_group", "__lastbit_bits"


class Job:
    """A frame's rows as the items of a batch; `job` makes it.

    `batch` is the batch as it was when the run began. `todo` has the frame's rows that are neither acked nor skipped
    then, with their ids in the column `item_id`: it stays the same while they are acked.
    """

    def __init__(self, batch: Batch, todo: DataFrame, connection: Connection) -> None:
        self.batch = batch
        self.todo = todo
        self._connection = connection

    def ack(self, df: DataFrame, **options: Any) -> AckReport:
        """`lastbit.spark.ack` for the job's service, with the same options."""
        return ack(df, url=self._connection.url, token=self._connection.token, **options)


def job(
    df: DataFrame,
    url: str | None = None,
    token: str | None = None,
    *,
    key: str,
    by: Sequence[str] | None = None,
    with_failed: bool = True,
    timeout: float = 30.0,
    retry: Retry | None = None,
) -> Job:
    """Make each row of `df` an item of the batch with this key. Run again with the same key and the same rows, it finds
    the same batch, and each row has the same id.

        run = job(products, url, key="catalog-42")
        render(run.todo).write.mode("append").parquet("rendered")
        run.ack(spark.read.parquet("rendered"))

    The rows, `by` and what makes them stable are as in `with_item_ids`. The batch is opened under the idempotency key
    `key`, extended and sealed. Without `with_failed`, `todo` leaves out what has failed. The driver holds a bit for
    each item of the groups in which some are done.

    Raises `IdempotencyKeyReused` if an earlier run had other rows, `BatchEnded` if the batch was cancelled or has
    expired, `InvalidArgument`, `ServiceError` and `ServiceUnreachable`.
    """
    connection = Connection.named(url, token, timeout, retry)
    driver = connection.driver()
    batch, _ = driver.run(_calls.open_batch, {"key": key}, key)
    if batch.state in ("cancelled", "expired"):
        raise errors.BatchEnded.of_rerun(batch)

    work = numbered(df, lambda count, digest: _extend(driver, batch, key, count, digest), by=by)
    driver.run(_calls.seal, batch.id)
    todo = _among(work, _left(driver, batch, with_failed), batch.group_size)
    return Job(driver.run(_calls.get, batch.id), todo, connection)


def _extend(driver: Driver, batch: Batch, key: str, count: int, digest: str) -> ItemIds:
    # With the digest, the service refuses as many other rows: their ids would be those of the earlier ones.
    try:
        return driver.run(_calls.extend, batch.id, count, f"{key}:rows", digest).ids
    except errors.IdempotencyKeyReused as cause:
        detail = (
            f"the key {key!r} is that of batch {batch.id}, whose {batch.items} rows were others than these {count}: "
            "give each input a key of its own, or name in `by` the columns that identify a row, so that others may "
            "change"
        )
        raise errors.IdempotencyKeyReused(cause.status, cause.code, detail) from cause


def _left(driver: Driver, batch: Batch, with_failed: bool) -> list[tuple[int, int]]:
    """The ranges of the numbers that are to do, start and end."""
    states = ("pending", "failed") if with_failed else ("pending",)
    return [numbers for state in states for numbers in driver.iterate(_calls.ranges_from, batch.id, state, 0, _PAGE)]


def _among(work: DataFrame, ranges: Sequence[tuple[int, int]], group_size: int) -> DataFrame:
    """The rows whose items are in these ranges of numbers."""
    rows = list(_masks(ranges, group_size))
    masks = work.sparkSession.createDataFrame(rows, f"{_GROUP} bigint, {_BITS} binary")
    index = item_index("item_id")
    place = sf.floor(index / 8).cast("int") + 1
    byte = sf.conv(sf.hex(sf.substr(sf.col(_BITS), place, sf.lit(1))), 16, 10).cast("int")
    is_set = sf.getbit(byte, index % 8) == 1
    rows_with_bits = work.join(sf.broadcast(masks), item_group("item_id") == sf.col(_GROUP))
    return rows_with_bits.where(sf.isnull(_BITS) | is_set).select(*(named(name) for name in work.columns))


def _masks(ranges: Sequence[tuple[int, int]], group_size: int) -> Iterator[tuple[int, bytes | None]]:
    """The bits of each group that has some in the ranges, lowest bit first; None if all are."""
    masks: dict[int, int] = {}
    for start, end in ranges:
        for group in range(start // group_size, (end - 1) // group_size + 1):
            low = max(start - group * group_size, 0)
            high = min(end - group * group_size, group_size)
            masks[group] = masks.get(group, 0) | ((1 << high) - (1 << low))
    for group, mask in sorted(masks.items()):
        is_whole = mask == (1 << group_size) - 1
        yield group, None if is_whole else mask.to_bytes((group_size + 7) // 8, "little")
