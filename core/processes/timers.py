"""Timers: time-outs that an instance of a process sets. When a timer is due, it becomes an event of the feed.

One transaction locks and removes the timer's row and appends the event, so a timer fires once or is cancelled, never
both. An event that makes the time-out pointless may arrive at the same time. Then the order in the feed decides:
events for a finished instance are late.

A due timer fires in the dispatcher's next round, so it may be a little late, but never early. Time is the database's.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed
from core.storage import dialects, tables
from core.storage.database import Database
from core.storage.statements import LIST, Pipeline, among, chunks, inserts

PAGE: Final = 200
"""Timers that are fired in one transaction."""

_timers = tables.timers.c


@dataclass(frozen=True, slots=True)
class TimerChange:
    """Sets a timer, replacing one with the same name; without `after`, cancels it. `data` is JSON as text."""

    timer: str
    after: timedelta | None
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Timer:
    timer: str
    due_at: datetime
    data: str | None


class TimerChanges:
    """Changes of locked instances' timers in one transaction; `write` stores them."""

    def __init__(self) -> None:
        self._cancelled: dict[tuple[str, str], None] = {}
        """The instances whose timers were all cancelled."""
        self._changed: dict[tuple[str, str, str], TimerChange] = {}
        """The last change of each timer, by process, instance and name."""

    def change(self, process: str, instance: str, changes: Sequence[TimerChange]) -> None:
        """Set and cancel timers."""
        for change in changes:
            self._changed[process, instance, change.timer] = change

    def cancel_all(self, process: str, instance: str) -> None:
        """Cancel all timers of an instance."""
        self._cancelled[process, instance] = None
        for key in [key for key in self._changed if key[:2] == (process, instance)]:
            del self._changed[key]

    def write(self, pipeline: Pipeline, now: datetime) -> None:
        tx = pipeline.tx
        deletes = [
            among(tx, columns, part)
            for columns, keys in ((_KEY[:2], self._cancelled), (_KEY, self._changed))
            for part in chunks(sorted(keys), LIST)
        ]
        pipeline.later(*(f"DELETE FROM timers WHERE {condition}" for condition in deletes))  # noqa: S608
        rows = []
        for key, change in self._changed.items():
            if change.after is not None:
                rows.append(dialects.of(tx).row((*key, str(uuid.uuid4()), now + change.after, change.data)))
        pipeline.later(*inserts("timers", ", ".join((*_KEY, "token", "due_at", "data")), rows))


_KEY: Final = ("name", "instance", "timer")


def of_instance(snapshot: Connection, process: str, instance: str) -> list[Timer]:
    query = (
        sa.select(_timers.timer, _timers.due_at, _timers.data)
        .where(_timers.name == process, _timers.instance == instance)
        .order_by(_timers.due_at, _timers.timer)
    )
    return [Timer(*row) for row in snapshot.execute(query)]


def event_type(process: str) -> str:
    """The type of the events of a process's timers."""
    return f"{feed.TIMER}.{process}"


def fire(database: Database, until: float = math.inf) -> int:
    """Append the events of the timers that are due, and return the number of events. It stops at the monotonic time
    `until`, after a page at least. Timers whose rows are locked are left to a later call: somebody may hold them, which
    must not delay the others."""
    count = 0
    while True:
        due = database.read(_due)
        if not due:
            return count
        fired = database.write(_fire, due)
        count += fired
        if len(due) < PAGE or not fired or time.monotonic() >= until:
            return count


_Key = tuple[str, str, str]


def _due(tx: Connection) -> list[_Key]:
    query = (
        sa.select(_timers.name, _timers.instance, _timers.timer)
        .where(_timers.due_at <= tables.utc_now())
        .order_by(_timers.due_at)
        .limit(PAGE)
    )
    # Sorted, as rows are locked in the order of their keys.
    return sorted((row.name, row.instance, row.timer) for row in tx.execute(query))


def _fire(tx: Connection, due: Sequence[_Key]) -> int:
    """Fire those timers that still exist, are due and not locked."""
    events: list[feed.NewEvent] = []
    for name, instance, timer in due:
        conditions = (_timers.name == name, _timers.instance == instance, _timers.timer == timer)
        row = tx.execute(
            sa.select(_timers.token, _timers.data)
            .where(*conditions, _timers.due_at <= tables.utc_now())
            .with_for_update(skip_locked=True)
        ).first()
        if row is not None:
            tx.execute(sa.delete(tables.timers).where(*conditions))
            events.append(_event(name, instance, timer, row))
    feed.append(tx, events)
    return len(events)


def _event(process: str, instance: str, timer: str, row: Any) -> feed.NewEvent:
    facts = {"process": process, "instance": instance, "timer": timer}
    head = json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
    data = f'{head[:-1]},"data":{row.data or "null"}}}'
    return feed.NewEvent(f"{feed.TIMER}:{row.token}", event_type(process), instance, data)
