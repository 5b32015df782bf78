"""Combines messages for a tally into few calls, and acks the messages after they were counted.

A consumer that waits for a response for each message spends most of its time waiting. A buffer combines calls. By
entries, it never sums deltas of several messages: the service compares each message with its guard, and a sum over
several messages would have no position of its own. By ranges, it sums all messages between two positions of their
source (see `ranges`). Either way it does not matter which messages are sent in one call. If the response of a call is
lost, the retry may be combined with later messages.

One call is in progress at a time, in the order of `add`, so that the messages of a source reach a key in order. A
message is acked in its window only after the service has applied all its entries. If a consumer dies before, the
message stays outstanding and is replayed.

A signal handler may interrupt `add` anywhere by an exception, such as a KeyboardInterrupt or the time limit of a task
queue. Its message is then added or not, and the buffer goes on: still with one call at a time, and `flush` waits for
all messages that were added.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self

from lastbit import errors
from lastbit._arguments import refusal
from lastbit._drivers import AsyncDriver, Driver
from lastbit._forks import is_forked
from lastbit.chains import Source, SourceChain
from lastbit.models import Json
from lastbit.streams.errors import WindowClosed
from lastbit.tallies import calls
from lastbit.tallies.ranges import By, Counting, Order, additions

DEFAULT_EVERY: Final = 0.2
"""Maximum seconds that a message waits for others."""
DEFAULT_MOST: Final = 1000
"""Maximum entries of one call."""
ROOM: Final = 10
"""Calls whose entries may wait before `add` waits."""


class Window(Protocol):
    """The part of an `AckWindow` that a buffer needs."""

    def ack(self, offset: int, /) -> object: ...


class Message(NamedTuple):
    """One message's entries, as JSON or `Addition`s, and a function that acks the message."""

    entries: list[Any]
    ack: Callable[[], object] | None


class Gathered(NamedTuple):
    """One call: the entries of complete messages, in order, the functions that ack them, and the number of messages."""

    entries: list[Any]
    acks: list[Callable[[], object]]
    messages: int


class Gatherer:
    """Combines messages into calls of at most `most` entries; only a single larger message makes a larger call. Uses no
    threads, clock or network."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._messages: deque[Message] = deque()
        self.entries = 0
        """Number of waiting entries."""
        self.size = 0
        """The same, with one for each message without entries."""

    def __len__(self) -> int:
        """Number of waiting messages."""
        return len(self._messages)

    def put(self, message: Message) -> None:
        entries = len(message.entries)
        size = max(1, entries)
        self.entries += entries
        self.size += size
        self._messages.append(message)  # last: a call may be interrupted when it has ended

    def take(self) -> Gathered | None:
        """The next call; None if nothing waits."""
        entries: list[Any] = []
        acks: list[Callable[[], object]] = []
        messages = 0
        while self._messages:
            message = self._messages[0]
            if entries and len(entries) + len(message.entries) > self._most:
                break
            self._messages.popleft()
            messages += 1
            entries += message.entries
            if message.ack is not None:
                acks.append(message.ack)
            self.entries -= len(message.entries)
            self.size -= max(1, len(message.entries))
        return Gathered(entries, acks, messages) if messages else None


def entries_of(deltas: Mapping[str, int], source: Source | SourceChain) -> list[Json]:
    """A message's entries, one per key. Raises `InvalidArgument`."""
    return [calls.entry_json((key, delta, source)) for key, delta in deltas.items()]


def message(
    entries: list[Any], source: Source | SourceChain, window: Window | None, window_offset: int | None = None
) -> Message:
    """A message with what it adds."""
    if window is None:
        return Message(entries, None)
    if window_offset is None:
        # The offset at which this consumer read it: the last hop. That is the root only if the message was never
        # republished.
        window_offset = (source.hops[-1] if isinstance(source, SourceChain) else source).offset
    return Message(entries, functools.partial(window.ack, window_offset))


