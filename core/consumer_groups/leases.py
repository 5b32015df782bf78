"""Who holds which partition: one call, `sync`, is heartbeat, taking and giving back, in one transaction.

There is no leader and no election: the transaction that holds the group's row is the leader, and each worker's own call
does to that worker what equal shares ask (`shares`).

What could go wrong, and why it cannot:

* *Two owners.* Ownership changes under the group's row lock alone, and with every new owner the epoch goes up, in the
  row that each guarded write locks (`groups.fence`). A session is random for each process, so one that was started
  again under its old name is a new owner too.
* *A worker that died.* It has one lease, on all that it holds; whoever syncs next after its end frees its partitions.
  The lease is in the worker's row, so a heartbeat writes that row and no other.
* *A newcomer that nobody sees.* Its first sync makes its row, and from then on it counts in everybody's share, with
  nothing to its name yet.
* *A hand-over that gets stuck.* Surplus is given back in two steps: the owner is told (`release`), again at each sync,
  and says when it is drained. The deadline is set once, when it is told first; after it anybody's sync frees the
  partition, alive though its owner may be. What is to be given back is not taken back on second thoughts: it comes
  round as a free one, at the next epoch, so what a worker was once told stays true.
* *A late word of an earlier release.* A sync may be delayed until its worker has drained the partition, lost it, got it
  back and was asked for it again. So `drained` bears the epoch that was drained; a later one is still worked on.
* *The clock jumps.* It is the database's, read after the group's row is locked, as a statement that waits has the time
  of before the wait. Forward, leases end early, and their workers are fenced. Backward, no lease and no deadline is
  left further away than it would be if it were given now.
* *Everybody was cut off for a while*, or the clock jumped forward. Whoever came first would find all others dead and
  take what they hold, to give it back at once. So a caller whose own lease has ended spares those that were there when
  it synced last; at its next sync, a third of a ttl later, it spares nobody.
* *The zombie of a worker that was started again syncs.* It is told that it was replaced, and can't take the name back
  while its successor's lease lasts; the two would fence each other in turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Connection

from core import errors, tables
from core.consumer_groups import groups, shares
from core.storage.database import Database
from core.storage.statements import LIST, chunks

log = structlog.get_logger(__name__)

REPLACED: Final = 8
"""How many sessions that went by a name before are known."""

_consumers = tables.consumers.c
_positions = tables.positions.c


@dataclass(frozen=True, slots=True)
class Caller:
    """Who syncs: `session` is random for each process, `capacity` the most partitions that it takes (None: any
    number). `drained` are the partitions, with their epochs, that it had to give back and no longer works on; None: at
    whichever epoch it holds them."""

    worker: str
    session: str
    capacity: int | None = None
    drained: Collection[tuple[int, int | None]] = ()


@dataclass(frozen=True, slots=True)
class Held:
    """A partition that the worker owns at `epoch`, and how far it was read: `outstanding` is a snapshot of the
    window."""

    partition: int
    epoch: int
    floor: int | None
    high: int | None
    outstanding: bytes | None
    token: str | None


@dataclass(frozen=True, slots=True)
class Synced:
    """All that the worker holds now, and which of these it is to give back, drained within a time."""

    ttl: timedelta
    assigned: list[Held]
    release: list[int]
    release_within: timedelta
    joined: bool
    """It was not in the group, or it was another process."""
    gone: list[str]
    """Workers whose leases were found to have ended."""
    overdue: list[int]
    """Partitions that were freed though nobody had said that they were drained."""


@dataclass(slots=True)
class _Partitions:
    """Those of a group, as a sync finds them. Ascending numbers."""

    free: list[int] = field(default_factory=list)
    """Without an owner already."""
    freed: list[int] = field(default_factory=list)
    """Whose owner is gone or has drained them."""
    overdue: list[int] = field(default_factory=list)
    mine: list[int] = field(default_factory=list)
    """Those that the caller is not to give back."""
    leaving: int = 0
    """How many the caller is to give back."""
    holding: dict[str, int] = field(default_factory=dict)
    """By live worker, how many it is not to give back."""


_FACTS: Final = (_positions.partition_no, _positions.owner, _positions.epoch, _positions.release_by)


def sync(tx: Connection, name: str, caller: Caller) -> Synced:
    """Renew the caller's lease, free what is to be freed, and take or mark for release what its share asks for. May be
    repeated at any time. A handful of statements, however many partitions there are.

    Raises `errors.ConsumerGroupNotFound`, `errors.SessionReplaced`, `errors.InvalidRequest` for a partition that the
    group doesn't have.
    """
    group = groups.lock(tx, name)
    now = tables.clock(tx)
    for place, (number, _) in enumerate(caller.drained):
        if number >= group.partitions:
            raise errors.InvalidRequest(f"body.drained[{place}]", f"expected at most {group.partitions - 1}")
    workers = {row.worker: row for row in tx.execute(sa.select(tables.consumers).where(_consumers.group_name == name))}
    before = workers.get(caller.worker)
    restarted = False
    if before is not None and before.session != caller.session:
        if caller.session in before.replaced.split() and before.lease_until >= now:
            raise errors.SessionReplaced(name, caller.worker)
        restarted = True
    gone = _gone(workers.values(), before, now, group)
    capacities = {worker: row.capacity for worker, row in workers.items() if worker not in gone}
    capacities[caller.worker] = caller.capacity
    if any(row.lease_until > now + group.ttl for row in workers.values()):
        _clamp_leases(tx, name, now, now + group.ttl)

    found = _look(tx, group, now, caller, capacities.keys(), restarted=restarted)
    share = shares.targets(found.holding, capacities, group.partitions)[caller.worker]
    mine, surplus = found.mine[:share], found.mine[share:]
    available = sorted(found.free + found.freed + found.overdue)
    most = group.partitions if caller.capacity is None else max(0, caller.capacity - len(mine) - found.leaving)
    taken = available[: min(share - len(mine), most)]
    freed = sorted({*found.freed, *found.overdue}.difference(taken))
    if restarted:  # this process works on none of them yet, so there is nothing to drain, and all is news to it
        freed, surplus = freed + surplus, []
        taken = taken + mine
    _update(tx, name, freed, owner=None, owned_since=None, release_by=None)
    own = {"owner": caller.worker, "epoch": _positions.epoch + 1, "owned_since": now, "release_by": None}
    _update(tx, name, taken, **own)
    _update(tx, name, surplus, release_by=now + group.release)

    if gone:
        tx.execute(sa.delete(tables.consumers).where(_consumers.group_name == name, _consumers.worker.in_(gone)))
    _renew(tx, name, caller, before, now, now + group.ttl)
    assigned, release = _held(tx, name, caller.worker)
    joined = before is None or restarted
    return Synced(group.ttl, assigned, release, group.release, joined, gone, found.overdue)


def synced(database: Database, name: str, caller: Caller) -> Synced:
    """`sync` in a transaction of its own, with its lines in the log."""
    answer = database.write(sync, name, caller, repeatable=True)
    if answer.joined:
        log.info("consumer_joined", group=name, worker=caller.worker)
    for worker in answer.gone:
        log.warning("consumer_gone", group=name, worker=worker)
    if answer.overdue:
        log.warning("release_overdue", group=name, partitions=answer.overdue)
    return answer


def leave(tx: Connection, name: str, worker: str, session: str | None = None) -> None:
    """Free all that the worker holds, at once. Nothing happens where it is not in the group, or is another session by
    now. Raises `errors.ConsumerGroupNotFound`."""
    groups.lock(tx, name)
    this = [_consumers.group_name == name, _consumers.worker == worker]
    if session is not None:
        this.append(_consumers.session == session)
    if tx.execute(sa.delete(tables.consumers).where(*this)).rowcount:
        tx.execute(
            sa.update(tables.positions)
            .where(_positions.group_name == name, _positions.owner == worker)
            .values(owner=None, owned_since=None, release_by=None)
        )


def _gone(workers: Iterable[Any], before: Any, now: datetime, group: groups.ConsumerGroup) -> list[str]:
    """Whose leases have ended. A caller that is late itself spares, this once, those that were there when it synced
    last."""
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
    caller: Caller,
    live: Collection[str],
    *,
    restarted: bool,
) -> _Partitions:
    found = _Partitions(holding=dict.fromkeys(live, 0))
    # No lock is needed: these change under that of the group alone.
    rows = tx.execute(sa.select(*_FACTS).where(_positions.group_name == group.name).order_by(_positions.partition_no))
    deadline, latest = now + group.release, now
    drained = frozenset(caller.drained)
    for number, owner, epoch, release_by in rows:
        if owner is None:
            found.free.append(number)
        elif owner not in found.holding:
            found.freed.append(number)
        elif release_by is None:
            found.holding[owner] += 1
            if owner == caller.worker:
                found.mine.append(number)
        elif owner == caller.worker and (restarted or not drained.isdisjoint({(number, epoch), (number, None)})):
            found.freed.append(number)
        elif release_by <= now:
            found.overdue.append(number)
        else:
            latest = max(latest, release_by)
            found.leaving += owner == caller.worker
    if latest > deadline:
        tx.execute(
            sa.update(tables.positions)
            .where(_positions.group_name == group.name, _positions.release_by > deadline)
            .values(release_by=deadline)
        )
    return found


def _clamp_leases(tx: Connection, name: str, now: datetime, until: datetime) -> None:
    tx.execute(
        sa.update(tables.consumers)
        .where(_consumers.group_name == name, _consumers.lease_until > until)
        .values(lease_until=until, last_seen=now)
    )


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
    # After the epochs went up: whoever owned them before has written by now, or never will.
    rows = tx.execute(
        sa.select(
            *(_positions.partition_no, _positions.epoch, _positions.floor, _positions.high, _positions.outstanding),
            *(_positions.token, _positions.release_by),
        )
        .where(_positions.group_name == name, _positions.owner == worker)
        .order_by(_positions.partition_no)
    ).all()
    return [Held(*row[:-1]) for row in rows], [row.partition_no for row in rows if row.release_by is not None]
