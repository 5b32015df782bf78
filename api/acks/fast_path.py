"""The fast path of the ack routes through the server.

An ack costs less than the work of an HTTP framework around it: a task, an ASGI cycle of four messages and two writes
for each request. So this module adds a second path to uvicorn's protocol. It serves plain requests for an ack route
(POST, HTTP/1.1, kept alive, a JSON body of known length, no other request in progress on its connection), and writes
each response at once. All other requests take the ordinary path, where `AckRoutes` sends the same responses, so no rule
of HTTP is implemented twice.

This module depends on names in uvicorn's `HttpToolsProtocol` and its cycle. An `_Exchange` takes the place of the
current request's cycle. So uvicorn makes pipelined requests wait for it, reports a lost connection to it, and waits for
its response at shutdown.
"""

from __future__ import annotations

import abc
import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any, Final, NamedTuple

from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from api import problems
from api.access.rules import SITE, digest_of
from api.acks.bodies import Check, encode
from api.acks.queue import AckQueue
from api.acks.refusals import refusal
from api.acks.routes import PATHS, AckRoutes
from api.limits import sizes
from api.metrics import REFUSED_BY_OVERLOAD, SHED
from api.problems import Problem
from api.server import bodies
from api.server.connection import USUAL_LINES, WatchedProtocol
from api.server.middleware import WIRE_HEADER
from core import errors, traces
from core.acks.call import AckResult, Call
from core.batches.lifecycle import Verb
from core.commits.combiner import TOO_MANY
from core.commits.pending import Pending
from core.traces import TraceContext
from lastbit.tokens import Token

_VERBS: Final = {path.encode(): verb for path, verb in PATHS.items()}


class Exchange(abc.ABC):
    """One request on a fast path, and its response. The public attributes are those of uvicorn's cycle."""

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
        "parts",
        "request_id",
        "response_complete",
        "trace",
    )

    def __init__(self, protocol: AckProtocol, caller: Token, key: bytes | None) -> None:
        self._protocol = protocol
        self.caller = caller
        self.key = key
        self.request_id: bytes | None = None
        """The request id that the client sent."""
        self.trace: TraceContext | None = None
        self.length = 0
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
        self._protocol.answered()

    def respond(self, status: int, content: bytes, lines: bytes = b"") -> None:
        self.response_complete = True
        self._protocol.write_response(
            STATUS_LINE[status], b"application/json", content, lines, keep_alive=self.keep_alive
        )
        self._protocol.answered()


class _Exchange(Exchange):
    """An ack or a failure."""

    __slots__ = ("verb",)

    def __init__(self, protocol: AckProtocol, verb: Verb, caller: Token, key: bytes | None) -> None:
        super().__init__(protocol, caller, key)
        self.verb = verb

    def __call__(self, result: Pending[AckResult]) -> None:
        """Respond to the finished call."""
        if result.error is not None:
            self.refuse(result.error)
        else:
            self.respond(200, encode(result.answer))

    def begin(self, content: bytes) -> None:
        self._protocol._begin(self, content)

    def refuse(self, error: Exception) -> None:
        self.respond_with(refusal(self.verb, error, self.request_id))

    def refuse_overload(self) -> None:
        """Refuse the call, as more acks arrive than can be committed. Under overload most requests end here, unparsed,
        so this must cost very little."""
        protocol = self._protocol
        if self.request_id is not None or not self.keep_alive:
            self.refuse(errors.Overloaded(TOO_MANY))
            return
        REFUSED_BY_OVERLOAD[self.verb].inc()
        SHED.inc()
        self.response_complete = True
        if not protocol.transport.is_closing():
            protocol.transport.write(_BUSY % (protocol.default_headers(), uuid.uuid4().hex.encode()))
            protocol.answered()


class _Event:
    """A substitute for the cycle's event, which nothing awaits here."""

    def set(self) -> None:
        pass


_UNUSED_EVENT: Final = _Event()


class _Head(NamedTuple):
    """The parsed meaning of a request's head, the bytes up to the empty line."""

    verb: Verb
    length: int
    """Bytes of the body."""
    digest: bytes
    """The digest of its token. The token's permissions are looked up for each request."""


_heads: Final[dict[bytes, _Head]] = {}
"""Heads of plain requests without an Idempotency-Key or a request id. The requests of a client usually have the same
head, which always parses to the same result. So it is parsed once."""
_MOST_HEADS: Final = 4096


def _busy() -> bytes:
    """The response to a request that is refused under overload, without the server's headers and the request id."""
    problem = problems.from_core(errors.Overloaded(TOO_MANY))
    content = problem.body()
    headers = {"content-type": problems.MEDIA_TYPE, "content-length": len(content), **problem.headers}
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    id_line = WIRE_HEADER + b": %b\r\n\r\n"
    return STATUS_LINE[problem.status] + b"%b" + USUAL_LINES + lines.encode() + id_line + content.replace(b"%", b"%%")


