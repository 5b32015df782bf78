"""The service without a server: the application of `app` on a database, called by functions of the same process.

A request and its response are those of HTTP, so that callers can't tell the difference. Acks, failures, skips and the
plain requests of `fast_path.verbs` are answered in the calling thread, and commit there if no other call is in
progress. All others go through the application, in the thread of a private event loop, which starts with the first of
them. Nothing else runs: no janitor, no dispatcher, no signal handler.

A process that was forked must make another `InProcess`: it has none of the threads, and must not use the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import anyio.to_thread
from sqlalchemy.exc import DBAPIError

from api import problems
from api.access.tokens import EVERYBODY, Tokens
from api.acks.bodies import encode, parse
from api.acks.refusals import refusal
from api.acks.routes import PATHS, AckRoutes, verb_of
from api.app import assemble, attach
from api.fast_path import verbs
from api.fast_path.verbs import NotPlain, RouteCall, RouteVerb, problem_of
from api.limits import sizes
from api.problems import Problem
from api.routes.reply import Reply
from core import errors, logs, threads, traces
from core.batches.lifecycle import Verb
from core.commits.combiner import InlineWhenIdle
from core.commits.operation import Done, Operation
from core.service import Service
from core.settings import Settings
from core.storage import schema
from core.storage.forkable import ForkableDatabase
from core.storage.numbering import Numbering
from core.storage.opening import explain
from core.traces import TraceContext
from lastbit.ids import INTEGER_LIMIT
from senders.webhooks import WebhookSender

GRACE: Final = 15.0
"""Seconds that calls in progress have to finish when it is closed."""

log = logging.getLogger("lastbit.embedded")

T = TypeVar("T")


class Closed(Exception):  # the caller's error, which it names itself
    """It is closed and answers no more requests."""


class TimedOut(Exception):  # as above
    """The response took longer than the caller wanted to wait."""


@dataclass(frozen=True, slots=True)
class Request:
    """`target`: the path and the query, percent-encoded. Names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class InProcess:
    """The service on the database at `url`, with at most `connections` connections, and its tables in the schema of
    this name. It connects with the first request, and answers none on a schema that doesn't fit. Threads may share it.

    Requests raise `Closed`; `errors.Misconfigured` for the schema; `errors.Unavailable` while the database can't be
    used.
    """

    def __init__(self, url: str, *, schema_name: str | None = None, connections: int) -> None:
        logs.leave_to_logging(log.name)
        self._settings = Settings.model_construct(database_url=url, shed_after=0.0)  # not from the environment
        self.database = ForkableDatabase(url, schema=schema_name, connections=connections)
        self._connections = connections
        self.service = Service(self.database, combiner=InlineWhenIdle, writes=InlineWhenIdle, sender=WebhookSender())
        self._has_schema = False
        self._calls = _Calls()
        self._loop: _Loop | None = None
        self._starting = threading.Lock()

    def request(self, request: Request, timeout: float) -> Response:
        """The response, when the request is carried out. `timeout`: seconds to wait for it, if it isn't answered in
        this thread. Raises `TimedOut` too: the request continues."""
        with self._calls.one():
            self.check_schema()
            try:
                return self._answer_here(request)
            except NotPlain:
                pass
            call = self._running().start(request)
            try:
                return call.response.result(timeout)
            except TimeoutError:
                raise TimedOut from None
            finally:
                call.abandon()

    async def request_async(self, request: Request, timeout: float) -> Response:
        """As `request`, for a task of any event loop. If it is cancelled, the request continues."""
        with self._calls.one():
            call = self._running().start(request, self.check_schema)
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(asyncio.wrap_future(call.response))
            except TimeoutError:
                raise TimedOut from None
            finally:
                call.abandon()

    def close(self) -> None:
        """Refuse new requests, finish those in progress, and close the connections."""
        self._calls.refuse()
        with self._starting:
            loop = self._loop
        if loop is not None:
            loop.end_long_polls()
        self._calls.wait(GRACE)
        if loop is not None:
            loop.stop()
        self.service.stop()

    def migrate(self, ids: Numbering | None = None) -> None:
        """Create the schema or update it, see `schema.migrate`. Raises `errors.Misconfigured`, with the reason, if the
        database refuses."""
        try:
            schema.migrate(self.database, ids=ids)
        except DBAPIError as error:
            raise errors.Misconfigured(": ".join(explain(self.database, error))) from error

    def explain(self, error: errors.Unavailable) -> str:
        """The cause, with the database's address and its own words."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, DBAPIError):
            cause = cause.__cause__
        return str(error) if cause is None else explain(self.database, cause)[0]

    def check_schema(self) -> None:
        """Raise `errors.Misconfigured` if the schema doesn't fit this release, `errors.Unavailable`."""
        if not self._has_schema:
            self.service.check_ready()
            self.service.enlisted.start(debts=True)
            self._has_schema = True

    def _running(self) -> _Loop:
        with self._starting:
            if self._loop is None:
                self._loop = _Loop(self.service, self._settings, self._connections)
            return self._loop

    def _answer_here(self, request: Request) -> Response:
        """The response, made in this thread. Raises `NotPlain` before anything is done if only the application can make
        it."""
        if len(request.content) > sizes.BODY:
            raise NotPlain
        verb = PATHS.get(request.target)
        if verb is not None and request.method == "POST":
            return self._answer_ack(verb, request)
        target = request.target.encode()
        for route in _VERBS.get(request.method, ()):
            match = route.pattern.fullmatch(target)
            if match is not None:
                call = _Call(self.service, match, request)
                if call.batch >= INTEGER_LIMIT:
                    break
                return call.answer(route)
        raise NotPlain

    def _answer_ack(self, verb: Verb, request: Request) -> Response:
        key = request.headers.get("idempotency-key")
        try:
            call, check = parse(
                verb, None if key is None else key.encode(), request.content or b"{}", EVERYBODY, self.service
            )
            if check is not None:
                check()
            if traces.has_sdk():
                call.trace = traces.in_headers(_encoded(request.headers))
            content = encode(self.service.acks.ack(call).result())
        except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
            _raise_outage(error)
            return refused(refusal(verb, error, None))
        return Response(200, JSON, content)


