"""Errors on the wire: RFC 9457 `application/problem+json` with a stable `code`. The only table of status codes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple, get_args

import msgspec
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from api import expectations
from core import errors

MEDIA_TYPE: Final = "application/problem+json"
MOST_EXPLAINED: Final = 16
"""Unknown fields of a request whose errors name the fields that exist."""
LONGEST_PATH: Final = 200
"""Characters of a path that its error and the log show."""

log = structlog.get_logger(__name__)

STATUS: Final[dict[str, int]] = {
    "invalid_request": 422,
    "idempotency_key_reused": 422,
    "step_reused": 422,
    "unauthorized": 401,
    "forbidden": 403,
    "batch_not_found": 404,
    "group_not_found": 404,
    "batch_sealed": 409,
    "batch_complete": 409,
    "batch_expired": 409,
    "batch_cancelled": 409,
    "item_resolved": 409,
    "batch_live": 409,
    "state_conflict": 409,
    "nothing_failed": 409,
    "nothing_pending": 409,
    "webhook_not_found": 404,
    "webhook_disabled": 409,
    "position_trimmed": 410,
    "out_of_order": 409,
    "source_conflict": 409,
    "consumer_group_not_found": 404,
    "consumer_group_in_use": 409,
    "partitions_fixed": 409,
    "session_replaced": 409,
    "stale_epoch": 409,
    "process_not_found": 404,
    "instance_not_found": 404,
    "version_conflict": 409,
    "upgrade_not_finished": 409,
    "not_found": 404,
    "method_not_allowed": 405,
    "unsupported_media_type": 415,
    "too_large": 413,
    "rate_limited": 429,
    "not_implemented": 501,
    "http_version_not_supported": 505,
    "unavailable": 503,
    "internal": 500,
}


ERROR: Final = "lastbit.error"
"""The key of the core's error in the ASGI scope of a request that it has failed."""


class Place(NamedTuple):
    """One error in a request: its place, and what was expected there."""

    place: str
    expected: str


