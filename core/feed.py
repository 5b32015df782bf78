"""The feed: events in commit order, with positions 1, 2, 3 … and no gap.

A reader that has read up to a position must never find something below it later. AUTO_INCREMENT can't promise that: a
slow transaction commits its lower number after a reader has passed it, and that event is lost in silence. So there is
one row, `feed_head`, with the position of the last event. An append locks it *last* (lock order: item_groups → batches
→ feed_head) and holds it until the commit, so the next position is not given away before this one is visible; a
rollback takes its positions back.

The event of a transition is appended in the transaction that makes the transition: either both are there, or neither.
Its id says what happened, `batch:7:completed`, and is unique; what happens once is an event once. (What a repair takes
back may happen again: its id then ends with the number of repairs.)

Trimming commits first up to which position events will be gone, then removes them in chunks from below, so a reader
that comes too late is told so, and none is shown a gap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, tables
from core.storage import galera, limits
from core.storage.database import APPENDED, Database
from core.storage.statements import LIST, chunks

CHUNK: Final = 1000
"""Events that one transaction removes, and that are looked up by one statement."""
FIRST: Final = 128
"""Events of the first statement of a page: not more than a page's bytes, however large they are."""
BATCH: Final = "batch"
COMMAND: Final = "command"
TIMER: Final = "timer"
RETRY: Final = "retry"
OWN_IDS: Final = tuple(f"{of}:" for of in (BATCH, COMMAND, TIMER, RETRY))
OWN_TYPES: Final = tuple(f"{of}." for of in (BATCH, COMMAND, TIMER, RETRY))
"""What begins so is the service's own."""

_head = tables.feed_head.c
_feed = tables.feed.c


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the feed. `data` is JSON as text; `at` the database's time when it was appended."""

    position: int
    id: str
    type: str
    batch: int | None
    key: str | None
    data: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to be appended."""

    id: str
    type: str
    key: str | None = None
    data: str | None = None
    batch: int | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """Where an event stands; `repeated`: it stood there before."""

    position: int
    repeated: bool


@dataclass(frozen=True, slots=True)
class EventPage:
    """Events in ascending order; `next` is the position up to which everything was looked at, `last` that of the feed's
    end."""

    events: list[Event]
    next: int
    last: int


def append(tx: Connection, events: Sequence[NewEvent]) -> range:
    """Append events whose ids are new; their positions. Takes the lock of the head, so nothing may be locked after
    it."""
    if not events:
        return range(0)
    position = lock(tx)
    _insert(tx, events, position)
    return range(position + 1, position + 1 + len(events))


def append_once(tx: Connection, events: Sequence[NewEvent]) -> list[Appended]:
    """Append those events whose ids are new; of each, where it stands. Ids are known as long as their event is kept."""
    if not events:
        return []
    position = lock(tx)
    known: dict[str, int] = {}
    ids = list(dict.fromkeys(event.id for event in events))
    for part in chunks(ids, LIST):
        found = tx.execute(sa.select(_feed.event_id, _feed.position).where(_feed.event_id.in_(part)))
        known |= {row.event_id: row.position for row in found}
    answers: list[Appended] = []
    new: list[NewEvent] = []
    for event in events:
        if event.id in known:
            answers.append(Appended(known[event.id], repeated=True))
        else:
            new.append(event)
            known[event.id] = position + len(new)
            answers.append(Appended(known[event.id], repeated=False))
    if new:
        _insert(tx, new, position)
    return answers


def lock(tx: Connection) -> int:
    """The position of the last event. Until the commit none is appended. For those who append; see `hold`."""
    position: int = tx.execute(sa.select(_head.position).where(_head.id == 1).with_for_update()).scalar_one()
    return position


def trimmed(tx: Connection) -> int:
    """The position up to which events were removed."""
    position: int = tx.execute(sa.select(_head.trimmed)).scalar_one()
    return position


def hold(tx: Connection) -> tuple[int, int]:
    """The position of the last event, and up to which they were removed. Until the commit none is appended, and none is
    trimmed. For those who write nothing to the feed, and need what it has."""
    row = tx.execute(sa.select(_head.position, _head.trimmed).where(_head.id == 1).with_for_update()).one()
    galera.guard(tx, _head.trimmed, _head.id == 1)
    return row.position, row.trimmed


def _insert(tx: Connection, events: Sequence[NewEvent], position: int) -> None:
    rows = [
        {
            "position": position + place,
            "event_id": event.id,
            "type": event.type,
            "batch_id": event.batch,
            "event_key": event.key,
            "data": event.data,
        }
        for place, event in enumerate(events, 1)
    ]
    tx.execute(sa.insert(tables.feed).values(appended_at=tables.utc_now()), rows)
    tx.execute(sa.update(tables.feed_head).values(position=position + len(events)).where(_head.id == 1))
    tx.info[APPENDED] = position + len(events)


def head(tx: Connection) -> int:
    """The position of the last event; 0 where there was none."""
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
    most: int | None = None,
) -> EventPage:
    """Events above `after` (None: all that are kept), at most `limit`, and `most` bytes of data; with `prefix`, of
    those whose key begins so. `snapshot` is one, so that what was trimmed can't look like a gap.

    Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for a position that was never given.
    """
    position, trimmed = snapshot.execute(sa.select(_head.position, _head.trimmed)).one()
    if after is None:
        after = trimmed
    if after < trimmed:
        raise errors.PositionTrimmed(after, trimmed)
    if after > position:
        raise errors.InvalidRequest("query.after", f"expected at most {position}, the feed's last position")
    query = sa.select(tables.feed).order_by(_feed.position)
    if types:
        query = query.where(_feed.type.in_(types))
    if batch is not None:
        query = query.where(_feed.batch_id == batch)
    if prefix is not None:
        query = query.where(tables.begins(_feed.event_key, prefix))

    def above(last: Event | None, count: int) -> list[Event]:
        start = after if last is None else last.position
        return [event(row) for row in snapshot.execute(query.where(_feed.position > start).limit(count))]

    rows = limits.stepwise(above, size, first=min(limit, FIRST), most=most)
    events, cut = limits.within(rows, size, limit, most)
    return EventPage(events, events[-1].position if cut else position, position)


def size(event: Event) -> int:
    """About how many bytes of users' text it bears."""
    return len(event.data or "")


