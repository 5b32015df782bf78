"""Process managers: state machines, an instance for each correlation id, that take events in any order, repeated, and
issue their commands once what they need has come.

What an event does to an instance is computed elsewhere, by a pure function in a worker, and written here in one
transaction: fence → inbox → instance → commands into the outbox and the feed, timers. What could go wrong, and why it
can't:

* *The same event twice*: its inbox row says what became of it. *After the inbox was pruned*: `pruned` says it.
* *Two workers with one instance*: the instance's partition is one worker's at one epoch, and its row, which is locked
  until the commit, says whose. A worker that slept through the loss of its partition is refused.
* *A state that is not the current one any more*: the version that it was computed from must be the instance's.
* *A command twice*: its id is made of process, instance and step, and is issued once.
* *A restart by a late event*: a finished instance stays, as a tombstone, for as long as `retention` says.
* *An event that no handler can take*: it is parked, with the error, for that instance alone; all others go on.

The process's workers are a consumer group (`definitions`); its partitions share the instances, by the CRC-32 of their
names, and each of them reads the whole feed, passing over what belongs to others.

Lock order: consumer_groups → positions → inbox → processes → timers → … → feed_head. Rows of the outbox are new ones,
and nobody else makes them while the instance is locked.
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
from core.consumer_groups import groups
from core.processes import definitions, inbox, outbox, timers
from core.storage import faults, limits
from lastbit.streams.partitions import partition_of

SHOWN: Final = 200
FIRST: Final = 8
"""Instances of the first statement of a page: their states have a mebibyte, at the most."""
"""Events and commands of an instance that are shown, the newest."""

_processes = tables.processes.c
_inbox = tables.inbox.c
_timers = tables.timers.c


class Status(StrEnum):
    """Of an instance."""

    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Summary:
    """A process with the numbers of its instances, its parked events and its timers; `floor` is the position up to
    which every event was handled."""

    definition: definitions.Definition
    running: int
    finished: int
    parked: int
    timers: int
    floor: int


@dataclass(frozen=True, slots=True)
class Instance:
    """`state` is JSON as text; `version` goes up with every event that was handled; `parked` counts its events that
    are."""

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
    """What an event does to an instance. `version` is that of the state it was computed from, 0 where there was none.
    With an `error` it does nothing, and is parked."""

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
    """What became of the event; `repeated`: that had been so before this call. The instance as it is now, None where
    it was forgotten, or its event was pruned and it never came to be."""

    status: inbox.Status
    repeated: bool
    instance: Instance | None
    commands: list[outbox.Issued]


def handle(tx: Connection, it: Handling) -> Handled:
    """Do what the event does, once.

    Raises `errors.ProcessNotFound`, `StaleEpoch`, `VersionConflict`, `InvalidRequest`; then nothing was done.
    `faults.BeginAgain` when it must be run again.
    """
    partitions = definitions.partitions_of(tx, it.process)
    if partitions is None:
        raise errors.ProcessNotFound(it.process)
    partition = partition_of(it.instance, partitions)
    groups.fence(tx, definitions.group_of(it.process), partition, it.worker, it.epoch)
    this = (it.process, it.instance, it.event, it.position)
    before = inbox.known(tx, *this)
    if before is not None and before is not inbox.Status.RETRYING:
        return Handled(before, True, _find(tx, it.process, it.instance), [])
    retried = before is not None
    instance = _find(tx, it.process, it.instance, locked=True)
    if instance is not None and instance.status is Status.FINISHED:
        inbox.record(tx, *this, inbox.Status.LATE, retried=retried)
        return Handled(inbox.Status.LATE, False, instance, [])
    version = 0 if instance is None else instance.version
    if it.version != version:
        raise errors.VersionConflict(it.process, it.instance, it.version, version)
    if it.error is not None:
        instance = instance or _begin(tx, it)
        inbox.park(tx, *this, it.error, retried=retried)
        return Handled(inbox.Status.PARKED, False, instance, [])
    instance = _go_on(tx, it, instance)
    inbox.record(tx, *this, inbox.Status.HANDLED, retried=retried)
    if it.finish:
        timers.cancel_all(tx, it.process, it.instance)
    else:
        timers.change(tx, it.process, it.instance, it.timers)
    issued = outbox.issue(tx, it.process, it.instance, it.commands)
    return Handled(inbox.Status.HANDLED, False, instance, issued)


def _begin(tx: Connection, it: Handling) -> Instance:
    """A new instance, to which nothing has been done."""
    now = tables.clock(tx)
    instance = Instance(it.process, it.instance, Status.RUNNING, 0, None, now, now, None)
    _insert(tx, instance)
    return instance


def _go_on(tx: Connection, it: Handling, instance: Instance | None) -> Instance:
    """The instance one version on; it begins with that where it is new."""
    now = tables.clock(tx)
    status, finished_at = (Status.FINISHED, now) if it.finish else (Status.RUNNING, None)
    if instance is None:
        begun = Instance(it.process, it.instance, status, 1, it.state, now, now, finished_at)
        _insert(tx, begun)
        return begun
    changed: dict[str, Any] = {
        "state": it.state,
        "version": it.version + 1,
        "status": status,
        "updated_at": now,
        "finished_at": finished_at,
    }
    this = (_processes.name == it.process, _processes.instance == it.instance)
    tx.execute(sa.update(tables.processes).where(*this).values(changed))
    return replace(instance, **changed)


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
    """Have the instance's parked events, or this one, handled again; how many. Raises `errors.ProcessNotFound`,
    `InstanceNotFound`."""
    definitions.get(tx, process)
    if _find(tx, process, instance) is None:
        raise errors.InstanceNotFound(process, instance)
    return inbox.retry(tx, process, instance, event)


def get(snapshot: Connection, process: str, instance: str) -> Details:
    """Raises `errors.ProcessNotFound`, `InstanceNotFound`."""
    definitions.get(snapshot, process)
    found = _find(snapshot, process, instance)
    if found is None:
        raise errors.InstanceNotFound(process, instance)
    parked = inbox.parked(snapshot, process, [instance]).get(instance, 0)
    return Details(
        replace(found, parked=parked),
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
    """The instances above `after`, by the bytes of their names: of a status, or those with parked events; and whether
    there may be more. Raises `errors.ProcessNotFound`."""
    definitions.get(snapshot, process)
    query = sa.select(tables.processes).where(_processes.name == process).order_by(_processes.instance)
    if status is not None:
        query = query.where(_processes.status == status)
    if parked:
        some = sa.select(_inbox.instance).where(_inbox.name == process, _inbox.status == inbox.Status.PARKED)
        query = query.where(_processes.instance.in_(some))

    def above(last: sa.Row[Any] | None, count: int) -> Sequence[sa.Row[Any]]:
        start = after if last is None else last.instance
        part = query if start is None else query.where(_processes.instance > start)
        return snapshot.execute(part.limit(count)).all()

    def size(row: sa.Row[Any]) -> int:
        return len(row.state or "")

    rows, cut = limits.within(limits.stepwise(above, size, first=min(limit, FIRST)), size, limit)
    counts = inbox.parked(snapshot, process, [row.instance for row in rows])
    return [_instance(row, counts.get(row.instance, 0)) for row in rows], cut


def summaries(snapshot: Connection) -> list[Summary]:
    """Every process, by name."""
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
            each,
            running=counts.get((each.name, Status.RUNNING), 0),
            finished=counts.get((each.name, Status.FINISHED), 0),
            parked=counts.get((each.name, "parked"), 0),
            timers=counts.get((each.name, "timers"), 0),
            floor=definitions.floor(snapshot, each),
        )
        for each in definitions.all_of(snapshot)
    ]
