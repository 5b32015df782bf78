"""The janitor. One pass expires idle and overdue batches, and removes batches, events and instances that are no longer
kept. Deadlines don't wait for a pass: the dispatcher calls `expire_overdue` each second.

Every step can be repeated, so several janitors may run at once, and a killed one can simply run again. `expiry` decides
which batches are due. A batch that stays locked is reported and left to the next pass.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy.engine import Connection

from core import errors, feed
from core.acks import parents
from core.batches import batch as batches
from core.batches import callbacks, descendants, expiry, nesting
from core.batches.expiry import Policy
from core.batches.lifecycle import Cause, State
from core.enlisted import mover
from core.processes import definitions, retention
from core.storage import commit_marks
from core.storage.database import Database
from core.storage.job_runs import JobRuns
from core.webhooks import deliveries

DEADLINES_EVERY: Final = 1.0
"""Seconds between two searches for overdue batches."""
LOCK_WAIT: Final = 0.25
"""Seconds that an overdue batch's lock is awaited."""
PATIENCE: Final = 1.0
"""Seconds that one search spends on locked batches."""


@dataclass(slots=True)
class Report:
    """The result of a pass. The lists have the ids of the batches that were expired or deleted; in a dry run, of those
    that would be."""

    dry_run: bool
    expired_open: list[int] = field(default_factory=list)
    expired_sealed: list[int] = field(default_factory=list)
    deleted: list[int] = field(default_factory=list)
    locked: list[int] = field(default_factory=list)
    """Ids of batches that were due, but locked by another transaction."""
    parents: int = 0
    """The number of ended batches whose parent's item this pass acked or failed."""
    children: int = 0
    """The number of batches that this pass ended because a batch above them had ended."""
    events: int = 0
    """The number of removed events."""
    inbox: int = 0
    """The number of removed rows of the processes' inboxes."""
    instances: int = 0
    """The number of removed instances of processes."""
    commands: int = 0
    """The number of removed commands of deleted processes."""


def run_once(
    database: Database, policy: Policy, *, dry_run: bool = False, progress: Callable[[int], None] = lambda batch: None
) -> Report:
    """Run one pass. `progress` is called with the id of each batch that was expired or deleted. Raises
    `errors.Unavailable`."""
    report = Report(dry_run)
    stuck = parents.Stuck()
    if not dry_run:
        mover.sweep(database)  # what waits may be what keeps a batch from being idle
        report.children = descendants.sweep(database).ended
        report.parents = parents.sweep(database, stuck_parents=stuck)

    def unless_locked(step: Callable[[], bool], batch: int) -> bool:
        try:
            return step()
        except errors.LockTimeout:
            report.locked.append(batch)
            return False

    def expire(row: Any, cause: Cause) -> bool:
        if dry_run:
            return cause is Cause.DEADLINE or not database.read(nesting.has_live_children, row.id)
        return unless_locked(lambda: _expire(database, row.id, policy, stuck) is not None, row.id)

    def remove(batch: int) -> bool:
        if dry_run:
            return not database.read(callbacks.is_owed, batch)
        return unless_locked(lambda: expiry.remove(database, batch, policy), batch)

    for row, cause in expiry.due(database, policy, dry_run=dry_run):
        if expire(row, cause):
            (report.expired_open if row.state == State.OPEN else report.expired_sealed).append(row.id)
            progress(row.id)
    for batch in expiry.half_deleted_or_due(database, policy):
        if remove(batch):
            report.deleted.append(batch)
            progress(batch)
    if not dry_run:
        report.events = feed.trim(database, policy.keep_events, needed=needed)
        deliveries.trim(database)
        report.inbox = definitions.prune(database)
        report.instances = retention.forget(database, policy.keep)
        definitions.sweep(database)
        report.commands = retention.forget_orphans(database)
        database.write_in_chunks(commit_marks.forget)
        JobRuns(database, "janitor").succeeded()
    return report


def expire_overdue(database: Database) -> list[int]:
    """Expire the batches that have reached their deadline, however busy they are; return their ids. Batches that stay
    locked are tried after the others, for at most `PATIENCE` seconds, and then left to the next call.
    Raises `errors.Unavailable`."""
    stuck = parents.Stuck()
    expired: list[int] = []
    locked: list[int] = []

    def expire(batch: int) -> bool:
        """Whether the batch was free."""
        try:
            if _expire(database, batch, Policy(), stuck, lock_wait=LOCK_WAIT) is not None:
                expired.append(batch)
        except errors.LockTimeout:
            return False
        return True

    for rows in expiry.overdue(database):
        page = [row.id for row in rows]
        busy = database.read(batches.locked, page)
        locked += [batch for batch in page if batch in busy or not expire(batch)]
    random.shuffle(locked)  # so that no batch is always the last one
    end = time.monotonic() + PATIENCE
    for batch in locked:
        expire(batch)
        if time.monotonic() >= end:
            break
    return expired


def _expire(
    database: Database, batch_id: int, policy: Policy, stuck: parents.Stuck, *, lock_wait: float | None = None
) -> batches.Batch | None:
    expired = expiry.expire(database, batch_id, policy, lock_wait=lock_wait)
    if expired is not None and expired.children_due is not None:
        descendants.settle(database, [expired.id], seconds=descendants.PATIENCE)
    if expired is not None and expired.parent_due is not None:
        parents.sweep(database, stuck_parents=stuck)
    return expired


def needed(tx: Connection, below: int | None) -> int | None:
    """The lowest position that a webhook or a process needs. See `core.feed.Needed`."""
    positions = deliveries.needed(tx, below), definitions.needed(tx)
    return min((position for position in positions if position is not None), default=None)
