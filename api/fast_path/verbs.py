"""The verbs for opening, extending, sealing and reading batches, for appending events, for reading them and waiting for
them, for tally entries and ranges, positions and handled events.

No rule is implemented twice. Only requests that the ordinary path would certainly accept are served here. All others
take the ordinary path, even when their body has arrived already: those with an unusual head or query, a body that the
route's model refuses, a limited token or a token with rates, or an item as the parent. They are queued and answered
without a task, but for those that wait for events.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import structlog
from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict, ValidationError

from api import problems
from api.access.rules import digest_of, rule_of
from api.fast_path.exchange import Exchange, ExchangeProtocol, FastVerb, PlainHead
from api.limits import sizes
from api.metrics import REQUESTS
from api.problems import Problem
from api.routes import batches, consumer_groups, events, fields, models, processes, tallies
from api.routes.reply import Reply
from api.routes.writes import Writes
from api.server import bodies
from api.server.middleware import WIRE_HEADER, request_id
from core import errors, feed, traces
from core.commits.operation import Done, Operation
from core.commits.pending import Pending
from core.consumer_groups import groups
from core.service.batches import opening_of, seal_of
from core.service.consumer_groups import commits_of
from core.traces import TraceContext
from lastbit.ids import INTEGER_LIMIT
from lastbit.tokens import Token

log = structlog.get_logger(__name__)

KEY: Final = re.compile(rb"[\x21-\x7e]{1,255}")

T = TypeVar("T")

Start = Callable[["RouteCall"], None]
"""Does the work of a request, or queues it. Raises `NotPlain` before anything is done."""


class NotPlain(Exception):  # a request to the caller, not an error
    """The request must take the ordinary path."""


class RouteCall(abc.ABC):
    """A request for a `RouteVerb`: what was sent, and how its work is done and answered."""

    __slots__ = ()

    batch: int
    """The first number of its target; 0 if there is none."""
    content: bytes
    path: str
    target: re.Match[bytes]
    """The match of the verb's pattern."""
    trace: TraceContext | None

    @property
    @abc.abstractmethod
    def idempotency_key(self) -> str | None: ...

    def name(self, group: int) -> str:
        """The name that a group of the target's pattern has matched."""
        return self.target[group].decode()

    def parsed(self, model: type[fields.Body]) -> Any:
        """The body as the route's model has it."""
        if len(self.content) > sizes.IN_LOOP_FAST:
            raise NotPlain
        try:
            # With this option, as FastAPI does: the messages about bad entries are the same then.
            return model.model_validate(bodies.parsed(self.content or b"{}"), from_attributes=True)
        except (ValidationError, Problem, RecursionError):
            raise NotPlain from None

    @abc.abstractmethod
    def write(self, operation: Operation, reply: Callable[[Any], Reply]) -> None:
        """Run the operation, and respond with what `reply` makes of its result, or with the error that it raises."""

    @abc.abstractmethod
    def write_all(self, operations: Sequence[Operation], reply: Callable[[list[Done]], Reply]) -> None:
        """Run the operations, and respond with what `reply` makes of their results, or with the error that it
        raises."""

    @abc.abstractmethod
    def read(self, kind: Callable[[Any], Any], question: Any, reply: Callable[[Any], Reply]) -> None:
        """Do a read of this kind, and respond with what `reply` makes of its value."""

    @abc.abstractmethod
    def wait_for(self, work: Callable[[Any], Coroutine[Any, Any, T]], reply: Callable[[T], Reply]) -> None:
        """Respond later, with what `reply` makes of the result of `work`, which gets the application's state and may
        need a thread."""


