"""A connection to addresses that were checked before, with one deadline for everything done on it.

httpcore requests a connection to a *name* from its network backend. This backend does not look up the name again: it
connects to the addresses that it was created with. The Host header, SNI and the certificate check still use the name.
httpcore applies its time-outs to each read, so a receiver that sends a byte now and then could keep a connection open
forever. Here each step gets the remaining time of one deadline."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import httpcore


class Deadline:
    """A point in time, `seconds` from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    def left(self) -> float:
        """The remaining seconds. Raises `httpcore.ReadTimeout` if there are none."""
        seconds = self._until - self._clock()
        if seconds <= 0:
            raise httpcore.ReadTimeout
        return seconds


@contextlib.contextmanager
def _raising(kind: type[Exception]) -> Iterator[None]:
    """Turn the socket's errors into httpcore's, with our own text, because the pool drops their cause."""
    try:
        yield
    except TimeoutError as error:
        raise httpcore.ReadTimeout from error
    except OSError as error:
        raise kind(_words(error)) from error


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "the TLS certificate was not accepted"
    if isinstance(error, ssl.SSLError):
        return "TLS failed"
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused"
    return "the connection failed"


class Pinned(httpcore.NetworkBackend):
    """Connects to the first of `addresses` that accepts, for every name."""

    def __init__(self, addresses: Sequence[str], deadline: Deadline) -> None:
        self._addresses = addresses
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        failure: Exception | None = None
        for place, address in enumerate(self._addresses):
            # Each address gets a share, so that a silent one leaves time for the next.
            patience = self._deadline.left() / (len(self._addresses) - place)
            try:
                with _raising(httpcore.ConnectError):
                    connection = socket.create_connection((address, port), patience)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return _Stream(connection, self._deadline)
            except (httpcore.ConnectError, httpcore.ReadTimeout) as error:
                failure = error
        raise failure or httpcore.ConnectError("there is no address")


class _Stream(httpcore.NetworkStream):
    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        self._socket = connection
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _raising(httpcore.ReadError):
            self._socket.settimeout(self._deadline.left())
            return self._socket.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _raising(httpcore.WriteError):
            while buffer:
                self._socket.settimeout(self._deadline.left())
                buffer = buffer[self._socket.send(buffer) :]

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            with _raising(httpcore.ConnectError):
                self._socket.settimeout(self._deadline.left())
                return _Stream(ssl_context.wrap_socket(self._socket, server_hostname=server_hostname), self._deadline)
        except BaseException:
            self.close()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._socket if info == "socket" else None
