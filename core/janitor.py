"""The janitor's rules: nobody waits for ever. One pass expires what is idle and removes what has ended long ago.

A pass walks the ids in bounded pages, each change is a transaction of its own that judges again under the batch's lock,
and every step can be repeated; so it may run twice at once, be killed anywhere, and run again. A batch that is being
acked is never expired: its `updated_at` moves with every bit, and is read under the lock that moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import batches, definitions, deliveries, errors, feed, nested, payments, purge, tables, tombstones
from core.db import Database
from core.lifecycle import LIVE, TERMINAL, State, is_idle

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
    if not dry_run:
        report.parents = payments.sweep(database)
    for row, now in _walk(database, LIVE):
        if _idle(row, now, policy) and (
            not database.read(lambda tx, row=row: nested.has_live_children(tx, row.id))  # type: ignore[misc]
            if dry_run
            else _expire(database, row.id, policy)
        ):
            (report.expired_open if row.state == State.OPEN else report.expired_sealed).append(row.id)
            progress(row.id)
    for row, now in _walk(database, TERMINAL | {State.DELETING}):
        if row.state != State.DELETING and now - row.ended_at < policy.keep:
            continue
        if dry_run or _remove(database, row, policy):
            report.deleted.append(row.id)
            progress(row.id)
    if not dry_run:
        report.events = feed.trim(database, policy.keep_events, needed=_needed)
        deliveries.trim(database)
        report.inbox = definitions.prune(database)
        report.instances = tombstones.forget(database, policy.keep)
        definitions.sweep(database)
        report.commands = tombstones.forget_orphans(database)
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


_FACTS: Final = (_table.id, _table.state, _table.updated_at, _table.ended_at, _table.expires_in)


def _idle(batch: Any, now: datetime, policy: Policy) -> bool:
    return is_idle(
        State(batch.state),
        batch.updated_at,
        batch.expires_in,
        now=now,
        open_idle=policy.open_idle,
        sealed_idle=policy.sealed_idle,
    )


def _expire(database: Database, batch_id: int, policy: Policy) -> bool:
    def work(tx: Connection) -> batches.Batch | None:
        try:
            batch, now = batches.lock(tx, batch_id)
        except errors.BatchNotFound:
            return None
        # A child is opened under its parent's lock, so none can come between.
        if not _idle(batch, now, policy) or nested.has_live_children(tx, batch_id):
            return None
        return batches.end(tx, batch, State.EXPIRED, now)

    expired = database.write(work, repeatable=True)
    if expired is not None and expired.parent_due is not None:
        payments.sweep(database)
    return expired is not None


def _remove(database: Database, row: Any, policy: Policy) -> bool:
    """Condemn the batch, if it is still what it was, and purge it. What another janitor condemned is purged all the
    same: it may have been killed."""

    def condemn(tx: Connection) -> bool:
        try:
            batch, now = batches.lock(tx, row.id)
        except errors.BatchNotFound:
            return True
        if batch.ended_at is None or now - batch.ended_at < policy.keep or batch.parent_due is not None:
            return False
        purge.mark(tx, row.id)
        return True

    if not database.write(condemn, repeatable=True):
        return False
    purge.purge(database, row.id)
    return True
