"""A stream whose records the tasks of an event loop handle, and those tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Any, Final, Generic, TypeVar

from lastbit.streams._progress import LOOK, Options, Progress, failed
from lastbit.streams._schedule import Entry, Schedule
from lastbit.streams._steps import Failures, Stream, run_steps_async
from lastbit.streams._turns import HasKeys
from lastbit.streams.errors import WindowFull

R = TypeVar("R")

Items = AsyncIterable[tuple[Any, R] | None] | Iterable[tuple[Any, R] | None]

_END: Final = None
"""In place of work: a task ends."""


class TaskWorkers:
    """Work begins in the order in which it is put."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[HasKeys, Hashable] | None] = asyncio.Queue()
        self._is_over = False
        self.tasks: set[asyncio.Task[None]] = set()

    def put(self, stream: HasKeys, key: Hashable) -> None:
        """A key of this stream is ready."""
        self._queue.put_nowait((stream, key))

    def start(self, count: int) -> None:
        for _ in range(count):
            task = asyncio.create_task(self._work(), name="lastbit-lane")
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    def stop(self) -> None:
        """The tasks end after what they do."""
        self._is_over = True
        for _ in self.tasks:
            self._queue.put_nowait(_END)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not self._is_over:  # it was cancelled, because its stream has no more time
            self.start(1)

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling() and (work := await self._queue.get()) is not _END:
            stream, key = work
            await stream.work(key)


class TaskStream(Generic[R]):
    """`put(stream, key)` makes a task await `work(key)`."""

    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[Any], Awaitable[object]],
        commit: Callable[[Any], Awaitable[object] | object] | None,
        dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None,
        put: Callable[[TaskStream[R], Hashable], object],
    ) -> None:
        self._progress = progress
        self._options = options
        call_later = asyncio.get_running_loop().call_later
        self._schedule: Schedule[R] = Schedule(partial(put, self), call_later, options.batch or 1, options.linger)
        self._stream = Stream(progress, self._schedule, options, commit, dead_letter, asyncio.sleep)
        self._handle = handle
        self._room = asyncio.Event()
        self._working: set[asyncio.Task[Any]] = set()
        """The tasks that handle records."""

    async def accept(self, offset: Any, record: R) -> None:
        """A record has come. Waits until the window has room, or the stream has failed."""
        position = self._progress.position_of(offset)
        if not await self._track(position, offset):
            return
        entry = Entry(position, offset, record)
        try:
            key = self._stream.key_of(record)
        except Exception as error:  # noqa: BLE001  # the caller's `key` or `wanted` failed
            await run_steps_async(self._stream.give_up(entry, error))
        else:
            self._stream.add(entry, key)

    async def _track(self, position: int, offset: Any) -> bool:
        while self._stream.failure is None:
            try:
                return self._progress.track(position, offset)
            except WindowFull:
                self._room.clear()
                # Check again now and then: other code may ack or close the window too.
                await set_within(self._room, LOOK)
        return False

    async def work(self, key: Hashable) -> None:
        """Handle the next records of a key, unless the stream has failed."""
        if self._stream.failure is not None:
            return
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            await self._handle_next(key)
        except BaseException as error:  # noqa: BLE001  # raised by the stream; a cancellation from inside is a failure too
            self._fail(error)
        self._working.discard(task)
        self._room.set()
        self._rested()

    async def _handle_next(self, key: Hashable) -> None:
        work = self._stream.take(key)
        failures: Failures[R]
        try:
            result = await self._handle(work.argument) if work.live_entries else None
        except Exception as error:  # noqa: BLE001  # any exception means that the records failed
            failures = [(entry, error) for entry in work.live_entries]
        except BaseException as error:
            raise failed(work.live_entries[0].offset, error) from error
        else:
            failures = self._stream.failures_in(work, result)
        if failures:
            await run_steps_async(self._stream.partly_done(work, failures))
        else:
            self._stream.done(work)

    def _fail(self, error: BaseException) -> None:
        """No further records are handled."""
        self._stream.fail(error)
        self._room.set()

    def _rested(self) -> None:
        """A task has handled records."""


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event was set in time. Not `asyncio.wait_for`: in Python 3.11 it loses a cancellation that coincides
    with the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def asynchronous(source: Items[R]) -> AsyncGenerator[tuple[Any, R] | None, None]:
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
    else:
        for item in source:
            yield item
            await asyncio.sleep(0)  # let the lanes run
