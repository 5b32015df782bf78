"""Process managers: state machines that accept events in any order, and issue a command when all required events have
arrived.

`process` makes one from a pure function, and `run` is its worker. `client.processes` shows the instances and their
commands. Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import Final

from lastbit._lazy import lazy

_HOMES: Final = {
    "lastbit.processes.calls": ("AsyncProcesses", "Processes"),
    "lastbit.processes.definition": ("CancelTimer", "Command", "Finish", "Process", "Timer", "process", "timer_of"),
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

__all__, __getattr__, __dir__ = lazy(__name__, _HOMES)
