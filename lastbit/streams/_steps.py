"""What a stream does with records, retries and commits, whether threads run it or the tasks of an event loop.

A flow is a generator that yields the calls to make: functions without arguments, whose results may have to be awaited.
`run_steps` and `run_steps_async` run it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from lastbit.errors import InvalidArgument
from lastbit.streams._progress import LAST_PAUSE, LAST_TRIES, Options, Progress, failed, log, uncommitted
from lastbit.streams._schedule import UNORDERED, UNWANTED, Entry, Schedule
from lastbit.streams.errors import WindowClosed
from lastbit.streams.metrics import counts_of

R = TypeVar("R")
T = TypeVar("T")

Flow = Generator[Callable[[], Any], Any, T]


def run_steps(flow: Flow[T]) -> T:
    try:
        call = next(flow)
        while True:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  # the flow decides
                call = flow.throw(error)
            else:
                call = flow.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


async def run_steps_async(flow: Flow[T]) -> T:
    """Results are awaited if they can be."""
    try:
        call = next(flow)
        while True:
            try:
                result = call()
                if inspect.isawaitable(result):
                    result = await result
            except asyncio.CancelledError as error:
                call = flow.throw(error if _is_cancelled() else _from_inside(error))
            except BaseException as error:  # noqa: BLE001  # the flow decides
                call = flow.throw(error)
            else:
                call = flow.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _from_inside(error: asyncio.CancelledError) -> RuntimeError:
    """The error of a call of which something that it awaited was cancelled. As a cancellation, it would end this task
    without a word."""
    failure = RuntimeError("it was cancelled from inside")
    failure.__cause__ = error
    return failure


Failures = Sequence[tuple[Entry[R], Exception]]


class Work(NamedTuple, Generic[R]):
    """Records of one key that a worker has taken."""

    key: Hashable
    entries: Sequence[Entry[R]]
    live_entries: Sequence[Entry[R]]
    """The records to handle. The others belong to another owner by now, and count as done here."""
    argument: Any
    """The handler's: a record, or the list of records of a batch."""


