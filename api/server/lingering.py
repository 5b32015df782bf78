"""A lingering close: the response to a request that the client is still sending must reach the client.

When a socket is closed and more of the client's data arrives, the kernel answers with a reset, and the client's kernel
then discards the response if the client hasn't read it yet. Many clients, such as Python's urllib, read only after they
have sent the whole body. So the service first closes only its half of the connection. It discards what the client still
sends, until the client closes its half too (RFC 9112, 9.6).

The bytes and the seconds of this, and the number of such connections, are limited (see `Connections`). Beyond them, the
connection is closed as usual.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from api.limits.connections import Connections
from api.limits.sizes import DISCARDED


class _Owner(Protocol):
    """The protocol of an HTTP connection."""

    @property
    def is_client_sending(self) -> bool:
        """Whether more data of the client may arrive."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class LingeringTransport(asyncio.Transport):
    """A connection's transport as its protocol sees it. Its `close` lingers while the client is sending."""

    def __init__(self, transport: asyncio.Transport, owner: _Owner, connections: Connections) -> None:
        super().__init__()
        self._transport = transport
        self._owner = owner
        self._connections = connections
        self._lingers = False
        self._written = 0

    @property
    def held(self) -> int:
        """The bytes in memory that are not sent yet. The transport keeps the whole of what was written last, even
        after it has sent a part of that."""
        return max(self._written, self._transport.get_write_buffer_size())

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._owner.is_client_sending or not self._transport.can_write_eof():
            self._transport.close()
            return
        discarding = Discarding(self._transport, self._owner, self._connections)
        if not self._connections.add_lingering(discarding):
            self._transport.close()
            return
        self._lingers = True
        self._transport.set_protocol(discarding)
        self._transport.resume_reading()
        self._transport.write_eof()

    def close_now(self) -> None:
        """Close without lingering."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        # A pipelined request may begin after its client has left.
        if not self.is_closing():
            self._written = len(data)
            self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._lingers:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._lingers:
            self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)


class Discarding(asyncio.Protocol):
    """The protocol of a connection while it lingers. Nothing is parsed."""

    def __init__(self, transport: asyncio.Transport, owner: _Owner, connections: Connections) -> None:
        self._transport = transport
        self._owner = owner
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._discarded = 0
        self.began = self.last_read = self._loop.time()

    def data_received(self, data: bytes) -> None:
        self._discarded += len(data)
        self.last_read = self._loop.time()
        if self._discarded > DISCARDED:
            self.end()

    def end(self) -> None:
        """Close the connection."""
        self._connections.remove_lingering(self)
        self._transport.close()

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove_lingering(self)
        self._owner.connection_lost(exc)
