"""Process managers: state machines with an instance for each correlation id. They accept events in any order, even
repeated ones, and issue commands when all required events have arrived.

A pure function in a worker computes the effects of an event on an instance. They are written here in one transaction:
fence → inbox → instance → commands into the outbox and the feed, timers. Possible failures, and why they can't happen:

* *The same event twice*: it has an inbox row, or after pruning it is at or below `pruned`.
* *Two workers with one instance*: the partition has one owner at one epoch, in a row that stays locked until the
  commit. A worker that has lost its partition is refused, even if it hasn't noticed.
* *A state computed from an old one*: the version that it was computed from must be the instance's current version.
* *A command twice*: its id is derived from process, instance and step, and each id is issued once.
* *A restart by a late event*: a finished instance is kept as a tombstone, see `retention`.
* *An event whose handler always fails*: it is parked with the error, for that instance only. Other instances continue.

The process's workers form a consumer group (`definitions`). Instances are assigned to partitions by the CRC-32 of their
names. Each partition reads the whole feed and skips the events of other partitions.

Lock order: consumer_groups → positions → inbox → processes → timers → … → feed_head. Outbox rows are only inserted, and
no other transaction can insert them while the instance is locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors, tables
from core.consumer_groups import positions
from core.processes import definitions, inbox, outbox, timers
from core.storage import faults, limits
from lastbit.streams.partitions import partition_of

SHOWN: Final = 200
"""Maximum number of events, and of commands, in an instance's details."""
FIRST: Final = 8
"""Instances that the first statement of a page reads. It is small, as each state may have a mebibyte."""

_processes = tables.processes.c
_inbox = tables.inbox.c
_timers = tables.timers.c


class Status(StrEnum):
    """The status of an instance."""

    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Summary:
    """A process with the numbers of its instances, parked events and timers. All events up to the position `floor` were
    handled."""

    definition: definitions.Definition
    running: int
    finished: int
    parked: int
    timers: int
    floor: int


@dataclass(frozen=True, slots=True)
class Instance:
    """`state` is JSON as text. `version` is the number of handled events, `parked` that of parked ones."""

    process: str
    instance: str
    status: Status
    version: int
    state: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    parked: int = 0


@dataclass(frozen=True, slots=True)
class Details:
    instance: Instance
    history: list[inbox.Entry]
    timers: list[timers.Timer]
    commands: list[outbox.Command]


@dataclass(frozen=True, slots=True)
class Handling:
    """The effects of an event on an instance. `version` is that of the state from which they were computed, 0 if there
    was none. With an `error`, the event has no effects and is parked."""

    process: str
    instance: str
    event: str
    position: int
    worker: str
    epoch: int
    version: int
    state: str | None = None
    commands: Sequence[outbox.NewCommand] = ()
    timers: Sequence[timers.TimerChange] = ()
    finish: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Handled:
    """`status` is the event's status. `repeated`: it had that status before this call. `instance` is None if retention
    has removed it, or if the event was pruned and the instance never existed."""

    status: inbox.Status
    repeated: bool
    instance: Instance | None
    commands: list[outbox.Issued]


def handle(tx: Connection, handling: Handling) -> Handled:
    """Apply the event's effects once.

    Raises `errors.ProcessNotFound`, `StaleEpoch`, `VersionConflict`, `InvalidRequest`, and changes nothing then. Raises
    `faults.BeginAgain` if it must be run again.
    """
    partitions = definitions.partitions_of(tx, handling.process)
    if partitions is None:
        raise errors.ProcessNotFound(handling.process)
    partition = partition_of(handling.instance, partitions)
    positions.fence(tx, definitions.group_of(handling.process), partition, handling.worker, handling.epoch)
    key = (handling.process, handling.instance, handling.event, handling.position)
    before = inbox.known(tx, *key)
    if before is not None and before is not inbox.Status.RETRYING:
        return Handled(before, True, _find(tx, handling.process, handling.instance), [])
    is_retry = before is not None
    instance = _find(tx, handling.process, handling.instance, locked=True)
    if instance is not None and instance.status is Status.FINISHED:
        inbox.record(tx, *key, inbox.Status.LATE, retried=is_retry)
        return Handled(inbox.Status.LATE, False, instance, [])
    version = 0 if instance is None else instance.version
    if handling.version != version:
        raise errors.VersionConflict(handling.process, handling.instance, handling.version, version)
    if handling.error is not None:
        instance = instance or _begin(tx, handling)
        inbox.park(tx, *key, handling.error, retried=is_retry)
        return Handled(inbox.Status.PARKED, False, instance, [])
    instance = _go_on(tx, handling, instance)
    inbox.record(tx, *key, inbox.Status.HANDLED, retried=is_retry)
    if handling.finish:
        timers.cancel_all(tx, handling.process, handling.instance)
    else:
        timers.change(tx, handling.process, handling.instance, handling.timers)
    issued = outbox.issue(tx, handling.process, handling.instance, handling.commands)
    return Handled(inbox.Status.HANDLED, False, instance, issued)


def _begin(tx: Connection, handling: Handling) -> Instance:
    """Insert a new instance at version 0."""
    now = tables.clock(tx)
    instance = Instance(handling.process, handling.instance, Status.RUNNING, 0, None, now, now, None)
    _insert(tx, instance)
    return instance


