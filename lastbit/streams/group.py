"""`ConsumerGroup`: this worker's part in a consumer group, from its first heartbeat until it leaves.

The rules are in `_membership.py`; here threads drive them, in `group_async.py` the tasks of an event loop.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lastbit import errors
from lastbit.groups import Granted, Synced, _commit, _leave, _sync
from lastbit.models import Fence
from lastbit.retry import Retry
from lastbit.streams._membership import A, Call, Held, Lease, Membership, Sync
from lastbit.streams._progress import CAPACITY
from lastbit.streams.ordered import run_ordered
from lastbit.streams.window import AckWindow

if TYPE_CHECKING:
    from lastbit._protocol import Flow, Service
    from lastbit.client import Client

R = TypeVar("R")

LONGEST_WAIT = 3600.0
"""Seconds until what is due is looked at, though nothing happened; what never is due has no other bound."""


def now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one: leases run out meanwhile."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def beat(
    service: Service, name: str, worker: str, capacity: int | None, membership: Membership[A], step: Sync
) -> Flow[Synced]:
    # One attempt, which leaves time for another: the next one is a sync of its own, with a lease of its own.
    hasty = replace(service, timeout=min(service.timeout, step.timeout), retry=Retry(attempts=1))
    capacity = 0 if step.leaving else capacity
    return _sync(hasty, name, worker, membership.session, step.drained, capacity)


def for_a_lease(service: Service, ttl: float) -> Service:
    """The service, with no more patience than a lease lasts: after it there is nothing left to insist on."""
    return replace(service, retry=replace(service.retry, deadline=min(service.retry.deadline, ttl)))


def window_of(granted: Granted, capacity: int) -> AckWindow:
    if granted.snapshot is None:
        return AckWindow(capacity=capacity)
    return AckWindow.restore(granted.snapshot, capacity=capacity)


class Released(Exception):
    """Ends a stream whose partition is to be given back, or was lost: what waits in its lanes is the next owner's."""


def while_active(assignment: Held, source: Iterable[R]) -> Iterator[R]:
    """The source's items until the partition is to be given back, or is lost: then raises `Released`."""
    try:
        for item in source:
            if not assignment.active:
                raise Released
            yield item
    finally:
        if isinstance(source, Generator):
            source.close()


class Assignment(Held):
    """A partition while it is this worker's; see `Held`."""

    def __init__(self, group: ConsumerGroup, granted: Granted, lease: Lease) -> None:
        fence = Fence(group.name, granted.partition, group.worker, granted.epoch)
        super().__init__(fence, granted.token, window_of(granted, group.window_capacity), lease)
        self._group = group

    def commit(self, token: str | None = None, head: int | None = None) -> None:
        """Keep what the window knows with the service, for whoever has the partition next; with it `token`, what the
        source calls the floor, and `head`, the source's last offset, to tell the lag by. Raises `StaleEpoch` where the
        partition is somebody else's by now: the assignment is lost then."""
        self._group._commit(self, token, head)


class ConsumerGroup:
    """A worker of the group `name`, under the name `worker`; the group has been made by `client.groups.create`.

    `capacity`: at most so many partitions at a time. `window_capacity`: positions of the window of each, up to 65,536;
    records that are large want fewer. A name belongs to one process: one that starts again under it is
    given new epochs, and whatever the one before still sends is refused.
    """

    def __init__(
        self, client: Client, name: str, worker: str, *, capacity: int | None = None, window_capacity: int = CAPACITY
    ) -> None:
        self.name = name
        self.worker = worker
        self.window_capacity = window_capacity
        self._client = client
        self._capacity = capacity
        self._changed = threading.Condition()
        self._stopped = False
        self._membership: Membership[Assignment] = Membership(
            lambda granted, lease: Assignment(self, granted, lease), now, random.random
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
                self._client._run(
                    _leave(
                        for_a_lease(self._client._service, membership.ttl), self.name, self.worker, membership.session
                    )
                )
        if membership.error is not None:
            raise membership.error

    def consume(
        self,
        source_of: Callable[[Assignment], Iterable[tuple[int, R] | None]],
        handle: Callable[[R], object],
        *,
        key: Callable[[R], Hashable],
        **options: Any,
    ) -> None:
        """`run` with an ordered stream for each partition: each record of `source_of(assignment)` is handled, those of
        a key in order, and the window is committed as it goes.

        A source yields (offset, record) from above `assignment.floor`, and None when it has nothing at the moment, or
        the partition can't be given back in time. When it is asked back, the records in hand are finished, and those
        that wait in the lanes are left to the next owner. `options` are those of `run_ordered`. A stream that fails
        ends the run with its error.
        """
        streams: dict[Assignment, threading.Thread] = {}

        def work(assignment: Assignment) -> None:
            try:
                run_ordered(
                    while_active(assignment, source_of(assignment)),
                    handle,
                    key=key,
                    commit=lambda floor: assignment.commit(),
                    window=assignment.window,
                    **options,
                )
            except Released:
                pass
            except BaseException as error:  # noqa: BLE001  # it is consume's caller who is told of it
                if assignment.lost:
                    return  # whatever it was, the next owner has these records now
                with self._changed:
                    self._membership.fail(error)
                    self._changed.notify_all()

        def begin(assignment: Assignment) -> None:
            name = f"lastbit-{self.name}-{assignment.partition}"
            streams[assignment] = threading.Thread(target=work, args=(assignment,), name=name, daemon=True)
            streams[assignment].start()

        def end(assignment: Assignment) -> None:
            streams.pop(assignment).join(self._membership.release)

        self.run(begin, end)

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
                self._changed.wait(min(LONGEST_WAIT, max(0.0, self._membership.deadline - now())))

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
        return self._client._run(beat(service, self.name, self.worker, self._capacity, self._membership, step))

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
            self._client._run(
                _commit(
                    for_a_lease(self._client._service, self._membership.ttl), assignment.fence, snapshot, token, head
                )
            )
        except errors.StaleEpoch:
            with self._changed:
                self._membership.fence(assignment)
                self._changed.notify_all()
            raise
        assignment.committed(acks)
