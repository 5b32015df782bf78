"""The inbox: the events of each instance of a process, and their statuses.

Each event counts once for an instance: its row is written in the transaction that applies its effects. The inbox is
pruned by position, never by time: first `pruned` is raised and committed, then the rows at or below it are removed.
`pruned` never passes the lowest floor of the process's partitions, and all events up to that floor were handled. So an
event at or below `pruned` without a row is a repeat. `pruned` is read after the missing row: if the row was removed in
between, `pruned` was raised before.

Parked events are those whose handler failed. They aren't pruned, and their rows have a copy of the event, because the
feed may be trimmed before an operator inspects them. A retry appends a new event with that copy to the feed. So a
worker reads it from the feed like any other event, in order, and again after a crash.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, TypeAlias

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.storage import dialects, tables
from core.storage.statements import Pipeline, among, as_text, inserts

KEEP: Final = 100_000
"""Positions below the lowest floor whose rows are kept for inspection."""
CHUNK: Final = 1000
"""Rows that are removed in one transaction."""
RETRIES: Final = 1000
"""Events that one call retries."""

_inbox = tables.inbox.c
_feed = tables.feed.c


class Status(StrEnum):
    """The status of an event for an instance. Late: the instance had already finished. Retrying: the event was parked,
    and is in the feed again."""

    HANDLED = "handled"
    PARKED = "parked"
    RETRYING = "retrying"
    LATE = "late"


PRUNED: Final = (Status.HANDLED, Status.LATE)


@dataclass(frozen=True, slots=True)
class Entry:
    event: str
    position: int
    status: Status
    error: str | None
    at: datetime


def retry_type(process: str) -> str:
    """The type of the events that retry a process's parked events."""
    return f"{feed.RETRY}.{process}"


Key: TypeAlias = tuple[str, str, str]
"""A process, an instance and an event's id."""
KEY: Final = ("name", "instance", "event_id")
"""Its columns."""


class LockedEvents:
    """Events for instances, whose rows the next round trip locks, until the commit. Their statuses change in memory
    first; `write` stores them. `positions` are those of all events, `failed` those of events that may be parked."""

    def __init__(
        self, pipeline: Pipeline, keys: Collection[Key], positions: Collection[int], failed: Collection[int]
    ) -> None:
        self._pipeline = pipeline
        tx = pipeline.tx
        dialect = dialects.of(tx)
        self._locked = pipeline.query_keys(
            keys,
            lambda part: (
                "SELECT name, instance, event_id, status "  # noqa: S608
                f"FROM {dialect.by_primary_key('inbox')} WHERE {among(tx, KEY, part)} "
                f"ORDER BY {', '.join(KEY)}{dialect.for_update()}"
            ),
        )
        # Read after the rows (see the module).
        self._limits = pipeline.query_keys(
            {process for process, _, _ in keys},
            lambda part: (
                "SELECT name, pruned FROM process_definitions "  # noqa: S608
                f"WHERE {among(tx, ('name',), [(name,) for name in part])} AND deleted_at IS NULL"
            ),
        )
        self._failed = pipeline.query_keys(
            failed,
            lambda part: (
                "SELECT position, event_id, type, batch_id, event_key, data, appended_at "  # noqa: S608
                f"FROM feed WHERE position IN ({','.join(map(str, part))})"
            ),
        )
        self._others = pipeline.query_keys(
            set(positions).difference(failed),
            lambda part: (
                f"SELECT position, event_id FROM feed WHERE position IN ({','.join(map(str, part))})"  # noqa: S608
            ),
        )
        self._statuses: dict[Key, Status] = {}
        self._pruned: dict[str, int] = {}
        self._copies: dict[tuple[int, str], str] = {}
        self._present: set[tuple[int, str]] = set()
        self._changes: dict[Key, tuple[int, Status, str | None, str | None]] = {}
        self._retried: set[Key] = set()

    def load(self) -> None:
        """Take what the round trip has read."""
        rows = [tuple(map(as_text, row)) for row in self._locked.rows()]
        self._statuses = {(row[0] or "", row[1] or "", row[2] or ""): Status(row[3] or "") for row in rows}
        self._retried = {key for key, status in self._statuses.items() if status is Status.RETRYING}
        self._pruned = {as_text(name) or "": pruned for name, pruned in self._limits.rows()}
        events = [feed.from_values(*row) for row in self._failed.rows()]
        self._copies = {(event.position, event.id): feed.encoded(event).decode() for event in events}
        others = {(place, as_text(event) or "") for place, event in self._others.rows()}
        self._present = others.union(self._copies)

    def status(self, key: Key, position: int) -> Status | None:
        """The event's status; None if it must be handled. Raises `errors.ProcessNotFound`; `errors.InvalidRequest` if
        it must be handled, but isn't at this position of the feed (see `handling`)."""
        status = self._statuses.get(key)
        if status is not None:
            return None if status is Status.RETRYING else status
        limit = self._pruned.get(key[0])
        if limit is None:
            raise errors.ProcessNotFound(key[0])
        if position <= limit:
            return Status.HANDLED
        if (position, key[2]) not in self._present:
            raise errors.InvalidRequest("body.event", f"expected an event of the feed: {key[2]!r} is not at {position}")
        return None

    def record(self, key: Key, position: int, status: Status) -> None:
        """Record the status of an event that was not parked this time."""
        self._change(key, position, status, None, None)

    def park(self, key: Key, position: int, error: str | None) -> None:
        """Park an event, with a copy of it; one that was parked before has its copy. Without an error, it waits behind
        another one."""
        self._change(key, position, Status.PARKED, error, self._copies.get((position, key[2])))

    def _change(self, key: Key, position: int, status: Status, error: str | None, copy: str | None) -> None:
        self._statuses[key] = status
        self._changes[key] = position, status, error, copy

    def write(self, now: datetime) -> None:
        """Store the changed statuses."""
        tx = self._pipeline.tx
        dialect = dialects.of(tx)
        rows = []
        for key, (position, status, error, copy) in self._changes.items():
            if key not in self._retried:
                rows.append(dialect.row((*key, position, status, error, copy, now)))
                continue
            # A row that was parked before keeps its copy if it is parked again.
            kept = "" if status is Status.PARKED else "event = NULL, "
            self._pipeline.later(
                f"UPDATE inbox SET {kept}status = {dialect.literal(status)}, error = {dialect.literal(error)}, "  # noqa: S608
                f"handled_at = {dialect.literal(now)} WHERE {among(tx, KEY, [key])}"
            )
        columns = ", ".join((*KEY, "position", "status", "error", "event", "handled_at"))
        self._pipeline.later(*inserts("inbox", columns, rows))


