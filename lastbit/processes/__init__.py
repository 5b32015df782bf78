"""Process managers: state machines that take events in any order, and issue a command once all that it needs has come.

`process` makes one of a pure function, `run` works on it. `client.processes` shows the instances and what they issued.
Each name is imported when it is first used.
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
