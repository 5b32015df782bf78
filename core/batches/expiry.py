"""Expiry: ends batches that have been idle for too long or have reached their deadline, and removes batches that ended
long ago.

Batches are read in bounded pages. Each change is a separate transaction that checks again under the batch's lock, by
the database's clock, and can be repeated. A batch that is being acked is never idle: every ack updates `updated_at`
under the same lock. A deadline ends it however busy it is, and also if it has live children: like a cancelled one, it
then ignores what they owe it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.batches import batch as batches
from core.batches import callbacks, nesting, purge
from core.batches.lifecycle import LIVE, Cause, State, is_idle, is_overdue
from core.storage import dialects, statements, tables
from core.storage.database import Database

PAGE: Final = 500
"""Batches that one statement reads."""

_table = tables.batches.c
_FACTS: Final = (_table.id, _table.state, _table.updated_at, _table.expires_in, _table.deadline)


@dataclass(frozen=True, slots=True)
class Policy:
    """The maximum idle times of open and of sealed batches. `keep` is the time for which ended batches are kept after
    their last change, and finished instances of processes after their end; `keep_events` is that for events."""

    open_idle: timedelta = timedelta(days=7)
    sealed_idle: timedelta = timedelta(days=30)
    keep: timedelta = timedelta(days=30)
    keep_events: timedelta = timedelta(days=30)


def due(database: Database, policy: Policy) -> Iterator[tuple[Any, Cause]]:
    """The live batches that have been idle for too long, or are overdue: their rows (`id`, `state`, …)."""
    for row, now in _walk(database, LIVE):
        reason = cause(row, now, policy)
        if reason is not None:
            yield row, reason


def overdue(database: Database) -> Iterator[list[int]]:
    """Pages of the live batches that have reached their deadline by the database's clock, earliest deadline first."""
    last: Any = None
    while True:

        def read(tx: Connection, last: Any = last) -> Sequence[Any]:
            query = sa.select(_table.id, _table.deadline)
            query = query.where(_table.state.in_(sorted(LIVE)), _table.deadline <= tables.clock(tx))
            if last is not None:
                after_last = sa.or_(_table.deadline > last.deadline, _table.id > last.id)
                query = query.where(_table.deadline >= last.deadline, after_last)
            return tx.execute(query.order_by(_table.deadline, _table.id).limit(PAGE)).all()

        rows = database.read(read)
        if rows:
            yield [row.id for row in rows]
        if len(rows) < PAGE:
            return
        last = rows[-1]


def half_deleted_or_due(database: Database, keep: timedelta) -> Iterator[int]:
    """The batches whose deletion was started, then those that ended and last changed at least `keep` ago, in the order
    of their ends."""
    for row, _ in _walk(database, frozenset({State.DELETING})):
        yield row.id
    latest = database.read(lambda tx: tx.execute(sa.select(tables.utc_now())).scalar_one()) - keep
    last: Any = None
    while True:
        query = sa.select(_table.id, _table.state, _table.ended_at, _table.updated_at)
        query = query.where(_table.ended_at <= latest)
        if last is not None:
            after_last = sa.or_(_table.ended_at > last.ended_at, _table.id > last.id)
            query = query.where(_table.ended_at >= last.ended_at, after_last)
        query = query.order_by(_table.ended_at, _table.id).limit(PAGE)
        rows = database.read(lambda tx, query=query: tx.execute(query).all())  # type: ignore[misc]
        # Not in the query: the server might use the index on the state, and read all ended batches. No index has the
        # last changes, as each ack would change it; few batches change after their end.
        yield from (row.id for row in rows if row.state != State.DELETING and _last_change(row) <= latest)
        if len(rows) < PAGE:
            return
        last = rows[-1]


def _last_change(batch: Any) -> datetime:
    """When an ended batch (a row or a `Batch`) last changed. A redrive, and the acks that follow it, change it after
    its end."""
    latest: datetime = max(batch.ended_at, batch.updated_at)
    return latest


def _walk(database: Database, states: frozenset[State]) -> Iterator[tuple[Any, datetime]]:
    """The batches in these states with the database's time, ordered by id within each state. One statement per page."""
    for state in sorted(states):
        after = 0
        while True:
            query = (
                sa.select(*_FACTS, tables.utc_now().label("now"))
                .where(_table.state == state, _table.id > after)
                .order_by(_table.id)
                .limit(PAGE)
            )
            rows = database.read(lambda tx, query=query: tx.execute(query).all())  # type: ignore[misc]
            for row in rows:
                yield row, row.now
            if len(rows) < PAGE:
                break
            after = rows[-1].id


def cause(batch: Any, now: datetime, policy: Policy) -> Cause | None:
    """Why the batch (a row or a `Batch`) must expire; None if it must not. A deadline comes before idleness."""
    if is_overdue(State(batch.state), batch.deadline, now=now):
        return Cause.DEADLINE
    is_due = is_idle(
        State(batch.state),
        batch.updated_at,
        batch.expires_in,
        now=now,
        open_idle=policy.open_idle,
        sealed_idle=policy.sealed_idle,
    )
    return Cause.IDLE if is_due else None


def expire(
    database: Database, batch_id: int, policy: Policy, *, lock_wait: float | None = None
) -> batches.Batch | None:
    """Expire the batch if it is overdue, or still idle and without live children. Return the expired batch, or None.
    The caller must pay the batch's debt to its parent, if any. Raises `errors.LockTimeout` if the batch stays
    locked. `lock_wait`: seconds to wait for the lock, on MariaDB."""

    def work(tx: Connection) -> batches.Batch | None:
        try:
            if lock_wait is not None:
                # Only such a statement observes the short wait.
                statements.run(tx, f"SELECT id FROM batches WHERE id = {batch_id}{dialects.of(tx).for_update()}")  # noqa: S608
            batch, now = batches.lock(tx, batch_id)
        except errors.BatchNotFound:
            return None
        reason = cause(batch, now, policy)
        # A child is opened under its parent's lock, so none can be opened in between.
        if reason is None or (reason is Cause.IDLE and nesting.has_live_children(tx, batch_id)):
            return None
        return batches.end(tx, batch, State.EXPIRED, now, cause=reason)

    return database.write(work, lock_waits=0, lock_wait=lock_wait)


def remove(database: Database, batch_id: int, policy: Policy) -> bool:
    """Mark the batch for deletion if it is still due, and purge it. A batch whose callback must still be sent stays,
    since its callback would be deleted with it. A batch that another janitor has marked is purged too, as that janitor
    may have been killed. Return whether the batch was removed. Raises `errors.LockTimeout` at once if the batch is
    locked."""

    def condemn(tx: Connection) -> bool:
        try:
            batch, now = batches.lock(tx, batch_id)
        except errors.BatchNotFound:
            return True
        if batch.ended_at is None or now - _last_change(batch) < policy.keep or batch.parent_due is not None:
            return False
        if callbacks.is_owed(tx, batch_id):
            return False
        purge.mark(tx, batch_id)
        return True

    if not database.write(condemn, lock_waits=0):
        return False
    purge.purge(database, batch_id)
    return True