class _Call(RouteCall):
    """A request that is answered in the calling thread."""

    __slots__ = ("_reply", "_request", "_service", "batch", "content", "path", "target", "trace")

    def __init__(self, service: Service, target: re.Match[bytes], request: Request) -> None:
        self._service = service
        self._request = request
        self._reply: Reply | None = None
        self.target = target
        self.batch = verbs.first_number(target)
        self.content = request.content
        self.path = request.target.partition("?")[0]
        self.trace: TraceContext | None = None

    @property
    def idempotency_key(self) -> str | None:
        return self._request.headers.get("idempotency-key")

    def answer(self, route: RouteVerb) -> Response:
        key = self.idempotency_key
        if key is not None and not verbs.KEY.fullmatch(key.encode()):
            raise NotPlain
        if route.wants_trace:
            self.trace = traces.in_headers(_encoded(self._request.headers))
        try:
            route.start(self)
        except NotPlain:
            raise
        except Exception as error:  # the outermost place: every error becomes a problem
            _raise_outage(error)
            problem = problem_of(error)
            if problem.code == "internal":
                log.error("%s %s failed", self._request.method, self.path, exc_info=error)
            return refused(problem)
        assert self._reply is not None
        status, headers = self._reply.status, self._reply.headers
        return Response(status, {**JSON, **{name.lower(): headers[name] for name in headers}}, self._reply.content)

    def write(self, operation: Operation, reply: Callable[[Any], Reply]) -> None:
        self._reply = reply(self._service.writes.run(operation))

    def write_all(self, operations: Sequence[Operation], reply: Callable[[list[Done]], Reply]) -> None:
        raise NotPlain  # the application merges them into one transaction

    def read(self, kind: Callable[[Any], Any], question: Any, reply: Callable[[Any], Reply]) -> None:
        if self.content:
            raise NotPlain
        self._reply = reply(kind(self._service.reads).get(question))

    def wait_for(self, work: Callable[[Any], Coroutine[Any, Any, T]], reply: Callable[[T], Reply]) -> None:
        raise NotPlain


