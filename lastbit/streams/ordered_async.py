"""`run_ordered` for one event loop: lanes are tasks. See `ordered` for what could go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from lastbit.streams._progress import EVERY, LOOK, Options, Progress, failed, log
from lastbit.streams._schedule import Entry, Schedule
from lastbit.streams._steps import Failures, Stream, run_steps_async
from lastbit.streams.errors import WindowFull
from lastbit.streams.window import AckWindow

R = TypeVar("R")
_END = object()
"""In place of a key: no more records will come."""

Items = AsyncIterable[tuple[Any, R] | None] | Iterable[tuple[Any, R] | None]


async def run_ordered_async(
    source: Items[R],
    handle: Callable[[Any], Awaitable[object]],
    *,
    key: Callable[[R], Hashable] | None = None,
    ordered: bool = True,
    lanes: int = 8,
    batch: int | None = None,
    linger: float = 0.0,
    retry: Callable[[Exception, int], float | None] | None = None,
    dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None = None,
    commit: Callable[[Any], Awaitable[object] | object] | None = None,
    every: float = EVERY,
    window: AckWindow | None = None,
    wanted: Callable[[R], bool] | None = None,
    stuck_after: float = 60.0,
    on_stuck: Callable[[Any, float], object] | None = None,
    grace: float = 30.0,
) -> None:
    """`run_ordered`, awaited: `handle` is a coroutine function, `commit` and `dead_letter` may be. `source` may be an
    asynchronous iterator; waiting for it is cancelled when the stream fails.

    Handlers that don't end within `grace` seconds of a failure are cancelled; if this call itself is cancelled, they
    are cancelled at once. Their records stay outstanding. In both cases the safe floor is committed.
    """
    options = Options(key, lanes, ordered, batch, linger, retry, every, wanted, stuck_after, on_stuck, grace).checked()
    await _Run(Progress(window, options), options, handle, commit, dead_letter).run(source)


class _Run(Generic[R]):
    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[Any], Awaitable[object]],
        commit: Callable[[Any], Awaitable[object] | object] | None,
        dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None,
    ) -> None:
        self._progress = progress
        self._options = options
        self._ready: asyncio.Queue[Hashable] = asyncio.Queue()
        call_later = asyncio.get_running_loop().call_later
        self._schedule: Schedule[R] = Schedule(self._ready.put_nowait, call_later, options.batch or 1, options.linger)
        self._stream = Stream(progress, self._schedule, options, commit, dead_letter, asyncio.sleep)
        self._handle = handle
        self._all_read = False
        self._room = asyncio.Event()
        self._failed = asyncio.Event()
        self._over = asyncio.Event()

    async def run(self, source: Items[R]) -> None:
        lanes = [asyncio.create_task(self._work(), name="lastbit-lane") for _ in range(self._options.lanes)]
        reader = asyncio.create_task(self._read(source), name="lastbit-reader")
        committer = asyncio.create_task(self._commit_regularly(), name="lastbit-commits")
        failure = asyncio.create_task(self._failed.wait())
        try:
            parts: set[asyncio.Future[Any]] = {failure, asyncio.gather(reader, *lanes)}
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if self._stream.failure is not None:
                reader.cancel()
                self._end_lanes()
                _, late = await asyncio.wait(lanes, timeout=self._options.grace)
                if late:
                    log.warning("%d handlers did not end within %g seconds", len(late), self._options.grace)
        except BaseException as error:
            # This call was cancelled: cancel the handlers and commit the safe floor before the cancellation continues.
            self._stream.failure = error
            raise
        finally:
            self._over.set()
            for task in (failure, reader, *lanes):
                task.cancel()
            # A cancellation waits for it; a second one doesn't.
            end = asyncio.create_task(self._end(reader, committer, *lanes), name="lastbit-end")
            try:
                await asyncio.shield(end)
            except asyncio.CancelledError:
                await end
                raise
        if self._stream.failure is not None:
            raise self._stream.failure

    def _fail(self, error: BaseException) -> None:
        self._stream.fail(error)
        self._failed.set()
        self._room.set()

    # The reader.

    async def _read(self, source: Items[R]) -> None:
        try:
            async for item in _asynchronous(source):
                if item is None:
                    continue
                offset, record = item
                position = self._progress.position_of(offset)
                if await self._track(position, offset):
                    await self._add(Entry(position, offset, record))
            self._all_read = True
            self._schedule.flush()
            if not self._schedule.left:
                self._end_lanes()
        except BaseException as error:  # noqa: BLE001  # raised by run; a cancellation from inside is a failure too
            self._fail(error)

    async def _track(self, position: int, offset: Any) -> bool:
        while True:
            try:
                return self._progress.track(position, offset)
            except WindowFull:
                self._room.clear()
                # Check again now and then: other code may ack or close the window too.
                await _set_within(self._room, LOOK)

    async def _add(self, entry: Entry[R]) -> None:
        try:
            key = self._stream.key_of(entry.record)
        except Exception as error:  # noqa: BLE001  # the caller's `key` or `wanted` failed
            await run_steps_async(self._stream.give_up(entry, error))
        else:
            self._stream.add(entry, key)

    # The lanes.

    async def _work(self) -> None:
        try:
            while (key := await self._ready.get()) is not _END and self._stream.failure is None:
                is_last = await self._handle_next(key)
                self._room.set()
                if is_last and self._all_read:
                    self._end_lanes()
        except BaseException as error:  # noqa: BLE001  # raised by run; a cancellation from inside is a failure too
            self._fail(error)

    async def _handle_next(self, key: Hashable) -> bool:
        """Returns whether no record is left."""
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
        return await run_steps_async(self._stream.partly_done(work, failures)) if failures else self._stream.done(work)

    def _end_lanes(self) -> None:
        for _ in range(self._options.lanes):
            self._ready.put_nowait(_END)

    # The committer.

    async def _end(self, *parts: asyncio.Task[None]) -> None:
        """Wait for the parts, which are ending, and commit the safe floor."""
        await asyncio.gather(*parts, return_exceptions=True)
        await run_steps_async(self._stream.commit_at_the_end())

    async def _commit_regularly(self) -> None:
        try:
            while not await _set_within(self._over, self._options.every):
                self._progress.report_if_stuck()
                await run_steps_async(self._stream.commit_once())
        except Exception as error:  # noqa: BLE001  # `run` raises it after the last commit
            self._fail(error)


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event was set in time. Not `asyncio.wait_for`: in Python 3.11 it loses a cancellation that coincides
    with the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def _asynchronous(source: Items[R]) -> AsyncIterator[tuple[Any, R] | None]:
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
    else:
        for item in source:
            yield item
            await asyncio.sleep(0)  # let the lanes run
