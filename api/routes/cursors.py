"""Cursors: the start of the next page, as an opaque text. A malformed cursor, or one of another list, is refused."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated

from fastapi import Query

from api import patterns
from core import errors

Cursor = Annotated[
    str | None,
    Query(
        description="`next` of the previous page",
        json_schema_extra={"minLength": 1, "pattern": patterns.CURSOR},
    ),
]


def encode(subject: str, place: int | str) -> str:
    """`subject` names the list, e.g. `pending:7`."""
    return base64.urlsafe_b64encode(f"{subject}:{place}".encode()).decode().rstrip("=")


def decode(subject: str, cursor: str | None) -> int | None:
    """The position, or None without a cursor. Raises `errors.InvalidRequest`."""
    position = _decode(subject, cursor, "0|[1-9][0-9]{0,15}")
    return None if position is None else int(position)


def decode_pair(subject: str, cursor: str | None) -> tuple[int, int] | None:
    """Two positions, for a list whose places are `1:2`, or None without a cursor. Raises `errors.InvalidRequest`."""
    number = "(?:0|[1-9][0-9]{0,15})"
    place = _decode(subject, cursor, f"{number}:{number}")
    if place is None:
        return None
    first, second = map(int, place.split(":"))
    return first, second


def decode_name(subject: str, cursor: str | None) -> str | None:
    """The name, for a list ordered by names, or None without a cursor. Raises `errors.InvalidRequest`."""
    return _decode(subject, cursor, "(?s:.{1,255})")


def _decode(subject: str, cursor: str | None, place: str) -> str | None:
    if cursor is None:
        return None
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    match = re.fullmatch(f"{re.escape(subject)}:({place})", text)
    if match is None or encode(subject, match[1]) != cursor:
        raise errors.InvalidRequest("query.cursor", "expected the `next` of an earlier page of this list")
    return match[1]
