"""A connection that knows its state: the request it is receiving, since when, and the answers that are due.

`Connections` uses that state to enforce time limits. The connection itself limits the length of a request, and never
writes a response that could be attributed to another request.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from api import problems
from api.metrics import REFUSED
from api.problems import Problem
from api.server import bodies
from api.server.middleware import USUAL
from api.server.upgrades import Http1Protocol
from api.server.watchdog import Connections

HEAD: Final = 65_536
"""Bytes of a request's head, beyond those that came with its first ones."""
WHOLE: Final = 8 * bodies.LIMIT
"""Of a request, with what its chunks are wrapped in."""
_CODING: Final = "header Transfer-Encoding: expected chunked alone; other transfer codings are not known here"
USUAL_LINES: Final = b"".join(b"%b: %b\r\n" % header for header in USUAL.items())


class WatchedProtocol(Http1Protocol):
    """See the module. The application's `state.connections` looks after it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        application: Any = self.app
        self._watch: Connections = application.state.connections
        self.between = True
        """The parser is not in the middle of a request."""
        self.heads = 0
        """How many have ended."""
        self.last = 0.0
        """When the connection was made, or the last answer."""
        self._began = 0.0
        """When the request that is coming in began."""
        self._head_ended = False
        self._received = 0
        """Bytes that came after its first ones."""
        self._unsent = 0
        self._unsent_since = 0.0
        self._headers_of: object = None
        self._headers = b""

    # State for the watchdog.

    @property
    def at_rest(self) -> bool:
        """No answer is due."""
        cycle: Any = self.cycle
        return cycle is None or cycle.response_complete

    @property
    def idle_since(self) -> float | None:
        return self.last if self.between and self.at_rest else None

    @property
    def head_since(self) -> float | None:
        # With a request under way, the next one may take its time.
        coming = not self.between and not self._head_ended and self.at_rest and not self.flow.read_paused
        return self._began if coming else None

    @property
    def body_since(self) -> float | None:
        return self._began if not self.between and self._head_ended and not self.flow.read_paused else None

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
        self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.last = self.loop.time()
        if not self._watch.made(self):
            self._turn_away(Problem("unavailable", "too many connections", headers={"Retry-After": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch.lost(self)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends nothing more. It may have left, or only have closed its half of the connection and wait for
        its answers, which looks the same from here; so the answers that are due are written, and then the connection
        is closed. A stream without an end is not continued for a client that may have left."""
        cycle: Any = self.cycle
        if not self.between or self.at_rest or (cycle.response_started and getattr(cycle, "chunked_encoding", False)):
            return None  # the transport closes itself
        cycle.keep_alive = False  # it is the last one: those that are pipelined before it are answered first
        return True

    def data_received(self, data: bytes) -> None:
        if not self.between:
            self._received += len(data)
        super().data_received(data)
        if not self.between and self._received > (WHOLE if self._head_ended else HEAD):
            REFUSED.labels("large").inc()
            self._turn_away(Problem("too_large", f"head: expected at most {HEAD:,} bytes"))

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        self.between = self._head_ended = False
        self._received = 0
        self._began = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.open_cycle()
        self._head_ended = True
        if not self.plain_head:
            self.heads += 1

    def open_cycle(self) -> None:
        """The head is known: begin the request."""
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.between = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.last = self.loop.time()
        super().on_response_complete()
        # The server reads on after each response, though requests still wait. Then a client that pipelines requests and
        # never reads would fill the memory: each response lets in as many requests as one read brings.
        if self.pipeline:
            self.flow.pause_reading()

    # Responses outside of a request, or to one that can't be parsed.

    def _turn_away(self, problem: Problem) -> None:
        """Say so, and end the connection, whatever it is about to say."""
        if self._is_their_turn:
            self.say_problem(problem, keep_alive=False)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._is_their_turn:
            if self.unknown_coding:
                self.say_problem(Problem("not_implemented", _CODING), keep_alive=False)
            else:
                super().send_400_response(msg)
        self.transport.close()

    @property
    def _is_their_turn(self) -> bool:
        """Whether a response written now would be attributed to the incoming request: it has none yet, and no earlier
        request waits for one. The sender of an earlier request would take a refusal for the answer to it, though that
        request may succeed. No answer is better than a wrong one."""
        if self.between or not self._head_ended:
            return self.at_rest
        return not self.pipeline and not self.cycle.response_started

    def default_headers(self) -> bytes:
        """The server's own, as they travel; it makes a new list each second."""
        current = self.server_state.default_headers
        if current is not self._headers_of:
            self._headers_of = current
            self._headers = b"".join(b"%b: %b\r\n" % header for header in current)
        return self._headers

    def say_problem(self, problem: Problem, *, keep_alive: bool) -> None:
        lines = b"".join(
            b"%b: %b\r\n" % (name.lower().encode(), value.encode())
            for name, value in problem.headers.items()
            if name != "Connection"
        )
        media_type = problems.MEDIA_TYPE.encode()
        self.say(STATUS_LINE[problem.status], media_type, problem.body(), lines, keep_alive=keep_alive)

    def say(self, status: bytes, media_type: bytes, content: bytes, lines: bytes = b"", *, keep_alive: bool) -> None:
        """Write a whole answer; `status` and `lines` are whole lines. Unless it is kept alive, end the connection."""
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
