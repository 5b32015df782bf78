"""Checks the names of query parameters. Frameworks ignore those that they don't expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.types import Scope

from api.limits.sizes import PARAMETERS
from api.problems import Place, invalid


def check_names(scope: Scope, parameters: Mapping[str, bool], *, allow_others: bool = False) -> None:
    """Raise `Problem` if a request has a query parameter that does not exist, unless `allow_others`, or a repeated one
    of which FastAPI would use only the last value. `parameters` are those that exist, each with whether it may be
    repeated."""
    if scope["query_string"].count(b"&") >= PARAMETERS:
        raise invalid([Place("query", f"expected at most {PARAMETERS} parameters")])
    query = scope["query_string"].decode("latin-1")
    places = []
    for name, count in Counter(name for name, _ in parse_qsl(query, keep_blank_values=True)).items():
        if name in parameters:
            if count > 1 and not parameters[name]:
                places.append(Place(f"query.{name}", f"expected once, got {count} times"))
        elif not allow_others:
            expected = f"expected one of {', '.join(sorted(parameters))}" if parameters else "this call has none"
            places.append(Place(f"query.{name}", f"no such parameter; {expected}"))
    if places:
        raise invalid(places)
