"""Ownership of partitions. One call, `sync`, renews a worker's lease and acquires and releases partitions, in one
transaction.

There is no leader and no election. Ownership changes only under the lock of the consumer group's row, and each worker's
own call moves that worker towards its equal share (`shares`).

Possible failures, and why they can't happen:

* *Two owners.* Ownership changes only under the row lock of the consumer group. Every new owner gets a higher epoch, in
  the row that each guarded write locks (`positions.fence`). Each process has a random session, so a restarted worker
  is a new owner too, even under its old name.
* *A worker that died.* It has one lease on all its partitions; after it expires, the next sync of any worker frees
  them. The lease is in the worker's row, so a heartbeat writes only that row.
* *A new worker that is ignored.* Its first sync inserts its row. From then on, all shares take it into account, even
  before it owns a partition.
* *A hand-over that gets stuck.* Surplus partitions are released in two steps: each sync of the owner lists them
  (`release`), and the owner reports when they are drained. The deadline is set once, with the first request. After it,
  any worker's sync frees the partition, even if its owner is alive. A release is never cancelled: the partition becomes
  free, and its next owner, even the same worker, gets a new epoch. So a request to release stays valid.
* *A request to release that is lost.* The owner goes on until its next sync, or until the lease ends that it knew of
  before. So the deadline is not earlier than that, however short the group's time to release is.
* *A delayed report of an earlier release.* A sync may arrive after its worker has drained the partition, lost it, got
  it back and was asked to release it again. So `drained` names the epoch that was drained; the worker may still be
  working at a later epoch.
* *The clock jumps.* Time is the database's. It is read after the consumer group's row is locked, because a statement
  that waits for a lock has the time before the wait. If the clock jumps forward, leases end early and their workers are
  fenced. If it jumps back, each lease and deadline is shortened to what it would be if it were set now.
* *All workers were disconnected for a while*, or the clock jumped forward. The first worker to sync would find all
  other leases expired and acquire their partitions, only to release them again. So a caller whose own lease has expired
  spares workers that were live when it last synced. Its next sync, a third of a ttl later, removes them too if their
  leases are still expired.
* *The group is deleted and created again under its name*, while a worker is suspended. Its epochs continue above those
  of the deleted one, so no fence of an old worker holds, and its reports of drained partitions are ignored. Each
  response has the `incarnation`, so that the worker doesn't continue with what it knew of the deleted group.
* *The old process of a restarted worker syncs again.* It gets `SessionReplaced`, and can't take the name back while its
  successor's lease lasts. Otherwise the two would keep fencing each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from core import errors
from core.consumer_groups import groups, shares
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks

log = structlog.get_logger(__name__)

REPLACED: Final = 8
"""The number of replaced sessions of a worker that are stored."""

_consumers = tables.consumers.c
_positions = tables.positions.c


@dataclass(frozen=True, slots=True)
class Caller:
    """A worker that syncs. `session` is random for each process. `capacity` is the maximum number of partitions that it
    accepts (None: no limit). `drained` has the partitions to release that it has drained, with their epochs (None: any
    epoch)."""

    worker: str
    session: str
    capacity: int | None = None
    drained: Collection[tuple[int, int | None]] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """A partition that the worker owns at `epoch`, and its position: `outstanding` is a snapshot of the window."""

    partition: int
    epoch: int
    floor: int | None
    high: int | None
    outstanding: bytes | None
    token: str | None


@dataclass(frozen=True, slots=True)
class Synced:
    """All partitions that the worker owns, and those of them that it must drain and release within `release_within`."""

    ttl: timedelta
    assigned: list[Held]
    release: list[int]
    release_within: timedelta
    group_partitions: int
    """The number of the consumer group's partitions."""
    incarnation: str
    """See `groups.ConsumerGroup`."""
    joined: bool
    """The worker is new in the consumer group, or has a new session."""
    gone: list[str]
    """Workers whose leases had expired."""
    overdue: list[int]
    """Partitions that were freed after their deadline, although their owners had not reported them as drained."""


@dataclass(slots=True)
class _Partitions:
    """The partitions of a consumer group before a sync, in ascending order."""

    free: list[int] = field(default_factory=list)
    """Partitions without an owner."""
    freed: list[int] = field(default_factory=list)
    """Partitions whose owner's lease has expired, or whose owner has drained them."""
    overdue: list[int] = field(default_factory=list)
    """Partitions whose deadline for the release has passed."""
    mine: list[int] = field(default_factory=list)
    """Partitions that the caller owns and need not release."""
    leaving: int = 0
    """The number of partitions that the caller must release."""
    late: list[int] = field(default_factory=list)
    """Partitions whose deadline is later than if it was set now: the clock was set back."""
    holding: dict[str, int] = field(default_factory=dict)
    """By live worker, the number of partitions that it owns and need not release."""


