"""Acking what a DataFrame holds, in batch and in Structured Streaming."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame

from lastbit import _calls
from lastbit._urllib import Connection, run
from lastbit.errors import InvalidArgument, LastbitError
from lastbit.retry import Retry
from lastbit.spark.masks import Failed, item_masks
from lastbit.spark.posting import GROUPS_A_CALL, Posted, Posting, post


class MalformedRows(LastbitError):
    """Rows of a strict call hold no item id. Nothing was sent."""

    def __init__(self, malformed: int, rows: int) -> None:
        super().__init__(malformed, rows)
        self.malformed = malformed
        self.rows = rows

    def __str__(self) -> str:
        return f"{self.malformed:,} of {self.rows:,} rows hold no item id (batch:group:index), and nothing was sent"


@dataclass(frozen=True, slots=True)
class AckReport:
    """What became of a DataFrame's ids: applied + repeated + rejected = items. `items` are distinct, `rows` are not;
    `malformed` counts rows, null ids too; `rejected` is reason → items; `completed` are the ids of all complete batches
    of which there was an issued item, this call's completions and earlier ones.

    Where Spark ran a task twice, the copy whose answer is reported may have found the other's work done: then items
    stand under `repeated` that this call applied. The service's bits and counts do not shift.
    """

    rows: int = 0
    items: int = 0
    applied: int = 0
    repeated: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    malformed: int = 0
    completed: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """Nothing was rejected or malformed."""
        return not self.rejected and not self.malformed

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def ack(
    df: DataFrame,
    column: str | Column = "item_id",
    url: str | None = None,
    token: str | None = None,
    *,
    failed: Failed | None = None,
    reason: str | None = None,
    strict: bool = False,
    parallel: int = 8,
    groups: int = GROUPS_A_CALL,
    timeout: float = 30.0,
    retry: Retry | None = None,
    idempotency_key: str | None = None,
) -> AckReport:
    """Resolve the items of `df`: made into bitfields in the JVM, sent by the executors, one row a group.

    `url`, `token`: by default LASTBIT_URL and LASTBIT_TOKEN of the driver. `failed`: a Column or SQL that says which
    rows failed; where one item has a good row and a failed one, it is acked. `reason`: of the failures; each item that
    fails with a reason is a row for the service to write. `parallel`: requests at a time, at most; `groups`: bitfields
    a request; `timeout`: seconds for each of connecting and the answer. `strict`: raise `MalformedRows` before anything
    is sent where a row holds no id; without it such rows are counted.

    It may be run again, whole or in part, any number of times: the bits are idempotent. `idempotency_key` names the run
    to the service, so that a repeated one is recognised; by default each call has its own.

    Raises `InvalidArgument` (no such column, not text), `ServiceUnreachable`, `ServiceError`; then some of the items
    may be acked, no report is made, and running it again is safe. Needs a classic session, not Spark Connect.
    """
    if parallel < 1:
        raise InvalidArgument(f"there is at least one request at a time, not {parallel!r}")
    connection = Connection.named(url, token, timeout, retry)
    posting = Posting(connection, idempotency_key or uuid.uuid4().hex, reason, groups)
    masks = item_masks(df, column, failed=failed)
    _greet(connection, ["acks", "failures"] if failed is not None else ["acks"])
    if strict:
        masks = masks.persist()
    try:
        if strict:
            _refuse_malformed(masks)
        return _posted(masks, posting, parallel)
    finally:
        if strict:
            masks.unpersist()


def ack_stream(
    column: str | Column = "item_id",
    url: str | None = None,
    token: str | None = None,
    *,
    on_report: Callable[[AckReport, int], object] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """For `foreachBatch`: acks each micro-batch, then calls `on_report(report, epoch)`.

        query = frame.writeStream.foreachBatch(ack_stream(url=url)).option("checkpointLocation", path).start()

    Spark replays a micro-batch whose commit it did not write down; the bits make that harmless, and the micro-batch
    bears the same idempotency key each time that this function acks it. `options` are those of `ack`. A micro-batch
    that fails stops the query, which goes on with it when it is started again.
    """
    connection = Connection.named(url, token)
    run_key = options.pop("idempotency_key", None) or uuid.uuid4().hex

    def acked(df: DataFrame, epoch: int) -> None:
        report = ack(df, column, connection.url, connection.token, idempotency_key=f"{run_key}:{epoch}", **options)
        if on_report is not None:
            on_report(report, epoch)

    return acked


def malformed_rows(df: DataFrame, column: str | Column = "item_id") -> DataFrame:
    """The rows of `df` that hold no item id, whole, to be written somewhere. Raises `InvalidArgument`."""
    from lastbit.spark.columns import is_item_id
    from lastbit.spark.masks import ids_of

    ids_of(df, column)
    return df.where(~is_item_id(column))


def _greet(connection: Connection, verbs: list[str]) -> None:
    """Ask the service for nothing, before Spark computes anything: is it there, and does it let us?"""
    for verb in verbs:
        run(_calls.resolve(connection.service(), verb, iter([{"items": []}]), None))


def _refuse_malformed(masks: DataFrame) -> None:
    rows = malformed = 0
    for known, count in masks.selectExpr("batch IS NOT NULL AS known", "rows").groupBy("known").sum("rows").collect():
        rows += count
        malformed += 0 if known else count
    if malformed:
        raise MalformedRows(malformed, rows)


def _posted(masks: DataFrame, posting: Posting, parallel: int) -> AckReport:
    def post_partition(rows: Any) -> Any:
        masks_of_rows: Any = map(tuple, rows)
        return post(masks_of_rows, posting)

    total = Posted()
    # A plain RDD of pickled rows: what goes through Arrow needs pyarrow, which a bare cluster does not have.
    for posted in masks.rdd.coalesce(parallel).mapPartitions(post_partition).collect():
        total.add(posted)
    if total.error is not None:
        raise total.error
    return AckReport(
        total.rows,
        total.items,
        total.applied,
        total.repeated,
        dict(sorted(total.rejected.items())),
        total.malformed,
        tuple(sorted(total.completed)),
    )