class _Buffer:
    """State shared by both buffers: waiting messages, the next deadline and the progress."""

    def __init__(self, tally: str, window: Window | None, every: float, most: int, by: By) -> None:
        if by not in ("entry", "range"):
            raise errors.InvalidArgument(f"by is 'entry' or 'range', not {by!r}")
        if not 0 <= every <= threading.TIMEOUT_MAX:
            raise errors.InvalidArgument(f"every is a number of seconds, not {every!r}")
        if not 1 <= most <= 10_000:
            raise errors.InvalidArgument(f"a call has 1 to 10,000 entries, not {most!r}")
        self._tally = tally
        self._window = window
        self._every = every
        self._most = most
        self._order = Order() if by == "range" else None
        self._apply = Counting().apply if by == "range" else calls.apply
        """Applies the entries of a call."""
        self._waiting = Gatherer(most)
        self._due = 0.0
        self._taken = 0
        """The number of messages in calls that were begun."""
        self._done = 0
        """The number of messages that were applied and acked."""
        self._flushed = 0
        """The number of messages, from the first one added, that must not wait for others."""
        self._closed = False
        self._failure: BaseException | None = None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise errors.BufferClosed

    def _full(self) -> bool:
        return self._waiting.size >= ROOM * self._most and self._failure is None and not self._closed

    def _message(
        self, deltas: Mapping[str, int], source: Source | SourceChain, window: Window | None, window_offset: int | None
    ) -> Message:
        if not isinstance(deltas, Mapping):
            raise refusal("deltas", "a mapping of keys to whole numbers", deltas)
        entries = entries_of(deltas, source) if self._order is None else additions(deltas, source)
        return message(entries, source, window or self._window, window_offset)

    def _put(self, new: Message) -> None:
        if self._order is not None:
            self._order.check(new.entries)
        if not self._waiting:
            self._due = time.monotonic() + self._every
        self._waiting.put(new)

    def _added(self) -> int:
        """The number of messages, counted where they are: an interrupted `add` couldn't count its own."""
        return self._taken + len(self._waiting)

    def _pause(self) -> float | None:
        """Seconds until the next call is due; None: no call is due until a message arrives."""
        if not self._waiting:
            return None
        if self._closed or self._flushed > self._done or self._waiting.entries >= self._most:
            return 0.0
        return max(0.0, self._due - time.monotonic())

    def _take(self) -> Gathered | None:
        taken = self._waiting.take()
        if taken is not None:
            self._taken += taken.messages
        self._due = time.monotonic() + self._every
        return taken

    def _ack(self, call: Gathered) -> None:
        for ack in call.acks:
            # A window is closed when its stream gets another owner. The applied entries stay applied.
            with contextlib.suppress(WindowClosed):
                ack()
        self._done += call.messages


