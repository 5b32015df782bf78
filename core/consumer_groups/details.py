"""One consumer group as an operator sees it: its workers and its partitions, read in one snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.consumer_groups import groups, positions
from core.consumer_groups.groups import ConsumerGroup
from core.consumer_groups.positions import Position
from core.storage import tables

_consumers = tables.consumers.c


@dataclass(frozen=True, slots=True)
class Worker:
    """`live`: its lease has not expired. `partitions` is the number of partitions that it owns, `releasing` the number
    of these that it must release."""

    worker: str
    live: bool
    capacity: int | None
    started_at: datetime
    last_seen: datetime
    lease_until: datetime
    partitions: int
    releasing: int


@dataclass(frozen=True, slots=True)
class Details:
    group: ConsumerGroup
    workers: list[Worker]
    positions: list[Position]


def has_live_worker(snapshot: Connection, name: str) -> bool:
    """Whether the consumer group exists and has a worker whose lease has not expired."""
    live = _consumers.group_name == name, _consumers.lease_until >= tables.utc_now()
    return bool(snapshot.scalar(sa.select(sa.exists().where(*live))))


def get(snapshot: Connection, name: str) -> Details:
    """The consumer group with its workers and positions. Raises `errors.ConsumerGroupNotFound`."""
    group = groups.find(snapshot, name)
    partitions = positions.of_group(snapshot, name)
    now = tables.clock(snapshot)
    members = sa.select(tables.consumers).where(_consumers.group_name == name).order_by(_consumers.worker)
    owned = Counter(partition.owner for partition in partitions)
    releasing = Counter(partition.owner for partition in partitions if partition.release_by is not None)
    workers = [
        Worker(
            worker=row.worker,
            live=row.lease_until >= now,
            capacity=row.capacity,
            started_at=row.started_at,
            last_seen=row.last_seen,
            lease_until=row.lease_until,
            partitions=owned[row.worker],
            releasing=releasing[row.worker],
        )
        for row in snapshot.execute(members)
    ]
    return Details(group, workers, partitions)
