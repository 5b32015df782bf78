"""Due times after the database's clock was set back: no pending delivery is due later than if it had been planned,
claimed or failed now. Otherwise it would wait until the clock has caught up. Postponed deliveries that were never tried
become due: they can't be told from the others.

Millions of deliveries may be in backoff, so they are looked through a page at a time, in the order of their due times,
the last first. No lock is needed for that: whatever others change meanwhile gets its due time from the new clock.

A claim is as long as its own dispatcher's lease (see `deliveries.lease_of`). With a shorter one, another dispatcher
would send the event while the first one is still sending it.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks
from core.webhooks.deliveries import lease_of
from core.webhooks.delivery_log import Progress

PAGE: Final = 20 * LIST
"""Deliveries that one query looks at, without those with the same due time as the last; and maximum deliveries that one
transaction corrects."""

_deliveries = tables.deliveries.c


class DueTimes:
    """`longest` is the longest pause between two attempts."""

    def __init__(self, database: Database, longest: timedelta) -> None:
        self._database = database
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
                corrected = self._database.write(self._bring_closer, part)
                self._were_locked |= corrected < len(part)
            self._before = before
            if before is None:
                self._looking, self._were_locked = self._were_locked, False
            if before is None or time.monotonic() >= until:
                break

    def _look(self, tx: Connection) -> tuple[list[int], datetime | None]:
        """The deliveries of the next page that are claimed or due too late, and where the page after it begins."""
        now = tables.clock(tx)
        conditions = [_deliveries.state == Progress.PENDING, _deliveries.due_at > now]
        if self._before is not None:
            conditions.append(_deliveries.due_at < self._before)
        last = sa.select(_deliveries.due_at).where(*conditions).order_by(_deliveries.due_at.desc())
        before: datetime | None = tx.scalar(last.offset(PAGE - 1).limit(1))
        if before is not None:
            conditions.append(_deliveries.due_at >= before)
        paused = sa.and_(_deliveries.token.is_(None), _deliveries.attempts > 0)
        latest = sa.case((paused, now + self._longest), else_=now)
        query = sa.select(_deliveries.id).where(*conditions, _deliveries.due_at > latest)
        return sorted(tx.scalars(query)), before

    def _bring_closer(self, tx: Connection, ids: list[int]) -> int:
        """Correct the due times of those of the deliveries, ascending, that are not locked. Return their number."""
        now = tables.clock(tx)
        count = 0
        for part in chunks(ids, LIST):
            query = sa.select(tables.deliveries).where(_deliveries.id.in_(part)).order_by(_deliveries.id)
            locked = tx.execute(query.with_for_update(skip_locked=True)).all()
            late: dict[timedelta, list[int]] = {}
            for row in locked:
                wait = self._longest_wait(row)
                if row.state == Progress.PENDING and row.due_at > now + wait:
                    late.setdefault(wait, []).append(row.id)
            for wait, late_ids in late.items():
                update = sa.update(tables.deliveries).where(_deliveries.id.in_(late_ids))
                tx.execute(update.values(due_at=now + wait))
            count += len(locked)
        return count

    def _longest_wait(self, row: sa.Row[Any]) -> timedelta:
        """How long the delivery can have to wait if its due time was set now."""
        if row.token is not None:
            return lease_of(row.token)
        return self._longest if row.attempts else timedelta()
