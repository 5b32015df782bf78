"""Counts a DataFrame into a tally, in batch and in Structured Streaming, each message once.

Entries are identified by the messages' own offsets, never by the number of a micro-batch: with a new checkpoint those
numbers start again, and a sink that relied on them would drop new messages or count old ones twice. So a micro-batch
may be replayed, divided differently, or sent by two drivers at once.

A row is a message, identified by its topic, partition and offset; a repeated row counts once. A flat map is applied
here (`explode`), so that its results can be distinguished from repeated rows: one message's deltas for one key are
summed, deltas of several messages never are.

A tally needs the order of each source for each key. All entries of one source for one key go to one task, which sends
them in offset order, one call after the other. The next micro-batch starts when all calls have finished. By ranges, one
task has all messages of a source: it adds them up, and says from which offset to which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import IntegralType, StringType

from lastbit._urllib import Connection
from lastbit.chains import BITS, MOST_CHILDREN, STAGES, Source
from lastbit.errors import InvalidArgument, LastbitError
from lastbit.ids import INTEGER_LIMIT
from lastbit.models import Json
from lastbit.retry import Retry
from lastbit.spark._partitions import on_partitions
from lastbit.spark.columns import INTEGER
from lastbit.tallies import calls
from lastbit.tallies.ranges import Addition, By, Counting, additions

Expression: TypeAlias = Column | str
"""A Column, or SQL."""

ENTRIES_A_CALL: Final = 1000
_ROW: Final = "__lastbit_row"
_CHAIN: Final = "array<struct<topic:string,partition:string,offset:string,child:string,generation:string>>"
"""Numbers are read as text: a number that is no integer would become null, as a hop without a child has."""


@dataclass(frozen=True, slots=True)
class TallyReport:
    """The result for a DataFrame's rows: applied + repeated = entries, one for each key of each message.

    If Spark ran a task twice, the report may be from the copy that found the work done. Then entries that this call
    applied count as `repeated`. The totals are not affected.
    """

    entries: int = 0
    applied: int = 0
    repeated: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
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
    by: By = "entry",
    parallel: int = 8,
    entries: int = ENTRIES_A_CALL,
    timeout: float = 30.0,
    retry: Retry | None = None,
) -> TallyReport:
    """Add `delta` to `key`, once for each message. All arguments that name columns are a Column or SQL. A row whose key
    or delta is null adds nothing.

    A row is a message, identified by `topic`, `partition`, `offset` and, for a recreated topic, `generation`; a second
    row with the same values is a repeat. `explode`: an array whose elements, as the column `item`, each have a key and
    a delta. `header`: the source chain of republished messages, as text; if it is null or an empty chain, the message
    itself is the root. `by`: "range" adds the messages of a source up, which is faster and takes any key; not with a
    `header`, as the messages of a root partition come over several. `parallel`: concurrent tasks; `entries`: per call;
    `timeout`: seconds for each of connecting and the response. `url`, `token`: by default LASTBIT_URL and
    LASTBIT_TOKEN of the driver.

    It is safe to repeat the call, wholly or in part, also concurrently. The earlier messages of a partition must be in
    this frame or already applied. The keys of a message may go through different tasks, so some may be counted before
    others.

    Raises `InvalidArgument` (no such column, wrong type, a row without its source), `OutOfOrder`, `InvalidRequest`,
    `ServiceUnreachable`; then some entries may be applied, and repeating the call is safe.
    """
    if parallel < 1:
        raise InvalidArgument(f"parallel must be at least 1, not {parallel!r}")
    if not 1 <= entries <= 10_000:
        raise InvalidArgument(f"a call has 1 to 10,000 entries, not {entries!r}")
    if by not in ("entry", "range"):
        raise InvalidArgument(f"by is 'entry' or 'range', not {by!r}")
    if by == "range" and header is not None:
        raise InvalidArgument("ranges need the order of their source; count republished messages by='entry'")
    connection = Connection.named(url, token, timeout, retry)
    source = {"topic": topic, "partition": partition, "offset": offset, "child": child, "generation": generation}
    rows = _rows(df, {"key": key, "delta": delta, **source}, header, explode)
    # Send an empty call before Spark computes anything, to check the address, the token and the tally's name.
    connection.driver().run(calls.apply if by == "entry" else calls.apply_ranges, tally, [])
    return _sent(_in_order(rows, parallel, by), connection, tally, entries, by)


def tally_stream(
    tally: str,
    url: str | None = None,
    token: str | None = None,
    *,
    on_report: Callable[[TallyReport, int], object] | None = None,
    **options: Any,
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch`: counts each micro-batch, then calls `on_report(report, epoch)`.

        sink = tally_stream("screws", url, key="value:robot", delta="1")
        query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

    `options` are those of `apply_tally`. A failed micro-batch stops the query, which repeats it when it is started
    again. On Spark Connect, Spark runs the function and `on_report` in a process of the server, so `on_report` must be
    picklable and can't change the caller's objects.
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
    """The rows' entries, with typed columns of fixed names; `row` is the same for all entries of one row."""
    try:
        columns = {name: _column(expression) for name, expression in named.items()}
        if header is not None:
            columns |= _roots(_column(header), columns)
        brought = df.withColumn(_ROW, sf.monotonically_increasing_id())
        if explode is not None:
            brought = brought.select("*", sf.explode(_column(explode)).alias("item"))
        rows = brought.select(sf.col(_ROW).alias("row"), *(column.alias(name) for name, column in columns.items()))
        schema = rows.schema
    except (AnalysisException, ParseException) as error:
        column_names = ", ".join(df.columns) or "none"
        raise InvalidArgument(f"there is no such column (the columns are {column_names}): {error}") from error
    for field in schema:
        wanted = StringType if field.name in ("key", "topic") else IntegralType
        if not isinstance(field.dataType, wanted):
            kind = "string" if wanted is StringType else "a whole number"
            raise InvalidArgument(f"the {field.name} has the type {field.dataType.simpleString()}, not {kind}")
    return rows.where("key IS NOT NULL AND delta IS NOT NULL")


