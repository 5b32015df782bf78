"""Limits on connections: their number, and how long each may take, so that the others are served.

A connection costs memory and a file descriptor even when it is silent. So their number is bounded, and a check each
second closes connections that are silent for long (earlier when there are many), that send a request too slowly, or
that don't read their answers. One check of five thousand connections is cheaper than a timer for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from typing import Final, Protocol

from api.metrics import REFUSED

LOOK: Final = 1.0
"""Seconds between two looks at all connections."""
SILENT: Final = 75.0
"""Seconds for which a connection may be there without a first request; as long as one is kept between two."""
CROWDED: Final = 0.8
"""Share of the bound from which on idle connections are ended early."""
IDLE_IN_CROWD: Final = 5.0
"""Seconds of idleness that are enough then. The client has to connect again."""
RESERVE: Final = 256
"""File descriptors that are not for clients: the database's connections, files, pipes."""


class Connection(Protocol):
    """State for the watchdog. Times are the loop's; None: it isn't so."""

    @property
    def idle_since(self) -> float | None: ...

    @property
    def head_since(self) -> float | None:
        """The first byte of a request has come, and its head has not ended."""

    @property
    def body_since(self) -> float | None:
        """As before, and the head has ended."""

    @property
    def stuck_since(self) -> float | None:
        """It doesn't take what we write."""

    def end(self) -> None: ...

    def abort(self) -> None: ...


class Connections:
    """Belongs to one event loop, the running one."""

    def __init__(self, limit: int, *, head_timeout: float, request_timeout: float) -> None:
        # With no file descriptor left nobody could be accepted, nor the database be reached.
        self.most = max(1, min(limit, open_files() - RESERVE))
        self._head_timeout = head_timeout
        self._request_timeout = request_timeout
        self._all: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def made(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        if len(self._all) >= self.most:
            REFUSED.labels("connections").inc()
            return False
        self._all.add(connection)
        return True

    def lost(self, connection: Connection) -> None:
        self._all.discard(connection)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look after them while the context lasts."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal timer
            self.look(loop.time())
            timer = loop.call_later(LOOK, look)

        look()
        try:
            yield
        finally:
            assert timer is not None
            timer.cancel()

    def look(self, now: float) -> None:
        """End those that have to leave."""
        idle = IDLE_IN_CROWD if len(self._all) >= CROWDED * self.most else SILENT
        for connection in list(self._all):
            if connection.stuck_since is not None and now - connection.stuck_since > self._request_timeout:
                REFUSED.labels("slow").inc()
                connection.abort()  # `close` would wait until the client reads the rest
            elif (connection.head_since is not None and now - connection.head_since > self._head_timeout) or (
                connection.body_since is not None and now - connection.body_since > self._request_timeout
            ):
                REFUSED.labels("slow").inc()
                connection.end()
            elif connection.idle_since is not None and now - connection.idle_since > idle:
                if idle != SILENT:
                    REFUSED.labels("idle").inc()
                connection.end()


def open_files() -> int:
    """How many file descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """To what the system allows: shells start with 1,024, which is a habit from the time of `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