class RouteExchange(Exchange, RouteCall):
    """Such a request on a connection. Its work is queued, and it is answered later."""

    __slots__ = ("batch", "content", "path", "started", "target", "verb")

    def __init__(
        self, protocol: ExchangeProtocol, verb: RouteVerb, target: re.Match[bytes], caller: Token, head: PlainHead
    ) -> None:
        super().__init__(protocol, caller, head)
        self.verb = verb
        self.target = target
        self.batch = first_number(target)
        self.content = b""
        self.path = protocol.url.partition(b"?")[0].decode()
        self.started = time.perf_counter()

    @property
    def idempotency_key(self) -> str | None:
        return None if self.key is None else self.key.decode()

    def begin(self, content: bytes) -> None:
        self.content = content
        protocol = self._protocol
        try:
            self.verb.start(self)
        except NotPlain:
            protocol.take_ordinary_path(content)
        except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
            self.refuse(error)
        finally:
            protocol.give_room(self)

    def write(self, operation: Operation, reply: Callable[[Any], Reply]) -> None:
        writes: Writes = self._protocol.state.writes
        writes.submit(operation, functools.partial(self._receive, reply))

    def write_all(self, operations: Sequence[Operation], reply: Callable[[list[Done]], Reply]) -> None:
        writes: Writes = self._protocol.state.writes
        writes.submit_all(operations, lambda results: self._reply(reply, results))

    def _receive(self, reply: Callable[[T], Reply], pending: Pending[T]) -> None:
        if pending.error is not None:
            self.refuse(pending.error)
        else:
            self._reply(reply, pending.answer)

    def _reply(self, reply: Callable[[T], Reply], value: T) -> None:
        try:
            answer = reply(value)
        except Exception as error:  # noqa: BLE001  # every error becomes a problem
            self.refuse(error)
        else:
            self.answer(answer)

    def read(self, kind: Callable[[Any], Any], question: Any, reply: Callable[[Any], Reply]) -> None:
        if self.content:
            raise NotPlain
        kind(self._protocol.state.reads).submit(question, functools.partial(self._receive, reply))

    def wait_for(self, work: Callable[[Any], Coroutine[Any, Any, T]], reply: Callable[[T], Reply]) -> None:
        state = self._protocol.state

        async def respond() -> None:
            try:
                state.limits.threads.admit()
                self.answer(reply(await work(state)))
            except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
                self.refuse(error)
            except asyncio.CancelledError:
                self._protocol.transport.close()
                raise

        self._protocol.run(respond())

    def answer(self, reply: Reply) -> None:
        name = request_id(self.request_id)
        lines = b"%b: %b\r\n" % (WIRE_HEADER, name.encode())
        if reply.headers:
            lines += "".join([f"{header}: {value}\r\n" for header, value in reply.headers.items()]).lower().encode()
        self.respond(reply.status, reply.content, lines)
        self._log(reply.status, name)

    def refuse(self, error: Exception) -> None:
        name = request_id(self.request_id)
        problem = problem_of(error)
        if problem.code == "internal":
            log.error("request_failed", method=self.verb.method, path=self.path, request_id=name, exc_info=error)
        self.respond_with(problem, b"%b: %b\r\n" % (WIRE_HEADER, name.encode()))
        facts = {"error": problem.detail} if problem.status == 503 else {}
        self._log(problem.status, name, **facts)

    def _log(self, status: int, name: str, **facts: str) -> None:
        seconds = time.perf_counter() - self.started
        if self.caller.name:
            facts["token"] = self.caller.name
        verb = self.verb
        log.info(
            "request",
            method=verb.method,
            path=self.path,
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=name,
            **facts,
        )
        verb.measured(status).observe(seconds)


