"""Combines single acks into few calls, without a timer.

A consumer handles one message at a time, and a call for each message would cost a round trip and a commit. An acker has
one call in progress. Items that are passed to it meanwhile wait, and the next call sends them together. So an idle
acker sends at once, a busy one sends large calls, and there is no interval to choose. Consumers that don't wait for
their acks, and whose work is cheaper than a call, can set `linger`: then an idle acker waits for more items first.

Two promises make it safe to remove a message from its queue when its future is done. First, the future is done only
after the service has responded, and so after the commit. Second, `on_completed` has returned before the futures of that
batch's items are done. If `on_completed` raises, or the process dies in it, the message is still in the queue, and the
ack of its redelivery reports the completion again.

A third promise: every future is finished. Exceptions of the caller's code, of any class, are raised by the futures that
they concern, or logged, and the acker continues. So it does if a signal handler interrupts `ack` or `fail` by an
exception, such as a KeyboardInterrupt or the time limit of a task queue, wherever that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from lastbit import _calls, errors
from lastbit._coalescer import Call, Coalescer, Kind
from lastbit._drivers import AsyncDriver, Driver
from lastbit._forks import is_forked
from lastbit._masks import checked
from lastbit._protocol import Flow, Service, utf8
from lastbit.ids import ItemId
from lastbit.models import AckResult, Completed

log = logging.getLogger("lastbit.acker")

DEFAULT_MAX_PENDING = 100_000
ACKS = Kind("acks", None)
GATHERED = 100
"""The number of waiting items at which an acker stops to linger: a call of this size costs little more than one item
costs alone."""

ItemResult = Completed | None
"""The result of an acker's future: the item's batch if that is complete, else None."""


class Receiver(Protocol):
    """An object that gets the outcome of an item. A future is one."""

    def set_result(self, result: ItemResult, /) -> object: ...

    def set_exception(self, error: BaseException, /) -> object: ...


R = TypeVar("R", bound=Receiver)


def _resolve(service: Service, call: Call[Any]) -> Flow[AckResult]:
    return _calls.resolve(service, call.kind.verb, iter([{"items": call.items}]), call.kind.reason)


def _running() -> Future[ItemResult]:
    """A new future that can't be cancelled: that would not undo the ack."""
    future: Future[ItemResult] = Future()
    future.set_running_or_notify_cancel()
    return future


def _report_to_each(receivers: list[Receiver], outcome: ItemResult | BaseException) -> None:
    for receiver in receivers:
        try:
            if isinstance(outcome, BaseException):
                receiver.set_exception(outcome)
            else:
                receiver.set_result(outcome)
        except BaseException:  # such as a SystemExit of a callback; the others must get their outcomes
            log.exception("a callback of an acker's future ended with an exception")


def _failures(reason: str | None) -> Kind:
    return Kind("failures", None if reason is None else utf8("a reason", reason))


def _skips(reason: str | None) -> Kind:
    return Kind("skips", None if reason is None else utf8("a reason", reason))


def _bound(max_pending: int) -> int:
    if max_pending < 1:
        raise errors.InvalidArgument(f"max_pending is at least 1, not {max_pending!r}")
    return max_pending


def _lingering(linger: float) -> float:
    if not 0 <= linger <= 60:
        raise errors.InvalidArgument(f"linger is 0 to 60 seconds, not {linger!r}")
    return linger


