"""The threads that handle records."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from lastbit._threads import join_started
from lastbit.streams._timers import Timers

LONGEST_WAIT: Final = 3600.0
"""Seconds. The next timer may be due much later, but a wait must be finite."""


class HasKeys(Protocol):
    """A stream."""

    def work(self, key: Hashable) -> None:
        """Handle the next records of the key; must not raise."""


Task = tuple[HasKeys, Hashable]

_LOOK: Final = (None, None)
"""A task that makes an idle thread ask the timers again."""


class Workers:
    """Tasks begin in the order in which they are put."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | tuple[None, None] | None] = SimpleQueue()
        self._timers = Timers(lambda: self._tasks.put(_LOOK))
        self._threads: list[threading.Thread] = []
        self.call_later = self._timers.call_later

    def put(self, stream: HasKeys, key: Hashable) -> None:
        """A key of this stream is ready."""
        self._tasks.put((stream, key))

    def start(self, count: int) -> None:
        """Raises `RuntimeError` if the process may have no more threads."""
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"lastbit-lane-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, wait: bool) -> None:
        """No more tasks come. `wait`: until the threads have ended."""
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            join_started(self._threads)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            stream, key = task
            stream.work(key)

    def _next(self) -> Task | None:
        while True:
            seconds = self._timers.run_due() if self._timers else None
            try:
                task = self._tasks.get(timeout=None if seconds is None else min(seconds, LONGEST_WAIT))
            except Empty:
                continue
            if task is None or task[0] is not None:
                if self._timers:
                    self._tasks.put(_LOOK)  # this thread no longer waits for the next timer: another one must
                return task
