"""Connections to addresses that were checked before, with one deadline for everything done in a request.

A connection goes to an *address*: the name is not looked up again. The Host header, SNI and the certificate check still
use the name. A time-out for each read would not be enough, as a receiver that sends a byte now and then could keep a
request waiting forever. So each step gets the remaining time of the request's deadline, to within `EXACT`.

A connection whose response was read completely stays open for the next request to the same origin (`Kept`), because
connecting and TLS cost more than the request."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final, TypeAlias

import h11

IDLE: Final = 4.0
"""Seconds for which an unused connection is kept. Many receivers close theirs after five."""
MOST: Final = 64
"""Maximum number of unused connections."""
HEAD: Final = 100 * 1024
"""Maximum bytes of a response's head."""
PART: Final = 64 * 1024
"""Maximum bytes of one read."""
EXACT: Final = 0.05
"""Seconds by which a time-out may differ from the remaining time. Setting it for each step is a measurable cost."""

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port."""


class Broken(Exception):
    """There is no complete response. The text is ours, as texts of the socket may contain addresses."""


class Deadline:
    """A point in time, `seconds` from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    def left(self) -> float:
        """The remaining seconds. Raises `TimeoutError` if there are none."""
        seconds = self._until - self._clock()
        if seconds <= 0:
            raise TimeoutError
        return seconds


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the TLS certificate was not accepted"
    if isinstance(error, ssl.SSLError):
        return "TLS failed"
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    return "the connection failed"


class Connection:
    """An open connection to `address`, one of the origin's, for one request at a time."""

    def __init__(self, origin: Origin, address: str, connection: socket.socket) -> None:
        self.origin = origin
        self.address = address
        self.was_answered = False
        """Whether anything was received since the last request began."""
        self._socket = connection
        self._timeout = connection.gettimeout() or 0.0
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD)

    def request(self, request: h11.Request, body: bytes, deadline: Deadline) -> h11.Response:
        """Send the request and return the response's head. Raises `Broken`, `TimeoutError`."""
        self.was_answered = False
        parts = [self._http.send(event) or b"" for event in (request, h11.Data(data=body), h11.EndOfMessage())]
        unsent = b"".join(parts)
        try:
            while unsent:
                self._limit(deadline)
                unsent = unsent[self._socket.send(unsent) :]
        except TimeoutError:
            raise
        except OSError:
            pass  # a receiver may answer and close before it has read everything
        while not isinstance(event := self._next(deadline), h11.Response):
            pass  # informational responses
        return event

    def body(self, deadline: Deadline) -> Iterator[int]:
        """The sizes of the parts of the response's body. Raises `Broken`, `TimeoutError`."""
        while isinstance(event := self._next(deadline), h11.Data):
            yield len(event.data)

    def _next(self, deadline: Deadline) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = self._read(deadline)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise Broken("the connection was closed before the response")
                self._http.receive_data(data)
        except h11.RemoteProtocolError:
            raise Broken("the response is not HTTP") from None
        return event

    def _read(self, deadline: Deadline) -> bytes:
        self._limit(deadline)
        try:
            data = self._socket.recv(PART)
        except TimeoutError:
            raise
        except OSError:
            raise Broken("the connection was closed before the response") from None
        self.was_answered |= bool(data)
        return data

    def _limit(self, deadline: Deadline) -> None:
        """Limit the socket's next step to the remaining time."""
        left = deadline.left()
        if abs(self._timeout - left) > EXACT or left < EXACT:
            self._timeout = left
            self._socket.settimeout(left)

    def reset(self) -> bool:
        """Prepare for the next request. False if there can't be one: the response was not read to its end, or the
        receiver will close the connection, or it has sent more than the response."""
        http = self._http
        if not (http.our_state is http.their_state is h11.DONE) or http.trailing_data[0]:
            return False
        http.start_next_cycle()
        return True

    def is_silent(self) -> bool:
        """Whether there is nothing to read. Otherwise the receiver has closed the connection, or has sent something
        that is no response to a request."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._socket.close()


def connect(origin: Origin, addresses: Sequence[str], deadline: Deadline, certificates: ssl.SSLContext) -> Connection:
    """Connect to the first of `addresses` that accepts. Raises `Broken`, `TimeoutError`."""
    scheme, host, port = origin
    failure: Exception = Broken("there is no address")
    for place, address in enumerate(addresses):
        # Each address gets a share, so that a silent one leaves time for the next.
        patience = deadline.left() / (len(addresses) - place)
        try:
            connection = socket.create_connection((address, port), patience)
        except TimeoutError as error:
            failure = error
            continue
        except OSError as error:
            failure = Broken(_words(error))
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if scheme == "https":
                connection.settimeout(deadline.left())
                connection = certificates.wrap_socket(connection, server_hostname=host)
            return Connection(origin, address, connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise Broken(_words(error)) from None
            raise
    raise failure


class Kept:
    """Connections that wait for the next request to their origin, the oldest first. Threads may share it. Old ones are
    closed when the next connection is added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[tuple[Connection, float]] = []
        """With the time at which each expires."""

    def take(self, origin: Origin, addresses: Collection[str]) -> Connection | None:
        """Remove and return the newest usable connection of the origin to one of these addresses."""
        while True:
            with self._lock:
                for place in reversed(range(len(self._connections))):
                    connection, until = self._connections[place]
                    if connection.origin == origin and connection.address in addresses:
                        del self._connections[place]
                        break
                else:
                    return None
            if time.monotonic() < until and connection.is_silent():
                return connection
            connection.close()

    def keep(self, connection: Connection) -> None:
        """Keep the connection, which was reset."""
        surplus: list[Connection] = []
        now = time.monotonic()
        with self._lock:
            self._connections.append((connection, now + IDLE))
            while len(self._connections) > MOST or self._connections[0][1] < now:
                surplus.append(self._connections.pop(0)[0])
        for one in surplus:
            one.close()
