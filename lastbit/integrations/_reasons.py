"""The reason of a failed or skipped item, as the service accepts it."""

from __future__ import annotations

from typing import Final

from lastbit.integrations._failed import Failed
from lastbit.integrations._skipped import Skipped

LONGEST_REASON: Final = 4000
"""Maximum characters of a reason; the service accepts no more."""


def reason_of(error: BaseException) -> str | None:
    """The reason that a handler gave with `Failed` or `Skipped`, else the exception as text."""
    if isinstance(error, Failed | Skipped):
        return None if error.reason is None else accepted(_text(error.reason))
    name, text = type(error).__name__, _text(error)
    return accepted(f"{name}: {text}" if text and text != name else name)


def accepted(reason: str) -> str:
    """The reason without surrogates, which UTF-8 can't encode, and not longer than the service accepts."""
    return reason.encode(errors="replace").decode()[:LONGEST_REASON]


def _text(value: object) -> str:
    """`str(value)`, or the name of its type if that raises, as it does for some exceptions that were unpickled: an item
    must fail whatever its exception is."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # any error of foreign code
        return type(value).__name__
