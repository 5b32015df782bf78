"""Limits on the number of connections, and on how long they may be idle or slow.

A connection costs memory and a file descriptor even when it is idle. So their number is limited, and a check each
second closes connections that are idle for long (earlier when there are many), that send a request too slowly, or
that don't read their responses. One check of five thousand connections is cheaper than a timer for each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from typing import Final, Protocol

import structlog

from api.metrics import REFUSED
from core import errors

CHECK_EVERY: Final = 1.0
"""Seconds between two checks of all connections."""
SILENT: Final = 75.0
"""Seconds that a connection may be idle before its first request. Between two requests, it is the same."""
CROWDED: Final = 0.8
"""The share of the limit from which idle connections are closed early."""
IDLE_IN_CROWD: Final = 5.0
"""Seconds after which idle connections are closed then. The client has to connect again."""
RESERVE: Final = 256
"""File descriptors that are reserved for the database's connections, files and pipes, and for connections that linger
although they were refused."""
MOST_PROBES: Final = 64
"""Connections to the port of the probes. They don't count as others."""
FEWEST: Final = 64
"""Connections that a service must be able to serve, unless it is limited to fewer."""
MOST_LINGERING: Final = 64
"""Connections that linger at the same time."""
LINGERING: Final = 10.0
"""Seconds that a connection lingers at most. They are fewer than those that a stopping service has."""
LINGERING_SILENT: Final = 5.0
"""Seconds that it lingers although the client sends nothing."""

log = structlog.get_logger(__name__)


class Connection(Protocol):
    """A connection's state, by which it is judged. Times are loop times. None: the connection is not in that state."""

    @property
    def idle_since(self) -> float | None: ...

    @property
    def head_since(self) -> float | None:
        """The first byte of a request was received, and its head is incomplete."""

    @property
    def body_since(self) -> float | None:
        """The head is complete, and the body is not. The time is that of the request's first byte."""

    @property
    def stuck_since(self) -> float | None:
        """The client doesn't read what the service writes."""

    def end(self) -> None: ...

    def abort(self) -> None: ...


class Lingering(Protocol):
    """A connection that is closed, but still reads. Times are loop times."""

    began: float
    last_read: float

    def end(self) -> None: ...


class Connections:
    """All connections of the running event loop."""

    def __init__(
        self, limit: int, *, head_timeout: float, request_timeout: float, probe_port: int | None = None
    ) -> None:
        """`limit`: connections. The timeouts are in seconds."""
        # Without a free file descriptor, the service could neither accept a client nor connect to the database.
        self.limit = max(1, min(limit, open_files() - RESERVE))
        self._head_timeout = head_timeout
        self._request_timeout = request_timeout
        self._probe_port = probe_port
        self._all: set[Connection] = set()
        self._probes: set[Connection] = set()
        self._lingering: set[Lingering] = set()

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: Connection, address: tuple[str, int]) -> bool:
        """Add a new connection to this address of the service. False if there are too many."""
        is_probe = self._probe_port is not None and address[1] == self._probe_port
        connections, limit = (self._probes, MOST_PROBES) if is_probe else (self._all, self.limit)
        if len(connections) >= limit:
            REFUSED.labels("connections").inc()
            return False
        connections.add(connection)
        return True

    def remove(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._probes.discard(connection)

    def add_lingering(self, lingering: Lingering) -> bool:
        """Add a connection that begins to linger. False if there are too many."""
        if len(self._lingering) >= MOST_LINGERING:
            return False
        self._lingering.add(lingering)
        return True

    def remove_lingering(self, lingering: Lingering) -> None:
        self._lingering.discard(lingering)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Check the connections each second while the context lasts."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def check() -> None:
            nonlocal timer
            timer = loop.call_later(CHECK_EVERY, check)  # first, as a check that raises must not be the last
            self.check(loop.time())

        check()
        try:
            yield
        finally:
            assert timer is not None
            timer.cancel()

    def check(self, now: float) -> None:
        """Close connections that are idle or slow, or that linger for long. `now`: loop time."""
        for lingering in list(self._lingering):
            if now - lingering.began > LINGERING or now - lingering.last_read > LINGERING_SILENT:
                lingering.end()
        idle = IDLE_IN_CROWD if len(self._all) >= CROWDED * self.limit else SILENT
        for connection in [*self._all, *self._probes]:
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
    """The maximum number of file descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def check_open_files(limit: int) -> None:
    """Raise the limit of file descriptors, and log if it doesn't suffice for `limit` connections. Raises
    `errors.Misconfigured` if it suffices only for few."""
    raise_open_files()
    allowed, needed = open_files(), RESERVE + min(FEWEST, limit)
    if allowed < needed:
        raise errors.Misconfigured(
            f"this process may open only {allowed} files, but needs at least {needed}: raise its hard limit, as with "
            "`ulimit -n 65536` before the start, LimitNOFILE=65536 in a systemd unit, or `--ulimit nofile=65536` of "
            "Docker"
        )
    if allowed < RESERVE + limit:
        log.warning("fewer_connections", open_files=allowed, connections=allowed - RESERVE, configured=limit)


def raise_open_files() -> None:
    """Raise the limit of file descriptors to the hard limit. The default soft limit is 1,024, for the sake of
    `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
