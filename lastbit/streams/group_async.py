"""`AsyncConsumerGroup`: a worker of a consumer group, run by the tasks of an event loop; see `group.py`."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from lastbit import errors
from lastbit._drivers import HasAsyncDriver
from lastbit.groups import Granted, Synced
from lastbit.models import Fence
from lastbit.streams._commits import commit, commit_many
from lastbit.streams._membership import Call, Held, Lease, Membership, Sync
from lastbit.streams._progress import CAPACITY, EVERY
from lastbit.streams.group import LONGEST_WAIT, Released, beat, leave, log, now, while_active, window_of
from lastbit.streams.ordered_async import run_ordered_async

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
                await self._driver.run(leave, self.name, self.worker, membership)
        if membership.error is not None:
            raise membership.error

    async def consume(
        self,
        source_of: Callable[[AsyncAssignment], AsyncIterable[tuple[int, R] | None] | Iterable[tuple[int, R] | None]],
        handle: Callable[[R], Awaitable[object]],
        *,
        key: Callable[[R], Hashable],
        every: float = EVERY,
        **options: Any,
    ) -> None:
        """`run` with an ordered stream for each partition; see `ConsumerGroup.consume`. `options` are those of
        `run_ordered_async`."""
        if not every > 0:
            raise errors.InvalidArgument(f"every must be more than 0 seconds, not {every!r}")
        streams: dict[AsyncAssignment, asyncio.Task[None]] = {}

        async def work(assignment: AsyncAssignment) -> None:
            try:
                await run_ordered_async(
                    _while_active(assignment, source_of(assignment)),
                    handle,
                    key=key,
                    every=every,
                    commit=None,
                    window=assignment.window,
                    **options,
                )
            except Released:
                pass
            except BaseException as error:  # noqa: BLE001  # `consume` raises it
                if assignment.lost:
                    return  # the next owner handles these records
                self._membership.fail(error)
                self._changed.set()

        def begin(assignment: AsyncAssignment) -> None:
            name = f"lastbit-{self.name}-{assignment.partition}"
            streams[assignment] = asyncio.create_task(work(assignment), name=name)

        async def end(assignment: AsyncAssignment) -> None:
            _, late = await asyncio.wait([streams.pop(assignment)], timeout=self._membership.release)
            for task in late:
                task.cancel()  # the partition is lost

        committer = asyncio.create_task(self._commit_regularly(every), name=f"lastbit-{self.name}")
        try:
            await self.run(begin, end)
        finally:
            committer.cancel()
            await asyncio.wait([committer])

    async def commit(self, assignments: Iterable[AsyncAssignment], *, head: int | None = None) -> None:
        """Commit the windows of these assignments with one call; see `ConsumerGroup.commit`."""
        commits = self._membership.committing(assignments)
        if not commits:
            return
        stale = await self._driver.run(commit_many, self._membership, commits, head)
        self._membership.committed(commits, stale)
        self._changed.set()

    def stop(self) -> None:
        """Make `run` release all partitions and return. Call it in the event loop's thread."""
        self._membership.stop()
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

    async def _commit_regularly(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await self.commit([assignment for assignment in self.assignments if assignment.uncommitted])
            except Exception as error:  # noqa: BLE001  # made again, or `consume` raises it
                if not (isinstance(error, errors.LastbitError) and error.is_temporary):
                    self._membership.fail(error)
                    self._changed.set()
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


async def _while_active(assignment: Held, source: AsyncIterable[R] | Iterable[R]) -> AsyncIterator[R]:
    if not isinstance(source, AsyncIterable):
        for item in while_active(assignment, source):
            yield item
            await asyncio.sleep(0)  # let heartbeats and lanes run
        return
    try:
        async for item in source:
            if not assignment.active:
                raise Released
            yield item
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()