def _go_on(tx: Connection, handling: Handling, instance: Instance | None) -> Instance:
    """Update the instance to the next version, or insert it at version 1. Return it."""
    now = tables.clock(tx)
    status, finished_at = (Status.FINISHED, now) if handling.finish else (Status.RUNNING, None)
    if instance is None:
        new = Instance(handling.process, handling.instance, status, 1, handling.state, now, now, finished_at)
        _insert(tx, new)
        return new
    values: dict[str, Any] = {
        "state": handling.state,
        "version": handling.version + 1,
        "status": status,
        "updated_at": now,
        "finished_at": finished_at,
    }
    conditions = (_processes.name == handling.process, _processes.instance == handling.instance)
    tx.execute(sa.update(tables.processes).where(*conditions).values(values))
    return replace(instance, **values)


def _insert(tx: Connection, instance: Instance) -> None:
    try:
        tx.execute(
            sa.insert(tables.processes).values(
                name=instance.process,
                instance=instance.instance,
                state=instance.state,
                version=instance.version,
                status=instance.status,
                created_at=instance.created_at,
                updated_at=instance.updated_at,
                finished_at=instance.finished_at,
            )
        )
    except IntegrityError as error:
        if faults.is_duplicate(error):
            raise faults.BeginAgain from error
        raise


def _find(tx: Connection, process: str, instance: str, *, locked: bool = False) -> Instance | None:
    query = sa.select(tables.processes).where(_processes.name == process, _processes.instance == instance)
    row = tx.execute(query.with_for_update() if locked else query).first()
    return None if row is None else _instance(row, 0)


def _instance(row: Any, parked: int) -> Instance:
    return Instance(
        *(row.name, row.instance, Status(row.status), row.version, row.state),
        *(row.created_at, row.updated_at, row.finished_at, parked),
    )


def retry(tx: Connection, process: str, instance: str, event: str | None = None) -> int:
    """Retry the instance's parked events, or one of them. Return the number of events. Raises `errors.ProcessNotFound`,
    `InstanceNotFound`."""
    definitions.get(tx, process)
    if _find(tx, process, instance) is None:
        raise errors.InstanceNotFound(process, instance)
    return inbox.retry(tx, process, instance, event)


def get(snapshot: Connection, process: str, instance: str) -> Details:
    """Raises `errors.ProcessNotFound`, `InstanceNotFound`."""
    definitions.get(snapshot, process)
    row = _find(snapshot, process, instance)
    if row is None:
        raise errors.InstanceNotFound(process, instance)
    parked = inbox.parked(snapshot, process, [instance]).get(instance, 0)
    return Details(
        replace(row, parked=parked),
        inbox.of_instance(snapshot, process, instance, SHOWN),
        timers.of_instance(snapshot, process, instance),
        outbox.of_instance(snapshot, process, instance, SHOWN),
    )


def page(
    snapshot: Connection,
    process: str,
    status: Status | None,
    after: str | None,
    limit: int,
    *,
    parked: bool = False,
) -> tuple[list[Instance], bool]:
    """Instances with names above `after`, ordered by the bytes of their names, and whether there may be more.
    Optionally only instances with this `status`, or with parked events. Raises `errors.ProcessNotFound`."""
    definitions.get(snapshot, process)
    query = sa.select(tables.processes).where(_processes.name == process).order_by(_processes.instance)
    if status is not None:
        query = query.where(_processes.status == status)
    if parked:
        instances = sa.select(_inbox.instance).where(_inbox.name == process, _inbox.status == inbox.Status.PARKED)
        query = query.where(_processes.instance.in_(instances))

    def above(last: sa.Row[Any] | None, count: int) -> Sequence[sa.Row[Any]]:
        start = after if last is None else last.instance
        part = query if start is None else query.where(_processes.instance > start)
        return snapshot.execute(part.limit(count)).all()

    def size(row: sa.Row[Any]) -> int:
        return len(row.state or "")

    rows, has_more = limits.within(limits.stepwise(above, size, first=min(limit, FIRST)), size, limit)
    counts = inbox.parked(snapshot, process, [row.instance for row in rows])
    return [_instance(row, counts.get(row.instance, 0)) for row in rows], has_more


def summaries(snapshot: Connection) -> list[Summary]:
    """All processes, ordered by name."""
    counts: dict[tuple[str, str], int] = {}
    for name, status, count in snapshot.execute(
        sa.select(_processes.name, _processes.status, sa.func.count()).group_by(_processes.name, _processes.status)
    ):
        counts[name, status] = count
    for name, count in snapshot.execute(
        sa.select(_inbox.name, sa.func.count()).where(_inbox.status == inbox.Status.PARKED).group_by(_inbox.name)
    ):
        counts[name, "parked"] = count
    for name, count in snapshot.execute(sa.select(_timers.name, sa.func.count()).group_by(_timers.name)):
        counts[name, "timers"] = count
    return [
        Summary(
            definition,
            running=counts.get((definition.name, Status.RUNNING), 0),
            finished=counts.get((definition.name, Status.FINISHED), 0),
            parked=counts.get((definition.name, "parked"), 0),
            timers=counts.get((definition.name, "timers"), 0),
            floor=definitions.floor(snapshot, definition),
        )
        for definition in definitions.all_of(snapshot)
    ]
