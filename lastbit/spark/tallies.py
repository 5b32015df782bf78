"""Counting what a DataFrame holds into a tally, in batch and in Structured Streaming, each message once.

Keyed by the messages' own offsets, never by the number of a micro-batch: after another checkpoint those begin
again, and a sink that goes by them drops what is new, or counts twice. So a micro-batch may be replayed, cut
otherwise, or sent by two drivers at once.

A row is a message, and is named by its topic, partition and offset: one that is there twice counts once. What a flat
map makes of it is told apart from that, because it is made here (`explode`): what one message brings to one key is
summed up, and what several bring never is.

What a tally needs is the order of a source for each key. All that comes from one source for one key goes to one task,
which sends it in the order of the offsets, one call after the other; the next micro-batch begins when all calls were
answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import IntegralType, StringType

from lastbit._urllib import Connection, run
from lastbit.chains import BITS, STAGES, Source
from lastbit.errors import InvalidArgument, LastbitError
from lastbit.models import Json
from lastbit.retry import Retry
from lastbit.tallies import calls

Expression: TypeAlias = Column | str
"""A Column, or SQL."""

ENTRIES_A_CALL: Final = 1000
_ROW: Final = "__lastbit_row"
_CHAIN: Final = "array<struct<topic:string,partition:bigint,offset:bigint,child:bigint,generation:bigint>>"


@dataclass(frozen=True, slots=True)
class TallyReport:
    """What became of a DataFrame's rows: applied + repeated = entries, one for each key of each message.

    Where Spark ran a task twice, the copy whose answer is reported may have found the other's work done: then entries
    stand under `repeated` that this call applied. The totals do not shift.
    """

    entries: int = 0
    applied: int = 0
    repeated: int = 0

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def apply_tally(
    df: DataFrame,
    tally: str,
    url: str | None = None,
    token: str | None = None,
    *,
    key: Expression = "key",
    delta: Expression = "delta",
    topic: Expression = "topic",
    partition: Expression = "partition",
    offset: Expression = "offset",
    child: Expression = "0",
    generation: Expression = "0",
    header: Expression | None = None,
    explode: Expression | None = None,
    parallel: int = 8,
    entries: int = ENTRIES_A_CALL,
    timeout: float = 30.0,
    retry: Retry | None = None,
) -> TallyReport:
    """Add `delta` to `key`, once for each message; all that names columns here is a Column or SQL. Where the key or the
    delta is null, nothing is added.

    A row is a message, which `topic`, `partition`, `offset` and, of a topic that was made anew, `generation` name; the
    same again is a repeat. `explode`: an array; each of its elements, the column `item`, has a key and a delta.
    `header`: the source chain of messages that were republished, as text; where it is null, or an empty chain, the
    message is at its root. `parallel`: tasks that send at a time; `entries`: of one call; `timeout`: seconds for each
    of connecting and the answer. `url`, `token`: by default LASTBIT_URL and LASTBIT_TOKEN of the driver.

    It may be run again, whole or in part, and beside itself. It needs that what was before a message in its partition
    is in this frame too, or was applied before. The keys of a message may go by different tasks, so for a moment some
    of them are counted and others are not.

    Raises `InvalidArgument` (no such column, another type, a row without its source), `OutOfOrder`, `InvalidRequest`,
    `ServiceUnreachable`; then some of it may be applied, and running it again is safe. Needs a classic session.
    """
    if parallel < 1:
        raise InvalidArgument(f"there is at least one task, not {parallel!r}")
    if not 1 <= entries <= 10_000:
        raise InvalidArgument(f"a call has 1 to 10,000 entries, not {entries!r}")
    connection = Connection.named(url, token, timeout, retry)
    source = {"topic": topic, "partition": partition, "offset": offset, "child": child, "generation": generation}
    rows = _rows(df, {"key": key, "delta": delta, **source}, header, explode)
    # Nothing, before Spark computes anything: is the service there, does it let us, can this be a tally?
    run(calls.apply(connection.service(), tally, []))
    return _sent(_in_order(rows, parallel), connection, tally, entries)


def tally_stream(
    tally: str,
    url: str | None = None,
    token: str | None = None,
    *,
    on_report: Callable[[TallyReport, int], object] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """For `foreachBatch`: counts each micro-batch, then calls `on_report(report, epoch)`.

        sink = tally_stream("screws", url, key="value:robot", delta="1")
        query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

    `options` are those of `apply_tally`. A micro-batch that fails stops the query, which goes on with it when it is
    started again.
    """
    connection = Connection.named(url, token)

    def applied(df: DataFrame, epoch: int) -> None:
        report = apply_tally(df, tally, connection.url, connection.token, **options)
        if on_report is not None:
            on_report(report, epoch)

    return applied


def _rows(
    df: DataFrame, named: dict[str, Expression], header: Expression | None, explode: Expression | None
) -> DataFrame:
    """What rows bring, the columns by their names here, each of its type; `row` is the same for all that one brings."""
    columns = {name: _column(each) for name, each in named.items()}
    if header is not None:
        columns |= _roots(_column(header), columns)
    try:
        brought = df.withColumn(_ROW, sf.monotonically_increasing_id())
        if explode is not None:
            brought = brought.select("*", sf.explode(_column(explode)).alias("item"))
        rows = brought.select(sf.col(_ROW).alias("row"), *(column.alias(name) for name, column in columns.items()))
        schema = rows.schema
    except AnalysisException as error:
        shown = ", ".join(df.columns) or "none"
        raise InvalidArgument(f"there is no such column as asked for (the columns are {shown}): {error}") from error
    for field in schema:
        wanted = StringType if field.name in ("key", "topic") else IntegralType
        if not isinstance(field.dataType, wanted):
            kind = "string" if wanted is StringType else "a whole number"
            raise InvalidArgument(f"the {field.name} is of type {field.dataType.simpleString()}, not {kind}")
    return rows.where("key IS NOT NULL AND delta IS NOT NULL")


def _column(given: Expression) -> Column:
    return sf.expr(given) if isinstance(given, str) else given


def _roots(header: Column, own: dict[str, Column]) -> dict[str, Column]:
    """The source of a chain, as `SourceChain.source` has it."""
    hops = sf.from_json(header, _CHAIN)
    children = sf.filter(sf.transform(hops, lambda hop: hop["child"]), lambda child: child.isNotNull())
    number = sf.lit(0).cast("long")
    for stage in range(STAGES):
        number = sf.shiftleft(number, BITS) + sf.coalesce(sf.get(children, sf.lit(stage)), sf.lit(0))
    # A header that is no chain gives null, and that is refused where it is met.
    root = sf.get(hops, sf.lit(0))
    found = {name: root[name] for name in ("topic", "partition", "offset")}
    found |= {"child": number, "generation": sf.coalesce(root["generation"], sf.lit(0))}
    at_root = header.isNull() | (sf.size(hops) == 0)
    return {name: sf.when(at_root, own[name]).otherwise(column) for name, column in found.items()}


def _in_order(rows: DataFrame, parallel: int) -> DataFrame:
    """One entry for each key of each message; those of one key and source in one task, by their position."""
    of = ["topic", "partition", "generation", "key"]
    position = ["offset", "child"]
    # One shuffle: the groupings are finer than the partitions, so they need none of their own.
    brought = rows.repartition(parallel, *of).groupBy(*of, *position, "row").agg(sf.sum("delta").alias("delta"))
    # A message that is there twice brings the same twice.
    messages = brought.groupBy(*of, *position).agg(sf.min("delta").alias("delta"), sf.max("delta").alias("most"))
    return messages.sortWithinPartitions("topic", "partition", "generation", *position, "key")


@dataclass(slots=True)
class _Sent:
    """What one task's calls came to; `error` where it did not come to its end."""

    entries: int = 0
    applied: int = 0
    repeated: int = 0
    error: LastbitError | None = None