_FACTS: Final = (_positions.partition_no, _positions.owner, _positions.epoch, _positions.release_by)


def sync(tx: Connection, name: str, caller: Caller) -> Synced:
    """Renew the caller's lease and free partitions. Then acquire partitions for the caller, or request their release,
    to match the caller's share. May be repeated at any time. The number of statements hardly depends on the number of
    partitions.

    Raises `errors.ConsumerGroupNotFound`, `errors.SessionReplaced`, `errors.InvalidRequest` for a partition that the
    group doesn't have.
    """
    group = groups.lock(tx, name)
    now = tables.clock(tx)
    for place, (number, epoch) in enumerate(caller.drained):
        is_of_deleted_group = epoch is not None and epoch <= group.first_epoch
        if number >= group.partitions and not is_of_deleted_group:
            raise errors.InvalidRequest(f"body.drained[{place}]", f"expected at most {group.partitions - 1}")
    workers = {row.worker: row for row in tx.execute(sa.select(tables.consumers).where(_consumers.group_name == name))}
    before = workers.get(caller.worker)
    is_new_session = False
    if before is not None and before.session != caller.session:
        if caller.session in before.replaced.split() and before.lease_until >= now:
            raise errors.SessionReplaced(name, caller.worker)
        is_new_session = True
    expired = _gone(workers.values(), before, now, group)
    capacities = {worker: row.capacity for worker, row in workers.items() if worker not in expired}
    capacities[caller.worker] = caller.capacity
    if any(row.lease_until > now + group.ttl for row in workers.values()):
        _clamp_leases(tx, name, now, now + group.ttl)

    deadline = now + max(group.release, group.ttl)
    partitions = _look(tx, group, now, deadline, caller, capacities.keys(), is_new_session=is_new_session)
    share = shares.targets(partitions.holding, capacities, group.partitions)[caller.worker]
    kept, surplus = partitions.mine[:share], partitions.mine[share:]
    available = sorted(partitions.free + partitions.freed + partitions.overdue)
    room = group.partitions if caller.capacity is None else max(0, caller.capacity - len(kept) - partitions.leaving)
    acquired = available[: min(share - len(kept), room)]
    vacated = sorted({*partitions.freed, *partitions.overdue}.difference(acquired))
    if is_new_session:  # a new process works on no partition yet: it has nothing to drain, and all get a new epoch
        vacated, surplus = vacated + surplus, []
        acquired = acquired + kept
    changed = sorted({*partitions.late, *vacated, *acquired, *surplus})
    for part in chunks(changed, LIST):
        _lock(tx, name, _positions.partition_no.in_(part))
    _update(tx, name, partitions.late, release_by=deadline)
    _update(tx, name, vacated, owner=None, owned_since=None, release_by=None)
    ownership = {"owner": caller.worker, "epoch": _positions.epoch + 1, "owned_since": now, "release_by": None}
    _update(tx, name, acquired, **ownership)
    if before is not None:
        _update(tx, name, surplus, release_by=max(now + group.release, min(before.lease_until, now + group.ttl)))

    if expired:
        tx.execute(sa.delete(tables.consumers).where(_consumers.group_name == name, _consumers.worker.in_(expired)))
    _renew(tx, name, caller, before, now, now + group.ttl)
    assigned, release = _held(tx, name, caller.worker)
    is_new = before is None or is_new_session
    identity = group.partitions, group.incarnation
    return Synced(group.ttl, assigned, release, group.release, *identity, is_new, expired, partitions.overdue)


def synced(database: Database, name: str, caller: Caller) -> Synced:
    """`sync` in a transaction, logging joins, expired workers and overdue releases."""
    answer = database.write(sync, name, caller)
    if answer.joined:
        log.info("consumer_joined", group=name, worker=caller.worker)
    for worker in answer.gone:
        log.warning("consumer_gone", group=name, worker=worker)
    if answer.overdue:
        log.warning("release_overdue", group=name, partitions=answer.overdue)
    return answer


