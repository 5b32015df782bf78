"""The two ack routes, as a small ASGI application in front of FastAPI's stack. They are called once per item, all other
routes once per batch. msgspec decodes the bodies. Problems have the same form as those of other routes, and the OpenAPI
document describes the bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from api import problems
from api.access.rules import Access, first_headers
from api.acks.bodies import Check, encode, parse
from api.acks.refusals import refusal
from api.limits import Limits, pause
from api.metrics import ACK_REQUESTS, ACKS, RESULTS
from api.problems import Problem
from api.server import bodies, queries
from api.server.middleware import USUAL, Requests, given_id
from api.server.wakeups import pass_on
from core import errors, traces
from core.acks.call import HELD, Call
from core.batches.lifecycle import Verb
from core.commits.combiner import TOO_MANY
from core.commits.lanes import Pending
from core.service import Service
from lastbit.tokens import Token

PATHS: Final = {"/v1/acks": Verb.ACK, "/v1/failures": Verb.FAIL}


class AckRoutes:
    """Serves the ack routes, and passes all other requests to FastAPI."""

    def __init__(self, app: FastAPI) -> None:
        self.app = Requests(app)
        self.fastapi = app
        self.state = app.state
        self.access: Access = app.state.access
        self._receive = self._deliver  # one bound method, so that the combiner can group calls by it
        self.finished: deque[Sequence[Pending]] = deque()
        """Finished calls whose responses are not written yet."""

    @property
    def limits(self) -> Limits:
        limits: Limits = self.state.limits
        return limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = PATHS.get(scope["path"]) if scope["type"] == "http" else None
        if verb is None:
            await self.app(scope, receive, send)
            return
        try:
            status, content, headers = 200, await self._handle(verb, scope, receive), {}
        except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
            problem = refusal(verb, error, given_id(scope["headers"]))
            status, content, headers = problem.status, problem.body(), problem.headers
        media_type = b"application/json" if status == 200 else problems.MEDIA_TYPE.encode()
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [
                *USUAL.items(),
                (b"content-type", media_type),
                (b"content-length", str(len(content)).encode()),
                *((name.lower().encode(), value.encode()) for name, value in headers.items()),
            ],
        }
        await send(start)
        await send({"type": "http.response.body", "body": content})

    async def _handle(self, verb: Verb, scope: Scope, receive: Receive) -> bytes:
        if scope["method"] != "POST":
            raise Problem("method_not_allowed", "this path takes POST", headers={"Allow": "POST"})
        headers = first_headers(scope)
        key = headers.get(b"idempotency-key")
        caller = self.access.enter_consumer(headers)
        if scope["query_string"]:
            queries.check_names(scope, {})
        if self.is_full():
            await asyncio.sleep(pause.SECONDS)
            raise errors.Overloaded(TOO_MANY)
        async with bodies.reading(scope, receive, self.limits.room) as content:
            call, check = self.parse(verb, key, content, caller)
            if traces.has_sdk():
                call.trace = traces.in_headers(scope["headers"])
            if check is not None:
                await run_in_threadpool(check)
        loop: asyncio.AbstractEventLoop = self.state.loop
        future: asyncio.Future[Pending] = loop.create_future()

        def answer(result: Pending) -> None:
            if not future.done():  # it is done if the client has disconnected
                future.set_result(result)

        self.submit(call, answer)
        result = await future
        if result.error is not None:
            raise result.error
        return encode(result.answer)

    def parse(
        self, verb: Verb, idempotency_key: bytes | None, content: bytes, caller: Token
    ) -> tuple[Call, Check | None]:
        """As `bodies.parse`, and also charges the items to the caller's rate. Writes responses first where parsing
        would delay them (see `ParseBudget.has_large_calls`)."""
        budget = self.limits.parse_budget
        if self.finished and budget.has_large_calls():
            self.answer_finished()
        start = budget.begin()
        try:
            call, check = parse(verb, idempotency_key, content, caller, self.state.service)
        finally:
            budget.end(start)
        if caller.items is not None:
            self.access.rates.charge_items(caller, call.items)
        return call, check

    def is_full(self) -> bool:
        """Whether the next call must be refused: more acks arrive than can be committed, or parsed."""
        service: Service = self.state.service
        return service.acks.is_full() or self.limits.parse_budget.is_full()

    def submit(self, call: Call, recipient: Callable[[Pending], object]) -> None:
        """Queue the call. `recipient` is called in the event loop when it is finished. Raises `errors.Overloaded`."""
        self.state.service.acks.submit(call, self._receive, recipient)

    def refuse_later(self, refuse: Callable[[], object]) -> None:
        """Call `refuse` after a delay. Writes the responses of finished calls now, not after all ready sockets were
        read."""
        self.limits.pause.before(refuse)
        if self.finished:
            self.answer_finished()

    def _deliver(self, results: Sequence[Pending]) -> None:
        """Called in the combiner's thread, once per commit, as each call into the loop wakes it."""
        self.finished.append(results)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so are all connections
            self.state.loop.call_soon_threadsafe(self.answer_finished)

    def answer_finished(self) -> None:
        """Write the responses of the finished calls. Only the event loop's thread may call this."""
        while self.finished:
            _answer_all(self.finished.popleft())


def _answer_all(results: Sequence[Pending]) -> None:
    pass_on(results)
    counts: dict[tuple[Verb, str], int] = {}
    acks = failures = 0
    for pending in results:
        if pending.error is None:
            answer, verb = pending.answer, pending.call.verb
            if verb is Verb.ACK:
                acks += 1
            else:
                failures += 1
            held = rejected = 0
            for rejection in answer.rejected:
                if rejection.reason == HELD:
                    held += rejection.count
                else:
                    rejected += rejection.count
            for result, count in zip(RESULTS, (answer.applied, answer.repeated, held, rejected), strict=True):
                if count:
                    counts[verb, result] = counts.get((verb, result), 0) + count
    for verb, count in ((Verb.ACK, acks), (Verb.FAIL, failures)):
        ACK_REQUESTS.labels(verb.value, "200").inc(count)
    for (verb, result), count in counts.items():
        ACKS.labels(verb.value, result).inc(count)
