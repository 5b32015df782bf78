"""Positions: the progress of each partition, and the fence, which refuses writes by anyone but its owner.

A partition's row has its owner, its epoch and its position. A transaction that writes for a partition locks this row
and checks that the writer is still the owner at the epoch it was given (`fence`). Every new owner gets a higher epoch,
so only the current owner can write, however long a former owner was paused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, metrics
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.consumer_groups import groups
from core.storage import dialects, tables
from core.storage.statements import LIST, Pipeline, among, as_text, chunks, inserts
from lastbit.streams.errors import CorruptSnapshot
from lastbit.streams.snapshot import Snapshot

SNAPSHOT: Final = 65_535
"""Maximum bytes of a stored snapshot. A window of 65,536 consecutive offsets takes at most an eighth of that. If a
snapshot is larger, the events of the part that doesn't fit are replayed."""

_positions = tables.positions.c


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
        """The number of known offsets above the floor; None if nothing has been committed."""
        if self.floor is None or self.high is None:
            return None
        return max(self.high, self.head or 0) - self.floor


@dataclass(frozen=True, slots=True)
class Fence:
    """The condition of a guarded write: `worker` must own the partition at this `epoch`."""

    group: str
    partition: int
    worker: str
    epoch: int


def of_group(snapshot: Connection, name: str) -> list[Position]:
    """The positions of the consumer group's partitions, in the partitions' order."""
    query = sa.select(*_SHOWN).where(_positions.group_name == name).order_by(_positions.partition_no)
    return [Position(*row) for row in snapshot.execute(query)]


_SHOWN: Final = (
    *(_positions.partition_no, _positions.owner, _positions.epoch, _positions.owned_since, _positions.release_by),
    *(_positions.floor, _positions.high, _positions.outstanding_count, _positions.head, _positions.token),
    _positions.updated_at,
)


def lock(pipeline: Pipeline, fences: Collection[Fence]) -> Callable[[], dict[Fence, errors.CoreError]]:
    """Lock the partitions of the fences in the next round trip, in one order. Call the result before any write on the
    workers' behalf: it returns the errors of the fences that don't hold, `StaleEpoch` or `ConsumerGroupNotFound`. The
    other workers stay the owners until the commit."""
    tx = pipeline.tx
    dialect = dialects.of(tx)
    locked = pipeline.query_keys(
        {(fence.group, fence.partition) for fence in fences},
        lambda part: (
            "SELECT group_name, partition_no, owner, epoch "  # noqa: S608
            f"FROM {dialect.by_primary_key('positions')} WHERE {among(tx, _KEY, part)} "
            f"ORDER BY {', '.join(_KEY)}{dialect.for_update()}"
        ),
    )

    def refusals() -> dict[Fence, errors.CoreError]:
        owners = {
            (as_text(group), partition): (as_text(owner), epoch) for group, partition, owner, epoch in locked.rows()
        }
        refused: dict[Fence, errors.CoreError] = {}
        for fence in fences:
            if owners.get((fence.group, fence.partition)) != (fence.worker, fence.epoch):
                refused[fence] = _refusal(tx, fence, exists=(fence.group, fence.partition) in owners)
        held = sorted({(fence.group, fence.partition) for fence in fences if fence not in refused})
        for part in chunks(held, LIST):
            dialect.guard(tx, _positions.epoch, part)
        return refused

    return refusals


def _refusal(tx: Connection, fence: Fence, *, exists: bool) -> errors.CoreError:
    if not exists:
        try:
            groups.find(tx, fence.group)
        except errors.ConsumerGroupNotFound as error:
            return error
    metrics.STALE_EPOCHS.inc()
    return errors.StaleEpoch(fence.group, fence.partition, fence.worker, fence.epoch)


def fence(tx: Connection, group: str, partition: int, worker: str, epoch: int) -> None:
    """Raise `errors.StaleEpoch` unless the worker owns the partition at this epoch. Otherwise it stays the owner until
    the commit. Call this before any write on the worker's behalf. Also raises `errors.ConsumerGroupNotFound`."""
    for error in lock(Pipeline(tx), [Fence(group, partition, worker, epoch)])().values():
        raise error


def hold(tx: Connection, group: str, partition: int) -> None:
    """Lock a partition, whoever owns it: no write on a worker's behalf commits there until this transaction does."""
    row = _positions.group_name == group, _positions.partition_no == partition
    tx.execute(sa.select(_positions.epoch).where(*row).with_for_update())
    dialects.of(tx).guard(tx, _positions.epoch, [(group, partition)])


_KEY: Final = ("group_name", "partition_no")


@dataclass(frozen=True, slots=True)
class Commit:
    """A window's snapshot, to be merged into the position of the fence's partition. The `token` belongs to the floor;
    `head` is the source's last offset."""

    fence: Fence
    snapshot: Snapshot
    token: str | None = None
    head: int | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """A partition's position after a commit; see `Position`."""

    partition: int
    epoch: int
    floor: int
    high: int
    outstanding: int
    token: str | None
    lag: int