def _sent(gathered: DataFrame, connection: Connection, tally: str, most: int) -> TallyReport:
    def send_partition(rows: Any) -> Iterator[_Sent]:
        return _send(rows, connection, tally, most)

    total = _Sent()
    # A plain RDD of pickled rows: what goes through Arrow needs pyarrow, which a bare cluster does not have.
    for sent in gathered.rdd.mapPartitions(send_partition).collect():
        total.entries += sent.entries
        total.applied += sent.applied
        total.repeated += sent.repeated
        total.error = total.error or sent.error
    if total.error is not None:
        raise total.error
    return TallyReport(total.entries, total.applied, total.repeated)


def _send(rows: Iterable[Any], connection: Connection, tally: str, most: int) -> Iterator[_Sent]:
    """One call after the other. An error is the value, not raised: Spark would try the task again, on top of the
    retries, and bury the error in its own."""
    sent, service = _Sent(), connection.service()
    waiting: list[Json] = []

    def flush() -> None:
        answer = run(calls.apply(service, tally, waiting))
        sent.entries += len(waiting)
        sent.applied += answer.applied
        sent.repeated += answer.repeated
        waiting.clear()

    try:
        for row in rows:
            waiting.append(_entry(row))
            if len(waiting) == most:
                flush()
        if waiting:
            flush()
    except LastbitError as error:
        sent.error = error
    yield sent


def _entry(row: Any) -> Json:
    source = Source(row.topic, row.partition, row["offset"], row.child, row.generation)
    if None in source:
        raise InvalidArgument(f"a row of the key {row.key!r} does not say where it comes from: {source}")
    if row.delta != row.most:
        raise InvalidArgument(
            f"the message at {source} is there twice, and brings {row.key!r} {row.delta} and {row.most}; what a flat "
            "map makes of one message is made by `explode`"
        )
    return calls.entry_json((row.key, row.delta, source))
