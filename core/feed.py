"""The feed: events in commit order, with positions 1, 2, 3 … and no gap.

Once a reader has read up to a position, no event may appear below it. AUTO_INCREMENT can't guarantee that: a slow
transaction may commit its lower number after a reader has passed it, and the reader misses that event. So the position
of the last event is in one row, `feed_head`. An append locks it *last* (see `lock_order`) and holds it until the
commit, so the next position isn't assigned before this one is visible. After a rollback, its positions are assigned
again.

The event of a state change is appended in the same transaction, so either both exist or neither. Its id names the
change, such as `batch:7:completed`, and is unique, so a change has only one event. (A change that was undone by a
reopen or a repair may happen again; its id then ends with the batch's generation.)

A transaction of a caller may last for seconds, and must not hold the head (see `core.enlisted`). It leaves its events
in an outbox. Whoever appends an event of a batch moves those of the same batch that wait there first, under the lock of
the batch's row: so the events of a batch are in the order of its transitions.

Trimming first commits the position up to which events will be removed, then removes them in chunks from below. So a
late reader gets an error, and no reader sees a gap.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, traces
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.consumer_groups.positions import Fence
from core.storage import dialects, limits, statements, tables
from core.storage.database import APPENDED, Database, after_commit
from core.storage.lock_order import HEAD
from core.storage.statements import LIST, Answer, Pipeline, as_text, as_time, chunks, inserts
from core.traces import TraceContext

CHUNK: Final = 1000
"""Events that are removed in one transaction."""
SCAN: Final = 100_000
"""Events whose times are read by one query."""
FIRST: Final = 128
"""Pages of at most this many events share their reads."""
STEP: Final = 16
"""Events that the first statement of a page reads: even the largest ones don't exceed a page's bytes."""
EXAMINED: Final = 20_000
"""Positions that a page examines at most for events that match its filter, or a statement reads the whole feed."""
SMALL: Final = 2048
"""Maximum characters of an event's data for which its JSON stays in memory with it."""
BATCH: Final = "batch"
COMMAND: Final = "command"
TIMER: Final = "timer"
RETRY: Final = "retry"
OWN_IDS: Final = tuple(f"{source}:" for source in (BATCH, COMMAND, TIMER, RETRY))
OWN_TYPES: Final = tuple(f"{source}." for source in (BATCH, COMMAND, TIMER, RETRY))
"""Prefixes of the service's own events; clients may not use them."""

Needed: TypeAlias = Callable[[Connection, int | None], int | None]
"""Returns the lowest position that is still needed, None if there is none. With a position as second argument, only
lower ones matter, so that it reads little while the head is locked."""

_head = tables.feed_head.c
_feed = tables.feed.c


@dataclass(slots=True)
class Event:
    """An event of the feed, which never changes. `data` is JSON as text; `at` the database's time when it was
    appended."""

    position: int
    id: str
    type: str
    batch: int | None
    key: str | None
    data: str | None
    at: datetime
    _encoded: bytes | None = field(default=None, init=False, repr=False, compare=False)
    """The result of `encoded`, as many readers get the same event."""


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to be appended."""

    id: str
    type: str
    key: str | None = None
    data: str | None = None
    batch: int | None = None
    trace: TraceContext | None = None
    """The context of the event's batch; the event becomes a span of that trace."""
    trigger: TraceContext | None = None
    """The context of the request that caused the event."""


