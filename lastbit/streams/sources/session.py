"""A session with a broker: one thread talks to it, and keeps sending heartbeats while handlers are slow.

Broker clients are seldom thread-safe, and their messages belong to the session: a later commit would affect another
session's records, so it is refused and never sent.
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
"""Seconds after which a waiting reader gets None, so that it can check whether to stop."""

T = TypeVar("T")
Done = Callable[[], None]


class Session(ABC, Generic[T]):
    """`stop()` ends the reading, from any thread or signal handler; `close()` ends the session."""

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
        """Run the session in its thread, until `_end` or an error."""

    @abstractmethod
    def _hand_over(self, work: Callable[[], None]) -> None:
        """Schedule `work` in the session's thread."""

    @abstractmethod
    def _end(self, on_done: Done) -> None:
        """Make `_talk` return. Called in the session's thread."""

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._talk()
        except BaseException as error:  # noqa: BLE001  # the reader raises it
            cause = error
        session_ended = SessionEnded(
            self.name, "it was closed" if cause is None else str(cause) or type(cause).__name__
        )
        session_ended.__cause__ = cause
        with self._lock:
            self._ended = session_ended
            for future in self._asked:
                future.set_exception(session_ended)
            self._asked.clear()
        self._inbox.put(None)

    def _ask(self, work: Callable[[Done], None]) -> None:
        """Call `work(on_done)` in the session's thread and wait until it calls `on_done`. Raises the exception of
        `work`, or `SessionEnded` if the session ends first."""
        answer: Future[None] = Future()

        def on_done() -> None:
            with self._lock:
                self._asked.discard(answer)
            if not answer.done():
                answer.set_result(None)

        def do() -> None:
            try:
                work(on_done)
            except BaseException as error:  # noqa: BLE001  # the caller raises it
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
        # Before taking the lock, which a thread of the parent process may have held at the fork.
        if self._process != os.getpid():
            raise UsedAfterFork(self.name)

    def _received(self) -> Iterator[T | None]:
        """Received items, and None while nothing arrives, until `stop()`. Raises `SessionEnded` when the session is
        lost."""
        while not self._stopped.is_set():
            self._check_process()
            item = None
            with contextlib.suppress(queue.Empty):
                item = self._inbox.get(timeout=LOOK)
            if self._stopped.is_set():
                break
            # Checked before buffered items, as the broker will deliver those again in another session.
            if self._ended is not None:
                raise self._ended
            yield item

    def stop(self) -> None:
        """Hand out nothing more. Records handed out before can be committed until `close()`."""
        self._stopped.set()
        self._inbox.put(None)

    def close(self) -> None:
        """End the session; uncommitted records are delivered again in another session."""
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