class Acker:
    """Combines acks, failures and skips from any number of threads into few calls; made by `client.acker(...)`.

    `on_completed` is called with a `Completed` for each complete batch in a result, in the acker's own thread. It may
    pass more items to the acker, but must not wait for their futures. At most `max_pending` futures are open at a time;
    beyond that, `ack` and `fail` block. Before each call the acker waits for more items, until `gathered` of them wait
    or `linger` seconds are over. `report` passes an outcome to receivers, by default to each by its methods, in the
    acker's thread.

    Every future is finished. What `on_completed` raises, even SystemExit, the futures of that batch's items raise; what
    a future's own callback raises is logged by `lastbit.acker`. If a signal handler's exception, such as Ctrl-C or a
    task's time limit, interrupts `ack`, the item is sent or not, and the acker continues.
    """

    def __init__(
        self,
        driver: Driver,
        on_completed: Callable[[Completed], object] | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        linger: float = 0.0,
        *,
        gathered: int = GATHERED,
        report: Callable[[list[Any], ItemResult | BaseException], object] | None = None,
    ) -> None:
        self._driver = driver
        self._on_completed = on_completed
        self._max_pending = _bound(max_pending)
        self._linger = _lingering(linger)
        self._gathered = min(gathered, max_pending)
        self._report = report or _report_to_each
        self._coalescer: Coalescer[Any] = Coalescer()
        self._open = 0
        self._closed = False
        self._lock = threading.Lock()
        self._work_waits = threading.Condition(self._lock)
        self._wake_at = math.inf
        """The number of open futures at which the thread is woken; infinite while it does not wait, and minus infinity
        while nothing waits for it."""
        self._room_waits = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._process: int | None = None
        """The id of the process in which the thread was started."""

    def ack(self, item: str | ItemId) -> Future[ItemResult]:
        """Ack an item. The future raises `ItemRejected`, `ServiceError`, `ServiceUnreachable`, or the exception of
        `on_completed`. Raises `MalformedItem`, `AckerClosed` and `UsedAfterFork` at once."""
        return self._put(item, ACKS, _running())

    def fail(self, item: str | ItemId, reason: str | None = None) -> Future[ItemResult]:
        """Mark an item as failed; otherwise like `ack`. Each reason needs a separate call, so use few different
        reasons. Raises `InvalidArgument` if the reason is not text."""
        return self._put(item, _failures(reason), _running())

    def skip(self, item: str | ItemId, reason: str | None = None) -> Future[ItemResult]:
        """Mark an item as not needed; otherwise like `fail`."""
        return self._put(item, _skips(reason), _running())

    def ack_for(self, receiver: Receiver, item: str | ItemId) -> None:
        """Like `ack`, without the cost of a future: `receiver` gets the outcome, in the acker's own thread, which it
        must not block."""
        self._put(item, ACKS, receiver)

    def fail_for(self, receiver: Receiver, item: str | ItemId, reason: str | None = None) -> None:
        """Like `fail`; see `ack_for`."""
        self._put(item, _failures(reason), receiver)

    def skip_for(self, receiver: Receiver, item: str | ItemId, reason: str | None = None) -> None:
        """Like `skip`; see `ack_for`."""
        self._put(item, _skips(reason), receiver)

    def _put(self, item: str | ItemId, kind: Kind, receiver: R) -> R:
        text = checked(item)
        self._check_process()
        with self._lock:
            # The acker's own thread, in `on_completed`, must not wait for itself. Items that it passes while the acker
            # is closing are sent before `close` returns.
            if (self._open >= self._max_pending or self._closed) and threading.current_thread() is not self._thread:
                while self._open >= self._max_pending and not self._closed:
                    self._room_waits.wait()
                if self._closed:
                    raise errors.AckerClosed
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="lastbit-acker", daemon=True)
                thread.start()  # may fail; then a later call tries again
                self._thread, self._process = thread, os.getpid()
            # If this is interrupted, an item may wait that was not counted. The next one wakes the thread all the same.
            self._coalescer.put(text, kind, receiver)
            self._open += 1
            if self._open >= self._wake_at:
                self._work_waits.notify_all()  # all, as an interrupted one leaves a waiter that has gone
                self._wake_at = math.inf
        return receiver

    def close(self) -> None:
        """Accept no more items, send all waiting ones, and return when every future is done; called by `on_completed`,
        return at once. Raises `UsedAfterFork`."""
        self._check_process()
        with self._lock:
            self._closed = True
            self._work_waits.notify_all()
            self._room_waits.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_forked(self._process):
            self.close()

    def _check_process(self) -> None:
        # Check before acquiring the lock, which a thread of the parent process may have held at the fork.
        if is_forked(self._process):
            raise errors.UsedAfterFork("the acker")

    def _work(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # the call that started it was interrupted, and later calls start another one
        while True:
            with self._lock:
                while not self._coalescer and not self._closed:
                    self._wake_at = -math.inf
                    self._work_waits.wait()
                self._gather()
                call = self._coalescer.take()
            if call is None:
                return
            self._settle(call)
            with self._lock:
                self._open -= call.size
                self._room_waits.notify_all()

    def _gather(self) -> None:
        """Wait for more items, for at most `linger` seconds. Called under the lock; no call is in progress."""
        if self._linger:
            self._wake_at = self._gathered
            self._work_waits.wait_for(lambda: self._open >= self._gathered or self._closed, self._linger)
        self._wake_at = math.inf

    def _settle(self, call: Call[Receiver]) -> None:
        try:
            result = self._driver.run(_resolve, call)
            outcomes = list(call.outcomes(result, self._notify(result)))
        except BaseException as error:  # noqa: BLE001  # the futures raise it
            outcomes = list(call.failed(error))
        for receivers, outcome in outcomes:
            try:
                self._report(receivers, outcome)
            except BaseException:  # the acker goes on
                log.exception("the outcome of a call was not passed on")

    def _notify(self, result: AckResult) -> dict[int, BaseException]:
        """Call `on_completed` for each complete batch; returns its exceptions, by batch."""
        errors_by_batch: dict[int, BaseException] = {}
        if self._on_completed is not None:
            for completion in result.completed:
                try:
                    self._on_completed(completion)
                except BaseException as error:  # noqa: BLE001  # of any class: the futures raise it
                    errors_by_batch[completion.batch] = error
        return errors_by_batch


class AsyncAcker:
    """`Acker` for the tasks of one event loop. `future = await acker.ack(item)` waits only until fewer than
    `max_pending` futures are open; `await future` waits for the response. `on_completed` may be a coroutine
    function."""

    def __init__(
        self,
        driver: AsyncDriver,
        on_completed: Callable[[Completed], Awaitable[object] | object] | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        linger: float = 0.0,
    ) -> None:
        self._driver = driver
        self._on_completed = on_completed
        self._max_pending = _bound(max_pending)
        self._linger = _lingering(linger)
        self._coalescer: Coalescer[asyncio.Future[ItemResult]] = Coalescer()
        self._open = 0
        self._closed = False
        self._room = asyncio.Event()
        self._gathered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def ack(self, item: str | ItemId) -> asyncio.Future[ItemResult]:
        """Ack an item; see `Acker.ack`. Cancelling the future does not undo the ack."""
        return await self._put(item, ACKS)

    async def fail(self, item: str | ItemId, reason: str | None = None) -> asyncio.Future[ItemResult]:
        """Mark an item as failed; see `Acker.fail`."""
        return await self._put(item, _failures(reason))

    async def skip(self, item: str | ItemId, reason: str | None = None) -> asyncio.Future[ItemResult]:
        """Mark an item as not needed; see `Acker.skip`."""
        return await self._put(item, _skips(reason))

    async def _put(self, item: str | ItemId, kind: Kind) -> asyncio.Future[ItemResult]:
        text = checked(item)
        # The acker's own task, in `on_completed`, must not wait for itself. Items that it passes while the acker is
        # closing are sent before `close` returns.
        if asyncio.current_task() is not self._task:
            while self._open >= self._max_pending and not self._closed:
                self._room.clear()
                await self._room.wait()
            if self._closed:
                raise errors.AckerClosed
        future: asyncio.Future[ItemResult] = asyncio.get_running_loop().create_future()
        self._coalescer.put(text, kind, future)
        self._open += 1
        if self._open >= self._enough:
            self._gathered.set()
        if self._task is None:
            # The task starts when the running task pauses, so items passed until then are sent in the same call.
            self._task = asyncio.create_task(self._work(), name="lastbit-acker")
        return future

    async def close(self) -> None:
        """Accept no more items, send all waiting ones, and return when every future is done; called by `on_completed`,
        return at once."""
        self._closed = True
        self._room.set()
        self._gathered.set()
        if self._task is not None and self._task is not asyncio.current_task():
            # If the caller is cancelled, it stops waiting, but the waiting items are still sent.
            await asyncio.shield(self._task)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _work(self) -> None:
        call = None
        try:
            await self._gather()
            while (call := self._coalescer.take()) is not None:
                await self._settle(call)
                self._open -= call.size
                self._room.set()
                await self._gather()
        except BaseException as error:
            # This happens only when the event loop ends. Cancel all futures, so that no caller waits forever.
            call = call or self._coalescer.take()
            while call is not None:
                for futures, _ in call.failed(error):
                    for future in futures:
                        with contextlib.suppress(RuntimeError):  # the loop is closed, and can't run callbacks
                            future.cancel()
                call = self._coalescer.take()
            self._open = 0
            self._room.set()
            raise
        finally:
            self._task = None

    @property
    def _enough(self) -> int:
        return min(GATHERED, self._max_pending)

    async def _gather(self) -> None:
        """Wait for more items, for at most `linger` seconds. No call is in progress."""
        if not self._linger or not self._open or self._open >= self._enough or self._closed:
            return
        self._gathered.clear()
        timer = asyncio.get_running_loop().call_later(self._linger, self._gathered.set)
        try:
            await self._gathered.wait()
        finally:
            timer.cancel()

    async def _settle(self, call: Call[asyncio.Future[ItemResult]]) -> None:
        try:
            result = await self._driver.run(_resolve, call)
            outcomes = list(call.outcomes(result, await self._notify(result)))
        except BaseException as error:  # the futures raise it
            if isinstance(error, KeyboardInterrupt | SystemExit) or self._is_ended():
                raise
            outcomes = list(call.failed(error))
        for futures, outcome in outcomes:
            for future in futures:
                _finish(future, outcome)

    async def _notify(self, result: AckResult) -> dict[int, BaseException]:
        """Call `on_completed` for each complete batch; returns its exceptions, by batch."""
        errors_by_batch: dict[int, BaseException] = {}
        if self._on_completed is not None:
            for completion in result.completed:
                try:
                    awaitable = self._on_completed(completion)
                    if inspect.isawaitable(awaitable):
                        await awaitable
                except BaseException as error:  # of any class: the futures raise it
                    if self._is_ended():
                        raise
                    errors_by_batch[completion.batch] = error
        return errors_by_batch

    def _is_ended(self) -> bool:
        """Whether an exception comes from the end of the acker's task, and not from the caller's code."""
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return True  # the coroutine is closed after its event loop
        return task is None or task is not self._task or task.cancelling() > 0


def _finish(future: asyncio.Future[ItemResult], outcome: ItemResult | BaseException) -> None:
    if future.done():
        return  # cancelled by the caller
    if isinstance(outcome, StopIteration | asyncio.CancelledError):
        # A future can't raise StopIteration, and CancelledError would look like a cancellation of the awaiting task.
        wrapper = RuntimeError(f"on_completed raised {outcome!r}")
        wrapper.__cause__ = outcome
        outcome = wrapper
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
