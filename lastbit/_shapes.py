"""Reads times from decoded JSON, and checks that a value has the types that its class declares.

`from_json` reads fields without checking their types. Without this check, a list in the place of a text would cause a
`TypeError` where the value is first used, far from the call that received it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")


def expect(value: T, hint: Any) -> T:
    """`value` if it has the type `hint`, including its elements. Supports dataclasses, tuples and mappings of strings,
    numbers and times. Raises `TypeError`."""
    if not _predicate(hint)(value):
        raise TypeError(f"{value!r:.100} is not of type {getattr(hint, '__name__', hint)}")
    return value


def check(value: Any) -> None:
    """Apply `expect` to `value` if it is a dataclass, or to the dataclasses in it if it is a list or tuple. Raises
    `TypeError`."""
    if isinstance(value, list | tuple):
        for element in value:
            check(element)
    elif dataclasses.is_dataclass(value):
        expect(value, type(value))


def timestamp(text: str) -> datetime:
    """A time of the contract, in UTC. Raises `ValueError`."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return moment.astimezone(UTC)


def timestamp_or_none(text: str | None) -> datetime | None:
    return None if text is None else timestamp(text)


@functools.cache
def _predicate(hint: Any) -> Callable[[Any], bool]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda _: True
    if hint is int:
        # The contract has no larger integers, and very large ones would make computations slow.
        return lambda value: type(value) is int and -(1 << 63) <= value < 1 << 63
    if hint is float:
        return lambda value: type(value) in (int, float) and math.isfinite(value)
    if origin in (types.UnionType, typing.Union):
        choices = [_predicate(argument) for argument in arguments]
        return lambda value: any(fits(value) for fits in choices)
    if origin is tuple:
        element = _predicate(arguments[0])
        return lambda value: isinstance(value, tuple) and all(map(element, value))
    if origin is Mapping:
        key, element = map(_predicate, arguments)
        return lambda value: isinstance(value, Mapping) and all(map(key, value)) and all(map(element, value.values()))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = [(argument.name, _predicate(hints[argument.name])) for argument in dataclasses.fields(hint)]
        return lambda value: isinstance(value, hint) and all(fits(getattr(value, name)) for name, fits in fields)
    return lambda value: isinstance(value, hint)