class TallyBuffer(_Buffer):
    """Combines messages for a tally, from any number of threads; made by `client.tally(…).buffer(…)`.

    A call is sent when `most` deltas wait, or `every` seconds after the first of them was added. `by="range"` adds up
    what lies between two positions of a source, which needs one order for all messages of a source: `add` refuses one
    that comes for the first time after a later one. `by="entry"`, the default, needs the order of each key alone.

    If a call fails after
    the client's retries, or an ack fails, the buffer ends: its messages stay outstanding in the window, and every
    method raises the error. Then read again from the window's floor.
    """

    def __init__(
        self, driver: Driver, tally: str, window: Window | None, every: float, most: int, by: By = "entry"
    ) -> None:
        super().__init__(tally, window, every, most, by)
        self._driver = driver
        self._lock = threading.Lock()
        self._work_waits = threading.Condition(self._lock)
        self._caller_waits = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._process: int | None = None
        """The id of the process in which the thread was started."""

    def add(
        self,
        deltas: Mapping[str, int],
        source: Source | SourceChain,
        *,
        window: Window | None = None,
        window_offset: int | None = None,
    ) -> None:
        """Add one message: its deltas by key, which may be empty. Add the messages of a source in order.

        `source`: the message's source or chain. The offset of its last hop, at which this consumer has read it, is
        acked in `window`, by default the buffer's own; `window_offset` if the window tracks another number. Blocks
        while too many entries wait. Raises `InvalidArgument`, `BufferClosed`, `UsedAfterFork`, or the error that ended
        the buffer.
        """
        new = self._message(deltas, source, window, window_offset)
        self._check_process()
        with self._lock:
            while self._full():
                self._caller_waits.wait()
            self._check()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="lastbit-tally-buffer", daemon=True)
                thread.start()  # may fail; then a later call tries again
                self._thread, self._process = thread, os.getpid()
            self._put(new)
            self._work_waits.notify_all()  # all, as an interrupted one leaves a waiter that has gone

    def flush(self) -> None:
        """Wait until all messages added before are applied and acked. Raises `UsedAfterFork`, or the error that ended
        the buffer."""
        self._check_process()
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Accept no more messages and flush. Raises `UsedAfterFork`, or the error that ended the buffer."""
        self._check_process()
        with self._lock:
            self._closed = True
            self._caller_waits.notify_all()
            self._flush()
        if self._thread is not None:
            self._thread.join()

    def _flush(self) -> None:
        target = self._flushed = self._added()
        self._work_waits.notify_all()
        while self._done < target and self._failure is None:
            self._caller_waits.wait()
        if self._failure is not None:
            raise self._failure

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
            raise errors.UsedAfterFork("the buffer")

    def _work(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # the call that started it was interrupted, and later calls start another one
        while True:
            with self._lock:
                while (pause := self._pause()) != 0.0:
                    if self._closed and not self._waiting:
                        return
                    self._work_waits.wait(pause)
                call = self._take()
            assert call is not None
            try:
                if call.entries:
                    self._driver.run(self._apply, self._tally, call.entries)
                self._ack(call)
            except BaseException as error:  # noqa: BLE001  # the callers raise it
                self._failure = error
            with self._lock:
                self._caller_waits.notify_all()
                if self._failure is not None:
                    return


class AsyncTallyBuffer(_Buffer):
    """`TallyBuffer` for the tasks of one event loop: same names, awaited."""

    def __init__(
        self, driver: AsyncDriver, tally: str, window: Window | None, every: float, most: int, by: By = "entry"
    ) -> None:
        super().__init__(tally, window, every, most, by)
        self._driver = driver
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def add(
        self,
        deltas: Mapping[str, int],
        source: Source | SourceChain,
        *,
        window: Window | None = None,
        window_offset: int | None = None,
    ) -> None:
        """Add one message; see `TallyBuffer.add`."""
        new = self._message(deltas, source, window, window_offset)
        async with self._changed:
            while self._full():
                await self._changed.wait()
            self._check()
            self._put(new)
            if self._task is None:
                self._task = asyncio.create_task(self._work(), name="lastbit-tally-buffer")
                # `flush` raises the task's exception. Retrieve it here, so that asyncio doesn't log it.
                self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._changed.notify_all()

    async def flush(self) -> None:
        """Wait until all messages added before are applied and acked; see `TallyBuffer.flush`."""
        async with self._changed:
            target = self._flushed = self._added()
            self._changed.notify_all()
            while self._done < target and self._failure is None:
                await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Accept no more messages and flush; see `TallyBuffer.close`."""
        self._closed = True
        await self.flush()
        if self._task is not None:
            await self._task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _work(self) -> None:
        try:
            while (call := await self._next_call()) is not None:
                if call.entries:
                    await self._driver.run(self._apply, self._tally, call.entries)
                self._ack(call)
                async with self._changed:
                    self._changed.notify_all()
        except BaseException as error:
            # A cancellation of this task must not be raised in the callers' tasks.
            cancelled = isinstance(error, asyncio.CancelledError)
            self._failure = RuntimeError("the buffer's task was cancelled") if cancelled else error
            if isinstance(error, GeneratorExit):
                raise  # the event loop ends
            async with self._changed:
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    async def _next_call(self) -> Gathered | None:
        """Wait until a call is due and return it; None when the buffer is closed and empty."""
        async with self._changed:
            while (pause := self._pause()) != 0.0:
                if self._closed and not self._waiting:
                    return None
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: in Python 3.11 it loses a cancellation that coincides with the notification.
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
            return self._take()
