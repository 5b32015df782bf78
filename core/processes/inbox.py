"""The inbox: which event came to which instance of a process, and what became of it.

An event counts once for an instance, however often it comes: its row is written in the transaction that does what the
event does. The inbox is pruned, by position and never by time: `pruned` is moved up first and committed, then what lies
at or below it is removed. It never passes the lowest floor of the process's partitions, below which all was handled; so
an event without a row at or below `pruned` is a repeat. Whoever finds no row reads `pruned` after that, so a row that
is removed in between has already moved it.

Parked events are those whose handler failed. They aren't pruned, and keep a copy of their event, as the feed may be
trimmed before somebody looks. A retry appends an event of its own to the feed, which brings that copy: so a worker
finds it where it finds everything else, in the order of the feed and again after a crash.
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
"""Positions of the feed below the lowest floor whose rows stay, for people who ask what happened."""
CHUNK: Final = 1000
"""Rows that one transaction removes."""
RETRIES: Final = 1000
"""Events that one call retries."""

_definitions = tables.process_definitions.c
_inbox = tables.inbox.c
_feed = tables.feed.c


class Status(StrEnum):
    """Of an event for an instance. Late: it came after the instance's end. Retrying: parked, and on its way again."""

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
    """Of the events that bring a parked event of a process again."""
    return f"{feed.RETRY}.{process}"


def known(tx: Connection, process: str, instance: str, event: str, position: int) -> Status | None:
    """What became of the event; None where it is to be handled. Locks its row. Raises
    `errors.ProcessNotFound`."""
    this = _this(process, instance, event)
    status = tx.scalar(sa.select(_inbox.status).where(*this).with_for_update())
    if status is not None:
        return Status(status)
    # Only now: see above.
    pruned = tx.scalar(
        sa.select(_definitions.pruned).where(_definitions.name == process, _definitions.deleted_at.is_(None))
    )
    if pruned is None:
        raise errors.ProcessNotFound(process)
    return Status.HANDLED if position <= pruned else None


def record(
    tx: Connection, process: str, instance: str, event: str, position: int, status: Status, *, retried: bool
) -> None:
    """What became of an event that was not parked this time."""
    values: dict[str, object] = {"status": status, "error": None, "event": None, "handled_at": tables.utc_now()}
    _write(tx, process, instance, event, position, values, retried=retried)


def park(tx: Connection, process: str, instance: str, event: str, position: int, error: str, *, retried: bool) -> None:
    """Put an event aside. Raises `errors.InvalidRequest` where the feed doesn't have it."""
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
    """Have the instance's parked events (or this one) handled again; how many. Locks their rows and the feed's head."""
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
    """The newest, newest first."""
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
    """How many events each of these instances has parked; nothing of those that have none."""
    query = (
        sa.select(_inbox.instance, sa.func.count().label("parked"))
        .where(_inbox.name == process, _inbox.status == Status.PARKED, _inbox.instance.in_(instances))
        .group_by(_inbox.instance)
    )
    return {row.instance: row.parked for row in snapshot.execute(query)}


def _this(process: str, instance: str, event: str) -> tuple[sa.ColumnElement[bool], ...]:
    return _inbox.name == process, _inbox.instance == instance, _inbox.event_id == event


def prune(database: Database, process: str, floor: int, keep: int = KEEP) -> int:
    """Remove what lies `keep` positions or more below `floor`, the process's lowest one; how many rows."""
    limit = floor - keep

    def mark(tx: Connection) -> int:
        tx.execute(
            sa.update(tables.process_definitions)
            .where(_definitions.name == process, _definitions.pruned < limit)
            .values(pruned=limit)
        )
        # What a pass before this one has left, too.
        return tx.scalar(sa.select(_definitions.pruned).where(_definitions.name == process)) or 0

    pruned = database.write(mark, repeatable=True)
    return sum(database.write_in_chunks(_remove, process, status, pruned) for status in PRUNED)


def _remove(tx: Connection, process: str, status: Status, pruned: int) -> int:
    """A chunk, from the lowest position on."""
    these = (_inbox.name == process, _inbox.status == status, _inbox.position <= pruned)
    lowest = tx.scalars(sa.select(_inbox.position).where(*these).order_by(_inbox.position).limit(CHUNK)).all()
    if not lowest:
        return 0
    return tx.execute(sa.delete(tables.inbox).where(*these, _inbox.position <= lowest[-1])).rowcount
