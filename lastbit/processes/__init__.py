"""Process managers: state machines that take events in any order, and issue a command once all that it needs has come.

`process` makes one of a pure function, `run` works on it. `client.processes` shows the instances and what they issued.
Each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lastbit.processes.calls import AsyncProcesses, Processes
    from lastbit.processes.definition import CancelTimer, Command, Finish, Process, Timer, process, timer_of
    from lastbit.processes.models import (
        CommandPage,
        Definition,
        Handled,
        Instance,
        InstanceDetails,
        Issued,
        IssuedCommand,
        PendingTimer,
        ProcessSummary,
        Received,
    )
    from lastbit.processes.worker import ProcessWorker, run

_HOMES: Final = {
    "lastbit.processes.calls": ("AsyncProcesses", "Processes"),
    "lastbit.processes.definition": (
        "CancelTimer",
        "Command",
        "Finish",
        "Process",
        "Timer",
        "process",
        "timer_of",
    ),
    "lastbit.processes.models": (
        "CommandPage",
        "Definition",
        "Handled",
        "Instance",
        "InstanceDetails",
        "Issued",
        "IssuedCommand",
        "PendingTimer",
        "ProcessSummary",
        "Received",
    ),
    "lastbit.processes.worker": ("ProcessWorker", "run"),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncProcesses",
    "CancelTimer",
    "Command",
    "CommandPage",
    "Definition",
    "Finish",
    "Handled",
    "Instance",
    "InstanceDetails",
    "Issued",
    "IssuedCommand",
    "PendingTimer",
    "Process",
    "ProcessSummary",
    "ProcessWorker",
    "Processes",
    "Received",
    "Timer",
    "process",
    "run",
    "timer_of",
]


if not TYPE_CHECKING:
    # Hidden from type checkers, which would else believe in any name.
    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'lastbit.processes' has no attribute {name!r}")
        found = getattr(import_module(home), name)
        globals()[name] = found  # the next look-up does not come here
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
