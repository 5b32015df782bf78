"""`ConsumerGroup`: this worker's part in a consumer group, from its first heartbeat until it leaves.

The rules are in `_membership.py`; here they are driven, once by threads and once by the tasks of an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from lastbit import errors
from lastbit.groups import Granted, Synced, _commit, _get, _leave, _sync
from lastbit.models import Fence
from lastbit.retry import Retry
from lastbit.streams._membership import A, Call, Held, Lease, Membership, Sync
from lastbit.streams.window import AckWindow

if TYPE_CHECKING:
    from lastbit._protocol import Flow, Service
    from lastbit.client import AsyncClient, Client

LONGEST_WAIT = 3600.0
"""Seconds until what is due is looked at, though nothing happened; what never is due has no other bound."""


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one: leases run out meanwhile."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def _beat(
    service: Service, name: str, worker: str, capacity: int | None, membership: Membership[A], step: Sync
) -> Flow[Synced]:
    # One attempt, which leaves time for another: the next one is a sync of its own, with a lease of its own.
    timeout = service.timeout if step.timeout is None else min(service.timeout, step.timeout)
    hasty = replace(service, timeout=timeout, retry=Retry(attempts=1))
    if membership.release is None:
        membership.release = (yield from _get(hasty, name)).release
    drained = [partition for partition, _ in step.drained]
    capacity = 0 if step.leaving else capacity
    return (yield from _sync(hasty, name, worker, membership.session, drained, capacity))


def _window(granted: Granted) -> AckWindow:
    return AckWindow() if granted.snapshot is None else AckWindow.restore(granted.snapshot)


class Assignment(Held):
    """A partition while it is this worker's; see `Held`."""

    def __init__(self, group: ConsumerGroup, granted: Granted, lease: Lease) -> None:
        fence = Fence(group.name, granted.partition, group.worker, granted.epoch)
        super().__init__(fence, granted.token, _window(granted), lease)
        self._group = group

    def commit(self, token: str | None = None, head: int | None = None) -> None:
        """Keep what the window knows with the service, for whoever has the partition next; with it `token`, what the
        source calls the floor, and `head`, the source's last offset, to tell the lag by. Raises `StaleEpoch` where the
        partition is somebody else's by now: the assignment is lost then."""
        self._group._commit(self, token, head)


class ConsumerGroup:
    """A worker of the group `name`, under the name `worker`; the group has been made by `client.groups.create`.

    `capacity`: at most so many partitions at a time. A name belongs to one process: one that starts again under it is
    given new epochs, and whatever the one before still sends is refused.
    """

    def __init__(self, client: Client, name: str, worker: str, *, capacity: int | None = None) -> None:
        self.name = name
        self.worker = worker
        self._client = client
        self._capacity = capacity
        self._changed = threading.Condition()
        self._stopped = False
        self._membership: Membership[Assignment] = Membership(
            lambda granted, lease: Assignment(self, granted, lease), _now, random.random
        )
        self._callbacks: tuple[Callable[[Assignment], object], Callable[[Assignment], object]] | None = None

    @property
    def assignments(self) -> tuple[Assignment, ...]:
        """What is held now."""
        with self._changed:
            return self._membership.held

    def run(self, on_assigned: Callable[[Assignment], object], on_released: Callable[[Assignment], object]) -> None:
        """Take part until `stop` is called; then give all back, leave, and return.

        `on_assigned(assignment)` begins the work on a partition and returns. `on_released(assignment)` ends it: it
        blocks until nothing of the partition is under way any more, and what the window knows by then is committed. It
        has the group's release time for that; where `assignment.lost` is true, at once or while it drains, the
        partition may be another's already. Each assignment gets both calls, one after the other, in threads of their
        own; those of different partitions run side by side.

        A callback that raises ends it as `stop` does, and `run` raises the same; so does Ctrl-C. Raises
        `ConsumerGroupNotFound` and other refusals; a service that is away is waited for, without the partitions.
        """
        with self._changed:
            if self._callbacks is not None:
                raise errors.InvalidArgument("a consumer group runs once; make another one")
            self._callbacks = (on_assigned, on_released)
        membership = self._membership
        try:
            self._drive()
        except BaseException as error:  # noqa: BLE001  # Ctrl-C above all: it is raised when all is given back
            with self._changed:
                membership.fail(error)
            self._drive()
        if not membership.gone:
            # Who is not heard is missed after its lease.
            with suppress(errors.LastbitError):
                self._client._run(_leave(self._client._service, self.name, self.worker, membership.session))
        if membership.error is not None:
            raise membership.error

    def stop(self) -> None:
        """Have `run` give everything back and return; from any thread, and from a signal's handler."""
        self._stopped = True
        with self._changed:
            self._changed.notify_all()

    def _drive(self) -> None:
        with self._changed:
            while not self._membership.over:
                if self._stopped:  # not done by stop itself: a signal comes in the middle of anything
                    self._membership.stop()
                for step in self._membership.due():
                    threading.Thread(target=self._do, args=(step,), name=f"lastbit-{self.name}", daemon=True).start()
                self._changed.wait(min(LONGEST_WAIT, max(0.0, self._membership.deadline - _now())))

    def _do(self, step: Sync | Call[Assignment]) -> None:
        outcome: Synced | BaseException | None = None
        try:
            if isinstance(step, Sync):
                outcome = self._beat(step)
            else:
                self._call(step)
        except BaseException as error:  # noqa: BLE001  # it is run's caller who is told of it
            outcome = error
        with self._changed:
            self._membership.done(step, outcome)
            self._changed.notify_all()

    def _beat(self, step: Sync) -> Synced:
        service = self._client._service
        return self._client._run(_beat(service, self.name, self.worker, self._capacity, self._membership, step))

    def _call(self, step: Call[Assignment]) -> None:
        assert self._callbacks is not None
        on_assigned, on_released = self._callbacks
        if step.assigned:
            on_assigned(step.assignment)
            return
        on_released(step.assignment)
        if step.assignment.uncommitted and not step.assignment.lost:
            # What cannot be kept now is done again by the next one.
            with suppress(errors.LastbitError):
                step.assignment.commit()

    def _commit(self, assignment: Assignment, token: str | None, head: int | None) -> None:
        with self._changed:
            self._membership.expire()
        snapshot, acks = assignment.committing()
        try:
            self._client._run(_commit(self._client._service, assignment.fence, snapshot, token, head))
        except errors.StaleEpoch:
            with self._changed:
                self._membership.fence(assignment)
                self._changed.notify_all()
            raise
        assignment.committed(acks)


