"""JSON that the service stores for a caller: the data of events, commands and timers, and the state of an instance.

It is checked on arrival, because consumers in other languages read it later, and one that can't parse a row could not
continue after it. It is stored as text and returned as that text, so every stored row can be returned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec
from fastapi import Response
from pydantic import AfterValidator

from api.limits.sizes import DEPTH

MAX_DATA: Final = 65_536
"""Maximum bytes of the data of an event, a command or a timer."""
MAX_STATE: Final = 1024 * 1024
"""Maximum bytes of an instance's state."""
DATA: Final = f"any JSON, at most {MAX_DATA:,} bytes and {DEPTH} levels of nesting"

_LONG: Final = re.compile(rb"[0-9]{309}")
"""The shortest integers that exceed the range of a double have 309 digits."""


def text(value: Any, limit: int) -> str | None:
    """`value` as JSON text of at most `limit` bytes; None for null. Raises `ValueError`. The value of a large body is
    still encoded."""
    if isinstance(value, msgspec.Raw):
        value = _parsed(bytes(value), limit)
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


def _parsed(content: bytes, limit: int) -> Any:
    """The value of JSON. Its text may become shorter than `content`, by its blanks and its escapes."""
    content = msgspec.json.format(content, indent=-1)
    size = len(content) - _ESCAPES_SAVE * content.count(b"\\u") - content.count(rb"\/")
    if size > limit:
        raise ValueError(f"expected at most {limit:,} bytes of JSON, got {size:,} or more")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


_ESCAPES_SAVE: Final = len(rb"\u0041") - len("A")
"""The most bytes by which an escape is longer than its character."""
_TOO_DEEP: Final = f"expected JSON of at most {DEPTH} levels of nesting"
_NOT_PORTABLE: Final = "expected JSON with finite numbers and Unicode text"


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether more than `limit` arrays and objects are nested."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [child for value in level for child in _children(value) if isinstance(child, dict | list)]
    return bool(level)


def _leaves(value: Any) -> Iterable[Any]:
    """All nested values that are neither arrays nor objects."""
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
    """Whether the value fits the range of a double, which JavaScript and Go use for numbers."""
    try:
        return not isinstance(value, int) or float(value) is not None
    except OverflowError:
        return False


Data = Annotated[Any, AfterValidator(lambda value: text(value, MAX_DATA))]
"""Any JSON in a request. The model's attribute is its text, or None for null."""
State = Annotated[Any, AfterValidator(lambda value: text(value, MAX_STATE))]


def stored(text: str | None) -> msgspec.Raw:
    """Stored JSON as a part of a response."""
    return msgspec.Raw(text or "null")


def response(content: Mapping[str, Any]) -> Response:
    """A response that may contain `stored` parts."""
    return Response(msgspec.json.encode(content), media_type="application/json")
