"""Definitions of processes: that there is one, whose group its workers are, and what of the feed it still needs.

The feed keeps its events until all partitions have handled them, however long nobody works on it; so a process that is
given up has to be deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors, feed, tables
from core.consumer_groups import groups
from core.processes import inbox
from core.storage import faults
from core.storage.database import Database

PARTITIONS: Final = 32
"""Of a process, by default: as many workers can share it."""
CHUNK: Final = 500
"""Instances that one transaction removes."""

_definitions = tables.process_definitions.c
_positions = tables.positions.c


@dataclass(frozen=True, slots=True)
class Definition:
    """A process. `after`: its workers begin above this position where they have none of their own yet."""

    name: str
    group: str
    partitions: int
    after: int
    created_at: datetime


def group_of(process: str) -> str:
    """The consumer group of its workers."""
    return f"process.{process}"


def define(
    tx: Connection,
    name: str,
    partitions: int | None = None,
    ttl: timedelta | None = None,
    release: timedelta | None = None,
    after: int | None = None,
) -> tuple[Definition, bool]:
    """The process with its consumer group, and whether it is new. A new one begins above the position `after`, or with
    all events that are kept; one that is there goes on where it is.

    Raises `errors.PartitionsFixed`, `PositionTrimmed`, `InvalidRequest` for a position that was never given,
    `ConsumerGroupInUse`; `faults.BeginAgain` where somebody else has just defined it.
    """
    row = tx.execute(sa.select(tables.process_definitions).where(_definitions.name == name)).first()
    if row is not None and row.deleted_at is not None:
        raise faults.BeginAgain  # what is left of it is being removed
    group, found = group_of(name), partitions_of(tx, name)
    if row is None and found is not None:
        groups.delete(tx, group)  # somebody's own: its positions are not ours
        found = None
    groups.put(tx, group, partitions or found or PARTITIONS, ttl, release)
    if row is None:
        # The head stays locked until the commit: nothing is trimmed that this process would still have to read.
        position, trimmed = feed.hold(tx)
        if after is not None and after < trimmed:
            raise errors.PositionTrimmed(after, trimmed)
        if after is not None and after > position:
            raise errors.InvalidRequest("body.after", f"expected at most {position}, the feed's last position")
        try:
            tx.execute(
                sa.insert(tables.process_definitions).values(
                    name=name, pruned=trimmed if after is None else after, created_at=tables.utc_now()
                )
            )
        except IntegrityError as error:
            if faults.is_duplicate(error):
                raise faults.BeginAgain from error
            raise
    return get(tx, name), row is None


def get(tx: Connection, name: str) -> Definition:
    """Raises `errors.ProcessNotFound`."""
    found = all_of(tx, _definitions.name == name)
    if not found:
        raise errors.ProcessNotFound(name)
    return found[0]


def all_of(tx: Connection, *conditions: sa.ColumnElement[bool]) -> list[Definition]:
    """By name."""
    query = (
        sa.select(tables.process_definitions)
        .where(_definitions.deleted_at.is_(None), *conditions)
        .order_by(_definitions.name)
    )
    return [
        # A group that was removed comes back when the process is defined again.
        Definition(row.name, group_of(row.name), partitions_of(tx, row.name) or 0, row.pruned, row.created_at)
        for row in tx.execute(query).all()
    ]


def partitions_of(tx: Connection, name: str) -> int | None:
    """Of the process's group; None where there is none."""
    known = tables.consumer_groups.c
    found: int | None = tx.scalar(
        sa.select(known.partitions).where(known.name == group_of(name), known.deleted_at.is_(None))
    )
    return found


def floor(tx: Connection, of: Definition) -> int:
    """The position up to which all partitions have handled everything."""
    query = sa.select(sa.func.min(_positions.floor), sa.func.count(_positions.floor), sa.func.count())
    lowest, told, partitions = tx.execute(query.where(_positions.group_name == of.group)).one()
    return of.after if not partitions or told < partitions else max(of.after, lowest)


def needed(tx: Connection) -> int | None:
    """The lowest position that a process still has to read."""
    return min((floor(tx, each) + 1 for each in all_of(tx)), default=None)


def prune(database: Database, keep: int = inbox.KEEP) -> int:
    """Prune the inboxes of all processes; how many rows went."""
    floors = database.snapshot(lambda tx: [(each.name, floor(tx, each)) for each in all_of(tx)])
    return sum(inbox.prune(database, name, lowest, keep) for name, lowest in floors)


def delete(database: Database, name: str) -> None:
    """Remove a process with its group, instances, inbox and timers. Its commands stay as long as the feed has their
    events (see `retention`): defined again, it does not issue them again.

    Raises `errors.ProcessNotFound`, `ConsumerGroupInUse`.
    """

    def condemn(tx: Connection) -> None:
        get(tx, name)
        groups.delete(tx, group_of(name))
        tx.execute(
            sa.update(tables.process_definitions).where(_definitions.name == name).values(deleted_at=tables.utc_now())
        )

    database.write(condemn)
    sweep(database)


def sweep(database: Database) -> None:
    """Remove what belongs to processes that were deleted, also where that ended half-way before."""
    query = sa.select(_definitions.name).where(_definitions.deleted_at.is_not(None))
    for name in database.read(lambda tx: tx.scalars(query).all()):
        for table in (tables.timers, tables.inbox, tables.processes):
            database.write_in_chunks(_remove, table, name)
        # Nobody defines it again while it is there.
        gone = sa.delete(tables.process_definitions).where(
            _definitions.name == name, _definitions.deleted_at.is_not(None)
        )
        database.write(lambda tx, gone=gone: tx.execute(gone).rowcount, repeatable=True)  # type: ignore[misc]


def _remove(tx: Connection, table: sa.Table, name: str) -> bool:
    """A chunk of a process's rows; whether there may be more."""
    these = table.c.name == name
    instances = sa.select(table.c.instance).where(these).distinct().order_by(table.c.instance).limit(CHUNK)
    found = tx.scalars(instances).all()
    if found:
        tx.execute(sa.delete(table).where(these, table.c.instance <= found[-1]))
    return len(found) == CHUNK
