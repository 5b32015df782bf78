"""The delay of refusals: clients that are refused under overload get their 503 after a fifth of a second.

Without the delay, many refused clients would retry at once, in spite of `Retry-After`, and each retry would be read and
refused again. That takes time from commits, as the event loop and the combiner's thread share the GIL. It also delays
other clients: sockets are read in order, so with two thousand busy sockets each client waits for two thousand refusals.
libuv continues to read within one event-loop iteration while a thousand sockets are ready, up to 49,152 times, and
nothing else runs meanwhile. A client that waits for its refusal sends nothing. The delay costs it nothing, as it should
retry only after a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

SECONDS: Final = 0.2
"""With this delay, two thousand clients send at most ten thousand requests a second. One worker can read that many and
still commit."""
TOGETHER: Final = 0.01
"""Seconds within which refusals are sent together. A timer for each would cost more than the refusal."""


class Pause:
    """The delayed refusals of one event loop. Only that loop's thread may call the methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        """(loop time when it is due, callback) of each refusal, the next one first."""
        self._set = False
        """Whether the timer is set."""

    def before(self, refuse: Callable[[], object]) -> None:
        """Call `refuse` after the delay."""
        self._waiting.append((self._loop.time() + SECONDS, refuse))
        self._wait(SECONDS)

    def _wait(self, seconds: float) -> None:
        if not self._set:
            self._set = True
            self._loop.call_later(seconds, self._refuse_due)

    def _refuse_due(self) -> None:
        # A refused client may have sent its next request already; that calls `before` during this loop.
        due = self._loop.time()
        try:
            while self._waiting and self._waiting[0][0] <= due:
                self._waiting.popleft()[1]()
        finally:
            self._set = False
            if self._waiting:
                self._wait(max(self._waiting[0][0] - due, TOGETHER))
