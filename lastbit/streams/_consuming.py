"""The streams of a worker's partitions. Their handlers share some threads (`Workers`), and their sources some others
(`Readers`). Another one, the keeper, commits the windows and reports records that are stuck.

A partition that must be released is drained when no handler runs and its source is closed. The keeper then commits it,
and all others that are drained by then, with one call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from lastbit import errors
from lastbit._threads import join_started
from lastbit.streams._membership import Call, Held, Membership
from lastbit.streams._progress import Options, Progress
from lastbit.streams._readers import Readers
from lastbit.streams._threaded import ThreadedStream
from lastbit.streams._turns import Turns
from lastbit.streams._workers import Workers
from lastbit.streams.errors import WindowFull

R = TypeVar("R")
Source = Iterable[tuple[int, R] | None]

PAUSE: Final = 0.02
"""Seconds until a source that had nothing, or whose window was full, has its next turn."""
LONGEST_WAIT: Final = 3600.0
"""Seconds. A wait must be finite."""
_END: Final = object()


class Group(Protocol):
    """The worker of a group, a `ConsumerGroup`."""

    _membership: Membership[Any]

    def commit(self, assignments: Iterable[Any]) -> None: ...
    def _commit_all(self) -> None: ...
    def _done(self, step: Call[Any], outcome: BaseException | None) -> None: ...
    def _fail(self, error: BaseException) -> None: ...


class Released(Exception):
    """The failure that ends the stream of a partition that must be released or was lost. The next owner handles the
    records that wait."""


class Partition(ThreadedStream[R]):
    def __init__(
        self,
        consumer: Consumer[R],
        assignment: Held,
        options: Options[R],
        handle: Callable[[Any], object],
        dead_letter: Callable[[R, Exception], object] | None,
    ) -> None:
        options = options._replace(name=assignment.fence.group, partition=assignment.fence.partition)
        progress: Progress[R] = Progress(assignment.window, options)
        super().__init__(progress, options, handle, None, dead_letter, consumer.turns.put, consumer.workers.call_later)
        self.assignment = assignment
        self._consumer = consumer
        self._items: Iterator[tuple[int, R] | None] | None = None
        self._item: tuple[int, R] | None = None
        """What was read while the window was full."""
        self._is_read = False
        """Whether the source is closed."""

    def is_drained(self) -> bool:
        """Whether it has ended, and nothing of it runs."""
        return self._is_read and self._stream.failure is not None and not self._working

    def end(self) -> None:
        """Let what runs end, and no more."""
        self._fail(Released())

    def report_if_stuck(self) -> None:
        self._progress.report_if_stuck()

    def read(self, until: float) -> float | None:
        """See `HasSource`."""
        seconds: float | None = None
        try:
            seconds = self._read(until)
            if seconds is None:
                self._schedule.flush()
        except BaseException as error:  # noqa: BLE001  # `consume` raises it
            self._fail(error)
        if seconds is None:
            self._close()
        return seconds

    def _read(self, until: float) -> float | None:
        while self._stream.failure is None and self.assignment.active:
            if self._items is None:
                self._items = iter(self._consumer.source_of(self.assignment))
            if self._item is None:
                item: Any = next(self._items, _END)
                if item is _END:
                    return None
                if item is None:
                    return PAUSE
                self._item = item
                continue  # it may have come late
            try:
                self.accept(*self._item)
            except WindowFull:
                return PAUSE
            self._item = None
            if time.monotonic() >= until:
                return 0.0
        return None

    def _close(self) -> None:
        try:
            if isinstance(self._items, Generator):
                self._items.close()
        except BaseException as error:  # noqa: BLE001  # `consume` raises it
            self._consumer.failed(self.assignment, error)
        self._is_read = True
        self._consumer.look()

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if self._stream.failure is error:
            self._consumer.failed(self.assignment, error)

    def _rested(self) -> None:
        if self._stream.failure is not None:
            self._consumer.look()


class _Ending(NamedTuple):
    partition: Partition[Any]
    step: Call[Any]
    until: float
    """When the partition is lost, drained or not."""


class Consumer(Generic[R]):
    def __init__(
        self,
        group: Group,
        source_of: Callable[[Any], Source[R]],
        handle: Callable[[Any], object],
        dead_letter: Callable[[R, Exception], object] | None,
        options: Options[R],
    ) -> None:
        self.source_of = source_of
        self.workers = Workers()
        self.turns = Turns(self.workers.put)
        self._readers = Readers()
        self._keeper = threading.Thread(target=self._keep, name="lastbit-keeper", daemon=True)
        self._group = group
        self._handle = handle
        self._dead_letter = dead_letter
        self._options = options
        self._partitions: dict[Held, Partition[R]] = {}
        self._ending: list[_Ending] = []
        self._late: list[Partition[R]] = []
        """The partitions that were not drained in time."""
        self._changed = threading.Condition()
        self._is_over = False

    def start(self) -> None:
        """Raises `RuntimeError` if the process may have no more threads."""
        self._keeper.start()
        self._readers.start()
        self.workers.start(self._options.lanes)

    def stop(self) -> None:
        """All streams have ended, though a handler that is stuck may still run."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        join_started([self._keeper])
        self._readers.stop()
        late = [*self._partitions.values(), *(ending.partition for ending in self._ending), *self._late]
        self.workers.stop(wait=all(partition.is_drained() for partition in late))

    # Called by the thread of the group.

    def do(self, step: Call[Any]) -> None:
        """Begin the step. The keeper reports the end of a release."""
        if step.assigned:
            partition = Partition(self, step.assignment, self._options, self._handle, self._dead_letter)
            with self._changed:
                self._partitions[step.assignment] = partition
            self._readers.add(partition)
            self._group._done(step, None)
            return
        with self._changed:
            partition = self._partitions.pop(step.assignment)
            until = time.monotonic() + (self._group._membership.release or 0.0)
            self._ending.append(_Ending(partition, step, until))
        partition.end()
        self._readers.hasten(partition)
        self.look()

    # Called by any thread.

    def failed(self, assignment: Held, error: BaseException) -> None:
        """A stream has ended. If the partition is lost, the next owner handles its records."""
        if not isinstance(error, Released) and not assignment.lost:
            self._group._fail(error)

    def look(self) -> None:
        """Something has changed for the keeper."""
        with self._changed:
            self._changed.notify_all()

    # The keeper.

    def _keep(self) -> None:
        commit_at = time.monotonic() + self._options.every
        while (ended := self._wait(commit_at)) is not None:
            if ended:
                self._release(ended)
            if time.monotonic() >= commit_at:
                self._report_stuck()
                self._group._commit_all()
                commit_at = time.monotonic() + self._options.every

    def _wait(self, commit_at: float) -> list[_Ending] | None:
        """The partitions that are drained, or out of time; an empty list once it is time to commit; None at the end."""
        with self._changed:
            while not self._is_over:
                moment = time.monotonic()
                ended = [ending for ending in self._ending if ending.partition.is_drained() or ending.until <= moment]
                if ended or moment >= commit_at:
                    self._ending = [ending for ending in self._ending if ending not in ended]
                    self._late += [ending.partition for ending in ended if not ending.partition.is_drained()]
                    return ended
                until = min([commit_at, *(ending.until for ending in self._ending)])
                self._changed.wait(min(LONGEST_WAIT, until - moment))
        return None

    def _release(self, ended: list[_Ending]) -> None:
        outcome: BaseException | None = None
        try:
            self._group.commit(ending.step.assignment for ending in ended if ending.step.assignment.uncommitted)
        except errors.LastbitError:
            pass  # the next owners repeat the uncommitted work
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            outcome = error
        for ending in ended:
            self._group._done(ending.step, outcome)

    def _report_stuck(self) -> None:
        with self._changed:
            partitions = list(self._partitions.values())
        try:
            for partition in partitions:
                partition.report_if_stuck()
        except Exception as error:  # noqa: BLE001  # the caller's `on_stuck` failed; `consume` raises it
            self._group._fail(error)