def retry(tx: Connection, process: str, instance: str, event: str | None = None) -> int:
    """Retry the instance's parked events, or one of them. Return the number of events. Locks their rows and the feed's
    head."""
    conditions = [_inbox.name == process, _inbox.instance == instance, _inbox.status == Status.PARKED]
    if event is not None:
        conditions.append(_inbox.event_id == event)
    query = sa.select(_inbox.event_id, _inbox.event).where(*conditions).order_by(_inbox.position).limit(RETRIES)
    rows = tx.execute(query.with_for_update()).all()
    for row in rows:
        tx.execute(
            sa.update(tables.inbox).where(*_this(process, instance, row.event_id)).values(status=Status.RETRYING)
        )
    feed.append(tx, [retry_event(process, instance, row.event) for row in rows])
    return len(rows)


def retry_event(process: str, instance: str, copy: str) -> feed.NewEvent:
    """The event that brings a parked one again, given the copy of it."""
    head = json.dumps({"process": process, "instance": instance}, ensure_ascii=False, separators=(",", ":"))
    data = f'{head[:-1]},"event":{copy}}}'
    return feed.NewEvent(f"{feed.RETRY}:{uuid.uuid4()}", retry_type(process), instance, data)


def of_instance(snapshot: Connection, process: str, instance: str, limit: int) -> list[Entry]:
    """The newest events of an instance, newest first."""
    query = (
        sa.select(_inbox.event_id, _inbox.position, _inbox.status, _inbox.error, _inbox.handled_at)
        .where(_inbox.name == process, _inbox.instance == instance)
        .order_by(_inbox.position.desc())
        .limit(limit)
    )
    return [
        Entry(row.event_id, row.position, Status(row.status), row.error, row.handled_at)
        for row in snapshot.execute(query)
    ]


def parked(snapshot: Connection, process: str, instances: Sequence[str]) -> dict[str, int]:
    """The number of parked events by instance, without the instances that have none."""
    query = (
        sa.select(_inbox.instance, sa.func.count().label("parked"))
        .where(_inbox.name == process, _inbox.status == Status.PARKED, _inbox.instance.in_(instances))
        .group_by(_inbox.instance)
    )
    return {row.instance: row.parked for row in snapshot.execute(query)}


def parked_by_process(tx: Connection, processes: Iterable[str]) -> dict[str, int]:
    """The number of parked events of each of these processes."""
    # One query each, served by an index: the inbox is large, and few of its events are parked.
    parked = sa.select(sa.func.count()).where(_inbox.status == Status.PARKED)
    return {process: tx.execute(parked.where(_inbox.name == process)).scalar_one() for process in processes}


def _this(process: str, instance: str, event: str) -> tuple[sa.ColumnElement[bool], ...]:
    return _inbox.name == process, _inbox.instance == instance, _inbox.event_id == event


def remove_chunk(tx: Connection, process: str, status: Status, pruned: int) -> int:
    """Remove a chunk of the rows at or below `pruned`, lowest positions first. Return the number of rows."""
    conditions = (_inbox.name == process, _inbox.status == status, _inbox.position <= pruned)
    lowest = tx.scalars(sa.select(_inbox.position).where(*conditions).order_by(_inbox.position).limit(CHUNK)).all()
    if not lowest:
        return 0
    return tx.execute(sa.delete(tables.inbox).where(*conditions, _inbox.position <= lowest[-1])).rowcount
