"""Reading a request's body. It checks the size and the type, and treats an empty body as `{}`."""

from __future__ import annotations

import binascii
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope

from api import expectations, problems
from api.limits import sizes
from api.limits.rates import Rates
from api.limits.room import Room
from api.problems import Place, Problem, invalid
from lastbit.tokens import Token

JSON: Final = b"application/json"
MERGE_PATCH: Final = b"application/merge-patch+json"
"""Also the type of the JSON of a PATCH (RFC 7396)."""


@contextlib.asynccontextmanager
async def reading(
    scope: Scope, receive: Receive, room: Room, rates: Rates, caller: Token, limit: int = sizes.BODY
) -> AsyncIterator[bytes]:
    """The whole body, of at most `limit` bytes, which occupies `room` until the context ends. One whose length wasn't
    declared is charged to the caller's rate. Raises `Problem`: `too_large`, `unavailable`, `invalid_request` if it is
    incomplete, or `unsupported_media_type` if its Content-Type isn't JSON."""
    content_type = length = b""
    from_browser = False
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value
        elif name == b"content-length":
            length = value
        elif name == b"origin":
            from_browser = True
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        is_incomplete = True
        while is_incomplete:
            message = await receive()
            if message["type"] == "http.disconnect":
                # Without this check, a request whose connection broke before its body would count as one without a
                # body, and be executed.
                raise invalid([Place("body", "expected its end; the connection was closed before it")])
            part: bytes = message.get("body", b"")
            is_incomplete = message.get("more_body", False)
            if size + len(part) > limit:
                raise _too_large(limit)
            room.take(caller, len(part))
            size += len(part)
            parts.append(part)
        # A page of another site can make a browser send a POST without a body, such as a cancel. A browser can set
        # application/json only after a preflight request, which the service refuses.
        is_accepted = is_json(content_type) or (scope["method"] == "PATCH" and _is(content_type, MERGE_PATCH))
        if (size or from_browser) and not is_accepted:
            actual = content_type.decode("latin-1") or "none"
            raise Problem("unsupported_media_type", f"header Content-Type: expected application/json, got {actual}")
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        yield body or b"{}"
    finally:
        room.give(caller, size)
        if not length:
            rates.owe_bytes(caller, size)


def decoded(decoder: msgspec.json.Decoder[Any], content: bytes) -> Any:
    """The body, decoded by `decoder`. Raises `Problem`."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        # A key of a mapping is at the place of the mapping.
        message, _, path = str(error).replace(" - at `key` in `$", " - at `$").partition(" - at `$")
        # The struct at a deeper place is not known here.
        fields = [] if path else [field.encode_name for field in msgspec.structs.fields(decoder.type)]
        field, expected = expectations.of_msgspec(message, fields)
        place = "body" + path.rstrip("`") + (f".{field}" if field else "")
        raise problems.invalid([Place(place, expected)]) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(error) from None


def parsed(content: bytes) -> Any:
    """The body as Python objects, for pydantic to validate. Accepts the same JSON as `decoded`. Raises `Problem`."""
    try:
        # Decoded as UTF-8 here: given bytes, `json.loads` also accepts UTF-16 and skips a byte order mark.
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None


def _not_json(error: Exception) -> Problem:
    expected = f"of at most {sizes.DEPTH} levels of nesting" if isinstance(error, RecursionError) else str(error)
    return problems.invalid([Place("body", f"expected JSON: {expected}")])


def from_base64(place: str, text: str) -> bytes:
    """The decoded bytes. Raises `Problem`, which names `place`."""
    try:
        content = binascii.a2b_base64(text, strict_mode=True)
        # Even in strict mode, `a2b_base64` accepts padding that isn't needed.
        if len(text) != (len(content) + 2) // 3 * 4:
            raise ValueError("Excess padding")
    except ValueError as error:
        raise problems.invalid([Place(place, f"expected base64: {error}")]) from None
    return content


def is_json(content_type: bytes) -> bool:
    """Whether a Content-Type header declares JSON."""
    return content_type == JSON or _is(content_type, JSON)


def _is(content_type: bytes, wanted: bytes) -> bool:
    return content_type.split(b";", 1)[0].strip().lower() == wanted


def _too_large(limit: int) -> Problem:
    # The rest of the body is not read, so the connection can't be used again.
    return Problem("too_large", f"body: expected at most {limit:,} bytes", headers={"Connection": "close"})
