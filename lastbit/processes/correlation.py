"""The instances that an event belongs to: the correlation of a process.

An event's correlation is `key`, the path of a field in its data, or a function of the event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from lastbit.errors import InvalidArgument
from lastbit.models import Event
from lastbit.names import NO_NAMES

KEY: Final = "key"
"""Stands for the event's key."""
LONGEST_NAME: Final = 255
"""Maximum characters of an instance's name."""
FIELDS: Final = {
    "batch": "acked cause count ended_by failed group_size items labels more note on_exceeded parent patch pending "
    "ranges reason skipped state traceparent tracestate",
    "command": "command process instance step data",
    "timer": "process instance timer data",
    "retry": "process instance event",
}
"""The fields in the data of the service's own events, by the first word of the type."""
NESTED: Final = ("labels", "patch", "ranges", "data", "event")
"""Which of these fields have fields of their own."""

Correlation = str | Callable[[Event], Any]


class Correlations:
    """The correlations of a process, by event type. Raises `InvalidArgument` for one that can't name an instance."""

    def __init__(self, by_type: Mapping[str, Correlation]) -> None:
        if not isinstance(by_type, Mapping) or not by_type or not all(isinstance(type, str) for type in by_type):
            raise InvalidArgument(f"correlate maps each event type to what names the instance, not {by_type!r}")
        self._of: dict[str, Callable[[Event], Any]] = {
            type: _function(type, correlation) for type, correlation in by_type.items()
        }

    @property
    def types(self) -> list[str]:
        return list(self._of)

    def instances_of(self, event: Event) -> list[str]:
        """The names, each once: several if there is a list, none if nothing there can be a name. Raises what the
        function raises."""
        correlation = self._of.get(event.type)
        if correlation is None:
            return []
        try:
            values = correlation(event)
        except Exception as error:
            error.add_note(
                f"raised by the function that correlates events of type {event.type!r}, for the event {event.id!r} at "
                f"position {event.position}; for an event that belongs to no instance it must return None"
            )
            raise
        names = map(_name, values if isinstance(values, list) else [values])
        return list(dict.fromkeys(name for name in names if name is not None))


def _function(type: str, correlation: Correlation) -> Callable[[Event], Any]:
    if callable(correlation):
        return correlation
    if correlation == KEY:
        return lambda event: event.key
    path = _path(type, correlation)
    return lambda event: list(_values(event.data, path))


def _path(type: str, correlation: object) -> list[str]:
    """The names of the fields on the path. Raises `InvalidArgument` for a path that can't exist."""
    if not isinstance(correlation, str) or not all(path := correlation.split(".")):
        raise InvalidArgument(
            f"{type!r} is correlated by {correlation!r}: expected 'key', a path in the event's data like 'order' or "
            "'payload.order', or a function of the event"
        )
    fields = FIELDS.get(type.partition(".")[0], "").split()
    if path[0] == KEY:
        raise InvalidArgument(f"{type!r} is correlated by {correlation!r}: the key of an event has no fields")
    if fields and (path[0] not in fields or (len(path) > 1 and path[0] not in NESTED)):
        raise InvalidArgument(
            f"{type!r} is correlated by {correlation!r}, which its data doesn't have: expected 'key', a function, or "
            f"a path that begins with one of {', '.join(sorted(fields))}"
        )
    return path


def _values(data: Any, path: list[str]) -> Iterator[Any]:
    """The values at the end of the path. If a field on the path holds a list, each of its elements is followed."""
    if isinstance(data, list):
        for element in data:
            yield from _values(element, path)
    elif not path:
        yield data
    elif isinstance(data, Mapping):
        yield from _values(data.get(path[0]), path[1:])


def _name(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_NAME or value in NO_NAMES:
        return None
    if any(character < " " or character == "\x7f" for character in value):
        return None
    return value