def _column(expression: Expression) -> Column:
    return sf.expr(expression) if isinstance(expression, str) else expression


def _roots(header: Column, row_columns: dict[str, Column]) -> dict[str, Column]:
    """The source of a chain, computed as in `SourceChain.source`. It is null for a header that `SourceChain.decode`
    refuses, or with an offset that entries can't have; such a row is refused when it is sent."""
    hops = sf.from_json(header, _CHAIN)
    children = sf.filter(sf.transform(hops, lambda hop: hop["child"]), lambda child: child.isNotNull())
    # Spark would take an object for an array of one.
    is_chain = header.rlike(r"\A[ \t\r\n]*\[") & sf.forall(hops, _is_hop) & (sf.size(children) <= STAGES)
    number = sf.lit(0).cast("long")
    for stage in range(STAGES):
        child = _whole(sf.get(children, sf.lit(stage)), MOST_CHILDREN)
        number = sf.shiftleft(number, BITS) + sf.coalesce(child, sf.lit(0))
    root = sf.get(hops, sf.lit(0))
    root_columns = {name: _whole(root[name], INTEGER_LIMIT) for name in ("partition", "offset", "generation")}
    root_columns["generation"] = sf.coalesce(root_columns["generation"], sf.lit(0))
    root_columns |= {"topic": root["topic"], "child": number}
    at_root = header.isNull() | (is_chain & (sf.size(hops) == 0))
    return {name: sf.when(at_root, row_columns[name]).when(is_chain, column) for name, column in root_columns.items()}


def _is_hop(hop: Column) -> Column:
    """Whether `SourceChain.decode` accepts the hop; null also means no."""
    child, generation = hop["child"], hop["generation"]
    return (
        (hop["topic"] != "")
        & _whole(hop["partition"], INTEGER_LIMIT).isNotNull()
        & _whole(hop["offset"], INTEGER_LIMIT).isNotNull()
        & (child.isNull() | _whole(child, MOST_CHILDREN).isNotNull())
        & (generation.isNull() | _whole(generation, INTEGER_LIMIT).isNotNull())
    )


