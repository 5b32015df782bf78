"""The application behind one of uvicorn's protocols, in this process: bytes in, bytes out, without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from api.acks.routes import AckRoutes
from api.app import create
from core.settings import Settings
from tests.support.servers import sqlite_file


class Transport(asyncio.Transport):
    """The transport of the client's end."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("sockname", "peername") else default

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Answer:
    """An answer, read from its bytes."""

    def __init__(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.status = status
        self.headers = headers
        self.content = content

    def json(self) -> Any:
        return json.loads(self.content)


def answers(data: bytes) -> list[Answer]:
    replies = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        assert end, f"incomplete answer: {data!r}"
        start, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status, length = int(start.split()[1]), int(headers.get("content-length", "0"))
        assert len(rest) >= length
        if status >= 200:
            replies.append(Answer(status, headers, rest[:length]))
        data = rest[length:]
    return replies


class Served:
    """The application, started; each connection uses the given protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, app: AckRoutes) -> None:
        self.loop = loop
        self.app = app

    @property
    def service(self) -> Any:
        return self.app.state.service

    def connect(self, kind: Any) -> Connection:
        return Connection(self, kind)


class Connection:
    def __init__(self, server: Served, kind: Any) -> None:
        self.loop = server.loop
        self.state = ServerState()
        # Its limits are uvicorn's own; `api.__main__` changes none that affects parsing.
        config = uvicorn.Config(server.app, http=kind, log_config=None, access_log=False, proxy_headers=False)
        config.load()
        self.transport = Transport()
        self.protocol: Any = kind(config=config, server_state=self.state, app_state={}, _loop=self.loop)
        self.protocol.connection_made(self.transport)

    def feed(self, *parts: bytes) -> None:
        """Feed each part as if it were read from a socket; all possible work is done before the next one."""
        for part in parts:
            if self.transport.closed:
                return
            self.protocol.data_received(part)
            self.loop.run_until_complete(_a_while())

    def until_answered(self, count: int = 1) -> list[Answer]:
        """Wait for this many answers, or for the end of the connection."""

        async def wait() -> None:
            while not self.transport.closed and self.transport.written.count(b"HTTP/1.1 ") < count:
                await asyncio.sleep(0)

        self.loop.run_until_complete(asyncio.wait_for(wait(), 60))
        return answers(self.transport.written)

    def lose(self) -> None:
        """Simulate the loss of the other end."""
        self.protocol.connection_lost(None)
        self.loop.run_until_complete(_a_while())


async def _a_while() -> None:
    """Run everything that is ready, and everything that becomes ready: without threads, that is all possible work."""
    for _ in range(12):
        await asyncio.sleep(0)


@contextlib.contextmanager
def served() -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with sqlite_file() as url:
        app = create(Settings(database_url=url, janitor_every=0, dispatcher_every=0, log_level="error"))
        context = app.fastapi.router.lifespan_context(app.fastapi)
        loop.run_until_complete(context.__aenter__())
        try:
            yield Served(loop, app)
        finally:
            loop.run_until_complete(context.__aexit__(None, None, None))
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            loop.close()
