"""Functions that the threads of a runner call when their time has come."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Timers:
    """`wake` makes an idle thread ask again how long to wait."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call the function in `seconds`."""
        with self._lock:
            heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), function))
        self._wake()

    def run_due(self) -> float | None:
        """Call the functions whose time has come. Returns the seconds until the next one's; None if there is none."""
        while True:
            with self._lock:
                if not self._heap:
                    return None
                seconds = self._heap[0][0] - time.monotonic()
                if seconds > 0:
                    return seconds
                function = heapq.heappop(self._heap)[2]
            function()