@dataclass(slots=True, eq=False, kw_only=True)
class CommitPositions(Operation):
    """Commit positions. Its result is a list of a `Committed` or an error for each: `StaleEpoch`,
    `ConsumerGroupNotFound`."""

    commits: Sequence[Commit]


class Commits(Kind):
    """Commits of positions. The positions are read under the locks of their fences."""

    handles = (CommitPositions,)
    locks = ()

    def fences(self) -> list[Fence]:
        return [commit.fence for operation in self.operations for commit in operation.commits]

    def prepare(self) -> None:
        tx, fences = self.pipeline.tx, self.fences()
        from_clause = dialects.of(tx).by_primary_key("positions")
        self._stored = self.pipeline.query_keys(
            {(fence.group, fence.partition) for fence in fences},
            lambda part: (
                f"SELECT {', '.join(_KEY)}, floor, outstanding, token, head FROM {from_clause} "  # noqa: S608
                f"WHERE floor IS NOT NULL AND ({among(tx, _KEY, part)})"
            ),
        )
        # A group may have such a name without being a process's; then its offsets are not the feed's positions.
        names = {fence.group for fence in fences if fence.group.startswith(groups.OF_PROCESSES)}
        self._feed_ends = self.pipeline.query_keys(
            {(name.removeprefix(groups.OF_PROCESSES),) for name in names},
            lambda part: (
                "SELECT process_definitions.name, feed_head.position FROM process_definitions, feed_head "  # noqa: S608
                f"WHERE deleted_at IS NULL AND ({among(tx, ('name',), part)})"
            ),
        )

    def judge(self, refused: Mapping[Fence, errors.CoreError]) -> None:
        """Merge the snapshots into the positions, in the order of the commits. A repeated or older snapshot changes
        nothing. The token of the snapshot with the higher floor is kept.

        A worker of a process may have read events that a restore or a failover has lost. A position beyond the feed's
        end is refused, or the process would skip the events that will be appended up to it."""
        feed_ends = {f"{groups.OF_PROCESSES}{as_text(name)}": end for name, end in self._feed_ends.rows()}
        stored = {
            (as_text(group), partition): _Stored(_decoded(floor, outstanding), as_text(token), head)
            for group, partition, floor, outstanding, token, head in self._stored.rows()
        }
        changed: dict[tuple[str, int], tuple[int, _Stored]] = {}

        def merge(commit: Commit) -> Committed | errors.CoreError:
            fence = commit.fence
            if fence in refused:
                return refused[fence]
            end = feed_ends.get(fence.group)
            if end is not None and commit.snapshot.high > end:
                expected = f"expected positions of the feed, which ends at {end}, got {commit.snapshot.high}"
                return errors.InvalidRequest("body.snapshot", expected)
            place = fence.group, fence.partition
            position = stored[place] = _merged(stored.get(place), commit)
            changed[place] = fence.epoch, position
            floor, high = position.snapshot.floor, position.snapshot.high
            outstanding = len(position.snapshot.outstanding)
            lag = max(high, position.head or 0) - floor
            return Committed(fence.partition, fence.epoch, floor, high, outstanding, position.token, lag)

        for operation in self.operations:
            self.outcomes[operation] = Done([merge(commit) for commit in operation.commits])
        self._store(changed)

    def _store(self, changed: Mapping[tuple[str, int], tuple[int, _Stored]]) -> None:
        if not changed:
            return
        tx = self.pipeline.tx
        dialect = dialects.of(tx)
        now = dialect.one_time(tx)
        rows = []
        for place in sorted(changed):
            epoch, (snapshot, token, head) = changed[place]
            values = (*place, epoch, snapshot.floor, snapshot.high, snapshot.encode(), len(snapshot.outstanding))
            rows.append(f"({','.join(map(dialect.literal, (*values, token, head)))},{now})")
        # One statement can't UPDATE rows to values of their own. No row is inserted, as all of them are locked.
        columns = ", ".join((*_KEY, "epoch", *_WRITTEN))
        self.pipeline.later(*inserts("positions", columns, rows, dialect.upsert(_KEY, _WRITTEN)))


_WRITTEN: Final = ("floor", "high", "outstanding", "outstanding_count", "token", "head", "updated_at")


class _Stored(NamedTuple):
    """A partition's position."""

    snapshot: Snapshot
    token: str | None
    head: int | None


def _merged(before: _Stored | None, commit: Commit) -> _Stored:
    """The position after the commit."""
    earlier, snapshot = (None if before is None else before.snapshot), commit.snapshot
    token, head = (None, None) if before is None else before[1:]
    if commit.token is not None and (earlier is None or snapshot.floor >= earlier.floor):
        token = commit.token
    if commit.head is not None:
        head = commit.head
    return _Stored((snapshot if earlier is None else earlier.merge(snapshot)).within(SNAPSHOT), token, head)


def _decoded(floor: int, outstanding: bytes) -> Snapshot:
    """The stored snapshot. If it can't be decoded, only its floor is used: events above it are replayed, none is
    skipped."""
    try:
        return Snapshot.decode(outstanding)
    except CorruptSnapshot:
        return Snapshot(floor, floor)
