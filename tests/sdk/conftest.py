"""A real HTTP server that does as it is told, for what a healthy service does not show: lost answers and refusals.

Where LASTBIT_MUTANT names a mutant, the code is broken before the tests see it (see `tests.guarantees.mutants`).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.guarantees import mutants

mutants.from_environment()

LOST = None
"""What a script's function gives to close the connection instead of answering."""

Reply = tuple[int, dict[str, str], Any] | None


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedService:
    """Answers each request with what `reply(request)` gives."""

    url: str
    reply: Callable[[Seen], Reply] = lambda _: (500, {}, {})
    seen: list[Seen] = field(default_factory=list)

    def replies(self, *script: Reply) -> None:
        """Answer with these, in this order, and with the last one ever after."""
        left = list(script)
        self.reply = lambda _: left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture
def scripted() -> Iterator[ScriptedService]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(self.command, self.path, headers, body)
            service.seen.append(seen)
            reply = service.reply(seen)
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

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815  # the names that http.server looks for

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
    """A port on which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
