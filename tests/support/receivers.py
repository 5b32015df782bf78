"""Receivers of webhooks, as real servers: they verify each request with the official library, and answer as set."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from standardwebhooks import Webhook, WebhookVerificationError


@dataclass
class Got:
    """One request. `valid` is whether its signature fits any of the receiver's secrets."""

    path: str
    headers: dict[str, str]
    body: bytes
    valid: bool

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Reply = Callable[["Handler", Got], None]


def status(code: int, **headers: str) -> Reply:
    """Reply with this status."""

    def reply(handler: Handler, _: Got) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": "2", **{n.replace("_", "-"): v for n, v in headers.items()}}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(b"ok")

    return reply


def raw(text: bytes) -> Reply:
    """Write these bytes and close the connection."""

    def reply(handler: Handler, _: Got) -> None:
        handler.wfile.write(text)

    return reply


@dataclass
class Receiver:
    url: str
    secrets: list[str] = field(default_factory=list)
    reply: Reply = field(default_factory=lambda: status(204, Content_Length="0"))
    got: list[Got] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def replies(self, *script: Reply) -> None:
        """Answer with these replies in order, and repeat the last one."""
        replies = list(script)
        lock = threading.Lock()

        def reply(handler: Handler, webhook: Got) -> None:
            with lock:
                current_reply = replies.pop(0) if len(replies) > 1 else replies[0]
            current_reply(handler, webhook)

        self.reply = reply

    def wait_for(self, count: int, seconds: float = 60) -> list[Got]:
        """Wait until `count` requests have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= count, seconds), f"{len(self.got)} of {count} arrived"
            return list(self.got)


class Handler(BaseHTTPRequestHandler):
    receiver: Receiver

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = self.rfile.read(length)
        if len(body) < length:
            return  # its sender died while sending; no server passes on half a request
        headers = {name.lower(): value for name, value in self.headers.items()}
        webhook = Got(self.path, headers, body, any(_verified(s, body, headers) for s in self.receiver.secrets))
        with self.receiver.changed:
            self.receiver.got.append(webhook)
            self.receiver.changed.notify_all()
        with contextlib.suppress(ConnectionError):
            self.receiver.reply(self, webhook)
        self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _verified(secret: str, body: bytes, headers: dict[str, str]) -> bool:
    try:
        Webhook(secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


@contextlib.contextmanager
def receiving(*, tls: ssl.SSLContext | None = None, port: int = 0, secrets: Sequence[str] = ()) -> Iterator[Receiver]:
    """A receiver on a free port, or on the given one. Requests must be signed with one of `secrets`, or with a later
    one."""
    handler = type("ItsHandler", (Handler,), {})
    # Dispatchers open many connections at once; the server's own default is a backlog of five.
    server_type = type("ItsServer", (ThreadingHTTPServer,), {"request_queue_size": 128})
    server = server_type(("127.0.0.1", port), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver = Receiver(f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}/hook")
    receiver.secrets += secrets
    handler.receiver = receiver  # type: ignore[attr-defined]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
