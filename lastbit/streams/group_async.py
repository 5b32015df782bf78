"""`AsyncConsumerGroup`: a worker of a consumer group, run by the tasks of an event loop; see `group.py`."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from lastbit import errors
from lastbit._drivers import HasAsyncDriver
from lastbit.groups import Granted, Synced
from lastbit.models import Fence
from lastbit.streams._commits import commit, commit_many
from lastbit.streams._consuming import Released
from lastbit.streams._membership import Call, Held, Lease, Membership, Sync
from lastbit.streams._progress import CAPACITY, EVERY, HANDLERS, Options, Progress
from lastbit.streams._tasks import Items, TaskStream, TaskWorkers, asynchronous, set_within
from lastbit.streams._turns import Turns
from lastbit.streams.group import LONGEST_WAIT, beat, end, log, now, window_of

R = TypeVar("R")


class AsyncAssignment(Held):
    """`Assignment`, awaited."""

    def __init__(self, group: AsyncConsumerGroup, grant: Granted, lease: Lease) -> None:
        fence = Fence(group.name, grant.partition, group.worker, grant.epoch)
        super().__init__(fence, grant.token, window_of(grant, group.window_capacity), lease)
        self._group = group

    async def commit(self, token: str | None = None, head: int | None = None) -> None:
        """Commit the window's snapshot to the service; see `Assignment.commit`."""
        await self._group._commit(self, token, head)


class AsyncPartition(TaskStream[R]):
    """The stream of a partition. `failed` is called with the error that ends it."""

    def __init__(
        self,
        assignment: AsyncAssignment,
        options: Options[R],
        handle: Callable[[Any], Awaitable[object]],
        dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None,
        turns: Turns,
        failed: Callable[[BaseException], object],
    ) -> None:
        options = options._replace(name=assignment.fence.group, partition=assignment.fence.partition)
        super().__init__(Progress(assignment.window, options), options, handle, None, dead_letter, turns.put)
        self._assignment = assignment
        self._failed = failed
        self._drained = asyncio.Event()

    def start(self, source_of: Callable[[AsyncAssignment], Items[R]]) -> None:
        """`source_of` is called at once."""
        name = f"lastbit-{self._assignment.fence.group}-{self._assignment.partition}"
        self._reader = asyncio.create_task(self._read(source_of(self._assignment)), name=name)
        self._reader.add_done_callback(lambda _: self._rested())

    async def end(self, seconds: float) -> None:
        """Let what runs end within so many seconds, and no more. After that the partition is lost."""
        self._fail(Released())
        self._rested()
        if not await set_within(self._drained, seconds):
            for task in (self._reader, *self._working):
                task.cancel()

    def report_if_stuck(self) -> None:
        self._progress.report_if_stuck()

    async def _read(self, source: Items[R]) -> None:
        try:
            try:
                async with aclosing(asynchronous(source)) as items:
                    async for item in items:
                        if self._stream.failure is not None or not self._assignment.active:
                            return
                        if item is not None:
                            await self.accept(*item)
                self._schedule.flush()
            finally:
                await _close(source)
        except BaseException as error:  # noqa: BLE001  # `consume` raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if self._stream.failure is error and not isinstance(error, Released):
            self._failed(error)

    def _rested(self) -> None:
        if self._stream.failure is not None and self._reader.done() and not self._working:
            self._drained.set()


async def _close(source: object) -> None:
    if isinstance(source, AsyncGenerator):
        await source.aclose()
    elif isinstance(source, Generator):
        source.close()


AsyncCallback = Callable[[AsyncAssignment], Awaitable[object] | object]


