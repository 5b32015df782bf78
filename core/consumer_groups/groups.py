"""Consumer groups: a fixed number of partitions, shared by a few workers.

Only the current owner of a partition can write for it (`positions.fence`). The lease, in the worker's row, decides only
when another worker *may* become the owner (`leases`), so safety depends on no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors
from core.storage import dialects, faults, tables

MOST_PARTITIONS: Final = 4096
OWN_NAMES: Final = "lastbit."
"""The prefix of internal consumer groups."""
OF_PROCESSES: Final = "process."
"""The prefix of the consumer groups of processes, whose offsets are the feed's positions."""
PARTITION_OF: Final = "crc32"
"""The function from keys to partitions (`lastbit.streams.partition_of`). It is recorded, so that a client that uses
another function can detect this."""
TTL: Final = timedelta(seconds=10)
RELEASE: Final = timedelta(seconds=30)

_groups = tables.consumer_groups.c
_consumers = tables.consumers.c
_positions = tables.positions.c


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """`ttl` is the duration of a lease, `release` the time that a worker has to drain a partition that it must
    release."""

    name: str
    partitions: int
    partition_of: str
    ttl: timedelta
    release: timedelta
    created_at: datetime
    first_epoch: int
    """The epochs of this consumer group's owners are above it. Those of earlier ones with this name are not."""
    incarnation: str
    """Differs between all consumer groups that have had this name."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A consumer group with the numbers of its live workers and its owned partitions."""

    group: ConsumerGroup
    workers: int
    owned: int


def _milliseconds(time: timedelta) -> int:
    return round(time / timedelta(milliseconds=1))


def _group(row: Any) -> ConsumerGroup:
    ttl, release = timedelta(milliseconds=row.ttl_ms), timedelta(milliseconds=row.release_ms)
    # The time is for a group that a failover has lost: its epochs are used again.
    incarnation = f"{row.first_epoch}-{row.created_at:%Y%m%d%H%M%S%f}"
    times = ttl, release, row.created_at
    return ConsumerGroup(row.name, row.partitions, row.partition_of, *times, row.first_epoch, incarnation)


def lock(tx: Connection, name: str) -> ConsumerGroup:
    """The consumer group, locked: until the commit no other worker joins, leaves, or gets a partition. Raises
    `errors.ConsumerGroupNotFound`."""
    group = find(tx, name, locked=True)
    dialects.of(tx).guard(tx, _groups.first_epoch, [(name,)])
    return group


def find(tx: Connection, name: str, *, locked: bool = False) -> ConsumerGroup:
    """Raises `errors.ConsumerGroupNotFound`."""
    query = sa.select(tables.consumer_groups).where(_groups.name == name, _groups.deleted_at.is_(None))
    row = tx.execute(query.with_for_update() if locked else query).first()
    if row is None:
        raise errors.ConsumerGroupNotFound(name)
    return _group(row)


def put(
    tx: Connection, name: str, partitions: int, ttl: timedelta | None, release: timedelta | None
) -> tuple[ConsumerGroup, bool]:
    """Create or update the consumer group; return it and whether it is new. A `ttl` or `release` of None stays
    unchanged.

    Raises `errors.PartitionsFixed` if it has another number of partitions; `faults.BeginAgain` if another transaction
    has just created it.
    """
    row = tx.execute(sa.select(tables.consumer_groups).where(_groups.name == name).with_for_update()).first()
    new = row is None or row.deleted_at is not None
    values: dict[str, Any] = {}
    if ttl is not None or new:
        values["ttl_ms"] = _milliseconds(ttl or TTL)
    if release is not None or new:
        values["release_ms"] = _milliseconds(RELEASE if release is None else release)
    if new:
        values |= {"partitions": partitions, "partition_of": PARTITION_OF, "created_at": tables.utc_now()}
    if row is None:
        try:
            tx.execute(sa.insert(tables.consumer_groups).values(name=name, first_epoch=0, **values))
        except IntegrityError as error:
            if faults.is_duplicate(error):
                raise faults.BeginAgain from error
            raise
    elif not new and row.partitions != partitions:
        raise errors.PartitionsFixed(name, row.partitions)
    elif values:
        tx.execute(sa.update(tables.consumer_groups).where(_groups.name == name).values(deleted_at=None, **values))
    if new:
        epoch = 0 if row is None else row.first_epoch
        rows = [{"group_name": name, "partition_no": number, "epoch": epoch} for number in range(partitions)]
        tx.execute(sa.insert(tables.positions), rows)
    return lock(tx, name), new


def delete(tx: Connection, name: str) -> None:
    """Remove the consumer group with its positions. Raises `errors.ConsumerGroupNotFound`, `ConsumerGroupInUse`."""
    lock(tx, name)
    now = tables.clock(tx)
    live = sa.select(sa.func.count()).where(_consumers.group_name == name, _consumers.lease_until >= now)
    if workers := tx.execute(live).scalar_one():
        raise errors.ConsumerGroupInUse(name, workers)
    last = tx.execute(sa.select(sa.func.max(_positions.epoch)).where(_positions.group_name == name)).scalar_one()
    tx.execute(sa.delete(tables.consumers).where(_consumers.group_name == name))
    tx.execute(sa.delete(tables.positions).where(_positions.group_name == name))
    values = {"deleted_at": now, "first_epoch": last + 1}  # another one, though no worker has ever owned a partition
    tx.execute(sa.update(tables.consumer_groups).where(_groups.name == name).values(values))


def page(snapshot: Connection, after: str | None, limit: int) -> list[Summary]:
    """Consumer groups with names above `after`, ordered by name."""
    query = sa.select(tables.consumer_groups).where(_groups.deleted_at.is_(None)).order_by(_groups.name).limit(limit)
    if after is not None:
        query = query.where(_groups.name > after)
    summaries = [_group(row) for row in snapshot.execute(query)]
    names = [group.name for group in summaries]
    live, owned = count(snapshot, names) if names else ({}, {})
    return [Summary(group, live.get(group.name, 0), owned.get(group.name, 0)) for group in summaries]


def count(snapshot: Connection, names: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """The numbers of live workers and of owned partitions, by consumer group."""
    live = (
        sa.select(_consumers.group_name, sa.func.count())
        .where(_consumers.group_name.in_(names), _consumers.lease_until >= tables.utc_now())
        .group_by(_consumers.group_name)
    )
    owned = (
        sa.select(_positions.group_name, sa.func.count())
        .where(_positions.group_name.in_(names), _positions.owner.is_not(None))
        .group_by(_positions.group_name)
    )
    workers, partitions = ({row[0]: row[1] for row in snapshot.execute(query)} for query in (live, owned))
    return workers, partitions
