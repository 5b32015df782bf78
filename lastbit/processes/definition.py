"""A process: a pure function from an instance's state and an event to its new state and what is to be done. Pure.

An event belongs to the instance that its correlation names. What the function does with it is computed here, and turned
into the body of a `handle` call; a function that raises, or returns what can't be meant, is told as an error.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from lastbit.errors import InvalidArgument
from lastbit.models import Event
from lastbit.names import NO_NAMES

LONGEST_NAME: Final = 255
LONGEST_ERROR: Final = 4000
"""Characters of a traceback that are kept, its last."""
_KEEP: Final = object()


@dataclass(frozen=True, slots=True)
class Command:
    """What is to be done: `type` and `data` (any JSON) are for whoever does it. An instance issues each `step` once,
    however often it asks; without one, the step is the type."""

    type: str
    data: Any = None
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Timer:
    """A time-out: `after` so many seconds an event comes that `timer_of` knows by `name`. One of that name is
    replaced."""

    name: str
    after: float | timedelta
    data: Any = None


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """The time-out of this name is not needed any more. It may be on its way already."""

    name: str


Wanted = Command | Timer | CancelTimer


@dataclass(frozen=True, slots=True)
class Finish:
    """The instance ends, with these last commands and, unless another is given, the state that it had. What comes later
    is late, and changes nothing."""

    commands: Iterable[Wanted] = ()
    state: Any = _KEEP


Function = Callable[[Any, Event], tuple[Any, Iterable[Wanted]] | Finish | None]
"""None leaves the state as it is."""


class Process:
    """What `process` makes; it can still be called as the function that it is."""

    def __init__(self, name: str, correlate: Mapping[str, str], function: Function) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"a process has a name, not {name!r}")
        if not correlate or not all(isinstance(each, str) and each for pair in correlate.items() for each in pair):
            raise InvalidArgument("correlate says for each type of event which field of its data names the instance")
        self.name = name
        self.correlate = dict(correlate)
        self.function = function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)

    def __call__(self, state: Any, event: Event) -> tuple[Any, Iterable[Wanted]] | Finish | None:
        return self.function(state, event)

    def __repr__(self) -> str:
        return f"<Process {self.name!r}>"

    @property
    def timer_type(self) -> str:
        """Of the events of its timers."""
        return f"timer.{self.name}"

    @property
    def retry_type(self) -> str:
        """Of the events that bring a parked one again."""
        return f"retry.{self.name}"

    @property
    def types(self) -> list[str]:
        """Of the events that its workers read."""
        return [*self.correlate, self.timer_type, self.retry_type]

    def instances_of(self, event: Event) -> list[str]:
        """The instances that an event is for, each once: several where its field is a list. None where it names
        none."""
        if event.type in (self.timer_type, self.retry_type):
            return [event.data["instance"]]
        field = self.correlate.get(event.type)
        if field is None:
            return []
        if field == "key":
            found: Any = event.key
        else:
            found = event.data.get(field) if isinstance(event.data, Mapping) else None
        named = [_name(each) for each in (found if isinstance(found, list) else [found])]
        return list(dict.fromkeys(name for name in named if name is not None))

    def decide(self, state: Any, event: Event) -> dict[str, Any]:
        """What the function makes of the event, as fields of a `handle` call's body."""
        try:
            body = _decided(self.function(state, event), state)
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except Exception as error:  # noqa: BLE001  # whatever it is, the event is parked with it
            return {"error": _told("".join(traceback.format_exception(error)))}
        return body


def _told(text: str) -> str:
    return text[-LONGEST_ERROR:].encode("utf-8", "replace").decode()


def _name(value: Any) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_NAME or value in NO_NAMES:
        return None
    if any(character < " " or character == "\x7f" for character in value):
        return None
    return value


def _decided(returned: Any, state: Any) -> dict[str, Any]:
    if returned is None:
        returned = (state, ())
    if isinstance(returned, Finish):
        new, wanted = (state if returned.state is _KEEP else returned.state), returned.commands
    elif isinstance(returned, tuple) and len(returned) == 2:
        new, wanted = returned
    else:
        raise TypeError(f"a process returns (state, commands), Finish(commands) or None, not {returned!r}")
    commands: list[dict[str, Any]] = []
    timers: list[dict[str, Any]] = []
    for each in wanted:
        if isinstance(each, Command):
            commands.append({"type": each.type, "step": each.step, "data": each.data})
        elif isinstance(each, Timer):
            after = each.after.total_seconds() if isinstance(each.after, timedelta) else each.after
            timers.append({"timer": each.name, "after": after, "data": each.data})
        elif isinstance(each, CancelTimer):
            timers.append({"timer": each.name, "after": None})
        else:
            raise TypeError(f"a process asks for Command, Timer and CancelTimer, not {each!r}")
    return {"state": new, "commands": commands, "timers": timers, "finish": isinstance(returned, Finish)}


def process(name: str, *, correlate: Mapping[str, str]) -> Callable[[Function], Process]:
    """A decorator that makes a process of a pure function `(state, event)`; see `Finish`, `Command`, `Timer`.

    `state` is None at an instance's first event, and any JSON later. `correlate` says for each type of event which
    field of its data names the instance, or `key` for the event's key; a list there is many instances. The function may
    be called several times for an event, so it does nothing but return.
    """
    return lambda function: Process(name, correlate, function)


def timer_of(event: Event) -> str | None:
    """The name of the timer whose time-out this is; None of any other event."""
    name: str | None = event.data["timer"] if event.type.startswith("timer.") else None
    return name
