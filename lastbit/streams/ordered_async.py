"""`run_ordered` for one event loop: lanes are tasks. See `ordered` for what could go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from lastbit.streams._progress import EVERY, NAME, Options, Progress, log
from lastbit.streams._steps import run_steps_async
from lastbit.streams._tasks import Items, TaskStream, TaskWorkers, asynchronous, set_within
from lastbit.streams.window import AckWindow

R = TypeVar("R")


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
    name: str = NAME,
) -> None:
    """`run_ordered`, awaited: `handle` is a coroutine function, `commit` and `dead_letter` may be. `source` may be an
    asynchronous iterator; waiting for it is cancelled when the stream fails.

    Handlers that don't end within `grace` seconds of a failure are cancelled; if this call itself is cancelled, they
    are cancelled at once. Their records stay outstanding. In both cases the safe floor is committed.
    """
    options = Options(
        key, lanes, ordered, batch, linger, retry, every, wanted, stuck_after, on_stuck, grace, name
    ).checked()
    await _Run(Progress(window, options), options.checked(), handle, commit, dead_letter).run(source)


class _Run(TaskStream[R]):
    def __init__(
        self,
        progress: Progress[R],
        options: Options[R],
        handle: Callable[[Any], Awaitable[object]],
        commit: Callable[[Any], Awaitable[object] | object] | None,
        dead_letter: Callable[[R, Exception], Awaitable[object] | object] | None,
    ) -> None:
        self._workers = TaskWorkers()
        super().__init__(progress, options, handle, commit, dead_letter, self._workers.put)
        self._all_read = False
        self._ended = asyncio.Event()  # set when no record is left, or the stream has failed
        self._over = asyncio.Event()  # set to end the committer

    async def run(self, source: Items[R]) -> None:
        self._workers.start(self._options.lanes)
        lanes = list(self._workers.tasks)
        reader = asyncio.create_task(self._read(source), name="lastbit-reader")
        committer = asyncio.create_task(self._commit_regularly(), name="lastbit-commits")
        try:
            await self._ended.wait()
            if self._stream.failure is not None:
                reader.cancel()
            self._workers.stop()
            _, late = await asyncio.wait(lanes, timeout=self._options.grace)
            if late:
                log.warning("%d handlers did not end within %g seconds", len(late), self._options.grace)
        except BaseException as error:
            # This call was cancelled: cancel the handlers and commit the safe floor before the cancellation continues.
            self._stream.failure = error
            raise
        finally:
            self._over.set()
            self._stream.leave_the_metrics()
            self._workers.stop()
            for task in (reader, *lanes):
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
        super()._fail(error)
        self._ended.set()

    def _rested(self) -> None:
        if self._all_read and not self._schedule.left:
            self._ended.set()

    async def _read(self, source: Items[R]) -> None:
        try:
            async for item in asynchronous(source):
                if item is not None:
                    await self.accept(*item)
            self._all_read = True
            self._schedule.flush()
            self._rested()
        except BaseException as error:  # noqa: BLE001  # raised by run; a cancellation from inside is a failure too
            self._fail(error)

    async def _end(self, *parts: asyncio.Task[None]) -> None:
        """Wait for the parts, which are ending, and commit the safe floor."""
        await asyncio.gather(*parts, return_exceptions=True)
        await run_steps_async(self._stream.commit_at_the_end())

    async def _commit_regularly(self) -> None:
        try:
            while not await set_within(self._over, self._options.every):
                self._progress.report_if_stuck()
                await run_steps_async(self._stream.commit_once())
        except Exception as error:  # noqa: BLE001  # `run` raises it after the last commit
            self._fail(error)