_VERBS: Final = {method: [verb for verb in verbs.VERBS if verb.method == method] for method in ("GET", "POST", "PUT")}
JSON: Final = {"content-type": "application/json"}


def refused(problem: Problem) -> Response:
    headers = {name.lower(): value for name, value in problem.headers.items()}
    return Response(problem.status, {**headers, "content-type": problems.MEDIA_TYPE}, problem.body())


def _raise_outage(error: BaseException | None) -> None:
    """Raise the error if it is one of the database, not of the request."""
    if isinstance(error, Exception) and errors.is_outage(error) and not isinstance(error, errors.Overloaded):
        raise error


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


class _Calls:
    """The requests in progress."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._refuses = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A request in progress. Raises `Closed`."""
        with self._changed:
            if self._refuses:
                raise Closed
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                if not self._count:
                    self._changed.notify_all()

    def refuse(self) -> None:
        with self._changed:
            self._refuses = True

    def wait(self, seconds: float) -> None:
        """Wait until none is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._count, seconds)


@dataclass(slots=True)
class _LoopCall:
    """A request that the application answers."""

    loop: asyncio.AbstractEventLoop
    response: Future[Response]
    gone: asyncio.Event
    """The caller doesn't wait any more."""

    def abandon(self) -> None:
        if not self.response.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.gone.set)


class _Loop:
    """The application in the event loop of a daemon thread. So the threads in which its routes run are daemons too, and
    a program can end without closing anything."""

    def __init__(self, service: Service, settings: Settings, connections: int) -> None:
        self.service = service
        self._settings = settings
        self._connections = connections
        start: Future[tuple[asyncio.AbstractEventLoop, AckRoutes, asyncio.Event]] = Future()
        self._thread = threads.start(lambda: asyncio.run(self._run(start)), name="lastbit-embedded")
        self._loop, self._routes, self._stopped = start.result()

    async def _run(self, start: Future[tuple[asyncio.AbstractEventLoop, AckRoutes, asyncio.Event]]) -> None:
        stop_event = asyncio.Event()
        try:
            loop = asyncio.get_running_loop()
            # Requests wait for a thread rather than for a connection, which they would get only for some seconds.
            anyio.to_thread.current_default_thread_limiter().total_tokens = self._connections
            routes = assemble(self._settings, Tokens(self._settings))
            attach(routes.fastapi, self.service, self._settings, loop)
        except BaseException as error:
            start.set_exception(error)
            raise
        start.set_result((loop, routes, stop_event))
        await stop_event.wait()

    def start(self, request: Request, prepare: Callable[[], object] | None = None) -> _LoopCall:
        """Start to answer the request, after `prepare`, which is called in a thread."""
        gone = asyncio.Event()
        response = asyncio.run_coroutine_threadsafe(self._respond(request, gone, prepare), self._loop)
        return _LoopCall(self._loop, response, gone)

    def end_long_polls(self) -> None:
        self._call(self._routes.state.waiting.close)

    def stop(self) -> None:
        self.stop_soon()
        self._thread.join()

    def stop_soon(self) -> None:
        self._call(self._stopped.set)

    def _call(self, react: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(react)

    async def _respond(self, request: Request, gone: asyncio.Event, prepare: Callable[[], object] | None) -> Response:
        if prepare is not None:
            await anyio.to_thread.run_sync(prepare)
        path, _, query = request.target.partition("?")
        headers = [*_encoded(request.headers), (b"content-length", str(len(request.content)).encode())]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
        }
        output = _Sent()
        messages = iter([{"type": "http.request", "body": request.content, "more_body": False}])

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            if message is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        # Not through the middleware of the server: it logs each request.
        app: Any = self._routes if verb_of(path, request.method) is not None else self._routes.fastapi
        try:
            await app(scope, receive, output.send)
        except Exception:
            if output.status is None:
                raise
            log.exception("%s %s failed", request.method, path)
        _raise_outage(scope.get(problems.ERROR))
        return output.response()


@dataclass(slots=True)
class _Sent:
    """What the application has sent."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b""))

    def response(self) -> Response:
        assert self.status is not None
        return Response(self.status, self.headers, b"".join(self.parts))
