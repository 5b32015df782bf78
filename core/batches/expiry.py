"""Expiry: ends batches that have been idle for too long or have reached their deadline, and removes batches that ended
long ago.

Batches are read in bounded pages, by indexes. None has `updated_at`, as each ack would change it. But one has
`seen_updated_at`, an earlier value of it: a batch can't be idle before its limit has passed since then. If a look at
it shows that it was active after all, its present `updated_at` is noted as seen, and the next look is due a whole limit
later. So a pass reads what is due, and a busy batch as often as it could have become idle, whatever limits earlier
passes had.

Each change is a separate transaction that checks again under the batch's lock, by the database's clock, and can be
repeated. A batch that is being acked is never idle: every ack updates `updated_at` under the same lock. A deadline ends
it however busy it is, and also if it has live children: they end as well (see `descendants`).
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
from core.batches.lifecycle import LIVE, Cause, Duty, State, is_idle, is_overdue
from core.storage import dialects, statements, tables
from core.storage.database import Database

PAGE: Final = 500
"""Batches that one statement reads."""

_table = tables.batches.c
_FACTS: Final = (
    *(_table.id, _table.state, _table.updated_at, _table.expires_in, _table.deadline, _table.seen_updated_at),
    tables.utc_now().label("now"),
)


@dataclass(frozen=True, slots=True)
class Policy:
    """The maximum idle times of open and of sealed batches. `keep` is the time for which ended batches are kept after
    their last change, and finished instances of processes after their end; `keep_failed` is that for batches with
    failures (None: twice `keep`), `keep_events` that for events."""

    open_idle: timedelta = timedelta(days=7)
    sealed_idle: timedelta = timedelta(days=30)
    keep: timedelta = timedelta(days=30)
    keep_events: timedelta = timedelta(days=30)
    keep_failed: timedelta | None = None

    def kept(self, *, failed: bool) -> timedelta:
        """How long an ended batch with or without failures is kept."""
        if not failed:
            return self.keep
        return 2 * self.keep if self.keep_failed is None else self.keep_failed


def due(database: Database, policy: Policy, *, dry_run: bool = False) -> Iterator[tuple[Any, Cause]]:
    """The live batches that have been idle for too long, then those that are overdue: their rows (`id`, `state`).
    With `dry_run`, nothing is written about the others that were looked at."""
    for state, default in ((State.OPEN, policy.open_idle), (State.SEALED, policy.sealed_idle)):
        for expires_in in (None, *_own_limits(database, state)):
            limit = default if expires_in is None else timedelta(seconds=expires_in)
            for rows in _unseen(database, state, expires_in, limit):
                causes = [(row, cause(row, row.now, policy)) for row in rows]
                active = [row.id for row, reason in causes if reason is None]
                if active and not dry_run:
                    database.write(_see, active)
                yield from ((row, reason) for row, reason in causes if reason is Cause.IDLE)
    for rows in overdue(database):
        yield from ((row, Cause.DEADLINE) for row in rows)


def _own_limits(database: Database, state: State) -> Iterator[int]:
    """The different `expires_in` of the batches in this state, ascending. Each is one entry of the index."""
    above: int | None = 0
    while True:
        query = sa.select(sa.func.min(_table.expires_in)).where(_table.state == state, _table.expires_in > above)
        above = database.read(lambda tx, query=query: tx.scalar(query))  # type: ignore[misc]
        if above is None:
            return
        yield above


def _unseen(database: Database, state: State, expires_in: int | None, limit: timedelta) -> Iterator[Sequence[Any]]:
    """Pages of the batches with this `expires_in` of which no change was seen within `limit`."""
    until = database.read(tables.clock) - limit
    query = sa.select(*_FACTS).where(_table.state == state, _table.expires_in == expires_in)
    query = query.where(_table.seen_updated_at <= until)
    last: Any = None
    while True:

        def read(tx: Connection, last: Any = last) -> Sequence[Any]:
            if last is None:
                return tx.execute(query.order_by(_table.seen_updated_at, _table.id).limit(PAGE)).all()
            # Two statements, each for one range of the index: after an upgrade, all batches have the same time.
            same = query.where(_table.seen_updated_at == last.seen_updated_at, _table.id > last.id)
            rows = list(tx.execute(same.order_by(_table.id).limit(PAGE)))
            if len(rows) < PAGE:
                later = query.where(_table.seen_updated_at > last.seen_updated_at)
                later = later.order_by(_table.seen_updated_at, _table.id).limit(PAGE - len(rows))
                rows += tx.execute(later)
            return rows

        rows = database.read(read)
        if rows:
            yield rows
        if len(rows) < PAGE:
            return
        last = rows[-1]


def _see(tx: Connection, ids: Sequence[int]) -> None:
    """Note when these batches were last changed. One that is locked is looked at again by the next pass."""
    free = sa.select(_table.id).where(_table.id.in_(ids)).order_by(_table.id).with_for_update(skip_locked=True)
    locked = list(tx.scalars(free))
    tx.execute(sa.update(tables.batches).where(_table.id.in_(locked)).values(seen_updated_at=_table.updated_at))


def overdue(database: Database) -> Iterator[Sequence[Any]]:
    """Pages of the live batches that have reached their deadline by the database's clock, earliest deadline first:
    their rows (`id`, `state`)."""
    last: Any = None
    while True:

        def read(tx: Connection, last: Any = last) -> Sequence[Any]:
            query = sa.select(_table.id, _table.state, _table.deadline)
            query = query.where(_table.state.in_(sorted(LIVE)), _table.deadline <= tables.clock(tx))
            if last is not None:
                after_last = sa.or_(_table.deadline > last.deadline, _table.id > last.id)
                query = query.where(_table.deadline >= last.deadline, after_last)
            return tx.execute(query.order_by(_table.deadline, _table.id).limit(PAGE)).all()

        rows = database.read(read)
        if rows:
            yield rows
        if len(rows) < PAGE:
            return
        last = rows[-1]


def half_deleted_or_due(database: Database, policy: Policy) -> Iterator[int]:
    """The batches whose deletion was started, then those that ended and have not changed for as long as they are kept,
    in the order of their ends."""
    yield from _half_deleted(database)
    now = database.read(tables.clock)
    latest, latest_failed = (now - policy.kept(failed=failed) for failed in (False, True))
    ended_long_ago = (
        _table.ended_at <= max(latest, latest_failed),  # one range of the index
        sa.or_(_table.failed > 0, _table.ended_at <= latest),
        sa.or_(_table.failed == 0, _table.ended_at <= latest_failed),
    )
    last: Any = None
    while True:
        query = sa.select(_table.id, _table.state, _table.failed, _table.ended_at, _table.updated_at)
        query = query.where(*ended_long_ago)
        if last is not None:
            after_last = sa.or_(_table.ended_at > last.ended_at, _table.id > last.id)
            query = query.where(_table.ended_at >= last.ended_at, after_last)
        query = query.order_by(_table.ended_at, _table.id).limit(PAGE)
        rows = database.read(lambda tx, query=query: tx.execute(query).all())  # type: ignore[misc]
        # Not in the query: the server might use the index on the state, and read all ended batches. No index has the
        # last changes, as each ack would change it; few batches change after their end.
        yield from (row.id for row in rows if row.state != State.DELETING and _is_due(row, now, policy))
        if len(rows) < PAGE:
            return
        last = rows[-1]


def _is_due(batch: Any, now: datetime, policy: Policy) -> bool:
    """Whether an ended batch (a row or a `Batch`) has not changed for as long as it is kept. A redrive, and the acks
    that follow it, change it after its end."""
    is_due: bool = now - max(batch.ended_at, batch.updated_at) >= policy.kept(failed=batch.failed > 0)
    return is_due


def _half_deleted(database: Database) -> Iterator[int]:
    """The batches whose deletion was started, by id."""
    after = 0
    while True:
        query = sa.select(_table.id).where(_table.state == State.DELETING, _table.id > after)
        query = query.order_by(_table.id).limit(PAGE)
        ids = database.read(lambda tx, query=query: tx.scalars(query).all())  # type: ignore[misc]
        yield from ids
        if len(ids) < PAGE:
            return
        after = ids[-1]


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
    The caller must end its children, if any, and pay its debt to its parent. Raises `errors.LockTimeout` if the batch
    stays locked. `lock_wait`: seconds to wait for the lock, on MariaDB."""

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
        if batch.ended_at is None or not _is_due(batch, now, policy):
            return False
        if batch.parent_due is not None or batch.children_due is Duty.END:
            return False
        if callbacks.is_owed(tx, batch_id):
            return False
        callbacks.disable(tx, batch_id)
        purge.mark(tx, batch_id)
        return True

    if not database.write(condemn, lock_waits=0):
        return False
    purge.purge(database, batch_id)
    return True