@dataclass(frozen=True, slots=True)
class Appended:
    """The position of an event; `repeated`: it had been appended before."""

    position: int
    repeated: bool


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in ascending order; `next` is the position up to which the page read, `last` that of the feed's last
    event. A page may be empty although `next` is below `last`."""

    events: list[Event]
    next: int
    last: int


def append(tx: Connection, events: Sequence[NewEvent]) -> range:
    """Append events whose ids are new, and return their positions. Locks the head, so the transaction must lock nothing
    after it."""
    if not events:
        return range(0)
    before = 0

    def own(position: int) -> Sequence[NewEvent]:
        nonlocal before
        before = position
        return events

    pipeline = Pipeline(tx)
    write(pipeline, own, batches={event.batch for event in events if event.batch is not None})
    pipeline.flush()
    return range(before + 1, before + 1 + len(events))


def write(
    pipeline: Pipeline,
    own: Callable[[int], Sequence[NewEvent]],
    look: Callable[[], object] = lambda: None,
    *,
    batches: Collection[int] = (),
) -> None:
    """Append events whose ids are new. One round trip runs the waiting statements, locks the head, and runs the queries
    that `look` adds; then `own(position)` returns the events, whose positions follow that one. The transaction must
    lock nothing after that. The statements that write wait in the pipeline.

    `batches`: existing ones that these events may belong to, under the locks of their rows. Their events that wait in
    the outbox come first."""
    head = pipeline.query(HEAD + dialects.of(pipeline.tx).for_update())
    waiting = pipeline.query_keys(
        batches,
        lambda part: (
            f"SELECT id, batch_id, events FROM event_outbox WHERE batch_id IN ({','.join(map(str, part))}) "  # noqa: S608
            "ORDER BY id"
        ),
    )
    look()
    position: int = head.rows()[0][0]
    new = _taken(pipeline, waiting)
    new += own(position + len(new))
    if new:
        _insert(pipeline, new, position)


def leave(pipeline: Pipeline, events: Sequence[NewEvent], table: str = "event_outbox") -> None:
    """Let the next round trip leave events of batches in the outbox, in this order: for a transaction that must not
    lock the head. Until they are in the feed, no later event of the same batch is. `table` is the outbox's name."""
    by_batch: dict[int, list[NewEvent]] = {}
    for event in events:
        assert event.batch is not None
        by_batch.setdefault(event.batch, []).append(event)
    literal = dialects.of(pipeline.tx).literal
    rows = [f"({batch},{literal(_left(own))})" for batch, own in sorted(by_batch.items())]
    pipeline.later(*inserts(table, "batch_id, events", rows))


def _left(events: Sequence[NewEvent]) -> str:
    """The content of a row of the outbox."""
    contents = []
    for event in events:
        contexts = [
            None if trace is None else [trace.traceparent, trace.tracestate] for trace in (event.trace, event.trigger)
        ]
        contents.append([event.id, event.type, event.key, event.data, *contexts])
    return json.dumps(contents, ensure_ascii=False)


def _taken(pipeline: Pipeline, waiting: Answer) -> list[NewEvent]:
    """Remove these rows of the outbox, and return their events."""
    events: list[NewEvent] = []
    rows = waiting.rows()
    for _, batch, content in rows:
        for id, type, key, data, *contexts in json.loads(content):
            trace, trigger = [None if context is None else TraceContext(*context) for context in contexts]
            events.append(NewEvent(id, type, key, data, batch, trace, trigger))
    for part in chunks([row[0] for row in rows], LIST):
        pipeline.later(f"DELETE FROM event_outbox WHERE id IN ({','.join(map(str, part))})")  # noqa: S608
    return events


@dataclass(slots=True, eq=False, kw_only=True)
class Append(Operation):
    """Append the events whose ids are new; with a `fence`, only if it holds. Its result is a list of `Appended`, one
    for each event. Errors: `StaleEpoch`, `ConsumerGroupNotFound`."""

    events: Sequence[NewEvent]
    fence: Fence | None = None


class Appends(Kind):
    """Events of clients. Ids are looked up under the lock of the head, and remembered as long as their events are
    kept."""

    handles = (Append,)
    locks = ("feed_head",)

    def fences(self) -> list[Fence]:
        return [operation.fence for operation in self.operations if operation.fence is not None]

    def judge(self, refused: Mapping[Fence, errors.CoreError]) -> None:
        self.refuse(refused)

    def has_events(self) -> bool:
        return any(operation.events for operation in self.remaining())

    def look(self) -> None:
        ids = list(dict.fromkeys(event.id for operation in self.remaining() for event in operation.events))
        dialect = dialects.of(self.pipeline.tx)
        self._found = self.pipeline.query_keys(
            ids,
            lambda part: (
                f"SELECT event_id, position FROM feed WHERE event_id IN ({','.join(map(dialect.literal, part))})"  # noqa: S608
            ),
        )

    def finish(self, position: int) -> list[NewEvent]:
        new: list[NewEvent] = []
        operations = self.remaining()
        positions: dict[str | None, int] = {}
        if any(operation.events for operation in operations):
            positions = {as_text(event_id): place for event_id, place in self._found.rows()}
        for operation in operations:
            appended: list[Appended] = []
            for event in operation.events:
                is_new = event.id not in positions
                if is_new:
                    new.append(event)
                    positions[event.id] = position + len(new)
                appended.append(Appended(positions[event.id], repeated=not is_new))
            self.outcomes[operation] = Done(appended)
        return new


def _lock(tx: Connection) -> tuple[int, int]:
    [[(position, trimmed)]] = statements.run(tx, HEAD + dialects.of(tx).for_update())
    return position, trimmed


def trimmed(tx: Connection) -> int:
    """The position up to which events were removed."""
    position: int = tx.execute(sa.select(_head.trimmed)).scalar_one()
    return position


