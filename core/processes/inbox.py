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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, tables
from core.storage.database import Database

KEEP: Final = 100_000
"""Positions below the lowest floor whose rows are kept for inspection."""
CHUNK: Final = 1000
"""Rows that are removed in one transaction."""
RETRIES: Final = 1000
"""Events that one call retries."""

_definitions = tables.process_definitions.c
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


def known(tx: Connection, process: str, instance: str, event: str, position: int) -> Status | None:
    """The event's status; None if it must be handled. Locks its row. Raises `errors.ProcessNotFound`."""
    condition = _this(process, instance, event)
    status = tx.scalar(sa.select(_inbox.status).where(*condition).with_for_update())
    if status is not None:
        return Status(status)
    # Read after the row (see the module).
    limit = tx.scalar(
        sa.select(_definitions.pruned).where(_definitions.name == process, _definitions.deleted_at.is_(None))
    )
    if limit is None:
        raise errors.ProcessNotFound(process)
    return Status.HANDLED if position <= limit else None


def record(
    tx: Connection, process: str, instance: str, event: str, position: int, status: Status, *, retried: bool
) -> None:
    """Record the status of an event that was not parked this time."""
    values: dict[str, object] = {"status": status, "error": None, "event": None, "handled_at": tables.utc_now()}
    _write(tx, process, instance, event, position, values, retried=retried)


def park(tx: Connection, process: str, instance: str, event: str, position: int, error: str, *, retried: bool) -> None:
    """Park an event. Raises `errors.InvalidRequest` if the feed doesn't have it."""
    values: dict[str, object] = {"status": Status.PARKED, "error": error, "handled_at": tables.utc_now()}
    if not retried:
        row = tx.execute(sa.select(tables.feed).where(_feed.position == position, _feed.event_id == event)).first()
        if row is None:
            raise errors.InvalidRequest("body.event", f"expected an event of the feed: {event!r} is not at {position}")
        values["event"] = feed.encoded(feed.event(row)).decode()
    _write(tx, process, instance, event, position, values, retried=retried)


def _write(
    tx: Connection,
    process: str,
    instance: str,
    event: str,
    position: int,
    values: dict[str, object],
    *,
    retried: bool,
) -> None:
    if retried:
        tx.execute(sa.update(tables.inbox).where(*_this(process, instance, event)).values(values))
    else:
        tx.execute(
            sa.insert(tables.inbox).values(name=process, instance=instance, event_id=event, position=position, **values)
        )


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
    head = json.dumps({"process": process, "instance": instance}, ensure_ascii=False, separators=(",", ":"))
    feed.append(
        tx,
        [
            feed.NewEvent(
                f"{feed.RETRY}:{uuid.uuid4()}", retry_type(process), instance, f'{head[:-1]},"event":{row.event}}}'
            )
            for row in rows
        ],
    )
    return len(rows)


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


def _this(process: str, instance: str, event: str) -> tuple[sa.ColumnElement[bool], ...]:
    return _inbox.name == process, _inbox.instance == instance, _inbox.event_id == event


def prune(database: Database, process: str, floor: int, keep: int = KEEP) -> int:
    """Remove rows at least `keep` positions below `floor`, the process's lowest floor. Return the number of rows."""
    limit = floor - keep

    def mark(tx: Connection) -> int:
        tx.execute(
            sa.update(tables.process_definitions)
            .where(_definitions.name == process, _definitions.pruned < limit)
            .values(pruned=limit)
        )
        # It may be higher than `limit`: an interrupted pass may have left rows.
        return tx.scalar(sa.select(_definitions.pruned).where(_definitions.name == process)) or 0

    pruned = database.write(mark, repeatable=True)
    return sum(database.write_in_chunks(_remove, process, status, pruned) for status in PRUNED)


def _remove(tx: Connection, process: str, status: Status, pruned: int) -> int:
    """Remove a chunk, lowest positions first."""
    conditions = (_inbox.name == process, _inbox.status == status, _inbox.position <= pruned)
    lowest = tx.scalars(sa.select(_inbox.position).where(*conditions).order_by(_inbox.position).limit(CHUNK)).all()
    if not lowest:
        return 0
    return tx.execute(sa.delete(tables.inbox).where(*conditions, _inbox.position <= lowest[-1])).rowcount
