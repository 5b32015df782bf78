"""Consumer groups: a fixed number of partitions, shared by a few workers. Their records, positions and the fence.

A partition's row has its owner, its epoch and its position. A transaction that writes for a partition locks this row
and checks that the writer is still the owner at the epoch it was given (`fence`). Every new owner gets a higher epoch,
so only the current owner can write, however long a former owner was paused. The lease, in the worker's row, decides
only when another worker *may* become the owner (`leases`), so safety depends on no clock.

Lock order: consumer_groups → positions → … → item_groups → batches → feed_head.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core import errors, metrics, tables
from core.storage import faults, galera
from lastbit.streams.errors import CorruptSnapshot
from lastbit.streams.snapshot import Snapshot

MOST_PARTITIONS: Final = 4096
OWN_NAMES: Final = "lastbit."
"""The prefix of internal consumer groups."""
PARTITION_OF: Final = "crc32"
"""The function from keys to partitions (`lastbit.streams.partition_of`). It is recorded, so that clients can detect
that they use another one."""
TTL: Final = timedelta(seconds=10)
RELEASE: Final = timedelta(seconds=30)
SNAPSHOT: Final = 65_535
"""Bytes of a stored snapshot. A window of 65,536 consecutive offsets takes at most an eighth of that. Of a larger
snapshot, the part that doesn't fit is replayed."""

_groups = tables.consumer_groups.c
_consumers = tables.consumers.c
_positions = tables.positions.c


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """`ttl` is how long a lease lasts, `release` how long a worker may take to drain a partition that it must
    release."""

    name: str
    partitions: int
    partition_of: str
    ttl: timedelta
    release: timedelta
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Summary:
    """A consumer group with the numbers of its live workers and its owned partitions."""

    group: ConsumerGroup
    workers: int
    owned: int


@dataclass(frozen=True, slots=True)
class Worker:
    """`live`: its lease has not expired. `partitions` is how many it owns, `releasing` how many of these it must
    release."""

    worker: str
    live: bool
    capacity: int | None
    started_at: datetime
    last_seen: datetime
    lease_until: datetime
    partitions: int
    releasing: int


@dataclass(frozen=True, slots=True)
class Position:
    """A partition: its owner and its position. `outstanding` counts the unresolved offsets between `floor` and `high`;
    `head` is the last offset of the source that a worker reported."""

    partition: int
    owner: str | None
    epoch: int
    since: datetime | None
    release_by: datetime | None
    floor: int | None
    high: int | None
    outstanding: int | None
    head: int | None
    token: str | None
    updated_at: datetime | None

    @property
    def lag(self) -> int | None:
        """The known number of offsets above the floor; None if nothing was committed yet."""
        if self.floor is None or self.high is None:
            return None
        return max(self.high, self.head or 0) - self.floor


@dataclass(frozen=True, slots=True)
class Details:
    group: ConsumerGroup
    workers: list[Worker]
    positions: list[Position]


@dataclass(frozen=True, slots=True)
class Fence:
    """The condition of a guarded write: `worker` must own the partition at this `epoch`."""

    group: str
    partition: int
    worker: str
    epoch: int


def _milliseconds(time: timedelta) -> int:
    return round(time / timedelta(milliseconds=1))


def _group(row: Any) -> ConsumerGroup:
    ttl, release = timedelta(milliseconds=row.ttl_ms), timedelta(milliseconds=row.release_ms)
    return ConsumerGroup(row.name, row.partitions, row.partition_of, ttl, release, row.created_at)


def lock(tx: Connection, name: str) -> ConsumerGroup:
    """The consumer group, locked: until the commit no other worker joins, leaves, or gets a partition. Raises
    `errors.ConsumerGroupNotFound`."""
    group = _find(tx, name, locked=True)
    galera.guard(tx, _groups.first_epoch, _groups.name == name)
    return group


def _find(tx: Connection, name: str, *, locked: bool = False) -> ConsumerGroup:
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
    tx.execute(sa.update(tables.consumer_groups).where(_groups.name == name).values(deleted_at=now, first_epoch=last))


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


def get(snapshot: Connection, name: str) -> Details:
    """The consumer group with its workers and positions. Raises `errors.ConsumerGroupNotFound`."""
    group = _find(snapshot, name)
    query = sa.select(*_SHOWN).where(_positions.group_name == name).order_by(_positions.partition_no)
    positions = [Position(*row) for row in snapshot.execute(query)]
    now = tables.clock(snapshot)
    members = sa.select(tables.consumers).where(_consumers.group_name == name).order_by(_consumers.worker)
    owned = Counter(position.owner for position in positions)
    releasing = Counter(position.owner for position in positions if position.release_by is not None)
    workers = [
        Worker(
            *(row.worker, row.lease_until >= now, row.capacity, row.started_at, row.last_seen, row.lease_until),
            *(owned[row.worker], releasing[row.worker]),
        )
        for row in snapshot.execute(members)
    ]
    return Details(group, workers, positions)


_SHOWN: Final = (
    *(_positions.partition_no, _positions.owner, _positions.epoch, _positions.owned_since, _positions.release_by),
    *(_positions.floor, _positions.high, _positions.outstanding_count, _positions.head, _positions.token),
    _positions.updated_at,
)


def fence(tx: Connection, group: str, partition: int, worker: str, epoch: int) -> None:
    """Raise `errors.StaleEpoch` unless the worker owns the partition at this epoch; if so, it stays the owner until the
    commit. Must be called before any write on the worker's behalf. Raises `errors.ConsumerGroupNotFound`."""
    conditions = (_positions.group_name == group, _positions.partition_no == partition)
    row = tx.execute(sa.select(_positions.owner, _positions.epoch).where(*conditions).with_for_update()).first()
    if row is None:
        _find(tx, group)
    if row is None or row.owner != worker or row.epoch != epoch:
        metrics.STALE_EPOCHS.inc()
        raise errors.StaleEpoch(group, partition, worker, epoch)
    galera.guard(tx, _positions.epoch, *conditions)


def commit(
    tx: Connection, holds: Fence, snapshot: Snapshot, *, token: str | None = None, head: int | None = None
) -> Position:
    """Merge a window's snapshot into the partition's position, and return the position. A repeated or older snapshot
    changes nothing. The `token` of the snapshot with the higher floor is kept.

    Raises `errors.StaleEpoch`, `errors.ConsumerGroupNotFound`.
    """
    fence(tx, holds.group, holds.partition, holds.worker, holds.epoch)
    conditions = (_positions.group_name == holds.group, _positions.partition_no == holds.partition)
    row = tx.execute(
        sa.select(_positions.floor, _positions.high, _positions.outstanding, _positions.token).where(*conditions)
    ).one()
    earlier = None if row.floor is None else _stored(row)
    result = (snapshot if earlier is None else earlier.merge(snapshot)).within(SNAPSHOT)
    values: dict[str, Any] = {
        "floor": result.floor,
        "high": result.high,
        "outstanding": result.encode(),
        "outstanding_count": len(result.outstanding),
        "updated_at": tables.utc_now(),
    }
    if token is not None and (earlier is None or snapshot.floor >= earlier.floor):
        values["token"] = token
    if head is not None:
        values["head"] = head
    tx.execute(sa.update(tables.positions).where(*conditions).values(values))
    return Position(*tx.execute(sa.select(*_SHOWN).where(*conditions)).one())


def _stored(row: Any) -> Snapshot:
    """The stored snapshot. If it can't be decoded, only its floor is used: events above it are replayed, none is
    skipped."""
    try:
        return Snapshot.decode(row.outstanding)
    except CorruptSnapshot:
        return Snapshot(row.floor, row.floor)
