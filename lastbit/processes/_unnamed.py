"""Counts the events that name no instance of a process, none twice.

All workers of a process read them, so the one that has partition 0 counts them. The service knows up to which position
they were counted: a count is added only if it begins there. Those that a worker has read just before it is killed may
be missing.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from lastbit.models import Event
from lastbit.processes.calls import Processes

if TYPE_CHECKING:
    from lastbit.processes.definition import Process

log = logging.getLogger("lastbit.processes")


class UnnamedEvents:
    """The unnamed events that this worker has read. After each `begin`, `add` gets them in the order of their
    positions."""

    def __init__(self, process: Process, calls: Processes) -> None:
        self._process = process
        self._calls = calls
        self._lock = threading.Lock()
        self._upto = 0
        self._positions: list[int] = []
        """Of the events above `upto`, which are not reported yet."""
        self._logged: set[str] = set()
        """The event types that the log has."""

    def begin(self, upto: int) -> None:
        """The worker has got partition 0, and events up to this position were counted."""
        with self._lock:
            self._upto, self._positions = upto, []

    def add(self, event: Event) -> None:
        if event.type not in self._logged:
            self._logged.add(event.type)
            log.warning(
                "event %s (%s) at position %d names no instance of %s: it is skipped; further ones are only counted",
                event.id,
                event.type,
                event.position,
                self._process,
            )
        with self._lock:
            if event.position > self._upto:
                self._positions.append(event.position)

    def report(self) -> None:
        """Add them to the service's count. Raises `ServiceError`, `ServiceUnreachable`."""
        while True:
            with self._lock:
                after, positions = self._upto, list(self._positions)
            if not positions:
                return
            # Without the lock: the reader and new partitions must not wait for the service.
            process = self._calls.count_unnamed(self._process.name, after, positions[-1], len(positions))
            with self._lock:
                if self._upto == after:  # no other call has begun anew, or reported
                    # Another worker may have counted up to another position.
                    self._upto = process.unnamed_upto
                    self._positions = [position for position in self._positions if position > self._upto]
