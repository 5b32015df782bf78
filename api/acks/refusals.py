"""Who is sent away under overload is told so a moment later.

Told at once, a crowd comes again at once, whatever `Retry-After` says, and each time it is read and refused. That costs
what commits need: the event loop and the combiner's thread share one interpreter. And it keeps others waiting: a socket
is read when those before it were, so with two thousand of them that always have something to say everybody waits for
two thousand refusals; libuv goes on reading within one turn of the loop for as long as a thousand sockets are ready, up
to 49,152 times, and nothing else is done meanwhile. Who waits for his refusal says nothing. To wait a moment takes
nothing from him, as he is to come back in a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

SECONDS: Final = 0.2
"""So two thousand come ten thousand times a second at the most, which one worker can read and commit beside it."""
TOGETHER: Final = 0.01
"""Seconds within which some are told together: a timer for each would cost more than to tell him."""


class Pause:
    """Of one event loop, whose thread alone calls this."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        """(time at which he is told, how) of each, the next one first."""
        self._set = False
        """The timer."""

    def before(self, tell: Callable[[], object]) -> None:
        """Call `tell` when the pause is over."""
        self._waiting.append((self._loop.time() + SECONDS, tell))
        self._wait(SECONDS)

    def _wait(self, seconds: float) -> None:
        if not self._set:
            self._set = True
            self._loop.call_later(seconds, self._tell)

    def _tell(self) -> None:
        # Who is told may have sent the next request already, which comes to `before` in here.
        due = self._loop.time()
        try:
            while self._waiting and self._waiting[0][0] <= due:
                self._waiting.popleft()[1]()
        finally:
            self._set = False
            if self._waiting:
                self._wait(max(self._waiting[0][0] - due, TOGETHER))