class Problem(Exception):  # named after its media type
    """A response that is not a 2xx."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        places: Sequence[Place] = (),
        headers: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.code = code
        self.status = STATUS[code]
        self.detail = detail
        self.places = places
        self.headers = dict(headers or {})
        self.facts = dict(facts or {})
        super().__init__(detail)

    def body(self) -> bytes:
        return msgspec.json.encode(self.content())

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "type": f"urn:lastbit:problem:{self.code}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.facts,
        }
        if self.places:
            content["errors"] = [place._asdict() for place in self.places]
        return content


def invalid(places: Sequence[Place]) -> Problem:
    """A 422 that lists the places. Its detail has the first one."""
    first = f"{places[0].place}: {places[0].expected}"
    rest = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
    return Problem("invalid_request", first + rest, places=places)


def from_core(error: errors.CoreError) -> Problem:
    """The problem for an error of core."""
    if isinstance(error, errors.InvalidRequest):
        return Problem(error.code, str(error), places=[Place(error.place, error.expected)])
    if isinstance(error, errors.Unavailable):
        return Problem(error.code, str(error), headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, errors.Misconfigured):
        return Problem("unavailable", str(error), headers={"Retry-After": "5"})
    if isinstance(error, errors.PositionTrimmed):
        return Problem(error.code, str(error), facts={"trimmed": error.trimmed})
    if isinstance(error, errors.VersionConflict):
        return Problem(error.code, str(error), facts={"version": error.version})
    if isinstance(error, errors.OutOfOrder):
        return Problem(error.code, str(error), places=[Place(error.place, "expected the order of its source")])
    if isinstance(error, errors.SourceConflict):
        return Problem(
            error.code, str(error), places=[Place(error.place, f"expected {error.counted_by} from its source")]
        )
    return Problem(error.code, str(error))


def internal() -> Problem:
    return Problem("internal", "an unexpected error occurred in the service; its log has the details")


def response(problem: Problem) -> Response:
    if problem.status == 503:
        structlog.contextvars.bind_contextvars(error=problem.detail)  # in the log, for the line of the request
    return Response(problem.body(), problem.status, headers=problem.headers, media_type=MEDIA_TYPE)


def _place(location: Sequence[str | int]) -> str:
    """("body", "items", 3) → body.items[3]"""
    place = ""
    for part in location:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return place.replace("header.idempotency-key", "header Idempotency-Key")


def _model(annotation: Any) -> type[BaseModel] | None:
    """The first model in the type of a field, such as `NewEvent` of `list[NewEvent] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model, get_args(annotation))), None)


def _known_fields(body: Any, location: Sequence[str | int]) -> list[str]:
    """The fields of the object in a body of the type `body` that has a fault at this location. Empty if they are not
    known."""
    model = _model(body)
    for name in [part for part in location[1:-1] if isinstance(part, str)]:
        if model is None or name not in model.model_fields:
            return []
        model = _model(model.model_fields[name].annotation)
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]


def from_faults(faults: Iterable[Mapping[str, Any]], body: Any = None) -> Problem:
    """The problem for what pydantic's `errors()` returned. `body`: the type of the body, to name its fields."""
    places: list[Place] = []
    for fault in faults:
        expected = expectations.of_pydantic(fault["type"], fault["msg"], fault.get("ctx", {}))
        # A body may have thousands of such faults.
        if fault["type"] == "extra_forbidden" and len(places) < MOST_EXPLAINED:
            expected += expectations.one_of(_known_fields(body, fault["loc"]))
        places.append(Place(_place([part for part in fault["loc"] if part != "[key]"]), expected))
    return invalid(places)


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    return compile_path(path)[0]


def _allowed(request: Request) -> str:
    """All methods of the path. Starlette's own Allow header has only those of the first route that matches."""
    methods: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        if route.path is not None and route.methods and _pattern(route.path).match(request.scope["path"]):
            methods |= route.methods
    return ", ".join(sorted(methods))


def _shown_path(request: Request) -> str:
    """The path as it was sent, escapes included, without the end of a long one."""
    return shortened(
        (request.scope.get("raw_path") or request.scope["path"].encode()).decode("ascii", "backslashreplace")
    )


def shortened(path: str) -> str:
    """The path without the end of a long one."""
    return path if len(path) <= LONGEST_PATH else f"{path[:LONGEST_PATH]}…"


def _from_starlette(error: HTTPException, request: Request) -> Problem:
    if error.status_code == 404:
        return Problem("not_found", f"there is no path {_shown_path(request)}; the API's documentation is at /docs")
    if error.status_code == 405:
        # The page's files are no routes, and their error has no header.
        allowed = _allowed(request) or (error.headers or {}).get("Allow", "GET, HEAD")
        return Problem("method_not_allowed", f"this path takes {allowed}", headers={"Allow": allowed})
    return invalid([Place("body", "expected JSON")])


def install(app: FastAPI) -> None:
    """Make every error of the app a problem response."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, Problem):
            return response(error)
        if isinstance(error, errors.CoreError):
            request.scope[ERROR] = error
            if error.code == "internal":
                log.error("request_failed", error=str(error))
            return response(from_core(error))
        if isinstance(error, RequestValidationError):
            field = getattr(request.scope.get("route"), "body_field", None)
            return response(from_faults(error.errors(), field and field.field_info.annotation))
        if isinstance(error, HTTPException):
            return response(_from_starlette(error, request))
        return response(internal())

    for kind in (Problem, errors.CoreError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


BODY: Final = ("unsupported_media_type", "invalid_request")
"""The codes that every route with a body can return."""

_PLACED: Final = ("idempotency_key_reused", "invalid_request", "out_of_order", "source_conflict", "step_reused")
_SCHEMA_BY_CODE: Final = {
    **dict.fromkeys(STATUS, "PlainProblem"),
    **dict.fromkeys(_PLACED, "PlacedProblem"),
    "position_trimmed": "PositionTrimmedProblem",
    "version_conflict": "VersionConflictProblem",
}


def _schema(name: str, **facts: dict[str, Any]) -> dict[str, Any]:
    """The schema `name`: the fields of every problem, and `facts`, the additional fields."""
    codes = sorted(code for code, schema in _SCHEMA_BY_CODE.items() if schema == name)
    return {
        "type": "object",
        "required": ["type", "title", "status", "code", "detail", *facts],
        "properties": {
            "type": {"type": "string", "format": "uri", "description": "`urn:lastbit:problem:` and the code"},
            "title": {"type": "string", "description": "the status in words"},
            "status": {"type": "integer", "format": "int32"},
            "code": {"type": "string", "enum": codes, "description": "stable; programs should use this one"},
            "detail": {"type": "string", "description": "a sentence for people"},
            **facts,
        },
    }


SCHEMAS: Final[dict[str, Any]] = {
    "Problem": {
        "description": "An error (RFC 9457). Some have more fields, depending on the code.",
        "oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in sorted(set(_SCHEMA_BY_CODE.values()))],
        "discriminator": {
            "propertyName": "code",
            "mapping": {code: f"#/components/schemas/{name}" for code, name in sorted(_SCHEMA_BY_CODE.items())},
        },
    },
    "PlainProblem": _schema("PlainProblem"),
    "PlacedProblem": _schema(
        "PlacedProblem",
        errors={
            "type": "array",
            "minItems": 1,
            "description": "the errors and their places in the request",
            "items": {
                "type": "object",
                "required": ["place", "expected"],
                "properties": {"place": {"type": "string"}, "expected": {"type": "string"}},
            },
        },
    ),
    "PositionTrimmedProblem": _schema(
        "PositionTrimmedProblem", trimmed={"type": "integer", "description": "read on after this position"}
    ),
    "VersionConflictProblem": _schema(
        "VersionConflictProblem", version={"type": "integer", "description": "the instance's version"}
    ),
}
"""The schemas of the OpenAPI document, by name."""


def documented(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The `responses=` of a route for these problem codes. Each route can also return `too_large`, for the request's
    head, and `unavailable`."""
    codes_by_status: dict[int, list[str]] = {}
    for code in sorted({*codes, "too_large", "unavailable"}):
        codes_by_status.setdefault(STATUS[code], []).append(code)
    result: dict[int | str, dict[str, Any]] = {}
    for status, answers in sorted(codes_by_status.items()):
        schemas = {_SCHEMA_BY_CODE[code] for code in answers}
        schema = schemas.pop() if len(schemas) == 1 else "Problem"
        result[status] = {
            "description": " or ".join(f"`{code}`" for code in answers),
            "content": {
                MEDIA_TYPE: {
                    "schema": {"$ref": f"#/components/schemas/{schema}"},
                    "examples": {code: {"$ref": f"#/components/examples/{code}"} for code in answers},
                }
            },
        }
        if status in (429, 503):
            result[status]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return result
