"""Checks of arguments, before anything is sent. All clients and handles use these, so that a wrong type is the same
error everywhere: `InvalidArgument`, which names the argument and what is expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from numbers import Real
from types import NoneType
from typing import Any

from lastbit import errors


def refusal(name: str, expected: str, value: object) -> errors.InvalidArgument:
    """The error for an argument that is not what is expected."""
    return errors.InvalidArgument(f"{name} must be {expected}, not {value!r:.200}")


def batch_id(batch: int) -> int:
    """Raises `InvalidArgument`."""
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
        raise errors.InvalidArgument(
            f"a batch id is a whole number, not {batch!r:.200}; batches(key=…) finds batches, each with its id"
        )
    return batch


def check_names(noun: str, options: Mapping[str, object], known: type) -> None:
    """Raise `TypeError`, as Python does, if one of the options is not among those of a `TypedDict`."""
    unknown = options.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no {noun} {min(unknown)!r}")


def key(value: str | None) -> str | None:
    """A key of a new batch. The service accepts an empty one, but no path and no command can name such a batch. Raises
    `InvalidArgument`."""
    if value == "":
        raise refusal("key", "a text that is not empty, or None", value)
    return value


def labels(value: Mapping[str, Any], *, removable: bool = False) -> dict[str, Any]:
    """`removable`: a label may be None. A number is not converted, as filters would then find what an open refuses.
    Raises `InvalidArgument`."""
    kinds = (str, NoneType) if removable else str
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and isinstance(text, kinds) for name, text in value.items()
    ):
        raise refusal("labels", 'a mapping of texts, like {"team": "search"}', value)
    return dict(value)


def deadline(value: datetime | timedelta) -> str:
    """A deadline as the service expects it. A duration begins now, by this machine's clock. Raises
    `InvalidArgument`."""
    if isinstance(value, timedelta):
        value = datetime.now(UTC) + value
    if not isinstance(value, datetime):
        raise refusal("deadline", "a datetime with a time zone, or a timedelta from now", value)
    if value.tzinfo is None or value.utcoffset() is None:
        raise errors.InvalidArgument("a deadline needs a time zone: datetime(…, tzinfo=UTC), or a timedelta from now")
    return value.astimezone(UTC).isoformat()


def whole(name: str, value: object, least: int, limit: int) -> int:
    """A whole number from `least` on, below `limit`. Raises `InvalidArgument`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < limit:
        raise refusal(name, f"a whole number from {least} on, below {limit}", value)
    return value


def seconds(name: str, value: object) -> float:
    """A number of seconds, 0 or more. Raises `InvalidArgument`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise errors.InvalidArgument(f"{name} is a number of seconds, not {value!r:.200}")
    return float(value)


def types(value: str | Iterable[str]) -> tuple[str, ...]:
    """One or several types of events. Raises `InvalidArgument`."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise refusal("types", "a type of events, or an iterable of types", value)
    return tuple(value)
