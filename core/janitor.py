"""The janitor. One pass expires idle batches and removes batches, events and instances that are no longer kept.

A pass reads all live batches, and those that ended long ago, in bounded pages. Each change is a separate transaction
that checks again under the batch's lock, and every step can be repeated. So several janitors may run at once, and a
killed one can simply run again. A batch that is being acked never expires: every ack updates `updated_at` under the
lock under which the janitor reads it. A batch that stays locked is reported and left to the next pass.
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
"""Batches that one statement reads."""

_table = tables.batches.c


@dataclass(frozen=True, slots=True)
class Policy:
    """How long a batch may be idle while it is open or sealed, and how long ended batches, finished instances of
    processes, and events are kept."""

    open_idle: timedelta = timedelta(days=7)
    sealed_idle: timedelta = timedelta(days=30)
    keep: timedelta = timedelta(days=30)
    keep_events: timedelta = timedelta(days=30)


@dataclass(slots=True)
class Report:
    """Ids of the batches that were expired or deleted, or would be in a dry run."""

    dry_run: bool
    expired_open: list[int] = field(default_factory=list)
    expired_sealed: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    locked: list[int] = field(default_factory=list)
    """Ids of batches that were due, but locked by another transaction."""
    parents: int = 0
    """Ended batches whose parent's item was acked or failed by this pass."""
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
    """Run one pass. `progress` is called with the id of each batch that was expired or deleted. Raises
    `errors.Unavailable`."""
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
    return min(
        (position for position in (deliveries.needed(tx), definitions.needed(tx)) if position is not None), default=None
    )


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
    """The batches whose deletion was started, then those that ended at least `keep` ago, oldest first."""
    for row, _ in _walk(database, frozenset({State.DELETING})):
        yield row.id
    latest = database.read(lambda tx: tx.execute(sa.select(tables.utc_now())).scalar_one()) - keep
    last: Any = None
    while True:
        query = sa.select(_table.id, _table.state, _table.ended_at).where(_table.ended_at <= latest)
        if last is not None:
            after_last = sa.or_(_table.ended_at > last.ended_at, _table.id > last.id)
            query = query.where(_table.ended_at >= last.ended_at, after_last)
        query = query.order_by(_table.ended_at, _table.id).limit(PAGE)
        rows = database.read(lambda tx, query=query: tx.execute(query).all())  # type: ignore[misc]
        # Not in the query: the server might use the index on the state, and read all ended batches.
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
        # A child is opened under its parent's lock, so none can be opened in between.
        if not _idle(batch, now, policy) or nesting.has_live_children(tx, batch_id):
            return None
        return batches.end(tx, batch, State.EXPIRED, now)

    expired = database.write(work, repeatable=True, lock_waits=0)
    if expired is not None and expired.parent_due is not None:
        parents.sweep(database, stuck_parents=stuck)
    return expired is not None


def _remove(database: Database, batch_id: int, policy: Policy) -> bool:
    """Mark the batch for deletion, if it is still due, and purge it. A batch that another janitor has marked is purged
    too: that janitor may have been killed."""

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
