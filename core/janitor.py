"""The janitor. One pass expires idle batches and removes batches, events and instances that are no longer kept.

Every step can be repeated, so several janitors may run at once, and a killed one can simply run again. `expiry` decides
which batches are due. A batch that stays locked is reported and left to the next pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.engine import Connection

from core import errors, feed
from core.acks import parents
from core.batches import expiry, nesting
from core.batches.expiry import Policy
from core.batches.lifecycle import State
from core.processes import definitions, retention
from core.storage.database import Database
from core.webhooks import deliveries


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

    for row in expiry.idle(database, policy):
        if expire(row):
            (report.expired_open if row.state == State.OPEN else report.expired_sealed).append(row.id)
            progress(row.id)
    for batch in expiry.half_deleted_or_due(database, policy.keep):
        if dry_run or unless_locked(lambda batch=batch: expiry.remove(database, batch, policy), batch):  # type: ignore[misc]
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


def _expire(database: Database, batch_id: int, policy: Policy, stuck: parents.Stuck) -> bool:
    expired = expiry.expire(database, batch_id, policy)
    if expired is not None and expired.parent_due is not None:
        parents.sweep(database, stuck_parents=stuck)
    return expired is not None


def _needed(tx: Connection) -> int | None:
    """The lowest position that a webhook or a process needs."""
    return min(
        (position for position in (deliveries.needed(tx), definitions.needed(tx)) if position is not None), default=None
    )