_BUSY: Final = _busy()
_LONGEST_HEAD: Final = 4096
"""The maximum bytes of a head that is cached."""


class Plain(NamedTuple):
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


class AckProtocol(WatchedProtocol):
    """See the module's docstring."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        routes: AckRoutes = self.app
        self.state = routes.state
        self.access = routes.access
        self.acks: AckQueue = self.state.acks
        self.room = self.state.limits.room

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cycle: Any = self.cycle
        if isinstance(cycle, Exchange):
            self.give_room(cycle)

    def data_received(self, data: bytes) -> None:
        # The ordinary path waits for clients that don't read their responses.
        if not self.between or not self.at_rest or self.flow.write_paused:
            super().data_received(data)
            return
        end = data.find(b"\r\n\r\n") + 4
        head = data[:end]
        cached = _heads.get(head)
        if cached is not None and len(data) == end + cached.length:
            caller = self.access.consumer(cached.digest)
            if caller is not None:
                exchange = _Exchange(self, cached.verb, caller, None)
                self.cycle = exchange  # type: ignore[assignment]  # has the attributes that uvicorn uses
                self._begin(exchange, data[end:])
                return
        heads = self.heads
        super().data_received(data)
        cycle: Any = self.cycle
        if (
            # `data` may have contained two requests. Then the first may be finished, and `cycle` is the second's.
            self.heads == heads + 1
            and end <= _LONGEST_HEAD
            # The parser skips blank lines before a request. In that case, `end` isn't the end of the head.
            and data.startswith(b"POST ")
            and type(cycle) is _Exchange
            and cycle.key is cycle.request_id is None
            and cycle.trace is None
            and len(data) == end + cycle.length
        ):
            if len(_heads) >= _MOST_HEADS:
                _heads.clear()
            _heads[head] = _Head(cycle.verb, cycle.length, cycle.caller.digest)

    def open_cycle(self) -> None:
        verb = _VERBS.get(self.url)
        if verb is None or not self._take(verb):
            super().open_cycle()

    def _take(self, verb: Verb) -> bool:
        head = self.plain(b"POST")
        if head is None or not head.length > 0 or not bodies.is_json(head.content_type):
            return False
        digest = digest_of(head.authorization)
        if head.names_site and digest is None:
            return False
        caller = self.access.consumer(digest)
        if caller is None:
            return False
        exchange = _Exchange(self, verb, caller, head.key)
        exchange.length = head.length
        exchange.request_id = head.request_id
        if head.has_trace and traces.has_sdk():
            exchange.trace = traces.in_headers(self.headers)
        self.cycle = exchange  # type: ignore[assignment]  # as above
        return True

    def plain(self, method: bytes) -> Plain | None:
        """What a fast path needs of the current request's head; None if the request must take the ordinary path."""
        parser = self.parser
        if (
            not self.at_rest
            or self.expect_100_continue
            or self.limit_concurrency is not None
            or self.flow.write_paused
            or parser.get_method() != method
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
        return Plain(int(length), content_type, key, authorization, request_id, names_site, has_trace)

    def on_body(self, body: bytes) -> None:
        cycle: Any = self.cycle
        if isinstance(cycle, Exchange):
            if cycle.response_complete:
                return
            try:
                self.room.take(len(body))
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
        self.room.give(exchange.held)
        exchange.held = 0
        exchange.parts = []

    def _begin(self, exchange: _Exchange, content: bytes) -> None:
        """Queue the complete request, or refuse it."""
        size, exchange.held = exchange.held, 0
        try:
            if self.acks.is_full():
                self.acks.refuse_later(exchange.refuse_overload)
                return
            if exchange.caller.requests is not None:
                self.access.rates.charge_call(exchange.caller)
            call, check = self.acks.parse(exchange.verb, exchange.key, content, exchange.caller)
            call.trace = exchange.trace
            if check is None:
                self.acks.submit(call, exchange)
                return
            # The call waits for a thread, and its content stays in memory.
            if not size:
                self.room.take(len(content))
                size = len(content)
            self.run(self._check_first(exchange, call, check, size))
            size = 0
        except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
            exchange.refuse(error)
        finally:
            self.room.give(size)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work in a task. The server waits for it when it stops."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _check_first(self, exchange: _Exchange, call: Call, check: Check, size: int) -> None:
        try:
            await run_in_threadpool(check)
            self.acks.submit(call, exchange)
        except Exception as error:  # noqa: BLE001  # as above
            exchange.refuse(error)
        except asyncio.CancelledError:
            self.transport.close()
            raise
        finally:
            self.room.give(size)

    def answered(self) -> None:
        """Like `on_response_complete`, for a response on this path. It doesn't reset the timer of idle connections,
        which would cost more: when the timer ends, it checks the time of the last response."""
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