def leave(tx: Connection, name: str, worker: str, session: str | None = None) -> None:
    """Free all partitions of the worker at once. Do nothing if the worker is not in the consumer group, or now has
    another session. Raises `errors.ConsumerGroupNotFound`."""
    groups.lock(tx, name)
    conditions = [_consumers.group_name == name, _consumers.worker == worker]
    if session is not None:
        conditions.append(_consumers.session == session)
    if tx.execute(sa.delete(tables.consumers).where(*conditions)).rowcount:
        _lock(tx, name, _positions.owner == worker)
        tx.execute(
            sa.update(tables.positions)
            .where(_positions.group_name == name, _positions.owner == worker)
            .values(owner=None, owned_since=None, release_by=None)
        )


def _gone(workers: Iterable[Any], before: Any, now: datetime, group: groups.ConsumerGroup) -> list[str]:
    """The workers whose leases have expired. If the caller's own lease has expired too, without those that were live at
    its last sync."""
    late = before is not None and before.lease_until < now
    return sorted(
        row.worker
        for row in workers
        if row.lease_until < now and row is not before and not (late and row.last_seen + group.ttl >= before.last_seen)
    )


def _look(
    tx: Connection,
    group: groups.ConsumerGroup,
    now: datetime,
    deadline: datetime,
    caller: Caller,
    live: Collection[str],
    *,
    is_new_session: bool,
) -> _Partitions:
    partitions = _Partitions(holding=dict.fromkeys(live, 0))
    # No lock is needed: these columns change only under the consumer group's lock.
    rows = tx.execute(sa.select(*_FACTS).where(_positions.group_name == group.name).order_by(_positions.partition_no))
    drained = frozenset(caller.drained)
    for number, owner, epoch, release_by in rows:
        if release_by is not None and release_by > deadline:
            partitions.late.append(number)
        if owner is None:
            partitions.free.append(number)
        elif owner not in partitions.holding:
            partitions.freed.append(number)
        elif release_by is None:
            partitions.holding[owner] += 1
            if owner == caller.worker:
                partitions.mine.append(number)
        elif owner == caller.worker and (is_new_session or not drained.isdisjoint({(number, epoch), (number, None)})):
            partitions.freed.append(number)
        elif release_by <= now:
            partitions.overdue.append(number)
        else:
            partitions.leaving += owner == caller.worker
    return partitions


def _clamp_leases(tx: Connection, name: str, now: datetime, until: datetime) -> None:
    tx.execute(
        sa.update(tables.consumers)
        .where(_consumers.group_name == name, _consumers.lease_until > until)
        .values(lease_until=until, last_seen=now)
    )


def _lock(tx: Connection, name: str, condition: sa.ColumnElement[bool]) -> None:
    """Lock these positions, in one order, before any of them changes (see `lock_order`)."""
    query = sa.select(_positions.partition_no).where(_positions.group_name == name, condition)
    tx.execute(query.order_by(_positions.partition_no).with_for_update())


def _update(tx: Connection, name: str, numbers: Sequence[int], **values: Any) -> None:
    for part in chunks(list(numbers), LIST):
        tx.execute(
            sa.update(tables.positions)
            .where(_positions.group_name == name, _positions.partition_no.in_(part))
            .values(**values)
        )


def _renew(tx: Connection, name: str, caller: Caller, before: Any, now: datetime, until: datetime) -> None:
    values = {"session": caller.session, "capacity": caller.capacity, "last_seen": now, "lease_until": until}
    if before is None:
        tx.execute(
            sa.insert(tables.consumers).values(
                group_name=name, worker=caller.worker, replaced="", started_at=now, **values
            )
        )
        return
    if before.session != caller.session:
        earlier = [before.session, *before.replaced.split()][:REPLACED]
        values |= {"replaced": " ".join(earlier), "started_at": now}
    tx.execute(
        sa.update(tables.consumers)
        .where(_consumers.group_name == name, _consumers.worker == caller.worker)
        .values(**values)
    )


def _held(tx: Connection, name: str, worker: str) -> tuple[list[Held], list[int]]:
    # Read after the epochs increased: the previous owners have committed their writes by now, or are fenced.
    rows = tx.execute(
        sa.select(tables.positions)
        .where(_positions.group_name == name, _positions.owner == worker)
        .order_by(_positions.partition_no)
    ).all()
    held = [Held(row.partition_no, row.epoch, row.floor, row.high, row.outstanding, row.token) for row in rows]
    return held, [row.partition_no for row in rows if row.release_by is not None]
