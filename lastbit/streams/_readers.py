"""The threads that read the sources of several streams, in turns.

A turn ends when the source has nothing, when the window is full, or after `TURN` seconds. A source that blocks for
longer than `PATIENCE` occupies its thread, so that another one is started for the time: it delays the others no longer
than that. So there are `READERS` threads, and one more for each source that blocks.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from contextlib import suppress
from typing import Final, Protocol

from lastbit._threads import join_started

READERS: Final = 4
TURN: Final = 0.02
PATIENCE: Final = 0.1


class HasSource(Protocol):
    """A stream."""

    def read(self, until: float) -> float | None:
        """Read the source until this time, on `time.monotonic`. Returns the seconds until the next turn; None: there is
        none. Must not raise."""


class Readers:
    def __init__(self) -> None:
        self._turns: list[tuple[float, int, HasSource]] = []
        """A heap: when the stream has its next turn, a number that makes ties fair, and the stream."""
        self._numbers = itertools.count()
        self._reading: dict[threading.Thread, float] = {}
        """Since when each thread has read."""
        self._threads: set[threading.Thread] = set()
        self._watcher = threading.Thread(target=self._watch, name="lastbit-readers", daemon=True)
        self._changed = threading.Condition()
        self._is_timed = False
        """Whether a thread waits for the time of the next turn. The others wait until they are notified."""
        self._over = threading.Event()

    def start(self) -> None:
        """Raises `RuntimeError` if the process may have no more threads."""
        self._watcher.start()
        with self._changed:
            for _ in range(READERS):
                self._add_thread()

    def stop(self) -> None:
        """The threads end after their turns."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()
        join_started([self._watcher])

    def add(self, stream: HasSource) -> None:
        """Give it turns, from now on."""
        with self._changed:
            self._add(0.0, stream)

    def hasten(self, stream: HasSource) -> None:
        """If the stream waits for its turn, it comes next."""
        with self._changed:
            turns = [turn for turn in self._turns if turn[2] is not stream]
            if len(turns) < len(self._turns):
                self._turns = turns
                heapq.heapify(self._turns)
                self._add(0.0, stream)

    def _add(self, moment: float, stream: HasSource) -> None:
        turn = moment, next(self._numbers), stream
        heapq.heappush(self._turns, turn)
        if self._turns[0] is turn:
            self._changed.notify_all()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._read, name="lastbit-reader", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _read(self) -> None:
        thread = threading.current_thread()
        while (stream := self._next(thread)) is not None:
            seconds = stream.read(time.monotonic() + TURN)
            with self._changed:
                del self._reading[thread]
                if seconds is not None:
                    self._add(time.monotonic() + seconds, stream)

    def _next(self, thread: threading.Thread) -> HasSource | None:
        """The stream whose turn it is; None: this thread is no longer needed."""
        with self._changed:
            try:
                while not self._over.is_set() and len(self._threads) <= self._needed():
                    if self._is_timed or not self._turns:
                        self._changed.wait()
                        continue
                    seconds = self._turns[0][0] - time.monotonic()
                    if seconds <= 0:
                        self._reading[thread] = time.monotonic()
                        return heapq.heappop(self._turns)[2]
                    self._is_timed = True
                    self._changed.wait(seconds)
                    self._is_timed = False
                self._threads.discard(thread)
                return None
            finally:
                self._changed.notify()  # this thread no longer waits for the next turn: another one must

    def _needed(self) -> int:
        overdue = time.monotonic() - PATIENCE
        return READERS + sum(since < overdue for since in self._reading.values())

    def _watch(self) -> None:
        while not self._over.wait(PATIENCE):
            # If the process may have no more threads, the sources wait for each other.
            with self._changed, suppress(RuntimeError):
                while len(self._threads) < self._needed():
                    self._add_thread()