class AsyncConsumerGroup:
    """`ConsumerGroup` for the tasks of one event loop. Callbacks may be coroutine functions. A callback that blocks the
    loop also stops the heartbeats."""

    def __init__(
        self,
        client: HasAsyncDriver,
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
        self._changed = asyncio.Event()
        self._membership: Membership[AsyncAssignment] = Membership(
            lambda grant, lease: AsyncAssignment(self, grant, lease), now, random.random, name, partitions, follow
        )
        self._callbacks: tuple[AsyncCallback, AsyncCallback] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def assignments(self) -> tuple[AsyncAssignment, ...]:
        """The current assignments, by partition."""
        return self._membership.held

    async def run(self, on_assigned: AsyncCallback, on_released: AsyncCallback) -> None:
        """Work in the group until `stop` is called or the task is cancelled; see `ConsumerGroup.run`."""
        if self._callbacks is not None:
            raise errors.InvalidArgument("an AsyncConsumerGroup can run only once; make another one")
        self._callbacks = (on_assigned, on_released)
        membership = self._membership
        try:
            await self._drive()
        except BaseException as error:  # noqa: BLE001  # such as a cancellation; raised at the end
            membership.fail(error)
            await self._drive()
        if not membership.gone:
            # If this fails, the lease expires.
            with suppress(errors.LastbitError):
                await self._driver.run(end, self.name, self.worker, self._capacity, membership)
        if membership.error is not None:
            raise membership.error

    async def consume(
        self,
        source_of: Callable[[AsyncAssignment], Items[R]],
        handle: Callable[[Any], Awaitable[object]],
        *,
        key: Callable[[R], Hashable] | None = None,
        ordered: bool = True,
        handlers: int = HANDLERS,
        batch: int | None = None,
        linger: float = 0.0,
        retry: Callable[[Exception, int], float | None] | None = None,
        dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None = None,
        every: float = EVERY,
        wanted: Callable[[R], bool] | None = None,
        stuck_after: float = 60.0,
        on_stuck: Callable[[Any, float], object] | None = None,
    ) -> None:
        """`run` with an ordered stream for each partition; see `ConsumerGroup.consume`. Each source has a task,
        so it may wait for a record, if it yields None within the group's release time."""
        options = Options(key, handlers, ordered, batch, linger, retry, every, wanted, stuck_after, on_stuck)
        options.checked("handlers")
        workers = TaskWorkers()
        turns = Turns(workers.put)
        partitions: dict[AsyncAssignment, AsyncPartition[R]] = {}

        def failed(assignment: AsyncAssignment, error: BaseException) -> None:
            if not assignment.lost:  # else the next owner handles its records
                self._fail(error)

        def begin(assignment: AsyncAssignment) -> None:
            partition = AsyncPartition(assignment, options, handle, dead_letter, turns, partial(failed, assignment))
            partitions[assignment] = partition
            partition.start(source_of)

        async def end(assignment: AsyncAssignment) -> None:
            await partitions.pop(assignment).end(self._membership.release or 0.0)

        async def keep() -> None:
            while True:
                await asyncio.sleep(every)
                try:
                    for partition in partitions.values():
                        partition.report_if_stuck()
                except Exception as error:  # noqa: BLE001  # the caller's `on_stuck` failed; `consume` raises it
                    self._fail(error)
                await self._commit_all()

        workers.start(handlers)
        keeper = asyncio.create_task(keep(), name=f"lastbit-{self.name}")
        try:
            await self.run(begin, end)
        finally:
            workers.stop()
            for task in (keeper, *workers.tasks):
                task.cancel()
            await asyncio.wait([keeper, *workers.tasks])

    async def commit(self, assignments: Iterable[AsyncAssignment], *, head: int | None = None) -> None:
        """Commit the windows of these assignments with one call; see `ConsumerGroup.commit`."""
        commits = self._membership.committing(assignments)
        if not commits:
            return
        stale = await self._driver.run(commit_many, self._membership, commits, head)
        self._membership.committed(commits, stale)
        self._changed.set()

    def stop(self, *, leave: bool = True) -> None:
        """Make `run` release all partitions and return. Call it in the event loop's thread. `leave`: see
        `ConsumerGroup.stop`."""
        self._membership.stop(leave)
        self._changed.set()

    async def _drive(self) -> None:
        while not self._membership.over:
            for step in self._membership.due():
                task = asyncio.create_task(self._do(step), name=f"lastbit-{self.name}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._changed.clear()
            # Not wait_for: in Python 3.11 it loses a cancellation that coincides with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LONGEST_WAIT, max(0.0, self._membership.deadline - now()))):
                    await self._changed.wait()

    def _fail(self, error: BaseException) -> None:
        self._membership.fail(error)
        self._changed.set()

    async def _commit_all(self) -> None:
        try:
            await self.commit([assignment for assignment in self.assignments if assignment.uncommitted])
        except Exception as error:  # noqa: BLE001  # made again, or `consume` raises it
            if not (isinstance(error, errors.LastbitError) and error.is_temporary):
                self._fail(error)
                return
            log.warning("the positions could not be committed; the commit will be made again: %r", error)

    async def _do(self, step: Sync | Call[AsyncAssignment]) -> None:
        outcome: Synced | BaseException | None = None
        try:
            if isinstance(step, Sync):
                outcome = await self._beat(step)
            else:
                await self._call(step)
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            outcome = error
        self._membership.done(step, outcome)
        self._changed.set()

    async def _beat(self, step: Sync) -> Synced:
        return await self._driver.run(beat, self.name, self.worker, self._capacity, self._membership, step)

    async def _call(self, step: Call[AsyncAssignment]) -> None:
        assert self._callbacks is not None
        on_assigned, on_released = self._callbacks
        result = (on_assigned if step.assigned else on_released)(step.assignment)
        if inspect.isawaitable(result):
            await result
        if not step.assigned and step.assignment.uncommitted and not step.assignment.lost:
            # If the commit fails, the next owner repeats the uncommitted work.
            with suppress(errors.LastbitError):
                await step.assignment.commit()

    async def _commit(self, assignment: AsyncAssignment, token: str | None, head: int | None) -> None:
        self._membership.expire()
        snapshot, acks = assignment.committing()
        try:
            await self._driver.run(commit, self._membership, assignment, snapshot, token, head)
        except errors.StaleEpoch:
            self._membership.fence(assignment)
            self._changed.set()
            raise
        assignment.committed(acks)
