"""A process: a pure function of an instance's state and an event, which returns the new state and the commands.

An event belongs to the instance that its correlation names. This module calls the function and converts the result to
the body of a `handle` call. If the function raises or returns an invalid value, the body contains an error.
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
from lastbit.processes.correlation import Correlation, Correlations

LONGEST_ERROR: Final = 4000
"""Maximum characters of a stored traceback: the last ones are kept."""
_KEEP: Final = object()


@dataclass(frozen=True, slots=True)
class Command:
    """A command to issue. `type` and `data` (any JSON) are for its executor.

    An instance issues each `step` once. A command without a step has one of its own, so it is issued for each event for
    which the function returns it. If the function returns a step that it has returned for another event, the event is
    parked. `once`: the instance issues the step at most once, whichever event leads to it, and the others are handled
    without it; the default step is the type then."""

    type: str
    data: Any = None
    step: str | None = None
    once: bool = False


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer: `after` seconds or a timedelta, an event arrives, for which `timer_of` returns `name`. It replaces a
    timer of the same name."""

    name: str
    after: float | timedelta
    data: Any = None


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Cancel the timer of this name. If it has already fired, its event still arrives."""

    name: str


Wanted = Command | Timer | CancelTimer


@dataclass(frozen=True, slots=True)
class Finish:
    """End the instance, and issue these last commands. Without `state`, the state stays unchanged. Later events have no
    effect."""

    commands: Iterable[Wanted] = ()
    state: Any = _KEEP


Function = Callable[[Any, Event], tuple[Any, Iterable[Wanted]] | Finish | None]
"""A result of None leaves the state unchanged."""


class Process:
    """A process, as made by `process`; it can still be called as a function."""

    counts_unnamed = True
    """Whether events of its types that name no instance are counted and logged."""

    def __init__(
        self, name: str, correlate: Mapping[str, Correlation], function: Function, *, strict: bool = False
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the name of a process is a text, not {name!r}")
        self.name = name
        self._correlations = Correlations(correlate)
        self.function = function
        self.strict = strict
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)

    def __call__(self, state: Any, event: Event) -> tuple[Any, Iterable[Wanted]] | Finish | None:
        return self.function(state, event)

    def __repr__(self) -> str:
        return f"<Process {self.name!r}>"

    @property
    def timer_type(self) -> str:
        """The type of its timers' events."""
        return f"timer.{self.name}"

    @property
    def retry_type(self) -> str:
        """The type of events that retry a parked event."""
        return f"retry.{self.name}"

    @property
    def types(self) -> list[str]:
        """The event types that its workers read."""
        return [*self._correlations.types, self.timer_type, self.retry_type]

    def instances_of(self, event: Event) -> list[str]:
        """The instances that an event belongs to, each once. Raises what a function among the correlations raises."""
        if event.type in (self.timer_type, self.retry_type):
            return [event.data["instance"]]
        return self._correlations.instances_of(event)

    def decide(self, state: str, event: Event) -> dict[str, Any]:
        """The function's result for the event, as fields of a `handle` call's body. `state` is JSON, as the function
        may change what it gets."""
        try:
            body = _decided(self.function(json.loads(state), event), state)
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except Exception as error:  # noqa: BLE001  # any error parks the event
            return {"error": _storable("".join(traceback.format_exception(error)))}
        return body


def _storable(text: str) -> str:
    return text[-LONGEST_ERROR:].encode("utf-8", "replace").decode()


def _decided(result: Any, state: str) -> dict[str, Any]:
    if result is None:
        result = (json.loads(state), ())
    if isinstance(result, Finish):
        new, actions = (json.loads(state) if result.state is _KEEP else result.state), result.commands
    elif isinstance(result, tuple) and len(result) == 2:
        new, actions = result
    else:
        raise TypeError(f"the function returns (state, commands), Finish(commands) or None, not {result!r}")
    commands: list[dict[str, Any]] = []
    timers: list[dict[str, Any]] = []
    for action in actions:
        if isinstance(action, Command):
            if not isinstance(action.once, bool):
                raise TypeError(f"once is True or False, not {action.once!r}")
            commands.append({"type": action.type, "step": action.step, "once": action.once, "data": action.data})
        elif isinstance(action, Timer):
            after = action.after.total_seconds() if isinstance(action.after, timedelta) else action.after
            timers.append({"timer": action.name, "after": after, "data": action.data})
        elif isinstance(action, CancelTimer):
            timers.append({"timer": action.name, "after": None})
        else:
            raise TypeError(f"the function returns Command, Timer and CancelTimer objects, not {action!r}")
    return {"state": new, "commands": commands, "timers": timers, "finish": isinstance(result, Finish)}


def process(name: str, *, correlate: Mapping[str, Correlation], strict: bool = False) -> Callable[[Function], Process]:
    """A decorator that makes a process from a pure function `(state, event)`; see `Finish`, `Command`, `Timer`.

    `state` is None at an instance's first event, and any JSON later. The function may be called several times for an
    event, so it must have no side effects.

    `correlate` maps each event type to what names the instance: a field of the event's data, or its path
    (`"payload.order"`); `key` for the event's key; or a function of the event. A list, also one on the path, names
    several instances. A function must always return the same for an event, and None for one that belongs to no
    instance. If it raises, the worker ends, as the event must not be lost.

    `strict`: while an event of an instance is parked, its later events wait behind it. Otherwise they overtake it.

    Raises `InvalidArgument`, also for a path that the data of these events can't have.
    """
    return lambda function: Process(name, correlate, function, strict=strict)


def timer_of(event: Event) -> str | None:
    """The name of the timer that sent this event; None for other events."""
    name: str | None = event.data["timer"] if event.type.startswith("timer.") else None
    return name
