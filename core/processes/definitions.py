"""Definitions of processes, their consumer groups, and the part of the feed that they still need.

The feed keeps events until all partitions have handled them, even if no worker runs. So delete a process that is no
longer used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors, feed
from core.consumer_groups import groups
from core.processes import inbox
from core.storage import faults, tables
from core.storage.database import Database
from core.storage.statements import LIST, among, as_text, chunks, run

PARTITIONS: Final = 32
"""The default number of partitions, and so the maximum number of workers that share a process."""
CHUNK: Final = LIST
"""Rows that are removed in one transaction."""

_definitions = tables.process_definitions.c
_positions = tables.positions.c


@dataclass(frozen=True, slots=True)
class Definition:
    """A process. Workers of partitions without a position begin above `after`. Of the events that a worker has read up
    to the position `unnamed_upto`, `unnamed` were of its types and named no instance."""

    name: str
    group: str
    partitions: int
    after: int
    created_at: datetime
    unnamed: int
    unnamed_upto: int


def group_of(process: str) -> str:
    """The consumer group of the process's workers."""
    return f"{groups.OF_PROCESSES}{process}"


def define(
    tx: Connection,
    name: str,
    partitions: int | None = None,
    ttl: timedelta | None = None,
    release: timedelta | None = None,
    after: int | None = None,
) -> tuple[Definition, bool]:
    """Define the process with its consumer group. Return it, and whether it is new. A new process begins after the
    position `after`, by default with the oldest event in the feed. An existing process keeps its positions.

    Raises `errors.PartitionsFixed`, `PositionTrimmed`, `InvalidRequest` for a position beyond the feed's end,
    `ConsumerGroupInUse`; `faults.BeginAgain` if another transaction has just defined it.
    """
    row = tx.execute(sa.select(tables.process_definitions).where(_definitions.name == name)).first()
    if row is not None and row.deleted_at is not None:
        raise faults.BeginAgain  # its remaining rows are being removed
    group, partition_count = group_of(name), partitions_of(tx, name)
    if row is None and partition_count is not None:
        _remove_group_of_client(tx, name)
        partition_count = None
    groups.put(tx, group, partitions or partition_count or PARTITIONS, ttl, release)
    if row is None:
        # The head stays locked until the commit, so that no event that this process must read is trimmed.
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
    try:
        return get(tx, name), row is None
    except errors.ProcessNotFound:
        raise faults.BeginAgain from None  # it was deleted since its row was read


def _remove_group_of_client(tx: Connection, name: str) -> None:
    """Remove the consumer group that a client created under the name of the process's: its positions are others. Raises
    `errors.ConsumerGroupInUse`; `faults.BeginAgain` if the process was defined since, or the group was deleted."""
    try:
        groups.lock(tx, group_of(name))
    except errors.ConsumerGroupNotFound:
        raise faults.BeginAgain from None
    if tx.execute(sa.select(_definitions.name).where(_definitions.name == name)).first() is not None:
        raise faults.BeginAgain
    groups.delete(tx, group_of(name))


def get(tx: Connection, name: str) -> Definition:
    """Raises `errors.ProcessNotFound`."""
    definitions = all_of(tx, _definitions.name == name)
    if not definitions:
        raise errors.ProcessNotFound(name)
    return definitions[0]


def all_of(tx: Connection, *conditions: sa.ColumnElement[bool]) -> list[Definition]:
    """The processes that meet the conditions, ordered by name."""
    query = (
        sa.select(tables.process_definitions)
        .where(_definitions.deleted_at.is_(None), *conditions)
        .order_by(_definitions.name)
    )
    rows = tx.execute(query).all()
    # Trimmed events were handled in all partitions, even if the positions went with a deleted consumer group.
    trimmed = feed.trimmed(tx) if rows else 0
    return [
        # There is no consumer group if it was deleted. Defining the process again creates it again.
        Definition(
            name=row.name,
            group=group_of(row.name),
            partitions=partitions_of(tx, row.name) or 0,
            after=max(row.pruned, trimmed),
            created_at=row.created_at,
            unnamed=row.unnamed,
            unnamed_upto=row.unnamed_upto,
        )
        for row in rows
    ]


def partitions_of(tx: Connection, name: str) -> int | None:
    """The partitions of the process's consumer group; None if there is none."""
    return partition_counts(tx, [name]).get(name)


def partition_counts(tx: Connection, names: Collection[str]) -> dict[str, int]:
    """The partitions of the processes' consumer groups, without the processes that have none."""
    process_of = {group_of(name): name for name in names}
    texts = [
        "SELECT name, partitions FROM consumer_groups "  # noqa: S608
        f"WHERE {among(tx, ('name',), [(group,) for group in part])} AND deleted_at IS NULL"
        for part in chunks(sorted(process_of), LIST)
    ]
    rows = [row for rows in run(tx, *texts) for row in rows]
    return {process_of[as_text(group) or ""]: count for group, count in rows}


