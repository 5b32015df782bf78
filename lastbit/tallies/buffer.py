"""Gathering what messages bring to a tally into few calls, and acking them once it was applied.

A consumer that waits for an answer for each message spends its time on that. A buffer joins calls. It never joins
deltas: the service holds each message against its guard, and one that had been added up over several messages would
have no place of its own. So it does not matter which messages travel together, and a call whose answer was lost is
repeated with whatever has come since.

One call is under way at a time, in the order of `add`, so that the messages of a source come to a key in their order.
A message is acked in its window when the service has answered for all that it brought, and not before: a consumer that
dies leaves it outstanding, and it is replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from lastbit import errors
from lastbit.acker import is_forked
from lastbit.chains import Source, SourceChain
from lastbit.models import Json
from lastbit.streams.errors import WindowClosed
from lastbit.tallies import calls

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client

DEFAULT_EVERY: Final = 0.2
"""Seconds that a message waits for others, at most."""
DEFAULT_MOST: Final = 1000
"""Entries of one call."""
ROOM: Final = 10
"""So many calls' entries may wait, then `add` does."""


class Window(Protocol):
    """What a buffer asks of an `AckWindow`."""

    def ack(self, offset: int, /) -> object: ...


class Message(NamedTuple):
    """What one message brings, and how to ack it."""

    entries: list[Json]
    ack: Callable[[], object] | None


class Gathered(NamedTuple):
    """One call: the entries of so many whole messages, in their order, and how to ack these."""

    entries: list[Json]
    acks: list[Callable[[], object]]
    messages: int


class Gatherer:
    """Takes messages one at a time and gives them back as calls of at most `most` entries; only a single message that
    has more makes a larger one. Knows no thread, no clock and no network."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._messages: deque[Message] = deque()
        self.entries = 0
        """Those that wait."""

    def __bool__(self) -> bool:
        return bool(self._messages)

    def put(self, message: Message) -> None:
        self._messages.append(message)
        self.entries += len(message.entries)

    def take(self) -> Gathered | None:
        """The next call; None where nothing waits."""
        entries: list[Json] = []
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
        return Gathered(entries, acks, messages) if messages else None


def message(deltas: Mapping[str, int], source: Source | SourceChain, window: Window | None) -> Message:
    """What a message brings, each key by an entry of its own. Raises `InvalidArgument`."""
    entries = [calls.entry_json((key, delta, source)) for key, delta in deltas.items()]
    if window is None:
        return Message(entries, None)
    # Where this consumer has read it: the last hop, which is the root only where nobody was in between.
    offset = (source.hops[-1] if isinstance(source, SourceChain) else source).offset
    return Message(entries, lambda: window.ack(offset))


class _Buffer:
    """What both have in common: what waits, since when, and what has become of it."""

    def __init__(self, tally: str, window: Window | None, every: float, most: int) -> None:
        if not 0 <= every <= threading.TIMEOUT_MAX:
            raise errors.InvalidArgument(f"every is a number of seconds, not {every!r}")
        if not 1 <= most <= 10_000:
            raise errors.InvalidArgument(f"a call has 1 to 10,000 entries, not {most!r}")
        self._tally = tally
        self._window = window
        self._every = every
        self._most = most
        self._waiting = Gatherer(most)
        self._due = 0.0
        self._added = 0
        self._done = 0
        """Messages that were added, and those of them that are applied and acked."""
        self._flushed = 0
        """So many of those that were added are not to wait for others."""
        self._closed = False
        self._failure: BaseException | None = None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise errors.BufferClosed

    def _full(self) -> bool:
        return self._waiting.entries >= ROOM * self._most and self._failure is None and not self._closed

    def _put(self, new: Message) -> None:
        if not self._waiting:
            self._due = time.monotonic() + self._every
        self._waiting.put(new)
        self._added += 1

    def _pause(self) -> float | None:
        """Seconds until the next call; None: as long as nothing comes."""
        if not self._waiting:
            return None
        if self._closed or self._flushed > self._done or self._waiting.entries >= self._most:
            return 0.0
        return max(0.0, self._due - time.monotonic())

    def _take(self) -> Gathered | None:
        taken = self._waiting.take()
        self._due = time.monotonic() + self._every
        return taken

    def _ack(self, call: Gathered) -> None:
        for ack in call.acks:
            # A window is closed when its stream was given to somebody else; what was applied stays so.
            with contextlib.suppress(WindowClosed):
                ack()
        self._done += call.messages


class TallyBuffer(_Buffer):
    """Gathers what messages bring to a tally, from any number of threads; made by `client.tally(…).buffer(…)`.

    A call goes out when `most` entries wait, or `every` seconds after the first of them came. When one fails, after the
    client's own retries, or an ack does, the buffer is over: what it had is outstanding in the window, and every method
    raises what had happened. Then read again from the window's floor.
    """

    def __init__(self, client: Client, tally: str, window: Window | None, every: float, most: int) -> None:
        super().__init__(tally, window, every, most)
        self._client = client
        self._lock = threading.Lock()
        self._work_waits = threading.Condition(self._lock)
        self._caller_waits = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._process: int | None = None
        """The process of the thread."""

    def add(self, deltas: Mapping[str, int], source: Source | SourceChain, *, window: Window | None = None) -> None:
        """What one message brings, by key; nothing is fine too. The messages of a source are added in their order.

        `source`: its chain, with the hop at which this consumer has read it: that one's offset is acked in `window`, by
        default the buffer's own. Waits while too much waits. Raises `InvalidArgument`, `BufferClosed`, `UsedAfterFork`,
        or what has ended the buffer.
        """
        new = message(deltas, source, window or self._window)
        self._check_process()
        with self._lock:
            while self._full():
                self._caller_waits.wait()
            self._check()
            self._put(new)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lastbit-tally-buffer", daemon=True)
                self._thread.start()
                self._process = os.getpid()
            self._work_waits.notify()

    def flush(self) -> None:
        """Return when all that was added before is applied and acked. Raises `UsedAfterFork`, or what has ended the
        buffer."""
        self._check_process()
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Take no more and flush. Raises `UsedAfterFork`, or what has ended the buffer."""
        self._check_process()
        with self._lock:
            self._closed = True
            self._caller_waits.notify_all()
            self._flush()
        if self._thread is not None:
            self._thread.join()

    def _flush(self) -> None:
        wanted = self._flushed = self._added
        self._work_waits.notify()
        while self._done < wanted and self._failure is None:
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
        # Before the lock, which a thread of the parent process may have held at the fork.
        if is_forked(self._process):
            raise errors.UsedAfterFork("the buffer")

    def _work(self) -> None:
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
                    self._client._run(calls.apply(self._client._service, self._tally, call.entries))
                self._ack(call)
            except BaseException as error:  # noqa: BLE001  # whatever it was, the callers are told
                self._failure = error
            with self._lock:
                self._caller_waits.notify_all()
                if self._failure is not None:
                    return


