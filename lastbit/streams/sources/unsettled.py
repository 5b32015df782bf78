"""Records that a broker delivered and that are not acked to it yet.

A floor says that everything up to it is done. Most brokers accept acks of single records, so every resolved record is
acked, above the floor too, and after a crash only outstanding ones are delivered again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Generic, TypeVar

from lastbit.streams.snapshot import Snapshot
from lastbit.streams.window import AckWindow

T = TypeVar("T")


class Unsettled(Generic[T]):
    """Offsets of a session, and the broker's name for each. The caller should pass `window` to `run_ordered`; otherwise
    only records up to the floor are acked."""

    def __init__(self, window: AckWindow) -> None:
        self.window = window
        self._handed_out: dict[int, T] = {}
        self._lock = threading.Lock()

    def hand_out(self, offset: int, at_broker: T) -> None:
        """Record a delivery. Offsets must ascend."""
        with self._lock:
            self._handed_out[offset] = at_broker

    def at_broker(self, offset: int) -> T | None:
        """The broker's name for a record that is not settled."""
        return self._handed_out.get(offset)

    def resolved(self, floor: int) -> dict[int, T]:
        """Finished records whose acks the broker has not received yet, in order."""
        snapshot = Snapshot.decode(self.window.snapshot())
        with self._lock:
            return {
                offset: at_broker
                for offset, at_broker in self._handed_out.items()
                if offset <= floor or snapshot.done(offset)
            }

    def settle(self, offsets: Iterable[int]) -> None:
        """Record that these acks were sent to the broker."""
        with self._lock:
            for offset in offsets:
                self._handed_out.pop(offset, None)
