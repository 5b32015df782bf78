"""The janitor's rules: nobody waits for ever. One pass expires what is idle and removes what has ended long ago.

A pass looks at all live batches, and at those that ended long ago, in bounded pages. Each change is a transaction of
its own that judges again under the batch's lock, and every step can be repeated; so it may run twice at once, be killed
anywhere, and run again. A batch that is being acked is never expired: its `updated_at` moves with every bit, and is
read under the lock that moves it. A batch that somebody else keeps locked is left to the next pass, and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, tables
from core.acks import parents
from core.batches import batch as batches
from core.batches import nesting, purge
from core.batches.lifecycle import LIVE, State, is_idle
from core.processes import definitions, retention
from core.storage.database import Database
from core.webhooks import deliveries

PAGE: Final = 500
"""Batches that are looked at in one statement."""

_table = tables.batches.c


@dataclass(frozen=True, slots=True)
class Policy:
    """How long a batch may be idle while it is open or sealed, and how long ended ones, ended instances of processes,
    and events are kept."""

    open_idle: timedelta = timedelta(days=7)
    sealed_idle: timedelta = timedelta(days=30)
    keep: timedelta = timedelta(days=30)
    keep_events: timedelta = timedelta(days=30)


@dataclass(slots=True)
class Report:
    """Ids of the batches that were expired and deleted (or would be, in a dry run), by what they were before."""

    dry_run: bool
    expired_open: list[int] = field(default_factory=list)
    expired_sealed: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    locked: list[int] = field(default_factory=list)
    """Ids of batches that were due, and locked by somebody else."""
    parents: int = 0
    """Ended batches whose parent had not been told."""
    events: int = 0
    """Events that were removed."""
    inbox: int = 0
    """Rows of the processes' inboxes that were removed."""
    instances: int = 0
    """Instances of processes that were removed."""
    commands: int = 0
    """Commands of deleted processes that were removed."""


def run_once(
    database: Database, policy: Policy, *, dry_run: bool = False, progress: Callable[[int], None] = lambda batch: None
) -> Report:
    """One pass. `progress` is told each id that was dealt with. Raises `errors.Unavailable`."""
    report = Report(dry_run)
    stuck = parents.Stuck()
    if not dry_run:
        report.parents = parents.sweep(database, stuck_parents=stuck)

    def unless_locked(step: Callable[[], bool], batch: int) -> bool:
        try:
            return step()
        except errors.LockTimeout:
            report.locked.append(batch)
            return False

    def expire(row: Any) -> bool:
        if dry_run:
            return not database.read(nesting.has_live_children, row.id)
        return unless_locked(lambda: _expire(database, row.id, policy, stuck), row.id)

    for row, now in _walk(database, LIVE):
        if _idle(row, now, policy) and expire(row):
            (report.expired_open if row.state == State.OPEN else report.expired_sealed).append(row.id)
            progress(row.id)
    for batch in _half_deleted_or_due(database, policy.keep):
        if dry_run or unless_locked(lambda batch=batch: _remove(database, batch, policy), batch):  # type: ignore[misc]
            report.deleted.append(batch)
            progress(batch)
    if not dry_run:
        report.events = feed.trim(database, policy.keep_events, needed=_needed)
        deliveries.trim(database)
        report.inbox = definitions.prune(database)
        report.instances = retention.forget(database, policy.keep)
        definitions.sweep(database)
        report.commands = retention.forget_orphans(database)
    return report


def _needed(tx: Connection) -> int | None:
    """The lowest position that a webhook or a process needs."""
    return min((each for each in (deliveries.needed(tx), definitions.needed(tx)) if each is not None), default=None)


def _walk(database: Database, states: frozenset[State]) -> Iterator[tuple[Any, datetime]]:
    """The batches in these states with the database's time, ascending by id in each state, a page a statement."""
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


_FACTS: Final = (_table.id, _table.state, _table.updated_at, _table.expires_in)


def _idle(batch: Any, now: datetime, policy: Policy) -> bool:
    return is_idle(
        State(batch.state),
        batch.updated_at,
        batch.expires_in,
        now=now,
        open_idle=policy.open_idle,
        sealed_idle=policy.sealed_idle,
    )


def _half_deleted_or_due(database: Database, keep: timedelta) -> Iterator[int]:
    """The batches whose deletion somebody has begun, and those that ended `keep` ago or longer, oldest first."""
    for row, _ in _walk(database, frozenset({State.DELETING})):
        yield row.id
    latest = database.read(lambda tx: tx.execute(sa.select(tables.utc_now())).scalar_one()) - keep
    last: Any = None
    while True:
        query = sa.select(_table.id, _table.state, _table.ended_at).where(_table.ended_at <= latest)
        if last is not None:
            later = sa.or_(_table.ended_at > last.ended_at, _table.id > last.id)
            query = query.where(_table.ended_at >= last.ended_at, later)
        query = query.order_by(_table.ended_at, _table.id).limit(PAGE)
        rows = database.read(lambda tx, query=query: tx.execute(query).all())  # type: ignore[misc]
        # By the state in the query, the server might go by the index of that, and look at all that have ended.
        yield from (row.id for row in rows if row.state != State.DELETING)
        if len(rows) < PAGE:
            return
        last = rows[-1]


def _expire(database: Database, batch_id: int, policy: Policy, stuck: parents.Stuck) -> bool:
    def work(tx: Connection) -> batches.Batch | None:
        try:
            batch, now = batches.lock(tx, batch_id)
        except errors.BatchNotFound:
            return None
        # A child is opened under its parent's lock, so none can come between.
        if not _idle(batch, now, policy) or nesting.has_live_children(tx, batch_id):
            return None
        return batches.end(tx, batch, State.EXPIRED, now)

    expired = database.write(work, repeatable=True, lock_waits=0)
    if expired is not None and expired.parent_due is not None:
        parents.sweep(database, stuck_parents=stuck)
    return expired is not None


def _remove(database: Database, batch_id: int, policy: Policy) -> bool:
    """Condemn the batch, if it is still what it was, and purge it. What another janitor condemned is purged all the
    same: it may have been killed."""

    def condemn(tx: Connection) -> bool:
        try:
            batch, now = batches.lock(tx, batch_id)
        except errors.BatchNotFound:
            return True
        if batch.ended_at is None or now - batch.ended_at < policy.keep or batch.parent_due is not None:
            return False
        purge.mark(tx, batch_id)
        return True

    if not database.write(condemn, repeatable=True, lock_waits=0):
        return False
    purge.purge(database, batch_id)
    return True
