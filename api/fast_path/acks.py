"""Acks, failures and skips on the fast path. `api.acks.routes` serves those that aren't plain: both must send the same
responses."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass
from typing import Final

from starlette.concurrency import run_in_threadpool
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from api import problems
from api.access.rules import digest_of
from api.acks.bodies import Check, encode
from api.acks.refusals import refusal
from api.acks.routes import PATHS
from api.fast_path.exchange import Exchange, ExchangeProtocol, FastVerb, PlainHead
from api.metrics import REFUSED_BY_OVERLOAD, SHED
from api.server import bodies
from api.server.connection import USUAL_LINES
from api.server.middleware import WIRE_HEADER
from core import errors, traces
from core.acks.call import AckResult, Call
from core.batches.lifecycle import Verb
from core.commits.combiner import TOO_MANY
from core.commits.pending import Pending
from lastbit.tokens import Token


def _busy() -> bytes:
    """The response to a request that is refused under overload, without the server's headers and the request id."""
    problem = problems.from_core(errors.Overloaded(TOO_MANY))
    content = problem.body()
    headers = {"content-type": problems.MEDIA_TYPE, "content-length": len(content), **problem.headers}
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    id_line = WIRE_HEADER + b": %b\r\n\r\n"
    return STATUS_LINE[problem.status] + b"%b" + USUAL_LINES + lines.encode() + id_line + content.replace(b"%", b"%%")


_BUSY: Final = _busy()


class AckExchange(Exchange):
    """A call of an ack route."""

    __slots__ = ("verb",)

    def __init__(self, protocol: ExchangeProtocol, verb: Verb, caller: Token, head: PlainHead) -> None:
        super().__init__(protocol, caller, head)
        self.verb = verb

    @property
    def has_usual_head(self) -> bool:
        """Whether nothing in its head belongs to this request alone."""
        return self.key is None and self.request_id is None and self.trace is None

    def begin(self, content: bytes) -> None:
        protocol = self._protocol
        queue, room = protocol.acks, protocol.room
        size, self.held = self.held, 0
        try:
            if queue.is_full():
                queue.refuse_later(self.refuse_overload)
                return
            if self.caller.is_limited:
                protocol.access.rates.charge_call(self.caller, len(content))
            call, check = queue.parse(self.verb, self.key, content, self.caller)
            call.trace = self.trace
            if check is None:
                queue.submit(call, self.receive)
                return
            # The call waits for a thread, and its content stays in memory.
            if not size:
                room.take(self.caller, len(content))
                size = len(content)
            protocol.run(self._check_first(call, check, size))
            size = 0
        except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
            self.refuse(error)
        finally:
            if size:
                room.give(self.caller, size)

    async def _check_first(self, call: Call, check: Check, size: int) -> None:
        protocol = self._protocol
        try:
            await run_in_threadpool(check)
            protocol.acks.submit(call, self.receive)
        except Exception as error:  # noqa: BLE001  # as above
            self.refuse(error)
        except asyncio.CancelledError:
            protocol.transport.close()
            raise
        finally:
            protocol.room.give(self.caller, size)

    def receive(self, result: Pending[AckResult]) -> None:
        """Respond to the finished call."""
        if result.error is not None:
            self.refuse(result.error)
        else:
            self.respond(200, encode(result.answer))

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
            protocol.answered(self)


class AckVerb(FastVerb):
    """One of the ack routes."""

    method = "POST"

    def __init__(self, path: str, verb: Verb) -> None:
        self.pattern = re.compile(re.escape(path.encode()))
        self._verb = verb

    def exchange(self, protocol: ExchangeProtocol, target: re.Match[bytes], head: PlainHead) -> AckExchange | None:
        if not head.length > 0 or not bodies.is_json(head.content_type):
            return None
        digest = digest_of(head.authorization)
        if head.names_site and digest is None:
            return None
        caller = protocol.access.consumer(digest)
        if caller is None:
            return None
        exchange = AckExchange(protocol, self._verb, caller, head)
        if caller.is_limited:
            exchange.open_request = protocol.open_requests.begin(caller)
            if exchange.open_request is None:
                return None  # the ordinary path refuses it
        if head.has_trace and traces.has_sdk():
            exchange.trace = traces.in_headers(protocol.headers)
        return exchange


VERBS: Final = tuple(AckVerb(path, verb) for path, verb in PATHS.items())


@dataclass(frozen=True, slots=True)
class _KnownHead:
    """What the bytes of a usual head mean."""

    verb: Verb
    length: int
    digest: bytes
    """The digest of its token. The token's permissions are looked up for each request."""


class KnownHeads:
    """The bytes of usual heads, up to the empty line. The requests of a client usually have the same head, which always
    means the same. So it is parsed once."""

    LONGEST: Final = 4096
    """The maximum bytes of a head that is kept."""
    MOST: Final = 4096

    def __init__(self) -> None:
        self._heads: dict[bytes, _KnownHead] = {}

    def exchange(self, protocol: ExchangeProtocol, data: bytes, end: int) -> AckExchange | None:
        """The exchange for one whole request whose head ends at `end`; None if the head isn't known, or the token has
        no permission any more."""
        head = self._heads.get(data[:end])
        if head is None or len(data) != end + head.length:
            return None
        caller = protocol.access.consumer(head.digest)
        return None if caller is None else AckExchange(protocol, head.verb, caller, _USUAL_HEAD)

    def add(self, exchange: Exchange, data: bytes, end: int) -> None:
        """Keep the head that `data` begins with, if it is a usual one and `data` is the whole request. `exchange`: that
        of the request."""
        if not isinstance(exchange, AckExchange) or not exchange.has_usual_head:
            return
        # The parser skips blank lines before a request. In that case, `end` isn't the end of the head.
        is_one_request = data.startswith(b"POST ") and len(data) == end + exchange.length
        if not is_one_request or end > self.LONGEST:
            return
        if len(self._heads) >= self.MOST:
            self._heads.clear()
        self._heads[data[:end]] = _KnownHead(exchange.verb, exchange.length, exchange.caller.digest)


_USUAL_HEAD: Final = PlainHead(0, b"", None, None, None, names_site=False, has_trace=False)
"""What an exchange needs of a known head. Its length is known to be right."""