class AsyncTallyBuffer(_Buffer):
    """`TallyBuffer` for the tasks of one event loop: same names, awaited."""

    def __init__(self, client: AsyncClient, tally: str, window: Window | None, every: float, most: int) -> None:
        super().__init__(tally, window, every, most)
        self._client = client
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def add(
        self, deltas: Mapping[str, int], source: Source | SourceChain, *, window: Window | None = None
    ) -> None:
        """What one message brings, by key; see `TallyBuffer.add`."""
        new = message(deltas, source, window or self._window)
        async with self._changed:
            while self._full():
                await self._changed.wait()
            self._check()
            self._put(new)
            if self._task is None:
                self._task = asyncio.create_task(self._work(), name="lastbit-tally-buffer")
                # `flush` raises what ended it; asyncio need not log that nobody asked.
                self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._changed.notify_all()

    async def flush(self) -> None:
        """Return when all that was added before is applied and acked; see `TallyBuffer.flush`."""
        async with self._changed:
            wanted = self._flushed = self._added
            self._changed.notify_all()
            while self._done < wanted and self._failure is None:
                await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Take no more and flush; see `TallyBuffer.close`."""
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
                    await self._client._run(calls.apply(self._client._service, self._tally, call.entries))
                self._ack(call)
                async with self._changed:
                    self._changed.notify_all()
        except BaseException as error:
            # The callers must not raise the cancellation of this task, which is not theirs.
            cancelled = isinstance(error, asyncio.CancelledError)
            self._failure = RuntimeError("the buffer's task was cancelled") if cancelled else error
            if isinstance(error, GeneratorExit):
                raise  # the event loop is gone
            async with self._changed:
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    async def _next_call(self) -> Gathered | None:
        """What is due, when it is due; None when the buffer is closed and empty."""
        async with self._changed:
            while (pause := self._pause()) != 0.0:
                if self._closed and not self._waiting:
                    return None
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: in Python 3.11 it loses a cancellation that coincides with the notification.
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
            return self._take()