def problem_of(error: Exception) -> Problem:
    """The response to a call that has failed."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, errors.CoreError) and error.code != "internal":
        return problems.from_core(error)
    return problems.internal()


class RouteVerb(FastVerb):
    """A verb that is served as its route does. The first group of `pattern` is the batch or the position, if it is a
    number."""

    def __init__(self, method: str, pattern: bytes, route: str, endpoint: Callable[..., object], start: Start) -> None:
        """`endpoint` is the route's, with the rule for its callers."""
        self.method = method
        self.pattern = re.compile(pattern)
        self.route = route
        self.start = start
        self._rule = rule_of(endpoint)
        self._measured: dict[int, Histogram] = {}

    @property
    def wants_trace(self) -> bool:
        """Whether the context of a trace belongs to its calls."""
        return self.start is _open

    def exchange(self, protocol: ExchangeProtocol, target: re.Match[bytes], head: PlainHead) -> RouteExchange | None:
        number = first_number(target)
        if head.names_site or number >= INTEGER_LIMIT or (head.length and not bodies.is_json(head.content_type)):
            return None
        if head.key is not None and not KEY.fullmatch(head.key):
            return None
        tokens = protocol.access.tokens
        digest = digest_of(head.authorization)
        if digest is None and (tokens.required or head.authorization is not None):
            return None
        caller = tokens.find(digest or b"")
        if caller is None or caller.is_limited or not caller.has(self._rule.roles):
            return None
        exchange = RouteExchange(protocol, self, target, caller, head)
        if head.has_trace and self.wants_trace:
            exchange.trace = traces.in_headers(protocol.headers)
        return exchange

    def measured(self, status: int) -> Histogram:
        """The durations of calls with this status."""
        histogram = self._measured.get(status)
        if histogram is None:
            histogram = self._measured[status] = REQUESTS.labels(self.method, self.route, str(status))
        return histogram


def _open(call: RouteCall) -> None:
    body: models.OpenBody = call.parsed(models.OpenBody)
    if body.parent is not None or body.callback is not None:
        raise NotPlain
    call.write(opening_of(body.opening(), call.idempotency_key, trace=call.trace), batches.opened)


def _extend(call: RouteCall) -> None:
    body: models.ExtendBody = call.parsed(models.ExtendBody)
    call.write(body.operation(call.batch, call.idempotency_key), batches.extended)


def _seal(call: RouteCall) -> None:
    call.parsed(fields.EmptyBody)
    call.write(seal_of(call.batch, call.idempotency_key), batches.sealed)


def _append(call: RouteCall) -> None:
    body: events.NewEvents = call.parsed(events.NewEvents)
    if body.fence is not None:
        raise NotPlain
    new = [feed.NewEvent(event.id, event.type, event.key, event.data) for event in body.events]
    call.write(feed.Append(events=new, cost=max(1, len(new))), lambda results: events.appended(new, results))


def _apply(call: RouteCall) -> None:
    try:
        operation = tallies.operation_of(call.name(1), call.content or b"{}")
    except Problem:
        raise NotPlain from None
    call.write(operation, tallies.applied)


def _apply_ranges(call: RouteCall) -> None:
    try:
        operation = tallies.ranges_of(call.name(1), call.content or b"{}")
    except Problem:
        raise NotPlain from None
    call.write(operation, tallies.counted)


def _commit(call: RouteCall) -> None:
    body: consumer_groups.PositionBody = call.parsed(consumer_groups.PositionBody)
    partition = int(call.target[2])
    if not body.is_small or partition >= groups.MOST_PARTITIONS or call.name(1).startswith(groups.OWN_NAMES):
        raise NotPlain
    try:
        commit = body.to_core(call.name(1), partition)
    except Problem:
        raise NotPlain from None
    call.write(commits_of([commit]), consumer_groups.single)


def _commit_many(call: RouteCall) -> None:
    body: consumer_groups.PositionsBody = call.parsed(consumer_groups.PositionsBody)
    if not body.is_small or call.name(1).startswith(groups.OWN_NAMES):
        raise NotPlain
    try:
        commits = consumer_groups.commits_in(body, call.name(1))
    except Problem:
        raise NotPlain from None
    call.write(commits_of(commits), lambda results: consumer_groups.many(commits, results))


def _handle(call: RouteCall) -> None:
    body: processes.HandlingsBody = call.parsed(processes.HandlingsBody)
    operations = processes.many_of(call.name(1), body)
    call.write_all(operations, lambda results: processes.handled_many(call.path, body, operations, results))


def _get(call: RouteCall) -> None:
    call.read(lambda reads: reads.batches, call.batch, batches.read)


def _watermark(call: RouteCall) -> None:
    call.read(lambda reads: reads.watermarks, call.batch, batches.watermark)


