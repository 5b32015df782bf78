"""A connection that tracks its state: when the current request began, and whether a response is due.

`Connections` uses that state to enforce time limits. The connection itself limits the length of a request, and never
writes a response that could be attributed to another request.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from api import problems
from api.limits import Limits
from api.limits.open_requests import OPEN, OpenRequest
from api.limits.shares import CALLER, NOBODY
from api.limits.sizes import HEAD, HEADERS, PATH, WHOLE
from api.metrics import REFUSED
from api.problems import Problem
from api.server.lingering import LingeringTransport
from api.server.middleware import USUAL
from api.server.upgrades import Http1Protocol
from lastbit.tokens import Token

USUAL_LINES: Final = b"".join(b"%b: %b\r\n" % header for header in USUAL.items())


class WatchedProtocol(Http1Protocol):
    """See the module. The application's `state.limits.connections` enforces its time limits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        application: Any = self.app
        limits: Limits = application.state.limits
        self._watch = limits.connections
        self._all_unsent = limits.unsent
        self._running: Any = None
        """The cycle whose request is handled now, or was handled last."""
        self._unread_by: Token | None = None
        """The caller whose response the client doesn't read."""
        self.transport: LingeringTransport = None  # type: ignore[assignment]  # as uvicorn has it
        self.between = True
        """The parser is not in the middle of a request."""
        self.heads = 0
        """The number of complete heads."""
        self.last = 0.0
        """The loop time of the last response, or of the connection's start."""
        self._began = 0.0
        """The loop time at which the request that is being received began."""
        self._head_ended = False
        self._is_refused = False
        """The rest of what the client sends is not parsed."""
        self._received = 0
        """Bytes of this request after the read that contained its first byte."""
        self._unsent = 0
        self._unsent_since = 0.0
        self._headers_of: object = None
        self._headers = b""

    # State for `Connections`.

    @property
    def at_rest(self) -> bool:
        """No response is due."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    @property
    def idle_since(self) -> float | None:
        return self.last if self.between and self.at_rest else None

    @property
    def head_since(self) -> float | None:
        # While a response is due, the next request has no time limit.
        coming = self._is_reading and not self._head_ended and self.at_rest
        return self._began if coming else None

    @property
    def body_since(self) -> float | None:
        return self._began if self._is_reading and self._head_ended else None

    @property
    def _is_reading(self) -> bool:
        """A part of a request has arrived, and the service reads the rest."""
        return not self.between and not self.flow.read_paused and not self.transport.is_closing()

    @property
    def stuck_since(self) -> float | None:
        if not self.flow.write_paused:
            self._unsent = 0
            return None
        size = self.transport.get_write_buffer_size()
        if size != self._unsent:
            self._unsent, self._unsent_since = size, self.loop.time()
        return self._unsent_since

    def end(self) -> None:
        self.transport.close_now()

    def abort(self) -> None:
        self.transport.abort()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _fact(self, attribute: str, key: str) -> Any:
        """A fact of the running request: an attribute of an exchange on the fast path, else an entry of the ASGI
        scope. None if it isn't known: before pipelined requests, uvicorn's `cycle` is that of the last one."""
        cycle: Any = self.cycle
        if not hasattr(cycle, "scope"):
            return getattr(cycle, attribute, None)
        return None if self._running is None else self._running.scope.get(key)

    # Callbacks of the transport.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_by = self._fact("caller", CALLER) or NOBODY
        self._all_unsent.add(self, self._unread_by, self.transport.held)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unsent()

    def _forget_unsent(self) -> None:
        if self._unread_by is not None:
            self._all_unsent.remove(self, self._unread_by)
            self._unread_by = None

    @property
    def is_client_sending(self) -> bool:
        """Whether more data of the client may arrive."""
        return self._is_refused or not self.between or self.flow.read_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self, self._watch))
        self.last = self.loop.time()
        if not self._watch.add(self, transport.get_extra_info("sockname")):
            self._refuse(Problem("unavailable", "too many connections", headers={"Retry-After": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch.remove(self)
        self._forget_unsent()
        request: OpenRequest | None = self._fact("open_request", OPEN)
        if request is not None:
            request.end()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends nothing more. Either it has left, or it has closed only its half of the connection and still
        reads. The service can't distinguish the two, so it writes the responses that are due and then closes the
        connection. It ends a stream at once, as the stream would otherwise never end."""
        cycle: Any = self.cycle
        if not self.between or self.at_rest or (cycle.response_started and getattr(cycle, "chunked_encoding", False)):
            return None  # the transport closes itself
        cycle.keep_alive = False  # pipelined requests get their responses in order, so this is the last one
        return True

    def data_received(self, data: bytes) -> None:
        if not self.between:
            self._received += len(data)
        super().data_received(data)
        if not self.between and self._received > (WHOLE if self._head_ended else HEAD):
            REFUSED.labels("large").inc()
            self._refuse(Problem("too_large", f"head: expected at most {HEAD:,} bytes"))

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self.between = self._head_ended = False
        self._received = 0
        self._began = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # Before uvicorn decodes it, and the routes are tried.
        if len(self.url) > PATH and len(self.url.partition(b"?")[0]) > PATH:
            raise self.refusal(Problem("too_large", f"path: expected at most {PATH:,} bytes"))
        if len(self.headers) > HEADERS:
            raise self.refusal(Problem("too_large", f"head: expected at most {HEADERS} headers"))
        self.open_cycle()
        self._head_ended = True
        if not self.plain_head:
            self.heads += 1

    def open_cycle(self) -> None:
        """Begin the request, whose head is now complete."""
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.between = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.last = self.loop.time()
        super().on_response_complete()
        # uvicorn resumes reading after each response, even if pipelined requests wait. Each read may add many requests,
        # so a client that pipelines requests and never reads its responses would fill the memory.
        if self.pipeline:
            self.flow.pause_reading()

    # Responses outside of a request, or to one that can't be parsed.

    def _refuse(self, problem: Problem) -> None:
        """Write `problem` if the client can attribute it correctly, and close the connection."""
        self._abandon()
        if self._may_respond:
            self.write_problem(problem, keep_alive=False)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._abandon()
        if self._may_respond:
            if self.fault is not None:
                self.write_problem(self.fault, keep_alive=False)
            else:
                super().send_400_response(msg)
        self.transport.close()

    def _abandon(self) -> None:
        """Parse nothing more. The application, which may wait for the rest of a body, is notified at once."""
        self._is_refused = True
        if not self.at_rest and self.cycle.more_body:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    @property
    def _may_respond(self) -> bool:
        """Whether a response written now would be attributed to the incoming request: it has none yet, and no earlier
        request waits for one. Otherwise the client would take the refusal for the response to the earlier request,
        which may succeed. No response is better than a wrong one."""
        if self.between or not self._head_ended:
            return self.at_rest
        return not self.pipeline and not self.cycle.response_started

    def default_headers(self) -> bytes:
        """uvicorn's own headers as encoded lines. They are cached, as uvicorn makes a new list only once a second."""
        current = self.server_state.default_headers
        if current is not self._headers_of:
            self._headers_of = current
            self._headers = b"".join(b"%b: %b\r\n" % header for header in current)
        return self._headers

    def write_problem(self, problem: Problem, lines: bytes = b"", *, keep_alive: bool) -> None:
        """Write a complete response with the problem. `lines` are further complete header lines."""
        lines += b"".join(
            b"%b: %b\r\n" % (name.lower().encode(), value.encode())
            for name, value in problem.headers.items()
            if name != "Connection"
        )
        media_type = problems.MEDIA_TYPE.encode()
        self.write_response(STATUS_LINE[problem.status], media_type, problem.body(), lines, keep_alive=keep_alive)

    def write_response(
        self, status: bytes, media_type: bytes, content: bytes, lines: bytes = b"", *, keep_alive: bool
    ) -> None:
        """Write a complete response. `status` and `lines` are complete lines with their line ends. Without
        `keep_alive`, close the connection."""
        if self.transport.is_closing():
            return
        if not keep_alive:
            lines += b"connection: close\r\n"
        self.transport.write(
            b"%b%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b\r\n%b"
            % (status, self.default_headers(), USUAL_LINES, media_type, len(content), lines, content)
        )
        if not keep_alive:
            self.transport.close()