def trim(database: Database, keep: timedelta, *, needed: Callable[[Connection], int | None] = lambda tx: None) -> int:
    """Remove the events that were appended longer ago than `keep`, and return how many. `needed`: the lowest position
    that somebody still needs."""

    # Before the head is locked, as this may read long; what is young enough to be kept only moves up.
    kept = database.read(_first_kept, keep)

    def mark(tx: Connection) -> tuple[int, int]:
        position, before = tx.execute(
            sa.select(_head.position, _head.trimmed).where(_head.id == 1).with_for_update()
        ).one()
        lowest = min(p for p in (kept, needed(tx), position + 1) if p is not None)
        trimmed = max(before, lowest - 1)
        if trimmed > before:
            tx.execute(sa.update(tables.feed_head).values(trimmed=trimmed).where(_head.id == 1))
        return before, trimmed

    before, trimmed = database.write(mark, repeatable=True)
    database.write_in_chunks(_remove_chunk, trimmed)
    return trimmed - before


def _first_kept(tx: Connection, keep: timedelta) -> int:
    """The position of the first event that is younger, or the one that the next event will have."""
    position = head(tx)
    now = tx.scalar(sa.select(tables.utc_now()))
    assert now is not None
    query = sa.select(_feed.position).where(_feed.appended_at > now - keep).order_by(_feed.position).limit(1)
    first: int | None = tx.scalar(query)
    return position + 1 if first is None else first


def _remove_chunk(tx: Connection, trimmed: int) -> bool:
    """Whether there may be more."""
    lowest: int | None = tx.scalar(sa.select(sa.func.min(_feed.position)))
    if lowest is None or lowest > trimmed:
        return False
    last = min(trimmed, lowest + CHUNK - 1)
    tx.execute(sa.delete(tables.feed).where(_feed.position <= last))
    return last < trimmed


def event(row: Any) -> Event:
    """From a row with the columns of the feed."""
    return Event(row.position, row.event_id, row.type, row.batch_id, row.event_key, row.data, row.appended_at)


def time(at: datetime) -> str:
    """As JSON has it: RFC 3339 in UTC with `Z`, to the microsecond."""
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def encoded(event: Event) -> bytes:
    """As JSON; the data is JSON already."""
    known = {"position": event.position, "id": event.id, "type": event.type, "batch": event.batch, "key": event.key}
    head = json.dumps(known, ensure_ascii=False, separators=(",", ":")).encode()
    return b'%b,"data":%b,"at":"%b"}' % (head[:-1], (event.data or "null").encode(), time(event.at).encode())
