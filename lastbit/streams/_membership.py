"""What a worker of a consumer group holds, and what it has to do next: without a socket, a thread or a clock.

Two drivers stand on it, one with threads and one with tasks: they do the steps that are `due`, report what came of
them, and wait until the `deadline`. Three things could go wrong, and cannot:

*The service gives a partition to another worker while this one believes that it has it.* The lease counts here from
the moment its sync was sent, there from when it was handled, which is later; so it ends here first, and everything held
counts as lost then. The same with the deadline of a release. What a worker that slept through all that still sends
bears its epoch, and the service refuses it.

*An answer tells of a partition what is no longer so*, because something happened while the answer was under way. What
was given back meanwhile is owed to the service until a sync that told it was answered; what the service refused as
stale is never taken again under that epoch; an answer that comes when its own lease is over is not believed.

*Callbacks of one partition overlap.* They stand in a lane, one at a time and in order; those of several partitions run
side by side, since one slow drain must not use up the time that another has.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from lastbit import errors

if TYPE_CHECKING:
    from lastbit.groups import Granted, Synced
    from lastbit.models import Fence
    from lastbit.streams.window import AckWindow

BEATS = 3
"""Syncs within the time that a lease lasts."""

FAREWELL = 2.0
"""Seconds for what is still under way when the time to drain is over."""

JITTER = 0.2
"""By which share a sync may come earlier, so that workers that began together don't stay so."""

FIRST_PAUSE = 0.05
LAST_PAUSE = 1.0
"""Seconds after a sync that was not answered, at most; twice as many after each further one, up to the last."""


@dataclass(slots=True)
class Lease:
    """Until when, on `now`'s clock, what was assigned is ours; all partitions of a worker share it."""

    now: Callable[[], float]
    until: float = -math.inf

    @property
    def over(self) -> bool:
        return self.now() >= self.until


class Held:
    """A partition while it is this worker's, under one epoch.

    `window` holds what is outstanding in it, as the last commit left it. It is closed, so that it refuses late acks,
    when the partition is given back or lost.
    """

    def __init__(self, fence: Fence, token: str | None, window: AckWindow, lease: Lease) -> None:
        self.fence = fence
        """What a write on behalf of the partition bears, so that the service refuses it of anybody else."""
        self.token = token
        """What the source calls the floor, as far as the last commit before the assignment said so."""
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
        """It may be another's by now: the lease or the time to give it back ran out, or it was taken."""
        return not self._given_back and (self._lost or self._lease.over or self._lease.now() >= self._release_by)

    @property
    def active(self) -> bool:
        """To be worked on: it is not lost, and it was not asked back."""
        return not self._given_back and self._release_by == math.inf and not self.lost

    @property
    def floor(self) -> int:
        """Everything at or below it is resolved: read on after it."""
        return self.window.floor

    @property
    def uncommitted(self) -> bool:
        """The window knows more than the last commit kept."""
        return self.window.acks != self._kept

    def committing(self) -> tuple[bytes, int]:
        """What a commit is to keep, and what `committed` is to be told then. Raises `StaleEpoch` where the partition is
        known to be lost."""
        if self.lost or self._given_back:
            detail = f"partition {self.partition} is not this worker's any more at epoch {self.epoch}"
            raise errors.StaleEpoch(409, "stale_epoch", detail)
        acks = self.window.acks  # before the snapshot, which then knows all of them
        return self.window.snapshot(), acks

    def committed(self, acks: int) -> None:
        """The service has kept it."""
        self._kept = max(acks, self._kept)

    def __repr__(self) -> str:
        state = "lost" if self.lost else "active" if self.active else "to be given back"
        return f"<{type(self).__name__} partition {self.partition}, epoch {self.epoch}, {state}>"


A = TypeVar("A", bound=Held)


@dataclass(frozen=True, slots=True)
class Sync:
    """A step: tell the service that we are there, and which partitions (with their epochs) were drained; with `leaving`
    that we want none."""

    drained: tuple[tuple[int, int], ...]
    leaving: bool
    sent: float
    timeout: float


