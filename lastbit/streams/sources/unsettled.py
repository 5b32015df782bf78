"""What a broker handed out and was not told of yet.

A floor says that all below it is done. Most brokers can be told more: this one, and this one, but not that one. So
what is told is each thing that the window says is resolved, above the floor as well, and after a crash only what was
outstanding comes again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from lastbit.streams.snapshot import Snapshot
from lastbit.streams.window import AckWindow

T = TypeVar("T")


class Unsettled(Generic[T]):
    """Offsets of a session and what each stands for at the broker. Those who read the session give its `window` to
    `run_ordered`; if they don't, all up to the floor is told and nothing above it."""

    def __init__(self, window: AckWindow) -> None:
        self.window = window
        self._handed_out: dict[int, T] = {}
        self._lock = threading.Lock()

    def hand_out(self, offset: int, at_broker: T) -> None:
        """Offsets ascend."""
        with self._lock:
            self._handed_out[offset] = at_broker

    def resolved(self, floor: int) -> dict[int, T]:
        """What is done and was not settled, in order."""
        known = Snapshot.decode(self.window.snapshot())
        with self._lock:
            return {
                offset: at_broker
                for offset, at_broker in self._handed_out.items()
                if offset <= floor or known.done(offset)
            }

    def settle(self, offsets: Iterable[int]) -> None:
        """The broker was told of these."""
        with self._lock:
            for offset in offsets:
                self._handed_out.pop(offset, None)
