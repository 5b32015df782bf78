"""A real HTTP server with scripted replies, for lost answers and refusals that a healthy service does not show.

When LASTBIT_MUTANT names a mutant, the code is broken before the tests import it (see `tests.mutants`).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests import mutants

mutants.from_environment()

from lastbit import AsyncClient, Client  # noqa: E402  # a mutant is broken before its users import it
from lastbit.embedded import Lastbit  # noqa: E402

LOST = None
"""The reply that closes the connection instead of answering."""

Reply = tuple[int, dict[str, str], Any] | None


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedService:
    """Answers each request with `reply(request)`."""

    url: str
    reply: Callable[[Seen], Reply] = lambda _: (500, {}, {})
    seen: list[Seen] = field(default_factory=list)

    def replies(self, *script: Reply) -> None:
        """Send these replies in order, then repeat the last one."""
        replies = list(script)
        self.reply = lambda _: replies.pop(0) if len(replies) > 1 else replies[0]


@pytest.fixture
def scripted_service() -> Iterator[ScriptedService]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Seen(self.command, self.path, headers, body)
            service.seen.append(request)
            reply = service.reply(request)
            if reply is LOST:
                self.close_connection = True
                return
            status, headers, content = reply
            text = b"" if status == 204 else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815  # the names that http.server looks for

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = ScriptedService(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield service
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port without a listener, reserved for the duration of the test."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@dataclass(frozen=True)
class Way:
    """A way to the database of `service_url`, for tests of what all clients do. `name`: `http` for a client of the
    service, `embedded` for one without it."""

    name: str
    client: Callable[..., Client]
    async_client: Callable[..., AsyncClient]


@pytest.fixture(scope="module")
def embedded(service_url: str, service_database: str) -> Iterator[Lastbit]:
    """Used beside the service on the same database."""
    with Lastbit(service_database) as lastbit:
        yield lastbit


@pytest.fixture(params=["http", "embedded"])
def way(request: pytest.FixtureRequest, service_url: str) -> Way:
    if request.param == "http":
        return Way("http", partial(Client, service_url), partial(AsyncClient, service_url))
    lastbit: Lastbit = request.getfixturevalue("embedded")
    return Way("embedded", lastbit.client, lastbit.async_client)


@pytest.fixture
def client(way: Way) -> Iterator[Client]:
    with way.client() as client:
        yield client
