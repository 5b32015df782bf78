"""Due times after the database's clock was set back: no pending delivery is due later than if it had been planned,
claimed or failed now. Otherwise it would wait until the clock has caught up.

Millions of deliveries may be in backoff, so they are looked through a page at a time, in the order of their due times,
the last first. No lock is needed for that: whatever others change meanwhile gets its due time from the new clock.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks
from core.webhooks.delivery_log import Progress

PAGE: Final = 20 * LIST
"""Deliveries that one query looks at, without those with the same due time as the last; and maximum deliveries that one
transaction corrects."""

_deliveries = tables.deliveries.c


class DueTimes:
    """`lease` is that of a claim, and `longest` the longest pause between two attempts."""

    def __init__(self, database: Database, lease: timedelta, longest: timedelta) -> None:
        self._database = database
        self._lease = lease
        self._longest = longest
        self._last: datetime | None = None
        """The database's time at the last call."""
        self._looking = False
        self._before: datetime | None = None
        """All deliveries that are due at this time or later have been checked; None: none has been."""
        self._were_locked = False
        """Whether a delivery that should have been corrected was locked."""

    def correct(self, seconds: float) -> None:
        """Look whether the clock was set back, perhaps before the first call, and correct the due times. This takes
        about `seconds` at most, and continues in the next call. Locked deliveries are left to a later call, too."""
        until = time.monotonic() + seconds
        now = self._database.read(tables.clock)
        if self._last is None or now < self._last:
            self._looking, self._before, self._were_locked = True, None, False
        self._last = now
        while self._looking:
            late, before = self._database.read(self._look)
            for part in chunks(late, PAGE):
                corrected = self._database.write(self._bring_closer, part, repeatable=True)
                self._were_locked |= corrected < len(part)
            self._before = before
            if before is None:
                self._looking, self._were_locked = self._were_locked, False
            if before is None or time.monotonic() >= until:
                break

    def _look(self, tx: Connection) -> tuple[list[int], datetime | None]:
        """The deliveries of the next page that are due too late, and where the page after it begins."""
        now = tables.clock(tx)
        conditions = [_deliveries.state == Progress.PENDING, _deliveries.due_at > now]
        if self._before is not None:
            conditions.append(_deliveries.due_at < self._before)
        last = sa.select(_deliveries.due_at).where(*conditions).order_by(_deliveries.due_at.desc())
        before: datetime | None = tx.scalar(last.offset(PAGE - 1).limit(1))
        if before is not None:
            conditions.append(_deliveries.due_at >= before)
        query = sa.select(_deliveries.id).where(*conditions, _deliveries.due_at > self._latest(now))
        return sorted(tx.scalars(query)), before

    def _bring_closer(self, tx: Connection, ids: list[int]) -> int:
        """Correct the due times of those of the deliveries, ascending, that are not locked. Return their number."""
        latest = self._latest(tables.clock(tx))
        count = 0
        for part in chunks(ids, LIST):
            is_late = sa.and_(_deliveries.state == Progress.PENDING, _deliveries.due_at > latest)
            query = sa.select(_deliveries.id, is_late).where(_deliveries.id.in_(part)).order_by(_deliveries.id)
            locked = tx.execute(query.with_for_update(skip_locked=True)).all()
            late = [id for id, late in locked if late]
            if late:
                tx.execute(sa.update(tables.deliveries).where(_deliveries.id.in_(late)).values(due_at=latest))
            count += len(locked)
        return count

    def _latest(self, now: datetime) -> sa.ColumnElement[datetime]:
        """The latest due time that a delivery can have got until now."""
        return sa.case(
            (_deliveries.token.is_not(None), now + self._lease),
            (_deliveries.attempts == 0, now),
            else_=now + self._longest,
        )