@dataclass(frozen=True, slots=True)
class Call(Generic[A]):
    """A step: tell the user that a partition was assigned, or is to be given back or lost."""

    assignment: A
    assigned: bool


@dataclass(slots=True)
class _Lane(Generic[A]):
    waiting: deque[Call[A]] = field(default_factory=deque)
    busy: bool = False


class Membership(Generic[A]):
    """`make` makes an assignment of what was granted; `chance` is random in [0, 1)."""

    def __init__(
        self, make: Callable[[Granted, Lease], A], now: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        self.session = secrets.token_hex(16)
        self.error: BaseException | None = None
        """Why it ended, if not because it was told to."""
        self.release: float | None = None
        """Seconds in which what is asked back must be drained, as the service said last."""
        self.gone = False
        """The service knows, or need not be told, that we leave."""
        self._make = make
        self._now = now
        self._chance = chance
        self._lease = Lease(now)
        self.ttl = math.inf
        """Seconds of a lease, once the service said so."""
        self._held: dict[int, A] = {}
        self._owed: dict[int, int] = {}
        self._fenced: dict[int, int] = {}
        self._lanes: dict[int, _Lane[A]] = {}
        self._next_sync = -math.inf
        self._syncing = False
        self._failures = 0
        self._stop_by = math.inf

    @property
    def held(self) -> tuple[A, ...]:
        return tuple(self._held[partition] for partition in sorted(self._held))

    @property
    def stopping(self) -> bool:
        return self._stop_by < math.inf

    @property
    def over(self) -> bool:
        """Nothing is held any more, and neither a callback nor a sync runs that could still end in time."""
        lanes = self._lanes.values()
        if not self.stopping or self._held or any(lane.waiting and not lane.busy for lane in lanes):
            return False
        return self._now() >= self._stop_by + FAREWELL or not (self._syncing or any(lane.busy for lane in lanes))

    @property
    def deadline(self) -> float:
        """When to look at what is due, if nothing is reported before."""
        moments = [self._stop_by + FAREWELL, *(each._release_by for each in self._held.values())]
        if not self._syncing:
            moments.append(self._next_sync)
        if self._held:
            moments.append(self._lease.until)
        return min(moments)

    def due(self) -> list[Sync | Call[A]]:
        """The steps to begin now, each once."""
        self.expire()
        steps: list[Sync | Call[A]] = []
        for lane in self._lanes.values():
            if lane.waiting and not lane.busy:
                lane.busy = True
                steps.append(lane.waiting.popleft())
        if not self._syncing and not self.over and self._now() >= self._next_sync:
            self._syncing = True
            timeout = self.ttl / 2
            steps.append(Sync(tuple(sorted(self._owed.items())), self.stopping, self._now(), timeout))
        return steps

    def done(self, step: Sync | Call[A], outcome: Synced | BaseException | None) -> None:
        """What came of a step: a sync's answer, what was raised, or None."""
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
        self._lease.until = until
        self._next_sync = sync.sent + answer.ttl / BEATS * (1 - JITTER * self._chance())
        granted = {each.partition: each for each in answer.assigned}
        for partition, assignment in list(self._held.items()):
            if partition not in granted or granted[partition].epoch != assignment.epoch:
                self._lose(assignment)
        for each in answer.assigned:
            self._take(each, each.partition in answer.release)
        for partition in answer.release:
            if partition in self._held:
                self._ask_back(self._held[partition], sync.sent + answer.release_within)
        if self._owed.items() - set(sync.drained) or (self.stopping and not sync.leaving):
            self._next_sync = self._now()

    def _refused(self, error: BaseException) -> None:
        if not passes(error):
            # The service knows nothing of us any more, or never will.
            self.gone = True
            self.fail(error)
            for assignment in self.held:
                self._lose(assignment)
            self._next_sync = math.inf
            return
        self._failures += 1
        # A random share of a doubling bound, as in lastbit.retry; the lease leaves no time for long pauses.
        bound = min(FIRST_PAUSE * 2.0 ** min(self._failures, 60), self.ttl / BEATS, LAST_PAUSE)
        wanted = error.retry_after if isinstance(error, errors.ServiceError) else None
        self._next_sync = self._now() + max(bound * self._chance(), wanted or 0.0)

    def _called(self, call: Call[A], error: BaseException | None) -> None:
        assignment, lane = call.assignment, self._lanes[call.assignment.partition]
        lane.busy = False
        if error is not None:
            self.fail(error)
            # Nobody knows what still runs of it: it is not told as drained, and its callbacks are over.
            if self._held.get(assignment.partition) is assignment:
                self._lose(assignment)
            lane.waiting = deque(each for each in lane.waiting if each.assignment is not assignment)
        elif not call.assigned and self._held.get(assignment.partition) is assignment and not assignment.lost:
            self._give_back(assignment)

    def expire(self) -> None:
        """Lose what the clock says is lost."""
        for assignment in self.held:
            if assignment.lost:
                self._lose(assignment)

    def fence(self, assignment: A) -> None:
        """The service refused the assignment's epoch as stale."""
        partition = assignment.partition
        self._fenced[partition] = max(assignment.epoch, self._fenced.get(partition, assignment.epoch))
        if self._held.get(partition) is assignment:
            self._lose(assignment)
            self._next_sync = min(self._next_sync, self._now())

    def fail(self, error: BaseException) -> None:
        """End because of `error`; the first one counts."""
        self.error = self.error or error
        self.stop()

    def stop(self) -> None:
        """Take nothing more, and give everything back."""
        if self.stopping:
            return
        self._stop_by = self._now() + (self.release or 0.0)
        # Others may have it all as soon as it is drained: the service asks it back of whoever has no capacity.
        self._next_sync = min(self._next_sync, self._now())
        for assignment in self.held:
            self._ask_back(assignment, self._stop_by)

    def _take(self, granted: Granted, asked_back: bool) -> None:
        partition, epoch = granted.partition, granted.epoch
        if partition in self._held or self._owed.get(partition) == epoch or epoch <= self._fenced.get(partition, -1):
            return
        if self.stopping:
            return  # whoever leaves gives back all of it
        if asked_back:
            self._owed[partition] = epoch
            return
        self._owed.pop(partition, None)
        try:
            assignment = self._make(granted, self._lease)
        except Exception as error:  # noqa: BLE001  # a snapshot that nobody can read; it is run's caller who is told
            self.fail(error)
            return
        self._held[partition] = assignment
        self._lane(partition).waiting.append(Call(assignment, assigned=True))

    def _ask_back(self, assignment: A, by: float) -> None:
        asked_before = assignment._release_by < math.inf
        # Told again it stays; less time than before is all that there is.
        assignment._release_by = min(assignment._release_by, by)
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
        self._owed[assignment.partition] = assignment.epoch
        self._next_sync = min(self._next_sync, self._now())

    def _lose(self, assignment: A) -> None:
        assignment._lost = True
        assignment.window.close()
        del self._held[assignment.partition]
        # One that drains already sees it in `lost`.
        if not self._forget_unbegun(assignment) and assignment._release_by == math.inf:
            self._lane(assignment.partition).waiting.append(Call(assignment, assigned=False))

    def _forget_unbegun(self, assignment: A) -> bool:
        """Take back a call that would tell of the assignment, if it has not begun."""
        waiting = self._lane(assignment.partition).waiting
        for call in waiting:
            if call.assignment is assignment and call.assigned:
                waiting.remove(call)
                return True
        return False

    def _lane(self, partition: int) -> _Lane[A]:
        return self._lanes.setdefault(partition, _Lane())


def passes(error: BaseException) -> bool:
    """Whether the same sync may be answered another time."""
    if isinstance(error, errors.ServiceError):
        return error.status >= 500 or isinstance(error, errors.RateLimited)
    return isinstance(error, errors.ServiceUnreachable | errors.UnexpectedAnswer)
