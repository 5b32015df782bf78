"""Timers: time-outs that an instance of a process has asked for, which become events of the feed when they are due.

The event is appended in the transaction that removes the timer's row, under that row's lock: it fires once, or it was
cancelled before; never both. Whether the time-out or the event that makes it pointless is first is for the feed to say:
whatever comes to an instance after its end is late.

A due timer fires when a dispatcher comes by, so it may be a little late, and never early. Time is the database's.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed, tables
from core.storage.database import Database

PAGE: Final = 200
"""Timers that fire in one transaction."""

_timers = tables.timers.c


@dataclass(frozen=True, slots=True)
class TimerChange:
    """A timer to be set, in place of one of the same name; without `after` to be cancelled. `data` is JSON as text."""

    timer: str
    after: timedelta | None
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Timer:
    timer: str
    due_at: datetime
    data: str | None


def change(tx: Connection, process: str, instance: str, changes: Sequence[TimerChange]) -> None:
    """Set and cancel timers of an instance, which is locked."""
    if not changes:
        return
    last = {each.timer: each for each in changes}
    this = (_timers.name == process, _timers.instance == instance)
    tx.execute(sa.delete(tables.timers).where(*this, _timers.timer.in_(sorted(last))))
    now = tx.scalar(sa.select(tables.utc_now()))
    assert now is not None
    rows = [
        {
            "name": process,
            "instance": instance,
            "timer": each.timer,
            "token": str(uuid.uuid4()),
            "due_at": now + each.after,
            "data": each.data,
        }
        for each in last.values()
        if each.after is not None
    ]
    if rows:
        tx.execute(sa.insert(tables.timers), rows)


def cancel_all(tx: Connection, process: str, instance: str) -> None:
    """Those of an instance, which is locked."""
    tx.execute(sa.delete(tables.timers).where(_timers.name == process, _timers.instance == instance))


def of_instance(snapshot: Connection, process: str, instance: str) -> list[Timer]:
    query = (
        sa.select(_timers.timer, _timers.due_at, _timers.data)
        .where(_timers.name == process, _timers.instance == instance)
        .order_by(_timers.due_at, _timers.timer)
    )
    return [Timer(*row) for row in snapshot.execute(query)]


def event_type(process: str) -> str:
    """Of the events of a process's timers."""
    return f"{feed.TIMER}.{process}"


def fire(database: Database) -> int:
    """Append the events of the timers that are due, and return how many."""
    fired = 0
    while True:
        due = database.read(_due)
        if not due:
            return fired
        fired += database.write(_fire, due, repeatable=True)
        if len(due) < PAGE:
            return fired


_Key = tuple[str, str, str]


def _due(tx: Connection) -> list[_Key]:
    query = (
        sa.select(_timers.name, _timers.instance, _timers.timer)
        .where(_timers.due_at <= tables.utc_now())
        .order_by(_timers.due_at)
        .limit(PAGE)
    )
    # Locked in the order of their key, whichever is due first.
    return sorted((row.name, row.instance, row.timer) for row in tx.execute(query))


def _fire(tx: Connection, due: Sequence[_Key]) -> int:
    """Those of them that are still there and due."""
    events: list[feed.NewEvent] = []
    for name, instance, timer in due:
        this = (_timers.name == name, _timers.instance == instance, _timers.timer == timer)
        row = tx.execute(
            sa.select(_timers.token, _timers.data).where(*this, _timers.due_at <= tables.utc_now()).with_for_update()
        ).first()
        if row is not None:
            tx.execute(sa.delete(tables.timers).where(*this))
            events.append(_event(name, instance, timer, row))
    feed.append(tx, events)
    return len(events)


def _event(process: str, instance: str, timer: str, row: Any) -> feed.NewEvent:
    known = {"process": process, "instance": instance, "timer": timer}
    head = json.dumps(known, ensure_ascii=False, separators=(",", ":"))
    data = f'{head[:-1]},"data":{row.data or "null"}}}'
    return feed.NewEvent(f"{feed.TIMER}:{row.token}", event_type(process), instance, data)
