"""Middleware for all routes but the ack routes: request ids, log lines and durations. It refuses requests while too
many wait for a thread."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable
from typing import Final

import structlog
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from api import problems
from api.limits import Limits
from api.metrics import REQUESTS
from api.patterns import name_of
from api.problems import Problem

HEADER: Final = "X-Request-Id"
WIRE_HEADER: Final = HEADER.lower().encode()
"""The name as ASGI and uvicorn pass it: bytes in lower case."""
USUAL: Final = {
    # Responses of the API are for programs: a browser must not guess their type, run, frame, embed or store them.
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
}
"""Default headers of every response. A route can set other values."""
_GIVEN: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})

log = structlog.get_logger(__name__)


def request_id(value: bytes | None) -> str:
    """The client's request id if it is valid, else a new one."""
    return value.decode() if value is not None and _GIVEN.fullmatch(value) else uuid.uuid4().hex


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The request id that the client sent."""
    return next((value for name, value in headers if name == WIRE_HEADER), None)


ALWAYS_ANSWERED: Final = frozenset({"/healthz", "/metrics"})
"""Paths that need no thread of the pool, so they are served even if too many requests wait for one."""


class Requests:
    """The middleware. It wraps FastAPI, so that the response to an unexpected error has a request id too."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        name = request_id(given_id(scope["headers"]))
        method, path = scope["method"], scope["path"]
        limits: Limits = self.app.state.limits
        shown_path = problems.shortened(path)
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

        # A pipelined request starts with the context variables of the previous request.
        structlog.contextvars.unbind_contextvars("token", "error")
        with structlog.contextvars.bound_contextvars(request_id=name):
            try:
                if path not in ALWAYS_ANSWERED:
                    limits.threads.admit()
                await self.app(scope, receive, send_named)
            except Problem as refusal:  # from the limit: FastAPI answers those of the routes
                await problems.response(refusal)(scope, receive, send_named)
            except Exception:  # logged, not raised again: FastAPI has already sent the 500
                log.exception("request_failed", method=method, path=shown_path)
            seconds = time.perf_counter() - start
            log.info("request", method=method, path=shown_path, status=status, ms=round(seconds * 1000, 1))
        # Labelled with the route, not the path: each path would be a separate series.
        route = name_of(getattr(scope.get("route"), "path", "none"))
        REQUESTS.labels(method if method in _METHODS else "other", route, str(status)).observe(seconds)
