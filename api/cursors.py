"""Cursors: where the next page begins, as an opaque word. One that isn't ours, or of another list, is refused."""

from __future__ import annotations

import base64
import binascii
import re

from core import errors


def encode(of: str, position: int) -> str:
    """`of` names the list, e.g. `pending:7`."""
    return base64.urlsafe_b64encode(f"{of}:{position}".encode()).decode().rstrip("=")


def decode(of: str, cursor: str | None) -> int | None:
    """The position, or None without a cursor. Raises `errors.InvalidRequest`."""
    if cursor is None:
        return None
    match = re.fullmatch(re.escape(of) + ":(0|[1-9][0-9]{0,15})", _decoded(cursor))
    if match is None or encode(of, int(match[1])) != cursor:
        raise _foreign()
    return int(match[1])


def encode_text(of: str, text: str) -> str:
    """As `encode`, where pages are cut by a text."""
    return base64.urlsafe_b64encode(f"{of}:{text}".encode()).decode().rstrip("=")


def decode_text(of: str, cursor: str | None) -> str | None:
    """The text, or None without a cursor. Raises `errors.InvalidRequest`."""
    if cursor is None:
        return None
    text = _decoded(cursor)
    if not text.startswith(f"{of}:") or encode_text(of, text.removeprefix(f"{of}:")) != cursor:
        raise _foreign()
    return text.removeprefix(f"{of}:")


def _decoded(cursor: str) -> str:
    """ "" where it can't be one of ours."""
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _foreign() -> errors.InvalidRequest:
    return errors.InvalidRequest("query.cursor", "expected the `next` of an earlier page of this very list")
