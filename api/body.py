"""Reading a request's body: bounded, of the right type, and `{}` where there is none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from fastapi import Request, Response
from starlette.types import Message, Receive, Scope

from api import problems
from api.access import GuardedRoute
from api.problems import Place, Problem

LIMIT: Final = 8 * 1024 * 1024
"""Bytes of a body."""


async def read(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises `Problem`: `too_large`, or `unsupported_media_type` where it isn't declared as JSON."""
    content_type = length = b""
    from_browser = False
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value
        elif name == b"content-length":
            length = value
        elif name == b"origin":
            from_browser = True
    if length.isdigit() and int(length) > LIMIT:
        raise _too_large()
    message = await receive()
    body: bytes = message.get("body", b"")
    if message.get("more_body"):
        parts, size = [body], len(body)
        while message.get("more_body"):
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > LIMIT:
                raise _too_large()
        body = b"".join(parts)
    if len(body) > LIMIT:
        raise _too_large()
    # A page of any site can have a browser send a POST without a body, and say cancel with it. To say application/json
    # the browser has to ask us first, and is refused.
    if not body and not from_browser:
        return b"{}"
    if not is_json(content_type):
        got = content_type.decode("latin-1") or "none"
        raise Problem("unsupported_media_type", f"header Content-Type: expected application/json, got {got}")
    return body or b"{}"


def decoded(decoder: msgspec.json.Decoder[Any], content: bytes) -> Any:
    """The body by its decoder. Raises `Problem`."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise problems.invalid([Place("body" + place.rstrip("`"), message)]) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise problems.invalid([Place("body", f"expected JSON: {error}")]) from None


def is_json(content_type: bytes) -> bool:
    """Whether a Content-Type header says so."""
    return content_type == b"application/json" or (
        content_type.split(b";", 1)[0].strip().lower() == b"application/json"
    )


def _too_large() -> Problem:
    # The rest of the body is not read, so the connection can't be used again.
    return Problem("too_large", f"body: expected at most {LIMIT:,} bytes", headers={"Connection": "close"})


class JsonRoute(GuardedRoute):
    """A route whose handler sees a body that went through `read`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        inner = super().get_route_handler()
        if self.body_field is None:
            return inner

        async def handler(request: Request) -> Response:
            body = await read(request.scope, request.receive)

            async def receive() -> Message:
                return {"type": "http.request", "body": body, "more_body": False}

            scope: dict[str, Any] = dict(request.scope)
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope["headers"] = [*headers, (b"content-type", b"application/json")]
            return await inner(Request(scope, receive))

        return handler