class Stream(Generic[R]):
    """`sleep` is the runner's, in seconds."""

    def __init__(
        self,
        progress: Progress[R],
        schedule: Schedule[R],
        options: Options[R],
        commit: Callable[[Any], Any] | None,
        dead_letter: Callable[[R, Exception], Any] | None,
        sleep: Callable[[float], Any],
    ) -> None:
        self._progress = progress
        self._window = progress.window
        self._schedule = schedule
        self._options = options
        self._commit = commit
        self._dead_letter = dead_letter
        self._sleep = sleep
        self._counts = counts_of(options.name, options.partition)
        self._counts.begin(self._window)
        self.failure: BaseException | None = None
        """The first error, which ends the stream."""

    def leave_the_metrics(self) -> None:
        """The stream has ended."""
        self._counts.end(self._window)

    def fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error

    # The reader.

    def key_of(self, record: R) -> Hashable:
        """The key whose queue gets the record; `UNWANTED` if the caller's filter rejects it."""
        options = self._options
        if options.wanted is not None and not options.wanted(record):
            return UNWANTED
        if options.key is None or not options.ordered:
            return UNORDERED
        key = options.key(record)
        hash(key)
        return UNORDERED if key is None else key

    def add(self, entry: Entry[R], key: Hashable) -> None:
        """A record was tracked that has this key."""
        if key is UNWANTED:
            self._window.ack(entry.position)
        else:
            self._schedule.add(entry, key)

    # A worker takes a key's next records, calls the handler, and reports the end.

    def take(self, key: Hashable) -> Work[R]:
        entries = self._schedule.take(key)
        live_entries = [entry for entry in entries if self._window.begins(entry.position)]
        if self._options.batch is None:
            return Work(key, entries, live_entries, entries[0].record)
        return Work(key, entries, live_entries, [entry.record for entry in live_entries])

    def failures_in(self, work: Work[R], result: Any) -> Failures[R]:
        """The failures that the handler has returned. Raises `RecordFailed` if it returned anything else."""
        if result is None or self._options.batch is None:
            return ()
        try:
            return _failures(result, work.live_entries)
        except InvalidArgument as error:
            raise failed(work.live_entries[0].offset, error) from error

    def done(self, work: Work[R]) -> bool:
        """Nothing has failed. Returns whether no record is left."""
        for entry in work.entries:
            self._window.ack(entry.position)
        return self._schedule.finished(work.key, len(work.entries))

    def partly_done(self, work: Work[R], failures: Failures[R]) -> Flow[bool]:
        """Some records have failed. Returns whether no record is left."""
        failed_positions = {entry.position for entry, _ in failures}
        for entry in work.entries:
            if entry.position not in failed_positions:
                self._window.ack(entry.position)
        waiting: list[tuple[Entry[R], float]] = []
        for entry, error in failures:
            new_entry = entry._replace(tries=entry.tries + 1)
            pause = self._pause(new_entry, error)
            if pause is None:
                yield from self.give_up(entry, error)
            else:
                log.info("offset %r failed, and is tried again in %g seconds: %r", entry.offset, pause, error)
                waiting.append((new_entry, pause))
        if not waiting:
            return self._schedule.finished(work.key, len(work.entries))
        self._counts.retry(len(waiting))
        self._schedule.retry(work.key, waiting, finished=len(work.entries) - len(waiting))
        return False

    def _pause(self, entry: Entry[R], error: Exception) -> float | None:
        """Seconds until the record is tried again; None: give it up."""
        if self._options.retry is None:
            return None
        try:
            pause = self._options.retry(error, entry.tries)
            if pause is not None and not pause >= 0:
                raise InvalidArgument(f"retry must return seconds, 0 or more, or None, not {pause!r}")
        except Exception as worse:
            raise failed(entry.offset, worse) from worse
        return pause

    def give_up(self, entry: Entry[R], error: Exception) -> Flow[None]:
        """The record is done once it is a dead letter. Raises `RecordFailed` if it can't be one."""
        if self._dead_letter is None:
            raise failed(entry.offset, error) from error
        try:
            yield partial(self._dead_letter, entry.record, error)
        except BaseException as worse:
            raise failed(entry.offset, worse) from worse
        self._counts.dead_letter()
        self._window.ack(entry.position)

    # The committer.

    def commit_once(self) -> Flow[None]:
        due = self._progress.due()
        if due is None or self._commit is None:
            return
        if self._window.closed:
            raise WindowClosed
        try:
            yield partial(self._commit, due.offset)
        except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
            self._progress.commit_failed(due, error)
        else:
            self._progress.committed(due)

    def commit_at_the_end(self) -> Flow[None]:
        for tries_left in reversed(range(LAST_TRIES)):
            due = self._progress.due()
            if due is None or self._commit is None:
                return
            if self._window.closed:
                self.fail(WindowClosed())
                return
            try:
                yield partial(self._commit, due.offset)
            except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
                if tries_left:
                    yield partial(self._sleep, min(LAST_PAUSE, self._options.every))
                else:
                    self.failure = uncommitted(self.failure, due, error)
            else:
                self._progress.committed(due)


def _failures(result: Any, live_entries: Sequence[Entry[R]]) -> Failures[R]:
    """What the handler of these records has returned: pairs of a record and its error."""
    expected = "the handler of a batch must return None or pairs of one of its records and an exception, not"
    if not isinstance(result, Iterable):
        raise InvalidArgument(f"{expected} {result!r}")
    errors: dict[int, Exception] = {}
    records = {id(entry.record) for entry in live_entries}
    for pair in result:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Exception)):
            raise InvalidArgument(f"{expected} {pair!r}")
        if id(pair[0]) not in records:
            raise InvalidArgument(f"{expected} {pair!r}, whose record is none of these")
        errors[id(pair[0])] = pair[1]
    return [(entry, errors[id(entry.record)]) for entry in live_entries if id(entry.record) in errors]
