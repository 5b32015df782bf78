"""One request on the fast path and its response, and the connection that carries it.

This module depends on names in uvicorn's `HttpToolsProtocol` and its cycle. An `Exchange` takes the place of the
current request's cycle. So uvicorn makes pipelined requests wait for it, reports a lost connection to it, and waits for
its response at shutdown.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from api.access.rules import SITE, Access
from api.acks.queue import AckQueue
from api.acks.routes import AckRoutes
from api.limits import Limits, sizes
from api.limits.open_requests import OpenRequest
from api.problems import Problem
from api.server.connection import WatchedProtocol
from api.server.middleware import WIRE_HEADER
from core import traces
from core.traces import TraceContext
from lastbit.tokens import Token


class PlainHead(NamedTuple):
    """The head of a plain request: the first value of each header, None if it is missing."""

    length: int
    """Bytes of the body."""
    content_type: bytes
    key: bytes | None
    authorization: bytes | None
    request_id: bytes | None
    names_site: bool
    """A browser named the site whose page sent it."""
    has_trace: bool


class Exchange(abc.ABC):
    """One request on the fast path, and its response. The public attributes are those of uvicorn's cycle."""

    __slots__ = (
        "_protocol",
        "caller",
        "disconnected",
        "held",
        "keep_alive",
        "key",
        "length",
        "message_event",
        "more_body",
        "open_request",
        "parts",
        "request_id",
        "response_complete",
        "trace",
    )

    def __init__(self, protocol: ExchangeProtocol, caller: Token, head: PlainHead) -> None:
        self._protocol = protocol
        self.open_request: OpenRequest | None = None
        self.caller = caller
        self.key = head.key
        self.request_id = head.request_id
        """The request id that the client sent."""
        self.trace: TraceContext | None = None
        self.length = head.length
        self.parts: list[bytes] = []
        self.held = 0
        """Bytes of `parts` that `room` has granted."""
        self.keep_alive = True
        self.disconnected = False
        self.response_complete = False
        self.message_event = _UNUSED_EVENT
        self.more_body = True

    @property
    def response_started(self) -> bool:
        return self.response_complete  # a response is one write

    @abc.abstractmethod
    def begin(self, content: bytes) -> None:
        """Start the complete request, or refuse it."""

    @abc.abstractmethod
    def refuse(self, error: Exception) -> None:
        """Respond with the problem that the error is."""

    def respond_with(self, problem: Problem, lines: bytes = b"") -> None:
        if "Connection" in problem.headers:
            self.keep_alive = False
        self.response_complete = True
        self._protocol.write_problem(problem, lines, keep_alive=self.keep_alive)
        self._protocol.answered(self)

    def respond(self, status: int, content: bytes, lines: bytes = b"") -> None:
        self.response_complete = True
        self._protocol.write_response(
            STATUS_LINE[status], b"application/json", content, lines, keep_alive=self.keep_alive
        )
        self._protocol.answered(self)


class FastVerb(abc.ABC):
    """A verb that is served on the fast path. `pattern` matches the target of its requests."""

    method: str
    pattern: re.Pattern[bytes]

    @abc.abstractmethod
    def exchange(self, protocol: ExchangeProtocol, target: re.Match[bytes], head: PlainHead) -> Exchange | None:
        """The exchange for a request with this target and head; None if it must take the ordinary path."""


class _Event:
    """A substitute for the cycle's event, which nothing awaits here."""

    def set(self) -> None:
        pass


_UNUSED_EVENT: Final = _Event()


class ExchangeProtocol(WatchedProtocol):
    """A connection whose requests may be exchanges."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        routes: AckRoutes = self.app
        self.state = routes.state
        self.access: Access = routes.access
        self.acks: AckQueue = self.state.acks
        limits: Limits = self.state.limits
        self.room = limits.room
        self.open_requests = limits.open_requests

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cycle: Any = self.cycle
        if isinstance(cycle, Exchange):
            self.give_room(cycle)

    def plain_request(self) -> PlainHead | None:
        """The current request's head; None if the request isn't plain."""
        parser = self.parser
        if (
            not self.at_rest
            or self.expect_100_continue
            or self.limit_concurrency is not None
            or self.flow.write_paused
            or parser.get_http_version() != "1.1"
            or not parser.should_keep_alive()
            or parser.should_upgrade()
        ):
            return None
        content_type = b""
        length = b"0"
        key = request_id = authorization = None
        names_site = has_trace = False
        for name, value in self.headers:
            if name == b"content-type":
                content_type = value
            elif name == b"content-length":
                length = value
            elif name == b"transfer-encoding":
                return None
            elif name == b"idempotency-key" and key is None:
                key = value
            elif name == b"authorization" and authorization is None:
                authorization = value
            elif name == WIRE_HEADER and request_id is None:
                request_id = value
            elif name in SITE:
                names_site = True
            elif name in traces.HEADERS:
                has_trace = True
        if not length.isdigit() or int(length) > sizes.BODY:
            return None
        return PlainHead(int(length), content_type, key, authorization, request_id, names_site, has_trace)

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if isinstance(cycle, Exchange):
            if cycle.response_complete:
                return
            try:
                self.room.take(cycle.caller, len(body))
            except Problem as problem:
                self.give_room(cycle)
                cycle.refuse(problem)
                return
            cycle.held += len(body)
            cycle.parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        exchange: Any = self.cycle
        if self.plain_head or not isinstance(exchange, Exchange) or exchange.response_complete:
            return
        parts, exchange.parts = exchange.parts, []
        exchange.begin(parts[0] if len(parts) == 1 else b"".join(parts))

    def give_room(self, exchange: Exchange) -> None:
        self.room.give(exchange.caller, exchange.held)
        exchange.held = 0
        exchange.parts = []

    def take_ordinary_path(self, content: bytes) -> None:
        """Hand the current request, whose head and body have arrived, to the application."""
        self.cycle = None  # type: ignore[assignment]  # as before a connection's first request
        WatchedProtocol.open_cycle(self)
        cycle: Any = self.cycle
        if content:
            super().on_body(content)
        cycle.more_body = False
        cycle.message_event.set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work in a task. The server waits for it when it stops."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def answered(self, exchange: Exchange) -> None:
        """Like `on_response_complete`, for a response on this path. It doesn't reset the timer of idle connections,
        which would cost more: when the timer ends, it checks the time of the last response."""
        if exchange.open_request is not None:
            exchange.open_request.end()
        self.last = self.loop.time()
        if self.pipeline or self.timeout_keep_alive_task is None:
            self.on_response_complete()
        else:
            self.server_state.total_requests += 1

    def timeout_keep_alive_handler(self) -> None:
        remaining = self.last + self.timeout_keep_alive - self.loop.time()
        if remaining > 0 or not self.at_rest:
            delay = max(remaining, 1.0)
            self.timeout_keep_alive_task = self.loop.call_later(delay, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()
