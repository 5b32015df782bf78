"""JSON whose content is the caller's own: the data of events, commands and timers, the state of an instance.

It is checked when it comes in, because consumers in other languages read it later: what one of them can't parse would
stop it at that row. It is stored as text and returned as that text, so every stored row can be returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
from fastapi import Response
from pydantic import AfterValidator

from api.server.bodies import DEPTH

MAX_DATA: Final = 65_536
"""Bytes of the data of an event, a command or a timer."""
MAX_STATE: Final = 1024 * 1024
"""Bytes of an instance's state."""
DATA: Final = f"any JSON, at most {MAX_DATA:,} bytes and {DEPTH} levels of nesting"

_LONG: Final = re.compile(rb"[0-9]{309}")
"""The shortest integers that no double holds have 309 digits."""


def text(value: Any, limit: int) -> str | None:
    """`value` as JSON; None for null. Raises `ValueError`."""
    if value is None:
        return None
    try:
        content = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError(_NOT_PORTABLE) from None
    if len(content) > limit:
        raise ValueError(f"expected at most {limit:,} bytes of JSON, got {len(content):,}")
    if content.count(b"[") + content.count(b"{") > DEPTH and _is_deeper(value, DEPTH):
        raise ValueError(_TOO_DEEP)
    if _LONG.search(content) and not all(map(_is_finite, _leaves(value))):
        raise ValueError(_NOT_PORTABLE)
    return content.decode()


_TOO_DEEP: Final = f"expected JSON of at most {DEPTH} levels of nesting"
_NOT_PORTABLE: Final = "expected JSON with finite numbers and Unicode text"


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` arrays and objects are nested."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [child for value in level for child in _children(value) if isinstance(child, dict | list)]
    return bool(level)


def _leaves(value: Any) -> Iterable[Any]:
    """All that is neither an array nor an object."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting.extend(_children(value))
        else:
            yield value


def _children(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _is_finite(value: Any) -> bool:
    """Whether a double can hold it, as it has to in JavaScript and in Go."""
    try:
        return not isinstance(value, int) or float(value) is not None
    except OverflowError:
        return False


Data = Annotated[Any, AfterValidator(lambda value: text(value, MAX_DATA))]
"""Any JSON in a request; the model has its text, None for null."""
State = Annotated[Any, AfterValidator(lambda value: text(value, MAX_STATE))]


def stored(text: str | None) -> msgspec.Raw:
    """Stored JSON as a part of an answer."""
    return msgspec.Raw(text or "null")


def response(content: Mapping[str, Any]) -> Response:
    """An answer that has `stored` parts."""
    return Response(msgspec.json.encode(content), media_type="application/json")
