"""How a request comes to its route: what is checked of each one before it runs (its caller, in `access.rules`, and that
it says each thing once), and how a path is taken apart."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_origin
from urllib.parse import parse_qsl

import structlog
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Receive, Scope, Send

from api.access.rules import CALLER, Access, rule_of
from api.problems import Place, Problem, invalid


class _Rest(Convertor[str]):
    """`{name:rest}`: all that is left of a path, slashes and line breaks too. Starlette's own `path` stops at a line
    break, so that there would be no such path."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("rest", _Rest())


class GuardedRoute(APIRoute):
    """A route that is handled once its caller may call it, and has said each thing once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._once = {
            parameter.alias
            for parameter in self.dependant.query_params
            if get_origin(parameter.field_info.annotation) is not list
        }

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in (self.methods or ()):  # else it's a 405, whoever asks
            access: Access = scope["app"].state.access
            caller = scope[CALLER] = access.enter(scope, rule_of(self.endpoint))
            if caller.name:
                structlog.contextvars.bind_contextvars(token=caller.name)
            if b"&" in scope["query_string"]:
                self._refuse_repeated(scope["query_string"].decode("latin-1"))
        await super().handle(scope, receive, send)

    def _refuse_repeated(self, query: str) -> None:
        """FastAPI would take the last one, and whoever said the others would not hear of it."""
        seen = Counter(name for name, _ in parse_qsl(query, keep_blank_values=True))
        repeated = [name for name, count in seen.items() if count > 1 and name in self._once]
        if repeated:
            raise invalid([Place(f"query.{name}", f"expected once, got {seen[name]} times") for name in repeated])


async def guarded(request: Request) -> None:
    """A dependency of the whole application, for a route that is no `GuardedRoute`: nobody has judged its caller."""
    if CALLER not in request.scope:
        raise Problem("forbidden", "this route doesn't say who may call it")
