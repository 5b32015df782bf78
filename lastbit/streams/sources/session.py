"""A session with a broker: one thread talks to it, and goes on (heartbeats, rebalances) while handlers are slow.

Clients of brokers are seldom safe to use from several threads, and what they hand out is theirs only while the session
lasts: a commit that comes later would be for somebody else's records, so it is refused and never sent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar

from lastbit.errors import UsedAfterFork
from lastbit.streams.errors import SessionEnded

LOOK = 0.1
"""Seconds after which a reader hears that nothing came: it may have reasons to stop."""

T = TypeVar("T")
Done = Callable[[], None]


class Session(ABC, Generic[T]):
    """Reading it ends with `stop()`, from any thread or signal handler; the session itself ends with `close()`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inbox: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._ended: SessionEnded | None = None
        self._asked: set[Future[None]] = set()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"lastbit: {name}", daemon=True)

    @abstractmethod
    def _talk(self) -> None:
        """The session, in its thread, until `_end` or an error."""

    @abstractmethod
    def _hand_over(self, work: Callable[[], None]) -> None:
        """Have it called soon by the session's thread."""

    @abstractmethod
    def _end(self, done: Done) -> None:
        """Let `_talk` return; in the session's thread."""

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._talk()
        except BaseException as error:  # noqa: BLE001  # of any class: the reader raises it
            cause = error
        ended = SessionEnded(self.name, "it was closed" if cause is None else str(cause) or type(cause).__name__)
        ended.__cause__ = cause
        with self._lock:
            self._ended = ended
            for each in self._asked:
                each.set_exception(ended)
            self._asked.clear()
        self._inbox.put(None)

    def _ask(self, work: Callable[[Done], None]) -> None:
        """Have `work` called by the session's thread, and wait until it has called what it is given. Raises what it
        raised, and `SessionEnded` if the session ends before."""
        answer: Future[None] = Future()

        def done() -> None:
            with self._lock:
                self._asked.discard(answer)
            if not answer.done():
                answer.set_result(None)

        def do() -> None:
            try:
                work(done)
            except BaseException as error:  # noqa: BLE001  # raised where it was asked for
                with self._lock:
                    self._asked.discard(answer)
                answer.set_exception(error)

        self._check_process()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._asked.add(answer)
        self._hand_over(do)
        answer.result()

    def _check_process(self) -> None:
        # Before the lock, which a thread of the parent process may have held at the fork.
        if self._process != os.getpid():
            raise UsedAfterFork(self.name)

    def _received(self) -> Iterator[T | None]:
        """What came, and None while nothing comes, until `stop()`. Raises `SessionEnded` when the session is lost."""
        while not self._stopped.is_set():
            self._check_process()
            item = None
            with contextlib.suppress(queue.Empty):
                item = self._inbox.get(timeout=LOOK)
            if self._stopped.is_set():
                break
            # Before what came earlier: the broker has taken that back by now.
            if self._ended is not None:
                raise self._ended
            yield item

    def stop(self) -> None:
        """Nothing more is handed out. What was, can still be committed until `close()`."""
        self._stopped.set()
        self._inbox.put(None)

    def close(self) -> None:
        """End the session; what was handed out and not committed comes again in another."""
        self.stop()
        with contextlib.suppress(SessionEnded):
            self._ask(self._end)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
