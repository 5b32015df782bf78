"""`run_ordered` for one event loop: lanes are tasks. See `ordered` for what could go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from lastbit.streams._progress import (
    EVERY,
    LAST_PAUSE,
    LAST_TRIES,
    LOOK,
    Entry,
    Options,
    Progress,
    failed,
    log,
    uncommitted,
)
from lastbit.streams.errors import WindowClosed, WindowFull
from lastbit.streams.window import AckWindow

R = TypeVar("R")
Items = AsyncIterable[tuple[Any, R] | None] | Iterable[tuple[Any, R] | None]


async def run_ordered_async(
    source: Items[R],
    handle: Callable[[R], Awaitable[object]],
    *,
    key: Callable[[R], Hashable],
    lanes: int = 8,
    commit: Callable[[Any], Awaitable[object] | object] | None = None,
    every: float = EVERY,
    window: AckWindow | None = None,
    wanted: Callable[[R], bool] | None = None,
    dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None = None,
    stuck_after: float = 60.0,
    on_stuck: Callable[[Any, float], object] | None = None,
    grace: float = 30.0,
) -> None:
    """`run_ordered`, awaited: `handle` is a coroutine function, `commit` and `dead_letter` may be. `source` may be an
    asynchronous iterator; waiting for it is cancelled when the stream fails.

    Handlers that don't end within `grace` seconds of a failure are cancelled; if this call itself is cancelled, they
    are cancelled at once. Their records stay outstanding. In both cases the safe floor is committed.
    """
    options = Options(key, lanes, every, wanted, stuck_after, on_stuck, grace).checked()
    await _Run(Progress(window, options), options, handle, commit, dead_letter).run(source)


class _Run(Generic[R]):
    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[R], Awaitable[object]],
        commit: Callable[[Any], Awaitable[object] | object] | None,
        dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None,
    ) -> None:
        self._progress = progress
        self._window = progress.window
        self._options = options
        self._handle = handle
        self._commit = commit
        self._dead_letter = dead_letter
        self._lanes: list[asyncio.Queue[Entry[R] | None]] = [asyncio.Queue() for _ in range(options.lanes)]
        self._room = asyncio.Event()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._over = asyncio.Event()

    async def run(self, source: Items[R]) -> None:
        lanes = [asyncio.create_task(self._work(lane), name="lastbit-lane") for lane in self._lanes]
        reader = asyncio.create_task(self._read(source), name="lastbit-reader")
        committer = asyncio.create_task(self._commit_regularly(), name="lastbit-commits")
        failure = asyncio.create_task(self._failed.wait())
        try:
            parts: set[asyncio.Future[Any]] = {failure, asyncio.gather(reader, *lanes)}
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                reader.cancel()
                for lane in self._lanes:
                    lane.put_nowait(None)
                _, late = await asyncio.wait(lanes, timeout=self._options.grace)
                if late:
                    log.warning("%d handlers did not end within %g seconds", len(late), self._options.grace)
        except BaseException as error:
            # This call was cancelled: cancel the handlers and commit the safe floor before the cancellation continues.
            self._failure = error
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
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
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
                    await self._route(Entry(position, offset, record))
            for lane in self._lanes:
                lane.put_nowait(None)
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

    async def _route(self, entry: Entry[R]) -> None:
        try:
            lane = self._progress.lane_of(entry.record)
        except Exception as error:  # noqa: BLE001  # the caller's `key` or `wanted` failed
            await self._give_up(entry, error)
            lane = None
        if lane is None:
            self._window.ack(entry.position)
        else:
            self._lanes[lane].put_nowait(entry)

    # The lanes.

    async def _work(self, lane: asyncio.Queue[Entry[R] | None]) -> None:
        try:
            while (entry := await lane.get()) is not None and self._failure is None:
                try:
                    if self._window.begins(entry.position):
                        await self._handle(entry.record)
                except Exception as error:  # noqa: BLE001  # any exception means that the record failed
                    await self._give_up(entry, error)
                except BaseException as error:
                    raise failed(entry.offset, error) from error
                self._window.ack(entry.position)
                self._room.set()
        except BaseException as error:  # noqa: BLE001  # raised by run; a cancellation from inside is a failure too
            self._fail(error)

    async def _give_up(self, entry: Entry[R], error: Exception) -> None:
        if self._dead_letter is None:
            raise failed(entry.offset, error) from error
        try:
            result = self._dead_letter(entry.record, error)
            if inspect.isawaitable(result):
                await result
        except Exception as worse:
            raise failed(entry.offset, worse) from worse

    # The committer.

    async def _end(self, *parts: asyncio.Task[None]) -> None:
        """Wait for the parts, which are ending, and commit the safe floor."""
        await asyncio.gather(*parts, return_exceptions=True)
        await self._commit_at_the_end()

    async def _commit_regularly(self) -> None:
        try:
            while not await _set_within(self._over, self._options.every):
                self._progress.report_if_stuck()
                await self._commit_once()
        except Exception as error:  # noqa: BLE001  # `run` raises it after the last commit
            self._fail(error)

    async def _call_commit(self, offset: Any) -> None:
        assert self._commit is not None
        try:
            result = self._commit(offset)
            if inspect.isawaitable(result):
                await result
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # Of something that it awaits. As a cancellation, it would end this task without a word.
            raise RuntimeError("the commit was cancelled from inside") from error

    async def _commit_once(self) -> None:
        due = self._progress.due()
        if due is None or self._commit is None:
            return
        if self._window.closed:
            raise WindowClosed
        try:
            await self._call_commit(due.offset)
        except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
            self._progress.commit_failed(due, error)
        else:
            self._progress.committed(due)

    async def _commit_at_the_end(self) -> None:
        for tries_left in reversed(range(LAST_TRIES)):
            due = self._progress.due()
            if due is None or self._commit is None:
                return
            if self._window.closed:
                self._failure = self._failure or WindowClosed()
                return
            try:
                await self._call_commit(due.offset)
            except Exception as error:  # noqa: BLE001  # tried again, or raised as the cause
                if tries_left:
                    await asyncio.sleep(min(LAST_PAUSE, self._options.every))
                else:
                    self._failure = uncommitted(self._failure, due, error)
            else:
                self._progress.committed(due)


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