def _whole(text: Column, limit: int) -> Column:
    """The text as a whole number from 0 below `limit`; null if it isn't one."""
    number = sf.when(text.rlike(rf"\A{INTEGER}\z"), text.cast("long"))
    return sf.when(number < limit, number)


def _in_order(rows: DataFrame, parallel: int, by: By) -> DataFrame:
    """One entry for each key of each message; all entries of one source, and by entries of one key, are in one task,
    sorted by position."""
    source_and_key = ["topic", "partition", "generation", "key"]
    task_columns = source_and_key if by == "entry" else source_and_key[:-1]
    position = ["offset", "child"]
    # The groupings are finer than these partitions, so most versions of Spark don't shuffle again for them.
    entries = (
        rows.repartition(parallel, *task_columns)
        .groupBy(*source_and_key, *position, "row")
        .agg(sf.sum("delta").alias("delta"))
    )
    # A repeated message must have the same delta.
    messages = entries.groupBy(*source_and_key, *position).agg(
        sf.min("delta").alias("delta"), sf.max("delta").alias("most")
    )
    # But PySpark 3.5 does if a column is a constant. Its shuffle would separate the entries of a key, and the service
    # would take the earlier ones for repeats. So the last shuffle is always this one.
    partitioned = messages.repartition(parallel, *task_columns)
    return partitioned.sortWithinPartitions("topic", "partition", "generation", *position, "key")


@dataclass(slots=True)
class _Sent:
    """The counts of one task's calls; `error` if it failed before its end."""

    entries: int = 0
    applied: int = 0
    repeated: int = 0
    error: LastbitError | None = None


def _sent(gathered: DataFrame, connection: Connection, tally: str, most: int, by: By) -> TallyReport:
    def send_partition(rows: Any) -> Iterator[_Sent]:
        send = _send if by == "entry" else _send_ranges
        return send(rows, connection, tally, most)

    total = _Sent()
    for task_result in on_partitions(gathered, send_partition):
        total.entries += task_result.entries
        total.applied += task_result.applied
        total.repeated += task_result.repeated
        total.error = total.error or task_result.error
    if total.error is not None:
        raise total.error
    return TallyReport(total.entries, total.applied, total.repeated)


def _send(rows: Iterable[Any], connection: Connection, tally: str, most: int) -> Iterator[_Sent]:
    """Send one call after the other. An error is yielded, not raised: Spark would retry the task, in addition to the
    client's retries, and wrap the error in its own."""
    sent, driver = _Sent(), connection.driver()
    waiting: list[Json] = []

    def flush() -> None:
        answer = driver.run(calls.apply, tally, waiting)
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


def _send_ranges(rows: Iterable[Any], connection: Connection, tally: str, most: int) -> Iterator[_Sent]:
    """`_send` by ranges. All that a message brings is in one call."""
    sent, driver, counting = _Sent(), connection.driver(), Counting()
    waiting: list[Addition] = []

    def flush() -> None:
        count = driver.run(counting.apply, tally, waiting)
        sent.entries += len(waiting)
        sent.applied += count
        sent.repeated += len(waiting) - count
        waiting.clear()

    try:
        for row in rows:
            source = _source(row)
            new = additions({row.key: row.delta}, source)
            if len(waiting) >= most and waiting[-1][:2] != new[0][:2]:
                flush()
            waiting += new
        if waiting:
            flush()
    except LastbitError as error:
        sent.error = error
    yield sent


def _entry(row: Any) -> Json:
    return calls.entry_json((row.key, row.delta, _source(row)))


def _source(row: Any) -> Source:
    """Raises `InvalidArgument` for a row that can't be counted."""
    source = Source(row.topic, row.partition, row["offset"], row.child, row.generation)
    if None in source:
        raise InvalidArgument(f"a row with the key {row.key!r} has no valid source: {source}")
    if row.delta != row.most:
        raise InvalidArgument(
            f"the message at {source} occurs twice, with the deltas {row.delta} and {row.most} for {row.key!r}; use "
            "`explode` to derive several entries from one message"
        )
    return source
