"""The ack routes, as a small ASGI application in front of FastAPI's stack. They are called once per item, all other
routes once per batch. msgspec decodes the bodies. Problems have the same form as those of other routes, and the OpenAPI
document describes the bodies.
"""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from api import problems
from api.access.rules import Access, first_headers
from api.acks.bodies import encode
from api.acks.queue import AckQueue
from api.acks.refusals import refusal
from api.limits import Limits, pause
from api.problems import Problem
from api.server import bodies, queries
from api.server.middleware import USUAL, Requests, given_id
from core import errors, traces
from core.acks.call import AckResult
from core.batches.lifecycle import Verb
from core.commits.combiner import TOO_MANY
from core.commits.pending import settle

PATHS: Final = {"/v1/acks": Verb.ACK, "/v1/failures": Verb.FAIL, "/v1/skips": Verb.SKIP}


def verb_of(path: str, method: str) -> Verb | None:
    """What a request asks of these routes; None if FastAPI answers it, as a GET of failures, which searches them."""
    verb = PATHS.get(path)
    return None if verb is Verb.FAIL and method == "GET" else verb


class AckRoutes:
    """Serves the ack routes, and passes all other requests to FastAPI."""

    def __init__(self, app: FastAPI) -> None:
        self.app = Requests(app)
        self.fastapi = app
        self.state = app.state
        self.access: Access = app.state.access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        verb = verb_of(scope["path"], scope["method"]) if scope["type"] == "http" else None
        if verb is None:
            await self.app(scope, receive, send)
            return
        try:
            status, content, headers = 200, await self._handle(verb, scope, receive), {}
        except Exception as error:  # noqa: BLE001  # the outermost place: every error becomes a problem
            scope[problems.ERROR] = error
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
            methods = "GET, POST" if verb is Verb.FAIL else "POST"
            raise Problem("method_not_allowed", f"this path takes {methods}", headers={"Allow": methods})
        headers = first_headers(scope)
        key = headers.get(b"idempotency-key")
        caller = self.access.enter_consumer(headers)
        if scope["query_string"]:
            queries.check_names(scope, {})
        queue: AckQueue = self.state.acks
        limits: Limits = self.state.limits
        if queue.is_full():
            await asyncio.sleep(pause.SECONDS)
            raise errors.Overloaded(TOO_MANY)
        with limits.open_requests.one_of(caller, scope):
            async with bodies.reading(scope, receive, limits.room, self.access.rates, caller) as content:
                call, check = queue.parse(verb, key, content, caller)
                if traces.has_sdk():
                    call.trace = traces.in_headers(scope["headers"])
                if check is not None:
                    await run_in_threadpool(check)
            loop: asyncio.AbstractEventLoop = self.state.loop
            future: asyncio.Future[AckResult] = loop.create_future()
            queue.submit(call, functools.partial(settle, future))
            return encode(await future)