def hold(tx: Connection) -> tuple[int, int]:
    """The position of the last event, and the position up to which they were removed. Until the commit no event is
    appended or trimmed. For transactions that depend on the feed's events but append none."""
    position, trimmed = _lock(tx)
    dialects.of(tx).guard(tx, _head.trimmed, [(1,)])
    return position, trimmed


def _insert(pipeline: Pipeline, events: Sequence[NewEvent], position: int) -> None:
    """Insert the events after this position, which is the locked head's, and update the head. The statements wait."""
    dialect = dialects.of(pipeline.tx)
    now = dialect.one_time(pipeline.tx)
    rows = [
        f"({','.join(map(dialect.literal, (place, event.id, event.type, event.batch, event.key, event.data)))},{now})"
        for place, event in enumerate(events, position + 1)
    ]
    columns = "position, event_id, type, batch_id, event_key, data, appended_at"
    last = position + len(events)
    pipeline.later(*inserts("feed", columns, rows))
    pipeline.later(f"UPDATE feed_head SET position = {last} WHERE id = 1")  # noqa: S608
    pipeline.tx.info[APPENDED] = last
    _trace(pipeline.tx, events, position)


def _trace(tx: Connection, events: Sequence[NewEvent], position: int) -> None:
    """Create the events' spans after the commit, if there is an SDK."""
    happenings = [
        traces.Happening(event.type, event.id, position + place, event.batch, event.key, event.trace, event.trigger)
        for place, event in enumerate(events, 1)
        if event.trace is not None
    ]
    if happenings and traces.has_sdk():
        after_commit(tx, partial(traces.record, happenings, traces.now()))


def head(tx: Connection) -> int:
    """The position of the last event; 0 if there was none yet."""
    position: int = tx.execute(sa.select(_head.position)).scalar_one()
    return position


def read(
    snapshot: Connection,
    after: int | None,
    limit: int,
    *,
    types: Collection[str] = (),
    batch: int | None = None,
    prefix: str | None = None,
    size_limit: int | None = None,
) -> EventPage:
    """Events above `after` (None: all that are kept), at most `limit`, and `size_limit` bytes of data; with `prefix`,
    only those whose key begins with it. `snapshot` must be a snapshot, so that trimmed events don't look like a gap.

    A page with a filter examines at most `EXAMINED` positions. One of a batch need not be bounded: an index has the
    batch's own events, which are few.

    Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for a position beyond the feed's end.
    """
    position, trimmed = snapshot.execute(sa.select(_head.position, _head.trimmed)).one()
    start = _checked(after, position, trimmed)
    end = position
    query = sa.select(tables.feed).order_by(_feed.position)
    if types:
        query = query.where(_feed.type.in_(types))
    if prefix is not None:
        query = query.where(tables.begins(_feed.event_key, prefix))
    if batch is not None:
        query = query.where(_feed.batch_id == batch)
    elif types or prefix is not None:
        end = min(position, start + EXAMINED)
        query = query.where(_feed.position <= end)

    def above(last: Event | None, count: int) -> list[Event]:
        reached = start if last is None else last.position
        return [event(row) for row in snapshot.execute(query.where(_feed.position > reached).limit(count))]

    rows = limits.stepwise(above, size, limit, first=STEP, most=size_limit)
    events, has_more = limits.within(rows, size, limit, size_limit)
    return EventPage(events, events[-1].position if has_more else end, position)


def _checked(after: int | None, position: int, trimmed: int) -> int:
    """The position from which a page starts, in a feed with these events."""
    if after is None:
        return trimmed
    if after < trimmed:
        raise errors.PositionTrimmed(after, trimmed)
    if after > position:
        raise errors.InvalidRequest("query.after", f"expected at most {position}, the feed's last position")
    return after


class Span(NamedTuple):
    """The arguments of a `read` of at most `FIRST` events without a filter."""

    after: int | None
    limit: int


