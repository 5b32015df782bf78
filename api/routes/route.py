"""The classes of routers and routes. Routes check a request before its endpoint runs: its caller's permissions (see
`access.rules`), its query parameters, and a JSON body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, get_origin

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from api.access.rules import Access, caller_of, rule_of
from api.limits import Limits, sizes
from api.limits.rates import Rates
from api.limits.room import Room
from api.limits.shares import CALLER
from api.problems import Problem
from api.routes.fields import Body
from api.server import bodies, queries
from api.server.shapes import LargeBodies


class _Rest(Convertor[str]):
    """`{name:rest}`: the rest of a path, including slashes and line breaks. Starlette's own `path` matches no line
    breaks, so a path with one would be a 404."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _Batch(_Rest):
    """`{id:batch}`: the id of a batch, valid or not, but not `counts`: a DELETE of that path is a 405."""

    regex = "(?!counts$)[^/]+"


register_url_convertor("rest", _Rest())
register_url_convertor("batch", _Batch())


class PrefixedRouter(APIRouter):
    """A router whose routes are only tried for paths that begin with its prefix. FastAPI tries each route of each
    router, twice for the one that matches. For the last routers, that was a third of a request's function calls."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # With a root path, the path may begin with that.
        if not scope["path"].startswith(self.prefix) and not scope.get("root_path"):
            return Match.NONE, {}
        return super().matches(scope)


def _query_params(dependant: Dependant) -> Iterator[Any]:
    """The query parameters of an endpoint, and those of its dependencies."""
    yield from dependant.query_params
    for dependency in dependant.dependencies:
        yield from _query_params(dependency)


class GuardedRoute(APIRoute):
    """A route that checks its caller's permissions, and refuses repeated query parameters. A route of the API also
    refuses those that it doesn't have: a misspelled filter must not select everything. Others may get such parameters
    from proxies, probes and browsers.

    An encoded slash is part of a name. Only the last names of some paths may have slashes (`_Rest`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parameters = {
            parameter.alias: get_origin(parameter.field_info.annotation) is list
            for parameter in _query_params(self.dependant)
        }
        self._is_strict = self.path.startswith("/v1/")
        before_the_rest, has_rest, _ = self.path.partition(":rest}")
        self._names = before_the_rest.count("/") if has_rest else None
        """How many segments of the path have no slash; None: all."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        raw = scope.get("raw_path") or b""
        # Starlette matches the decoded path: without this, `a%2Fb` would be two names.
        if b"%" in raw and b"%2f" in b"/".join(raw.lower().split(b"/")[: self._names]):
            return Match.NONE, {}
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in (self.methods or ()):  # else every caller gets a 405
            access: Access = scope["app"].state.access
            caller = scope[CALLER] = access.enter(scope, rule_of(self.endpoint))
            if caller.name:
                structlog.contextvars.bind_contextvars(token=caller.name)
            if scope["query_string"]:
                queries.check_names(scope, self._parameters, allow_others=not self._is_strict)
            limits: Limits = scope["app"].state.limits
            with limits.open_requests.one_of(caller, scope):
                await super().handle(scope, receive, send)
        else:
            await super().handle(scope, receive, send)


class _Parsed(Request):
    """A request whose body is already parsed."""

    def __init__(self, scope: Scope, receive: Receive, content: Any) -> None:
        super().__init__(scope, receive)
        self._content = content

    async def json(self) -> Any:
        return self._content


def reading(request: Request, limit: int = sizes.BODY) -> AbstractAsyncContextManager[bytes]:
    """The whole body of the request, as `bodies.reading` has it."""
    state = request.app.state
    room: Room = state.limits.room
    rates: Rates = state.access.rates
    return bodies.reading(request.scope, request.receive, room, rates, caller_of(request), limit)


class JsonRoute(GuardedRoute):
    """A route whose body is read by `bodies.reading`. FastAPI validates a small one after `bodies.parsed`, and all its
    faults are reported. A large one arrives validated."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        inner = super().get_route_handler()
        if self.body_field is None:
            return inner
        model: type[Body] = self.body_field.field_info.annotation  # type: ignore[assignment]  # bodies are models
        large_bodies = LargeBodies(model)

        async def handler(request: Request) -> Response:
            limits: Limits = request.app.state.limits
            async with reading(request, model.LIMIT) as body:
                if len(body) <= sizes.IN_LOOP:
                    content = bodies.parsed(body)
                else:
                    caller, access = caller_of(request), request.app.state.access
                    if model.HAS_ITEMS:
                        access.rates.require_items(caller)
                    content = await limits.parsing.run(caller, large_bodies.validated, body)

                async def receive() -> Message:
                    return {"type": "http.request", "body": body, "more_body": False}

                scope: dict[str, Any] = dict(request.scope)
                headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
                scope["headers"] = [*headers, (b"content-type", b"application/json")]
                return await inner(_Parsed(scope, receive, content))

        return handler


async def guarded(request: Request) -> None:
    """A dependency of the whole application. It refuses every request to a route that isn't a `GuardedRoute`, as
    nothing has checked its caller."""
    if CALLER not in request.scope:
        raise Problem("forbidden", "this route doesn't declare its callers")
