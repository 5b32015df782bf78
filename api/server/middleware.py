"""Around every request but those of the ack routes: its id, its line in the log, its time."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Iterable
from typing import Final

import anyio.to_thread
import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.metrics import REFUSED, REQUESTS
from api.problems import Problem

HEADER: Final = "X-Request-Id"
WIRE_HEADER: Final = HEADER.lower().encode()
"""As servers hand it on."""
USUAL: Final = {
    # Responses of the API are for programs: a browser must not guess their type, run, frame, embed or store them.
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
}
"""Headers of each answer, where its route says nothing else."""
_GIVEN: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})

log = structlog.get_logger(__name__)


def request_id(value: bytes | None) -> str:
    """The one that the caller gave, if it can be one, else a new one."""
    return value.decode() if value is not None and _GIVEN.fullmatch(value) else uuid.uuid4().hex


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The id that the caller sent."""
    return next((value for name, value in headers if name == WIRE_HEADER), None)


ALWAYS_ANSWERED: Final = frozenset({"/healthz", "/metrics"})
"""Paths that need no thread of the pool, and are answered whatever waits for one."""


class Requests:
    """Stands outside of FastAPI's stack, so that the answer to an unexpected error has its id too."""

    def __init__(self, app: ASGIApp, *, most_waiting: int) -> None:
        self.app = app
        self.most_waiting = most_waiting
        self._coming = 0
        """Requests that were let in within this turn of the event loop, and ask for a thread in the next one."""

    def _is_full(self) -> bool:
        """Whether so many wait for a thread, or are about to, that the next one is sent away."""
        threads = anyio.to_thread.current_default_thread_limiter().statistics()
        free = threads.total_tokens - threads.borrowed_tokens
        return threads.tasks_waiting + self._coming - free >= self.most_waiting

    def _let_in(self) -> None:
        """Many may come in one turn: they see each other, and not only those who have a thread or wait for one."""
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._came)

    def _came(self) -> None:
        self._coming -= 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = request_id(given_id(scope["headers"]))
        method, path = scope["method"], scope["path"]
        status = 500
        start = time.perf_counter()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message["headers"]
                names = {name for name, _ in headers}
                usual = [header for header in USUAL.items() if header[0] not in names]
                message["headers"] = [*headers, *usual, (WIRE_HEADER, name.encode())]
            await send(message)

        # A pipelined request begins in the context of the one before it.
        structlog.contextvars.unbind_contextvars("token")
        with structlog.contextvars.bound_contextvars(request_id=name):
            try:
                if path not in ALWAYS_ANSWERED and self._is_full():
                    REFUSED.labels("requests").inc()
                    busy = Problem("unavailable", "too many requests are waiting", headers={"Retry-After": "1"})
                    await problems.response(busy)(scope, receive, send_named)
                else:
                    self._let_in()
                    await self.app(scope, receive, send_named)
            except Exception:  # logged, not raised again: FastAPI has already sent the 500
                log.exception("request_failed", method=method, path=path)
            seconds = time.perf_counter() - start
            log.info("request", method=method, path=path, status=status, ms=round(seconds * 1000, 1))
        # By the route, not by the path: each path would be series of its own.
        route = getattr(scope.get("route"), "path", "none")
        REQUESTS.labels(method if method in _METHODS else "other", route, str(status)).observe(seconds)
