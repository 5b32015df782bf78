"""`ConsumerGroup`: a worker of a consumer group, from its first heartbeat until it leaves.

The rules are in `_membership.py`. Threads run them here, tasks of an event loop in `group_async.py`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from lastbit import errors, groups
from lastbit._drivers import HasDriver
from lastbit._protocol import Flow, Service
from lastbit.groups import Granted, Synced
from lastbit.models import Fence
from lastbit.retry import Retry
from lastbit.streams._commits import commit, commit_many, for_a_lease
from lastbit.streams._consuming import Consumer, Source
from lastbit.streams._membership import A, Call, Held, Lease, Membership, Sync
from lastbit.streams._progress import CAPACITY, EVERY, HANDLERS, Options
from lastbit.streams.window import AckWindow

log = logging.getLogger("lastbit.streams")

R = TypeVar("R")
S = TypeVar("S", Sync, Call[Any])

LONGEST_WAIT = 3600.0
"""Maximum seconds between checks for due steps. The deadline may be infinite, but a wait must be finite."""


def now() -> float:
    """Seconds on a clock that also runs while the machine sleeps, if there is one, as leases expire during sleep."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def beat(
    service: Service, name: str, worker: str, capacity: int | None, membership: Membership[A], step: Sync
) -> Flow[Synced]:
    # One attempt with a short timeout, which leaves time for another sync. Each sync is a new request with a new lease.
    hasty = replace(service, timeout=min(service.timeout, step.timeout), retry=Retry(attempts=1))
    limits = [limit for limit in (capacity, step.limit) if limit is not None]
    return groups.sync(hasty, name, worker, membership.session, step.drained, min(limits, default=None))


def end(service: Service, name: str, worker: str, capacity: int | None, membership: Membership[A]) -> Flow[None]:
    """Leave, or renew the lease of the partitions that the worker keeps."""
    step = membership.last_sync()
    if step is None:
        yield from groups.leave(for_a_lease(service, membership.ttl), name, worker, membership.session)
    else:
        yield from beat(service, name, worker, capacity, membership, step)


def window_of(grant: Granted, capacity: int) -> AckWindow:
    if grant.snapshot is None:
        return AckWindow(capacity=capacity)
    return AckWindow.restore(grant.snapshot, capacity=capacity)


class Assignment(Held):
    """A partition assigned to this worker; see `Held`."""

    def __init__(self, group: ConsumerGroup, grant: Granted, lease: Lease) -> None:
        fence = Fence(group.name, grant.partition, group.worker, grant.epoch)
        super().__init__(fence, grant.token, window_of(grant, group.window_capacity), lease)
        self._group = group

    def commit(self, token: str | None = None, head: int | None = None) -> None:
        """Commit the window's snapshot to the service for the partition's next owner. `token` is the source's own name
        for the floor, `head` the source's last offset, from which the service computes the lag. Raises `StaleEpoch` if
        another worker owns the partition; the assignment is then lost."""
        self._group._commit(self, token, head)


