"""Acks the items of a DataFrame, in batch and in Structured Streaming."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame

from lastbit import _calls
from lastbit._urllib import Connection
from lastbit.errors import InvalidArgument, LastbitError
from lastbit.models import HELD
from lastbit.retry import Retry
from lastbit.spark._partitions import on_partitions
from lastbit.spark.masks import Condition, item_masks
from lastbit.spark.posting import GROUPS_A_CALL, Posted, Posting, post
from lastbit.spark.progress import Progress, Watcher, labelled, stages, watched


class MalformedRows(LastbitError):
    """Some rows of a strict call have no item id. Nothing was sent."""

    def __init__(self, malformed: int, rows: int) -> None:
        super().__init__(malformed, rows)
        self.malformed = malformed
        self.rows = rows

    def __str__(self) -> str:
        return f"{self.malformed:,} of {self.rows:,} rows have no item id (batch:group:index); nothing was sent"


@dataclass(frozen=True, slots=True)
class AckReport:
    """The result for a DataFrame's ids: applied + repeated + rejected = items. `items` are distinct, `rows` are not.
    `malformed` counts rows, including null ids. `rejected` maps reasons to numbers of items. `completed`: ids of all
    complete batches that issued one of the items, whether this call or an earlier one completed them.

    If Spark ran a task twice, the report may be from the copy that found the work done. Then items that this call
    applied count as `repeated`. The service's bits and counts are not affected.
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
        """Whether nothing was malformed, or rejected for another reason than `held`: nested batches resolve those
        items."""
        return not self.malformed and self.rejected.keys() <= {HELD}

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return asdict(self)


def ack(
    df: DataFrame,
    column: str | Column = "item_id",
    url: str | None = None,
    token: str | None = None,
    *,
    failed: Condition | None = None,
    skipped: Condition | None = None,
    reason: str | None = None,
    strict: bool = False,
    parallel: int = 8,
    groups: int = GROUPS_A_CALL,
    timeout: float = 30.0,
    retry: Retry | None = None,
    idempotency_key: str | None = None,
    progress: bool | Watcher = False,
) -> AckReport:
    """Ack the items of `df`. The JVM combines them into bitfields, one row per group, and the executors send these.

    `url`, `token`: by default LASTBIT_URL and LASTBIT_TOKEN of the driver. `failed`: a Column or SQL that selects
    failed rows, and `skipped` one that selects rows that are not needed. An item with several rows is acked if any of
    them is done, else skipped if any is, and so is a row that both select. `reason`: for the failures and skips; the
    service writes a row for each such item with a reason. `parallel`: maximum concurrent requests; `groups`: bitfields
    per request; `timeout`: seconds for each of connecting and the response. `strict`: raise `MalformedRows` before
    anything is sent if a row has no id; by default such rows are counted.

    It is safe to repeat the call, wholly or in part, as acks are idempotent. `idempotency_key` identifies the run to
    the service; by default each call has its own.

    `progress=True` draws a bar with the tasks of the running stage, what was sent, the rate and an estimate on standard
    error (needs `lastbit[cli]`); a function is called with an `AckProgress` whenever it changes, possibly by another
    thread. In a classic session the jobs have the description "lastbit.ack" unless the caller has set one; on Connect
    their tag is "lastbit.ack".

    Raises `InvalidArgument` (no such column, not text, a reason without `failed` or `skipped`), `ServiceUnreachable`,
    `ServiceError`; then some items may be acked, no report is returned, and repeating the call is safe.
    """
    if parallel < 1:
        raise InvalidArgument(f"parallel must be at least 1, not {parallel!r}")
    if reason is not None and failed is None and skipped is None:
        raise InvalidArgument("a reason is for failed or skipped items: select them with `failed` or `skipped`")
    connection = Connection.named(url, token, timeout, retry)
    posting = Posting(connection, idempotency_key or uuid.uuid4().hex, reason, groups)
    masks = item_masks(df, column, failed=failed, skipped=skipped)
    given_up = {verb: reason for verb, condition in (("failures", failed), ("skips", skipped)) if condition is not None}
    _greet(connection, {"acks": None, **given_up})
    with labelled(df.sparkSession), _watched(progress) as watching, stages(df.sparkSession, watching):
        if strict:
            masks = masks.persist()
        try:
            if strict:
                _refuse_malformed(masks)
            return _posted(masks, posting, parallel, watching)
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
    """A function for `foreachBatch`: acks each micro-batch, then calls `on_report(report, epoch)`.

        query = frame.writeStream.foreachBatch(ack_stream(url=url)).option("checkpointLocation", path).start()

    Spark replays a micro-batch if its commit was not recorded. That is harmless, as acks are idempotent. This function
    uses the same idempotency key each time it acks the micro-batch; with an `idempotency_key` of your own, also after a
    restart of the program. `options` are those of `ack`. A failed micro-batch stops the query, which repeats it when it
    is started again. On Spark Connect, Spark runs the function and `on_report` in a process of the server, so
    `on_report` must be picklable and can't change the caller's objects.
    """
    connection = Connection.named(url, token)
    run_key = options.pop("idempotency_key", None) or uuid.uuid4().hex

    def acked(df: DataFrame, epoch: int) -> None:
        report = ack(df, column, connection.url, connection.token, idempotency_key=f"{run_key}:{epoch}", **options)
        if on_report is not None:
            on_report(report, epoch)

    return acked


def malformed_rows(df: DataFrame, column: str | Column = "item_id") -> DataFrame:
    """The rows of `df` without an item id, with all columns, for example to store them. Raises `InvalidArgument`."""
    from lastbit.spark.columns import is_item_id
    from lastbit.spark.masks import column_of, ids_of

    ids_of(df, column)
    return df.where(~is_item_id(column_of(df, column)))


def _watched(option: bool | Watcher) -> AbstractContextManager[Progress | None]:
    if callable(option):
        return watched(nullcontext(option))
    if not option:
        return nullcontext()
    from lastbit.spark.bar import bar  # needs more than executors have

    return watched(bar())


def _greet(connection: Connection, reasons: Mapping[str, str | None]) -> None:
    """Send an empty request for each verb before Spark computes anything, to check the address, the token and the
    reason."""
    driver = connection.driver()
    for verb, reason in reasons.items():
        driver.run(_calls.resolve, verb, iter([{"items": []}]), reason)


def _refuse_malformed(masks: DataFrame) -> None:
    rows = malformed = 0
    for is_id, count in masks.selectExpr("batch IS NOT NULL AS is_id", "rows").groupBy("is_id").sum("rows").collect():
        rows += count
        malformed += 0 if is_id else count
    if malformed:
        raise MalformedRows(malformed, rows)


def _posted(masks: DataFrame, posting: Posting, parallel: int, watching: Progress | None) -> AckReport:
    def post_partition(rows: Any) -> Any:
        masks_of_rows: Any = map(tuple, rows)
        return post(masks_of_rows, posting)

    total, so_far = Posted(), Posted()

    def receive(partial: Posted) -> None:
        so_far.add(partial)
        if watching is not None:
            watching.sent(so_far.rows, so_far.groups)

    for partial in on_partitions(masks.coalesce(parallel), post_partition, receive if watching else None):
        total.add(partial)
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
