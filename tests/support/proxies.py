"""A TCP proxy in front of a database, for network failures: slow, cut, silent, unreachable."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final, Literal

Cut = Literal["before", "amid", "after"]


COMMIT: Final = b"\x03COMMIT"
"""The end of a packet that contains only a COMMIT."""
LAST: Final = b";COMMIT"
"""The end of a packet with the last statements of a transaction and its COMMIT."""
READ: Final = (b"\x03SELECT", b"\x03SET TRANSACTION")
"""The first bytes of packets that only read, after their length and number."""


class Proxy:
    """Listens on its own port and forwards everything. The modes can be changed at any time."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.delay = 0.0
        """Seconds by which each piece from a client is delayed."""
        self.cut: Cut | None = None
        """Whether to break a connection at its COMMIT: before the server gets it, or after it, before the answer. Amid:
        the server gets the writes of the packet, but not their COMMIT."""
        self.every = 7
        """Cut one of this many COMMITs."""
        self.most = sys.maxsize
        """How many to cut in all."""
        self.cuts = 0
        self.rewrite: Callable[[bytes], bytes] = bytes
        """Changes what a client sends, in pieces of any size, to as many other bytes."""
        self.away = False
        """Break each connection as soon as it is made."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._commits = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def leave(self) -> None:
        """Break all connections, and new ones, until `come_back`."""
        self.away = True
        self._break_all()

    def come_back(self) -> None:
        self.away = False

    def fall_silent(self) -> None:
        """Keep connections, but forward nothing, until `speak`."""
        self._flowing.clear()

    def speak(self) -> None:
        self._flowing.set()

    def close(self) -> None:
        self._closed.set()
        self._flowing.set()
        # Closing the socket doesn't wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break_all()

    def _break_all(self) -> None:
        with self._lock:
            for connection in self._open:
                _break(connection)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.away:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                if is_client:
                    data = self.rewrite(data)
                if is_client and self.delay:
                    self._closed.wait(self.delay)
                if is_client and _commits(data) and self._is_due():
                    if self.cut == "before":
                        break
                    if self.cut == "amid":
                        data = _without_commit(data)
                        if not data:  # the server would wait for more, with its locks
                            break
                    # First, so that the client never gets the answer. The other direction's thread waits for it, finds
                    # that the client is gone, and closes both ends.
                    _break(source)
                    sink.sendall(data)
                    return
                sink.sendall(data)
        for end in (source, sink):
            _break(end)
        with self._lock:
            self._open -= {source, sink}
        for end in (source, sink):
            end.close()

    def _is_due(self) -> bool:
        if self.cut is None:
            return False
        with self._lock:
            self._commits += 1
            due = self._commits % self.every == 0 and self.cuts < self.most
            self.cuts += due
            return due


def _commits(data: bytes) -> bool:
    """Whether this ends a transaction that may have written."""
    if data.endswith(b"COMMIT\0"):  # PostgreSQL's simple query
        return data.startswith(b"Q") and data.endswith((b";COMMIT\0", b"\x0bCOMMIT\0"))
    return data.endswith(COMMIT) or (data.endswith(LAST) and not data.startswith(READ, 4))


def _without_commit(packet: bytes) -> bytes:
    """The packet without its COMMIT; nothing if that is all, or if this is only the end of a packet."""
    if packet.startswith(b"Q") and packet.endswith(b"COMMIT\0"):
        length = int.from_bytes(packet[1:5], "big")
        if not packet.endswith(b";COMMIT\0") or len(packet) != length + 1:
            return b""
        return b"Q" + (length - len(LAST)).to_bytes(4, "big") + packet[5 : -len(LAST) - 1] + b"\0"
    length = int.from_bytes(packet[:3], "little")
    if packet.endswith(COMMIT) or len(packet) != length + 4:
        return b""
    return (length - len(LAST)).to_bytes(3, "little") + packet[3 : -len(LAST)]


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