class ConsumerGroup:
    """A worker named `worker` of the consumer group `name`, which must exist (`client.groups.create`).

    `capacity`: maximum number of partitions; None: no limit. `window_capacity`: positions in each partition's window,
    up to 65,536; use fewer for large records. A worker name belongs to one process: when another process starts under
    the same name, it gets new epochs, and writes of the earlier process are refused.

    `partitions`: the number by which your code divides keys, or None: `run` raises `PartitionsFixed` if the group has
    another one. If the group is deleted and created again, `run` raises `GroupReplaced`. With `follow` it continues in
    the new group instead: for code that reads what it must know of the group after each assignment.
    """

    def __init__(
        self,
        client: HasDriver,
        name: str,
        worker: str,
        *,
        partitions: int | None = None,
        capacity: int | None = None,
        window_capacity: int = CAPACITY,
        follow: bool = False,
    ) -> None:
        self.name = name
        self.worker = worker
        self.window_capacity = window_capacity
        self._driver = client.driver
        self._capacity = capacity
        self._changed = threading.Condition()
        self._stopped = False
        self._leaves = True
        self._membership: Membership[Assignment] = Membership(
            lambda grant, lease: Assignment(self, grant, lease), now, random.random, name, partitions, follow
        )
        self._do: Callable[[Call[Assignment]], object] | None = None
        """Begins the step and reports its outcome to `_done`."""

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """The current assignments, by partition."""
        with self._changed:
            return self._membership.held

    def run(self, on_assigned: Callable[[Assignment], object], on_released: Callable[[Assignment], object]) -> None:
        """Work in the group until `stop` is called; then release all partitions, leave, and return.

        `on_assigned(assignment)` starts the work on a partition and returns. `on_released(assignment)` ends it: it
        blocks until no work on the partition is running, and then the window is committed. It must return within the
        group's release time. If `assignment.lost` is true, at once or while it drains, another worker may already own
        the partition. Each assignment gets both calls in order, in threads of their own; calls for different partitions
        run in parallel.

        If a callback raises, the worker stops as with `stop`, and `run` raises the exception; the same is true of
        Ctrl-C. Raises `ConsumerGroupNotFound`, `SessionReplaced` if another process has joined under the worker's name,
        `GroupReplaced`, `PartitionsFixed` and other refusals. If the service is unreachable for a ttl, the worker loses
        its partitions and keeps trying; it receives again those that nobody has taken.
        """

        def call(step: Call[Assignment]) -> None:
            (on_assigned if step.assigned else on_released)(step.assignment)
            if not step.assigned and step.assignment.uncommitted and not step.assignment.lost:
                # If the commit fails, the next owner repeats the uncommitted work.
                with suppress(errors.LastbitError):
                    step.assignment.commit()

        self._run(partial(self._in_thread, call))

    def _run(self, do: Callable[[Call[Assignment]], object]) -> None:
        with self._changed:
            if self._do is not None:
                raise errors.InvalidArgument("a ConsumerGroup can run only once; make another one")
            self._do = do
        membership = self._membership
        try:
            self._drive()
        except BaseException as error:  # noqa: BLE001  # such as Ctrl-C; raised after all partitions are released
            with self._changed:
                membership.fail(error)
            self._drive()
        if not membership.gone:
            # If this fails, the lease expires.
            with suppress(errors.LastbitError):
                self._driver.run(end, self.name, self.worker, self._capacity, membership)
        if membership.error is not None:
            raise membership.error

    def consume(
        self,
        source_of: Callable[[Assignment], Source[R]],
        handle: Callable[[Any], object],
        *,
        key: Callable[[R], Hashable] | None = None,
        ordered: bool = True,
        handlers: int = HANDLERS,
        batch: int | None = None,
        linger: float = 0.0,
        retry: Callable[[Exception, int], float | None] | None = None,
        dead_letter: Callable[[R, Exception], object] | None = None,
        every: float = EVERY,
        wanted: Callable[[R], bool] | None = None,
        stuck_after: float = 60.0,
        on_stuck: Callable[[Any, float], object] | None = None,
    ) -> None:
        """Like `run`, with an ordered stream for each partition: handles each record of `source_of(assignment)`, those
        of a key in order. At intervals of `every` seconds, one call commits the windows of all partitions.

        At most `handlers` calls of `handle` run at once, over all partitions of this worker. Partitions take turns. The
        other options are those of `run_ordered`, for each partition.

        A source yields (offset, record) pairs from above `assignment.floor`. It must also yield None when it has
        nothing at the moment, otherwise the partition can't be released in time. A few threads read all sources in
        turns: a source is read by one thread at a time, but not always by the same. One that waits should wait for at
        most 0.1 seconds before it yields None; a thread of its own is started for one that blocks for longer.

        On release, the current records are finished, and records that wait, for a handler or a retry, are left to the
        next owner. If a stream fails, or the service refuses a commit for good, the worker stops and this raises the
        error. A commit that fails for another reason is made again after an interval.
        """
        options = Options(key, handlers, ordered, batch, linger, retry, every, wanted, stuck_after, on_stuck)
        consumer = Consumer(self, source_of, handle, dead_letter, options.checked("handlers"))
        try:
            consumer.start()
            self._run(consumer.do)
        finally:
            consumer.stop()

    def commit(self, assignments: Iterable[Assignment], *, head: int | None = None) -> None:
        """Commit the windows of these assignments with one call; `head` is as in `Assignment.commit`. Those that
        another worker owns are lost afterwards, and don't affect the others."""
        with self._changed:
            commits = self._membership.committing(assignments)
        if not commits:
            return
        stale = self._driver.run(commit_many, self._membership, commits, head)
        with self._changed:
            self._membership.committed(commits, stale)
            self._changed.notify_all()

    def stop(self, *, leave: bool = True) -> None:
        """Make `run` release all partitions and return. May be called from any thread or signal handler.

        With `leave=False`, it drains and commits them, and the service keeps them for a process that starts under the
        same name before the lease ends. So a restart moves none of them. If none starts, other workers take them over
        then. Only the first call counts.
        """
        if not self._stopped:
            self._leaves = leave
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def _drive(self) -> None:
        while True:
            with self._changed:
                if self._membership.over:
                    return
                if self._stopped:  # checked here, as a signal handler may call `stop`
                    self._membership.stop(self._leaves)
                steps = self._membership.due()
                if not steps:
                    self._changed.wait(min(LONGEST_WAIT, max(0.0, self._membership.deadline - now())))
            for step in steps:
                self._begin(step)

    def _begin(self, step: Sync | Call[Assignment]) -> None:
        if isinstance(step, Sync):
            self._in_thread(self._beat, step)
        else:
            assert self._do is not None
            self._do(step)

    def _in_thread(self, function: Callable[[S], Synced | None], step: S) -> None:
        """Call it in a thread that reports the outcome of the step."""

        def do() -> None:
            outcome: Synced | BaseException | None = None
            try:
                outcome = function(step)
            except BaseException as error:  # noqa: BLE001  # `run` raises it
                outcome = error
            self._done(step, outcome)

        try:
            threading.Thread(target=do, name=f"lastbit-{self.name}", daemon=True).start()
        except RuntimeError as error:  # the process may have no more threads: release all partitions, one by one
            self._fail(error)
            do()

    def _done(self, step: Sync | Call[Assignment], outcome: Synced | BaseException | None) -> None:
        with self._changed:
            self._membership.done(step, outcome)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._membership.fail(error)
            self._changed.notify_all()

    def _commit_all(self) -> None:
        try:
            self.commit(assignment for assignment in self.assignments if assignment.uncommitted)
        except Exception as error:  # noqa: BLE001  # made again, or `consume` raises it
            if not (isinstance(error, errors.LastbitError) and error.is_temporary):
                self._fail(error)
                return
            log.warning("the positions could not be committed; the commit will be made again: %r", error)

    def _beat(self, step: Sync) -> Synced:
        return self._driver.run(beat, self.name, self.worker, self._capacity, self._membership, step)

    def _commit(self, assignment: Assignment, token: str | None, head: int | None) -> None:
        with self._changed:
            self._membership.expire()
        snapshot, acks = assignment.committing()
        try:
            self._driver.run(commit, self._membership, assignment, snapshot, token, head)
        except errors.StaleEpoch:
            with self._changed:
                self._membership.fence(assignment)
                self._changed.notify_all()
            raise
        assignment.committed(acks)