def pages(tx: Connection, spans: Collection[Span]) -> dict[Span, EventPage | errors.CoreError]:
    """`read` for each of the spans, on one snapshot, in one round trip if each has a position. The transaction reads
    nothing else. Events that several pages have are read once. Positions have no gap, so a span is a range of
    positions."""
    begin = [text] if (text := dialects.of(tx).begin_snapshot) else []
    trimmed = 0
    if any(span.after is None for span in spans):
        [*_, [(_, trimmed)]] = statements.run(tx, *begin, HEAD)
        begin = []
    ranges = [(trimmed if span.after is None else span.after, span.limit) for span in spans]
    joined: list[tuple[int, int]] = []
    for start, end in sorted({(start, start + limit) for start, limit in ranges}):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    texts = [
        "SELECT position, event_id, type, batch_id, event_key, data, appended_at FROM feed "  # noqa: S608
        f"WHERE position > {start} AND position <= {end} ORDER BY position"
        for start, end in joined
    ]
    [(position, trimmed)], *parts = statements.finish(tx, *begin, HEAD, *texts)[len(begin) :]
    events = [from_values(*row) for rows in parts for row in rows]
    # Usually, but not always, the bound of a page's bytes doesn't matter.
    is_small = sum(map(size, events)) <= limits.BYTES
    results: dict[Span, EventPage | errors.CoreError] = {}
    for span in spans:
        try:
            start = _checked(span.after, position, trimmed)
        except errors.CoreError as error:
            results[span] = error
            continue
        end = min(start + span.limit, position)
        first, last = (bisect.bisect_right(events, place, key=_position) for place in (start, end))
        page, is_cut = events[first:last], False
        if not is_small:
            page, is_cut = limits.within(page, size, span.limit)
        results[span] = EventPage(page, page[-1].position if is_cut else end, position)
    return results


def _position(event: Event) -> int:
    return event.position


def from_values(
    position: int, id: Any, type: Any, batch: int | None, key: Any, data: str | None, at: str | datetime
) -> Event:
    """The event in a row as the driver returns it."""
    return Event(position, as_text(id) or "", as_text(type) or "", batch, as_text(key), data, as_time(at))


def size(event: Event) -> int:
    """The bytes of an event's data."""
    return limits.size_of_json(event.data)


def trim(database: Database, keep: timedelta, *, needed: Needed = lambda tx, below: None) -> int:
    """Remove the events that were appended longer ago than `keep`, and return how many."""

    # Before the head is locked, because this may take long.
    first_kept = _first_kept(database, keep, needed)

    def mark(tx: Connection) -> tuple[int, int]:
        position, before = _lock(tx)
        lowest = min(p for p in (first_kept, needed(tx, first_kept), position + 1) if p is not None)
        trimmed = max(before, lowest - 1)
        if trimmed > before:
            tx.execute(sa.update(tables.feed_head).values(trimmed=trimmed).where(_head.id == 1))
        return before, trimmed

    before, trimmed = database.write(mark)
    database.write_in_chunks(_remove_chunk, trimmed)
    return trimmed - before


def _first_kept(database: Database, keep: timedelta, needed: Needed) -> int:
    """The position of the first event younger than `keep`, or the lowest that is needed, or that of the next event. No
    index has the times. So the events that may be removed are read in chunks, as a single query for many millions,
    which something has needed for long, would take longer than the database's time-outs allow."""

    def range_and_time(tx: Connection) -> tuple[int, int, datetime]:
        position, before = tx.execute(sa.select(_head.position, _head.trimmed).where(_head.id == 1)).one()
        lowest = needed(tx, None)
        now = tx.scalar(sa.select(tables.utc_now()))
        assert now is not None
        return before + 1, position + 1 if lowest is None else min(lowest, position + 1), now - keep

    start, end, until = database.read(range_and_time)
    for first in range(start, end, SCAN):
        young = database.read(_first_younger, first, min(first + SCAN, end), until)
        if young is not None:
            return young
    return end


def _first_younger(tx: Connection, start: int, end: int, until: datetime) -> int | None:
    query = sa.select(_feed.position).where(_feed.position >= start, _feed.position < end, _feed.appended_at > until)
    return tx.scalar(query.order_by(_feed.position).limit(1))


def _remove_chunk(tx: Connection, trimmed: int) -> bool:
    """Remove a chunk. Return whether there may be more."""
    lowest: int | None = tx.scalar(sa.select(sa.func.min(_feed.position)))
    if lowest is None or lowest > trimmed:
        return False
    last = min(trimmed, lowest + CHUNK - 1)
    tx.execute(sa.delete(tables.feed).where(_feed.position <= last))
    return last < trimmed


def event(row: Any) -> Event:
    """The event in a row with the columns of the feed."""
    return Event(row.position, row.event_id, row.type, row.batch_id, row.event_key, row.data, row.appended_at)


def time(at: datetime) -> str:
    """A time in JSON: RFC 3339 in UTC with `Z`, to the microsecond."""
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def encoded(event: Event) -> bytes:
    """The event as JSON; its data is JSON already."""
    text = event._encoded
    if text is None:
        facts = {"position": event.position, "id": event.id, "type": event.type, "batch": event.batch, "key": event.key}
        data = event.data or "null"
        text = f'{_json(facts)[:-1]},"data":{data},"at":"{time(event.at)}"}}'.encode()
        if len(data) <= SMALL:
            event._encoded = text
    return text


_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
