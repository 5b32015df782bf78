"""Reading a request's body: bounded, of the right type, and `{}` where there is none."""

from __future__ import annotations

import binascii
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope

from api import problems
from api.metrics import REFUSED
from api.problems import Place, Problem, invalid

LIMIT: Final = 8 * 1024 * 1024
"""Bytes of a body."""
DEPTH: Final = 100
"""Levels of nested arrays and objects in JSON of a caller's own. Every parser has a limit, Python's near 1,000; this
one is below all of them."""


class Room:
    """Bytes of bodies that are being read, or wait to be handled; bounded, as a crowd of large ones could fill the
    memory. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.most = limit
        self.taken = 0

    def take(self, size: int) -> None:
        """Raises `Problem`: come back later. One body alone always has room."""
        if self.taken and self.taken + size > self.most:
            REFUSED.labels("bytes").inc()
            raise Problem(
                "unavailable",
                "too many large bodies are being read at the moment",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self.taken += size

    def give(self, size: int) -> None:
        self.taken -= size


@contextlib.asynccontextmanager
async def reading(scope: Scope, receive: Receive, room: Room) -> AsyncIterator[bytes]:
    """The whole body; it takes its room until the context ends. Raises `Problem`: `too_large`, `unavailable`, or
    `unsupported_media_type` where it isn't declared as JSON."""
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
    parts: list[bytes] = []
    size = 0
    try:
        is_incomplete = True
        while is_incomplete:
            message = await receive()
            if message["type"] == "http.disconnect":
                # The body is incomplete. Without this, a call that broke off before its body would be carried out as a
                # call without one.
                raise invalid([Place("body", "expected its end; the connection was closed before it")])
            part: bytes = message.get("body", b"")
            is_incomplete = message.get("more_body", False)
            if size + len(part) > LIMIT:
                raise _too_large()
            room.take(len(part))
            size += len(part)
            parts.append(part)
        # A page of any site can have a browser send a POST without a body, and say cancel with it. To say
        # application/json the browser has to ask us first, and is refused.
        if (size or from_browser) and not is_json(content_type):
            actual = content_type.decode("latin-1") or "none"
            raise Problem("unsupported_media_type", f"header Content-Type: expected application/json, got {actual}")
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        yield body or b"{}"
    finally:
        room.give(size)


def decoded(decoder: msgspec.json.Decoder[Any], content: bytes) -> Any:
    """The body by its decoder. Raises `Problem`."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        raise problems.invalid([Place("body" + place.rstrip("`"), message)]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


def parsed(content: bytes) -> Any:
    """The body as Python has it: the same JSON that `decoded` accepts, for models that name what is wrong in it. Raises
    `Problem`."""
    try:
        # As text, which has to be UTF-8 then: from bytes Python also reads UTF-16, and skips a byte order mark.
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _not_json(error: Exception) -> Problem:
    expected = f"of at most {DEPTH} levels of nesting" if isinstance(error, RecursionError) else str(error)
    return problems.invalid([Place("body", f"expected JSON: {expected}")])


def from_base64(place: str, text: str) -> bytes:
    """Raises `Problem`, which names the place in the body."""
    try:
        content = binascii.a2b_base64(text, strict_mode=True)
        # Strict as it is, it takes padding where none is due.
        if len(text) != (len(content) + 2) // 3 * 4:
            raise ValueError("Excess padding")
    except ValueError as error:
        raise problems.invalid([Place(place, f"expected base64: {error}")]) from None
    return content


def is_json(content_type: bytes) -> bool:
    """Whether a Content-Type header says so."""
    return content_type == b"application/json" or (
        content_type.split(b";", 1)[0].strip().lower() == b"application/json"
    )


def _too_large() -> Problem:
    # The rest of the body is not read, so the connection can't be used again.
    return Problem("too_large", f"body: expected at most {LIMIT:,} bytes", headers={"Connection": "close"})
