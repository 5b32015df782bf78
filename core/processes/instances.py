"""Instances of process managers: state machines, one for each correlation id.

A pure function in a worker computes the effects of an event on an instance, a `Handling`, and `handling` applies it.
The process's workers form a consumer group (`definitions`). Instances are assigned to partitions by the CRC-32 of their
names. Each partition reads the whole feed and skips the events of other partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.consumer_groups import positions
from core.processes import definitions, inbox, outbox, timers
from core.storage import dialects, limits, tables
from core.storage.statements import Pipeline, among, as_text, as_time, inserts
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
    was none. With an `error`, the event has no effects and is parked; with `strict`, also if it would overtake one that
    is parked (see `waiting`)."""

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
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Handled:
    """`status` is the event's status. `repeated`: it had that status before this call. `instance` is None if retention
    has removed it, or if the event was pruned and the instance never existed."""

    status: inbox.Status
    repeated: bool
    instance: Instance | None
    commands: list[outbox.Issued]


_COLUMNS: Final = ("name", *(f.name for f in fields(Instance) if f.name not in ("process", "parked")))


class LockedInstances:
    """Instances that the next round trip locks, until the commit. They change in memory first; `write` stores them."""

    def __init__(self, pipeline: Pipeline, keys: Collection[tuple[str, str]]) -> None:
        self._pipeline = pipeline
        tx = pipeline.tx
        dialect = dialects.of(tx)
        self._locked = pipeline.query_keys(
            keys,
            lambda part: (
                f"SELECT {', '.join(_COLUMNS)} FROM {dialect.by_primary_key('processes')} "  # noqa: S608
                f"WHERE {among(tx, ('name', 'instance'), part)} ORDER BY name, instance{dialect.for_update()}"
            ),
        )
        self._stored: dict[tuple[str, str], Instance] | None = None
        self._changed: dict[tuple[str, str], Instance] = {}

    def get(self, process: str, instance: str) -> Instance | None:
        if self._stored is None:
            rows = [_from_values(*row) for row in self._locked.rows()]
            self._stored = {(row.process, row.instance): row for row in rows}
        return self._changed.get((process, instance)) or self._stored.get((process, instance))

    def put(self, instance: Instance) -> None:
        self._changed[instance.process, instance.instance] = instance

    def write(self) -> None:
        """Store the changed instances. A new one that another transaction has inserted makes this one begin again."""
        tx, stored = self._pipeline.tx, self._stored or {}
        update = dialects.of(tx).upsert(("name", "instance"), _COLUMNS[2:])
        for is_new, end in ((True, ""), (False, update)):
            rows = [_row(tx, new) for key, new in self._changed.items() if (key not in stored) is is_new]
            self._pipeline.later(*inserts("processes", ", ".join(_COLUMNS), rows, end))


def _row(tx: Connection, instance: Instance) -> str:
    values = (instance.process, *(getattr(instance, name) for name in _COLUMNS[1:]))
    return dialects.of(tx).row(values)


def _from_values(
    process: Any,
    instance: Any,
    status: Any,
    version: int,
    state: Any,
    created_at: Any,
    updated_at: Any,
    finished_at: Any,
) -> Instance:
    """The instance in a row with `_COLUMNS`, as the driver returns it."""
    return Instance(
        as_text(process) or "",
        as_text(instance) or "",
        Status(as_text(status) or ""),
        version,
        as_text(state),
        as_time(created_at),
        as_time(updated_at),
        None if finished_at is None else as_time(finished_at),
    )


def _find(tx: Connection, process: str, instance: str) -> Instance | None:
    query = sa.select(tables.processes).where(_processes.name == process, _processes.instance == instance)
    row = tx.execute(query).first()
    return None if row is None else _instance(row, 0)


def _instance(row: Any, parked: int) -> Instance:
    return Instance(
        *(row.name, row.instance, Status(row.status), row.version, row.state),
        *(row.created_at, row.updated_at, row.finished_at, parked),
    )


def retry(tx: Connection, process: str, instance: str, event: str | None = None) -> int:
    """Retry the instance's parked events, or one of them. Return the number of events. Raises `errors.ProcessNotFound`,
    `InstanceNotFound`."""
    definition = definitions.get(tx, process)
    if _find(tx, process, instance) is None:
        raise errors.InstanceNotFound(process, instance)
    if definition.partitions:  # not if a client has deleted the process's consumer group: then nothing can be parked
        # Otherwise an event that is parked meanwhile could miss the retry, and yet come before it in the feed's order.
        positions.hold(tx, definition.group, partition_of(instance, definition.partitions))
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
        return limits.size_of_json(row.state)

    rows, has_more = limits.within(limits.stepwise(above, size, limit, first=FIRST), size, limit)
    counts = inbox.parked(snapshot, process, [row.instance for row in rows])
    return [_instance(row, counts.get(row.instance, 0)) for row in rows], has_more


def summaries(snapshot: Connection) -> list[Summary]:
    """All processes, ordered by name."""
    counts: dict[tuple[str, str], int] = {}
    for name, status, count in snapshot.execute(
        sa.select(_processes.name, _processes.status, sa.func.count()).group_by(_processes.name, _processes.status)
    ):
        counts[name, status] = count
    for name, count in snapshot.execute(sa.select(_timers.name, sa.func.count()).group_by(_timers.name)):
        counts[name, "timers"] = count
    all_definitions = definitions.all_of(snapshot)
    parked = inbox.parked_by_process(snapshot, [definition.name for definition in all_definitions])
    return [
        Summary(
            definition,
            running=counts.get((definition.name, Status.RUNNING), 0),
            finished=counts.get((definition.name, Status.FINISHED), 0),
            parked=parked[definition.name],
            timers=counts.get((definition.name, "timers"), 0),
            floor=definitions.floor(snapshot, definition),
        )
        for definition in all_definitions
    ]