def _page(call: RouteCall) -> None:
    limit = int(call.target[2] or events.LIMIT)
    if limit > feed.FIRST:
        raise NotPlain
    call.read(lambda reads: reads.pages, feed.Span(first_number(call.target), limit), events.paged)


class _Poll(BaseModel):
    """The parameters of a long poll of the feed, as its route has them."""

    model_config = ConfigDict(extra="forbid")

    after: events.Position
    limit: events.Limit = events.LIMIT
    wait: events.Seconds
    types: events.Types = []
    batch: events.OfBatch = None


def _poll(call: RouteCall) -> None:
    values: dict[str, Any] = {}
    for parameter in call.target[1].decode().split("&"):
        name, _, value = parameter.partition("=")
        if name == "type":
            values.setdefault(name, []).append(value)
        elif name not in values:
            values[name] = value
        else:
            raise NotPlain
    try:
        poll = _Poll.model_validate(values)
    except ValidationError:
        raise NotPlain from None
    if not poll.wait or call.content:
        raise NotPlain
    asked = events.Asked(poll.after, poll.limit, poll.types, poll.batch)
    call.wait_for(lambda state: asked.first_page(state.service, state.waiting, poll.wait), events.paged)


def first_number(target: re.Match[bytes]) -> int:
    """The number that the target begins with; 0 if there is none."""
    return int(target[1]) if target.lastindex and target[1].isdigit() else 0


_ID: Final = rb"/v1/batches/(0|[1-9][0-9]{0,15})"
_PAGE: Final = rb"/v1/events\?after=(0|[1-9][0-9]{0,15})(?:&limit=([1-9][0-9]{0,2}))?"
# The values, and the names below, have no percent-encoded characters.
_POLL: Final = rb"/v1/events\?([a-z]+=[A-Za-z0-9._:-]+(?:&[a-z]+=[A-Za-z0-9._:-]+)*)"
_TALLY: Final = f"/v1/tallies/({tallies.NAME})".encode()
_HANDLE: Final = f"/v1/processes/({processes.NAME})/handle".encode()
_GROUP: Final = rb"/v1/consumer-groups/([A-Za-z0-9_][A-Za-z0-9._:-]{0,254})"
VERBS: Final = (
    RouteVerb("POST", rb"/v1/batches", "/v1/batches", batches.open_batch, _open),
    RouteVerb("POST", _ID + rb"/items", "/v1/batches/{id}/items", batches.extend_batch, _extend),
    RouteVerb("POST", _ID + rb"/seal", "/v1/batches/{id}/seal", batches.seal_batch, _seal),
    RouteVerb("POST", rb"/v1/events", "/v1/events", events.append_events, _append),
    RouteVerb("POST", _TALLY + b"/apply", "/v1/tallies/{tally}/apply", tallies.apply_entries, _apply),
    RouteVerb("POST", _TALLY + b"/ranges", "/v1/tallies/{tally}/ranges", tallies.apply_ranges, _apply_ranges),
    RouteVerb(
        "PUT",
        _GROUP + rb"/partitions/(0|[1-9][0-9]{0,3})/position",
        "/v1/consumer-groups/{group}/partitions/{partition}/position",
        consumer_groups.commit_position,
        _commit,
    ),
    RouteVerb(
        "PUT",
        _GROUP + rb"/positions",
        "/v1/consumer-groups/{group}/positions",
        consumer_groups.commit_positions,
        _commit_many,
    ),
    RouteVerb("POST", _HANDLE, "/v1/processes/{process}/handle", processes.handle_events, _handle),
    RouteVerb("GET", _ID, "/v1/batches/{id}", batches.get_batch, _get),
    RouteVerb("GET", _ID + rb"/watermark", "/v1/batches/{id}/watermark", batches.get_watermark, _watermark),
    RouteVerb("GET", _PAGE, "/v1/events", events.read_events, _page),
    RouteVerb("GET", _POLL, "/v1/events", events.read_events, _poll),
)