class AsyncAssignment(Held):
    """`Assignment`, awaited."""

    def __init__(self, group: AsyncConsumerGroup, granted: Granted, lease: Lease) -> None:
        fence = Fence(group.name, granted.partition, group.worker, granted.epoch)
        super().__init__(fence, granted.token, _window(granted), lease)
        self._group = group

    async def commit(self, token: str | None = None, head: int | None = None) -> None:
        """Keep what the window knows with the service; see `Assignment.commit`."""
        await self._group._commit(self, token, head)


AsyncCallback = Callable[[AsyncAssignment], Awaitable[object] | object]


class AsyncConsumerGroup:
    """`ConsumerGroup` for the tasks of one event loop. Callbacks may be coroutine functions; one that blocks the loop
    stops the heartbeats too."""

    def __init__(self, client: AsyncClient, name: str, worker: str, *, capacity: int | None = None) -> None:
        self.name = name
        self.worker = worker
        self._client = client
        self._capacity = capacity
        self._changed = asyncio.Event()
        self._membership: Membership[AsyncAssignment] = Membership(
            lambda granted, lease: AsyncAssignment(self, granted, lease), _now, random.random
        )
        self._callbacks: tuple[AsyncCallback, AsyncCallback] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def assignments(self) -> tuple[AsyncAssignment, ...]:
        """What is held now."""
        return self._membership.held

    async def run(self, on_assigned: AsyncCallback, on_released: AsyncCallback) -> None:
        """Take part until `stop` is called, or the task is cancelled; see `ConsumerGroup.run`."""
        if self._callbacks is not None:
            raise errors.InvalidArgument("a consumer group runs once; make another one")
        self._callbacks = (on_assigned, on_released)
        membership = self._membership
        try:
            await self._drive()
        except BaseException as error:  # noqa: BLE001  # a cancelled task above all: it is raised when all is given back
            membership.fail(error)
            await self._drive()
        if not membership.gone:
            # Who is not heard is missed after its lease.
            with suppress(errors.LastbitError):
                await self._client._run(_leave(self._client._service, self.name, self.worker, membership.session))
        if membership.error is not None:
            raise membership.error

    def stop(self) -> None:
        """Have `run` give everything back and return; from the event loop's own thread."""
        self._membership.stop()
        self._changed.set()

    async def _drive(self) -> None:
        while not self._membership.over:
            for step in self._membership.due():
                task = asyncio.create_task(self._do(step), name=f"lastbit-{self.name}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._changed.clear()
            # Not wait_for, which in Python 3.11 swallows a cancellation that comes together with what it waits for.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LONGEST_WAIT, max(0.0, self._membership.deadline - _now()))):
                    await self._changed.wait()

    async def _do(self, step: Sync | Call[AsyncAssignment]) -> None:
        outcome: Synced | BaseException | None = None
        try:
            if isinstance(step, Sync):
                outcome = await self._beat(step)
            else:
                await self._call(step)
        except BaseException as error:  # noqa: BLE001  # it is run's caller who is told of it
            outcome = error
        self._membership.done(step, outcome)
        self._changed.set()

    async def _beat(self, step: Sync) -> Synced:
        service = self._client._service
        return await self._client._run(_beat(service, self.name, self.worker, self._capacity, self._membership, step))

    async def _call(self, step: Call[AsyncAssignment]) -> None:
        assert self._callbacks is not None
        on_assigned, on_released = self._callbacks
        returned = (on_assigned if step.assigned else on_released)(step.assignment)
        if inspect.isawaitable(returned):
            await returned
        if not step.assigned and step.assignment.uncommitted and not step.assignment.lost:
            # What cannot be kept now is done again by the next one.
            with suppress(errors.LastbitError):
                await step.assignment.commit()

    async def _commit(self, assignment: AsyncAssignment, token: str | None, head: int | None) -> None:
        self._membership.expire()
        snapshot, acks = assignment.committing()
        try:
            await self._client._run(_commit(self._client._service, assignment.fence, snapshot, token, head))
        except errors.StaleEpoch:
            self._membership.fence(assignment)
            self._changed.set()
            raise
        assignment.committed(acks)