def count_unnamed(tx: Connection, name: str, after: int, upto: int, count: int) -> Definition:
    """Count events that named no instance: those above `after`, up to `upto`. Changes nothing if the events have been
    counted up to another position than `after`: by an earlier attempt of this call, or by another worker. Return the
    process as it is then. Raises `errors.ProcessNotFound`."""
    tx.execute(
        sa.update(tables.process_definitions)
        .where(_definitions.name == name, _definitions.deleted_at.is_(None), _definitions.unnamed_upto == after)
        .values(unnamed=_definitions.unnamed + count, unnamed_upto=upto)
    )
    return get(tx, name)


def floor(tx: Connection, definition: Definition) -> int:
    """The position up to which all partitions have handled all events."""
    query = sa.select(sa.func.min(_positions.floor), sa.func.count(_positions.floor), sa.func.count())
    lowest, committed, partitions = tx.execute(query.where(_positions.group_name == definition.group)).one()
    return definition.after if not partitions or committed < partitions else max(definition.after, lowest)


def needed(tx: Connection) -> int | None:
    """The lowest position that a process must still read; None if there is no process."""
    return min((floor(tx, definition) + 1 for definition in all_of(tx)), default=None)


def prune(database: Database, keep: int = inbox.KEEP) -> int:
    """Prune the inboxes of all processes: remove rows at least `keep` positions below the lowest floor. Return the
    number of removed rows."""
    count = 0
    for definition in database.read(all_of):
        database.write(_raise_pruned, definition.name, keep)
        for status in inbox.PRUNED:
            count += database.write_in_chunks(_remove_pruned, definition.name, status)
    return count


def _raise_pruned(tx: Connection, name: str, keep: int) -> None:
    if _lock(tx, name, deleted=False):
        limit = floor(tx, get(tx, name)) - keep
        tx.execute(
            sa.update(tables.process_definitions)
            .where(_definitions.name == name, _definitions.pruned < limit)
            .values(pruned=limit)
        )


def _remove_pruned(tx: Connection, name: str, status: inbox.Status) -> int:
    row = _lock(tx, name, deleted=False)
    return inbox.remove_chunk(tx, name, status, row.pruned) if row else 0


def _lock(tx: Connection, name: str, *, deleted: bool) -> Any:
    """The process's row, if it is in this state. Locked, because the process may be deleted and defined again between
    any two transactions; the rows of the new one must stay."""
    state = _definitions.deleted_at.is_not(None) if deleted else _definitions.deleted_at.is_(None)
    query = sa.select(tables.process_definitions).where(_definitions.name == name, state)
    return tx.execute(query.with_for_update()).first()


def delete(database: Database, name: str) -> None:
    """Remove a process with its consumer group, instances, inbox and timers. Its commands stay as long as the feed has
    their events (see `retention`), so that the process, if defined again, doesn't issue them again.

    Raises `errors.ProcessNotFound`, `ConsumerGroupInUse`.
    """

    def condemn(tx: Connection) -> None:
        get(tx, name)
        try:
            groups.delete(tx, group_of(name))
        except errors.ConsumerGroupNotFound:
            # A client may have deleted it. Or another call has deleted the process, which may be defined again by now.
            if _lock(tx, name, deleted=False) is None:
                raise errors.ProcessNotFound(name) from None
            if partitions_of(tx, name) is not None:
                raise faults.BeginAgain from None
        tx.execute(
            sa.update(tables.process_definitions).where(_definitions.name == name).values(deleted_at=tables.utc_now())
        )

    database.write(condemn)
    sweep(database)


def sweep(database: Database) -> None:
    """Remove the rows of deleted processes, including those that an interrupted call has left."""
    query = sa.select(_definitions.name).where(_definitions.deleted_at.is_not(None))
    for name in database.read(lambda tx: tx.scalars(query).all()):
        for table in (tables.timers, tables.inbox, tables.processes):
            database.write_in_chunks(_remove, table, name)
        # Until this row is removed, the process can't be defined again.
        statement = sa.delete(tables.process_definitions).where(
            _definitions.name == name, _definitions.deleted_at.is_not(None)
        )
        database.write(lambda tx, statement=statement: tx.execute(statement).rowcount)  # type: ignore[misc]


def _remove(tx: Connection, table: sa.Table, name: str) -> int:
    """Remove a chunk of a deleted process's rows. Return the number of rows."""
    if not _lock(tx, name, deleted=True):
        return 0
    key = list(table.primary_key)
    query = sa.select(*key).where(table.c.name == name).order_by(*key).limit(CHUNK)
    rows = [tuple(row) for row in tx.execute(query)]
    if rows:
        condition = among(tx, [column.name for column in key], rows)
        run(tx, f"DELETE FROM {table.name} WHERE {condition}")  # noqa: S608
    return len(rows)
