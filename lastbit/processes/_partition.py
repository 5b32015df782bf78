"""A partition of a process while this worker owns it.

Its window covers the positions of the whole feed. Positions of other partitions' events, and of types that the process
doesn't read, are acked as soon as they are read, so they never hold the floor.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from lastbit.streams.errors import WindowClosed, WindowFull
from lastbit.streams.group import Assignment

log = logging.getLogger("lastbit.processes")

PATIENCE: Final = 0.5
"""Seconds until a full window is logged."""


@dataclass(eq=False)
class Partition:
    assignment: Assignment
    reached: int
    """The position up to which events were passed to it."""
    lane: int
    left: set[int]
    """Positions that were outstanding at the last commit and have not been read again."""
    open: bool = True
    """Whether it is not released yet."""
    cut: bool = False
    """Whether an event was not accepted. Then no later event may be skipped."""
    busy: int = 0
    """Number of events being handled."""
    handled: bool = False
    """Whether an event was handled since the last commit."""
    committed: float = field(default_factory=time.monotonic)
    """The time of the last commit."""

    @property
    def keeps_events(self) -> bool:
        """False once it is being released, or was lost: then events are left to its next owner."""
        return self.open and not self.assignment.lost

    def track(self, position: int, stopping: threading.Event) -> bool:
        """Whether the event at this position must be handled. A partition that is being released is cut off here."""
        while self.open and not stopping.is_set():
            try:
                is_new = self.assignment.window.track(position, timeout=PATIENCE)
            except WindowFull as full:
                log.warning("partition %d waits for its event at %d", self.assignment.partition, full.oldest)
            except WindowClosed:
                break
            else:
                self.left.discard(position)
                return is_new
        self.cut = True
        return False

    def ack(self, position: int) -> None:
        """The event at this position is handled."""
        with suppress(WindowClosed):
            self.assignment.window.ack(position)
            self.handled = True

    def pass_over(self, position: int) -> None:
        """Advance the window to `position`, up to which all events were read. Positions that were outstanding and were
        not read again are acked."""
        if position < self.reached or self.cut:
            return
        window = self.assignment.window
        # A full window needs no place for `position`: a later one takes the floor beyond it.
        with suppress(WindowClosed, WindowFull):
            for offset in sorted(each for each in self.left if each <= position):
                window.ack(offset)  # of an event type that an earlier version of the process read
                self.left.discard(offset)
            if position > window.high and window.track(position):
                window.ack(position)
        self.reached = position
