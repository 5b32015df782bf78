"""The partitions of a consumer group's worker and its next steps, without sockets, threads or a clock.

Two drivers use it, one with threads and one with tasks: they run the steps that are `due`, report each outcome, and
wait until the `deadline`. Three things that could go wrong, and why they cannot:

*The service assigns a partition to another worker while this one believes that it owns it.* Here the lease starts when
the sync is sent. In the service it starts when the sync is handled, which is later. So the lease ends here first, and
all partitions then count as lost. The same is true of the deadline of a release: it starts when the first sync was
sent that may have got the request, whether or not its response arrived. For a ttl after a failure, that is the sync
before, since the one that failed may be handled late. After a request that this worker has not received, the service
waits at least until the lease has ended here. If a worker is suspended past these deadlines, a sync is handled even
later, or an operator has just shortened them, its writes have the old epoch, and the service refuses them.

*A response is outdated*, because something changed while it was in transit. A partition released in the meantime stays
in `_owed` until there is a response to a sync that reported it. A partition whose epoch the service refused as stale is
accepted under that epoch only from a later sync: after a failover, the service may have lost that it gave the partition
to another worker. A response that arrives after its own lease has ended is ignored.

*A worker stops, and its successor has its name.* It reports its partitions as drained, but the service frees only what
it has asked back itself, and gives the others to the next session of the name, at new epochs. The limit prevents that a
worker that is stopping gets partitions that nobody would work on.

*The group is deleted and created again*, with this worker's name for it unchanged, while the worker is suspended. Each
response names the group's incarnation. With another one than before, the worker takes no partition, loses those that it
has, and ends with `GroupReplaced`: what its code knows of the group, such as the division of the keys, may be wrong.

*Callbacks of one partition overlap.* Each partition has a lane that runs its callbacks in order, one at a time. Lanes
run in parallel, because one slow drain must not use up another's time.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from lastbit import errors
from lastbit.streams.errors import GroupReplaced

if TYPE_CHECKING:
    from lastbit.groups import Granted, Synced
    from lastbit.models import Fence
    from lastbit.streams.window import AckWindow

BEATS = 3
"""Syncs per lease."""

FAREWELL = 2.0
"""Seconds to wait for running steps after the time to drain is over."""

JITTER = 0.2
"""The maximum fraction of the interval by which a sync may be early, so that workers started together spread out."""

FIRST_PAUSE = 0.05
LAST_PAUSE = 1.0
"""Maximum seconds between an unanswered sync and the next one: doubles with each failure, from the first to the
last."""


@dataclass(slots=True)
class Lease:
    """When this worker's lease ends, on the clock `now`; all its partitions share it."""

    now: Callable[[], float]
    until: float = -math.inf

    @property
    def over(self) -> bool:
        return self.now() >= self.until


class Held:
    """A partition assigned to this worker under one epoch.

    `window` holds the outstanding offsets, restored from the last commit. It is closed, so that it refuses late acks,
    when the partition is released or lost.
    """

    def __init__(self, fence: Fence, token: str | None, window: AckWindow, lease: Lease) -> None:
        self.fence = fence
        """Sent with each write for the partition, so that the service refuses the write of any other owner."""
        self.token = token
        """The source's own name for the floor, from the last commit before the assignment; None if that commit had
        none."""
        self.window = window
        self._kept = window.acks
        self._lease = lease
        self._lost = False
        self._release_by = math.inf
        self._given_back = False

    @property
    def partition(self) -> int:
        return self.fence.partition

    @property
    def epoch(self) -> int:
        return self.fence.epoch

    @property
    def lost(self) -> bool:
        """Whether another worker may own it: the lease or the time to release it ran out, or the service revoked it."""
        return not self._given_back and (self._lost or self._lease.over or self._lease.now() >= self._release_by)

    @property
    def active(self) -> bool:
        """Whether to work on it: it is neither lost nor being released."""
        return not self._given_back and self._release_by == math.inf and not self.lost

    @property
    def floor(self) -> int:
        """Every offset up to and including this one is resolved: continue reading after it."""
        return self.window.floor

    @property
    def uncommitted(self) -> bool:
        """Whether the window has acks that are not committed yet."""
        return self.window.acks != self._kept

    def committing(self) -> tuple[bytes, int]:
        """The snapshot to commit, and the ack count to pass to `committed` afterwards. Raises `StaleEpoch` if the
        partition is known to be lost."""
        if self.lost or self._given_back:
            detail = f"this worker no longer owns partition {self.partition} at epoch {self.epoch}"
            raise errors.StaleEpoch(409, "stale_epoch", detail)
        acks = self.window.acks  # before the snapshot, so that the snapshot contains all of them
        return self.window.snapshot(), acks

    def committed(self, acks: int) -> None:
        """Record that the service has stored a snapshot with this ack count."""
        self._kept = max(acks, self._kept)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "active" if self.active else "being released"
        return f"<{type(self).__name__} partition {self.partition}, epoch {self.epoch}, {state}>"


