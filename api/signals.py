"""What a process measures of itself, twice a second and in a thread of its own, which runs when the event loop doesn't.

A scrape reaches one of several workers, so each leaves its values where the others find them (see `api.metrics`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

import anyio.to_thread

from api import memory, metrics
from api.access.tokens import Tokens
from api.limits.connections import Connections
from core.storage.database import Database

EVERY: Final = 0.5
"""Seconds between two measurements. A stall of the event loop is longer than it seems by at most as much."""
MINUTE: Final = 60.0
HOUR: Final = 3600.0
STEP: Final = 0.5
"""Seconds by which the wall clock moves against the monotonic one if it was set. Corrections of its speed are less."""
INTERRUPTED: Final = 0.1
"""Seconds between two readings of a clock, if the thread was interrupted in between."""


class Worst:
    """The largest value of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()
        """Times and values, which descend."""

    def add(self, at: float, value: float) -> None:
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((at, value))

    def get(self, at: float) -> float:
        while self._values and at - self._values[0][0] > self._seconds:
            self._values.popleft()
        return self._values[0][1] if self._values else 0.0


class Delay:
    """The longest of the last minute's waits, one of which may be in progress."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._worst = Worst(MINUTE)

    def begin(self) -> bool:
        """Begin to wait. False if a wait is in progress."""
        if self._began is not None:
            return False
        self._began = time.monotonic()
        return True

    def end(self) -> None:
        assert self._began is not None
        at = time.monotonic()
        self._worst.add(at, at - self._began)
        self._began = None

    def longest(self) -> float:
        at, began = time.monotonic(), self._began
        return max(self._worst.get(at), 0.0 if began is None else at - began)


class WallClock:
    """The steps of the wall clock: how far it was set, forward or back."""

    def __init__(self) -> None:
        self._ahead: float | None = None
        """The wall clock minus the monotonic one."""
        self._worst = Worst(HOUR)

    def largest_step(self) -> float:
        """That of the last hour, in seconds."""
        before, wall, at = time.monotonic(), time.time(), time.monotonic()
        if at - before < INTERRUPTED:
            ahead = wall - at
            if self._ahead is not None and abs(ahead - self._ahead) > STEP:
                self._worst.add(at, abs(ahead - self._ahead))
            self._ahead = ahead
        return self._worst.get(at)


class Signals:
    """Created in the event loop that it measures."""

    def __init__(self, database: Database, connections: Connections, tokens: Tokens) -> None:
        self._write_watch = database.write_watch
        self._connections = connections
        self._tokens = tokens
        self._loop = asyncio.get_running_loop()
        self._threads = anyio.to_thread.current_default_thread_limiter()
        self._loop_lag = Delay()
        self._thread_wait = Delay()
        self._waiting: asyncio.Task[None] | None = None
        self._clock = WallClock()

    def measure(self) -> None:
        if self._loop_lag.begin():
            self._loop.call_soon_threadsafe(self._in_loop)
        metrics.WRITE_STALL.set(self._write_watch.stall())
        metrics.LOOP_LAG.set(self._loop_lag.longest())
        metrics.THREAD_WAIT.set(self._thread_wait.longest())
        metrics.WAITING_REQUESTS.set(self._threads.statistics().tasks_waiting)
        metrics.CONNECTIONS.set(len(self._connections))
        metrics.CONNECTIONS_LIMIT.set(self._connections.limit)
        metrics.RESIDENT_MEMORY.set(memory.resident())
        metrics.MEMORY_LIMIT.set(memory.limit())
        metrics.TOKENS_UNREADABLE.set(not self._tokens.are_current)
        metrics.CLOCK_STEP.set(self._clock.largest_step())

    def _in_loop(self) -> None:
        self._loop_lag.end()
        if self._thread_wait.begin():
            # Waits as a request does.
            self._waiting = self._loop.create_task(anyio.to_thread.run_sync(self._thread_wait.end))