A = TypeVar("A", bound=Held)


@dataclass(frozen=True, slots=True)
class WindowCommit(Generic[A]):
    """An assignment's snapshot to commit, and its ack count; see `Held.committing`."""

    assignment: A
    snapshot: bytes
    acks: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A step: send a heartbeat that reports the drained partitions with their epochs. `limit`: the most partitions that
    a worker that is stopping requests, 0 or those that it keeps; None before."""

    drained: tuple[tuple[int, int], ...]
    limit: int | None
    sent: float
    timeout: float


@dataclass(frozen=True, slots=True)
class Call(Generic[A]):
    """A step: call the user's callback for a partition that was assigned, or must be released, or was lost."""

    assignment: A
    assigned: bool


@dataclass(slots=True)
class _Lane(Generic[A]):
    waiting: deque[Call[A]] = field(default_factory=deque)
    busy: bool = False


class Membership(Generic[A]):
    """`make` builds an assignment from a grant; `chance` returns a random number in [0, 1). The other arguments are
    those of `ConsumerGroup`."""

    def __init__(
        self,
        make: Callable[[Granted, Lease], A],
        now: Callable[[], float],
        chance: Callable[[], float],
        name: str,
        partitions: int | None = None,
        follow: bool = False,
    ) -> None:
        self.session = secrets.token_hex(16)
        self.error: BaseException | None = None
        """The error that ended the membership; None if `stop` ended it."""
        self.release: float | None = None
        """Seconds in which a partition must be drained, as of the last sync."""
        self.gone = False
        """Whether the worker need not leave explicitly, because the service knows that it has left."""
        self._make = make
        self._now = now
        self._chance = chance
        self._name = name
        self._partitions = partitions
        self._follow = follow
        self._incarnation: str | None = None
        self._lease = Lease(now)
        self.ttl = math.inf
        """Seconds of a lease; infinite before the first sync."""
        self._held: dict[int, A] = {}
        self._owed: dict[int, int] = {}
        self._fenced: dict[int, tuple[int, float]] = {}
        """By partition, the highest epoch that the service refused as stale, and when."""
        self._lanes: dict[int, _Lane[A]] = {}
        self._next_sync = -math.inf
        self._syncing = False
        self._asking_since = math.inf
        """When the first sync was sent since the last response. After a failure, when that response's sync was sent."""
        self._late_until = -math.inf
        """Until when a sync that failed may still be handled."""
        self._failures = 0
        self._stop_by = math.inf
        self._limit: int | None = None

    @property
    def held(self) -> tuple[A, ...]:
        return tuple(self._held[partition] for partition in sorted(self._held))

    @property
    def stopping(self) -> bool:
        return self._stop_by < math.inf

    @property
    def over(self) -> bool:
        """Whether no partition is held, and no callback or sync is running that could still end in time."""
        lanes = self._lanes.values()
        if not self.stopping or self._held or any(lane.waiting and not lane.busy for lane in lanes):
            return False
        return self._now() >= self._stop_by + FAREWELL or not (self._syncing or any(lane.busy for lane in lanes))

    @property
    def deadline(self) -> float:
        """When to call `due` again, unless an outcome is reported earlier."""
        moments = [self._stop_by + FAREWELL, *(assignment._release_by for assignment in self._held.values())]
        if not self._syncing:
            moments.append(self._next_sync)
        if self._held:
            moments.append(self._lease.until)
        return min(moments)

    def due(self) -> list[Sync | Call[A]]:
        """The steps to start now. Each is returned once."""
        self.expire()
        steps: list[Sync | Call[A]] = []
        for lane in self._lanes.values():
            if lane.waiting and not lane.busy:
                lane.busy = True
                steps.append(lane.waiting.popleft())
        if not self._syncing and not self.over and self._now() >= self._next_sync:
            self._syncing = True
            self._asking_since = min(self._asking_since, self._now())
            steps.append(self._sync())
        return steps

    def last_sync(self) -> Sync | None:
        """If the worker keeps its partitions, the step that renews their lease once more, after all others; its outcome
        doesn't matter. None: it leaves."""
        return self._sync() if self._limit and self.error is None else None

    def _sync(self) -> Sync:
        return Sync(tuple(sorted(self._owed.items())), self._limit, self._now(), self.ttl / 2)

    def done(self, step: Sync | Call[A], outcome: Synced | BaseException | None) -> None:
        """Report the outcome of a step: a sync's response, the exception raised, or None."""
        if isinstance(step, Call):
            assert outcome is None or isinstance(outcome, BaseException)
            self._called(step, outcome)
            return
        self._syncing = False
        if isinstance(outcome, BaseException):
            self._refused(outcome)
        else:
            assert outcome is not None
            self._answered(step, outcome)

    def _answered(self, sync: Sync, answer: Synced) -> None:
        self._failures = 0
        self.expire()
        self.ttl, self.release = answer.ttl, answer.release_within
        for partition, epoch in sync.drained:
            if self._owed.get(partition) == epoch:
                del self._owed[partition]
        until = sync.sent + answer.ttl
        if self._now() >= until:
            self._next_sync = self._now()
            return
        if (error := self._identified(answer)) is not None:
            self._end(error)
            return
        asked_since = self._asking_since
        self._asking_since = sync.sent if self._now() < self._late_until else math.inf
        self._lease.until = until
        self._next_sync = sync.sent + answer.ttl / BEATS * (1 - JITTER * self._chance())
        grants = {grant.partition: grant for grant in answer.assigned}
        for partition, assignment in list(self._held.items()):
            if partition not in grants or grants[partition].epoch != assignment.epoch:
                self._lose(assignment)
        for grant in answer.assigned:
            self._take(grant, grant.partition in answer.release, sync.sent)
        for partition in answer.release:
            if partition in self._held:
                self._ask_back(self._held[partition], asked_since + answer.release_within)
        if self._owed.items() - set(sync.drained) or (self.stopping and sync.limit is None):
            self._next_sync = self._now()

    def _refused(self, error: BaseException) -> None:
        if not (isinstance(error, errors.LastbitError) and error.is_temporary):
            # The service no longer knows this worker, or will never accept it.
            self.gone = True
            self._end(error)
            return
        self._failures += 1
        self._late_until = self._now() + self.ttl
        # A random share of a doubling bound, as in lastbit.retry; the lease leaves no time for long pauses.
        ceiling = min(FIRST_PAUSE * 2.0 ** min(self._failures, 60), self.ttl / BEATS, LAST_PAUSE)
        retry_after = error.retry_after if isinstance(error, errors.ServiceError) else None
        self._next_sync = self._now() + max(ceiling * self._chance(), retry_after or 0.0)

    def _identified(self, answer: Synced) -> errors.LastbitError | None:
        """The error if the response is of another group than the one that this worker has joined, or expects. A worker
        that follows the name loses what it had of the earlier group."""
        if answer.partitions is None or answer.incarnation is None:  # from a service of an earlier release
            return None
        if self._incarnation not in {None, answer.incarnation}:
            if not self._follow:
                return GroupReplaced(self._name, answer.partitions)
            self._lose_all()
            self._owed.clear()
        if self._partitions not in {None, answer.partitions}:
            detail = f"consumer group {self._name!r} has {answer.partitions} partitions, not {self._partitions}"
            return errors.PartitionsFixed(409, "partitions_fixed", detail)
        self._incarnation = answer.incarnation
        return None

    def _end(self, error: BaseException) -> None:
        """End because of `error`, without any partition and without another sync."""
        self.fail(error)
        self._lose_all()
        self._next_sync = math.inf

    def _called(self, call: Call[A], error: BaseException | None) -> None:
        assignment, lane = call.assignment, self._lanes[call.assignment.partition]
        lane.busy = False
        if error is not None:
            self.fail(error)
            # Work on it may still be running, so it is not reported as drained, and no further callback is made for it.
            if self._held.get(assignment.partition) is assignment:
                self._lose(assignment)
            lane.waiting = deque(other for other in lane.waiting if other.assignment is not assignment)
        elif not call.assigned:
            self.expire()
            if self._held.get(assignment.partition) is assignment:
                self._give_back(assignment)
            elif assignment.partition not in self._held and assignment._release_by < math.inf and not self.gone:
                self._report(assignment)  # after its deadline, but the service may still be waiting

    def expire(self) -> None:
        """Mark assignments as lost whose time has run out."""
        for assignment in self.held:
            if assignment.lost:
                self._lose(assignment)

    def committing(self, assignments: Iterable[A]) -> list[WindowCommit[A]]:
        """What to commit of these assignments, without those that are known to be lost or were given back."""
        self.expire()
        commits: list[WindowCommit[A]] = []
        for assignment in assignments:
            if self._held.get(assignment.partition) is assignment:
                with suppress(errors.StaleEpoch):  # the lease may end while the snapshots are made
                    commits.append(WindowCommit(assignment, *assignment.committing()))
        return commits

    def committed(self, commits: Iterable[WindowCommit[A]], stale: Collection[A]) -> None:
        """Record that the service has stored these windows, except those of assignments whose epoch is stale."""
        for each in commits:
            if each.assignment in stale:
                self.fence(each.assignment)
            else:
                each.assignment.committed(each.acks)

    def fence(self, assignment: A) -> None:
        """Record that the service refused the assignment's epoch as stale."""
        partition = assignment.partition
        epoch, _ = self._fenced.get(partition, (assignment.epoch, 0.0))
        self._fenced[partition] = max(assignment.epoch, epoch), self._now()
        if self._held.get(partition) is assignment:
            self._lose(assignment)
            self._next_sync = min(self._next_sync, self._now())

    def fail(self, error: BaseException) -> None:
        """End because of `error`. Only the first error is kept."""
        self.error = self.error or error
        self.stop()

    def stop(self, leave: bool = True) -> None:
        """Accept no more partitions, and drain all. With `leave` they are released. Otherwise the service keeps them
        for another process with the worker's name, until the lease ends. Only the first call counts."""
        if self.stopping:
            return
        self._stop_by = self._now() + (self.release or 0.0)
        self._limit = 0 if leave else sum(assignment.active for assignment in self.held)
        # Sync now: the service revokes the partitions of a worker without capacity, so others get each one once it is
        # drained.
        self._next_sync = min(self._next_sync, self._now())
        for assignment in self.held:
            self._ask_back(assignment, self._stop_by)

    def _take(self, grant: Granted, asked_back: bool, sent: float) -> None:
        partition, epoch = grant.partition, grant.epoch
        refused_epoch, refused_at = self._fenced.get(partition, (-1, 0.0))
        is_refused = epoch <= refused_epoch and sent <= refused_at
        if partition in self._held or self._owed.get(partition) == epoch or is_refused:
            return
        if self.stopping:
            return  # a leaving worker accepts nothing
        if asked_back:
            self._owed[partition] = epoch
            return
        self._owed.pop(partition, None)
        try:
            assignment = self._make(grant, self._lease)
        except Exception as error:  # noqa: BLE001  # an unreadable snapshot; `run` raises it
            self.fail(error)
            return
        self._held[partition] = assignment
        self._lane(partition).waiting.append(Call(assignment, assigned=True))

    def _ask_back(self, assignment: A, release_by: float) -> None:
        asked_before = assignment._release_by < math.inf
        # A repeated request must not extend the deadline.
        assignment._release_by = min(assignment._release_by, release_by)
        if asked_before:
            return
        if self._forget_unbegun(assignment):
            self._give_back(assignment)
        else:
            self._lane(assignment.partition).waiting.append(Call(assignment, assigned=False))

    def _give_back(self, assignment: A) -> None:
        assignment._given_back = True
        assignment.window.close()
        del self._held[assignment.partition]
        self._report(assignment)

    def _report(self, assignment: A) -> None:
        """Report at once that the partition is drained."""
        # A drain that ends late may be of an epoch before one that is reported already.
        self._owed[assignment.partition] = max(assignment.epoch, self._owed.get(assignment.partition, 0))
        self._next_sync = min(self._next_sync, self._now())

    def _lose_all(self) -> None:
        for assignment in self.held:
            self._lose(assignment)

    def _lose(self, assignment: A) -> None:
        assignment._lost = True
        assignment.window.close()
        del self._held[assignment.partition]
        # An assignment that is already draining detects this by its attribute `lost`.
        if not self._forget_unbegun(assignment) and assignment._release_by == math.inf:
            self._lane(assignment.partition).waiting.append(Call(assignment, assigned=False))

    def _forget_unbegun(self, assignment: A) -> bool:
        """Remove the `assigned` call if it has not started. Returns whether it did."""
        waiting = self._lane(assignment.partition).waiting
        for call in waiting:
            if call.assignment is assignment and call.assigned:
                waiting.remove(call)
                return True
        return False

    def _lane(self, partition: int) -> _Lane[A]:
        return self._lanes.setdefault(partition, _Lane())
