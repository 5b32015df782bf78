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
    """Offsets of a session, and what the broker calls each. The caller passes `window` to `run_ordered`; otherwise only
    records up to the floor are acked."""

    def __init__(self, window: AckWindow) -> None:
        self.window = window
        self._handed_out: dict[int, T] = {}
        self._lock = threading.Lock()

    def hand_out(self, offset: int, at_broker: T) -> None:
        """Record a delivery. Offsets must ascend."""
        with self._lock:
            self._handed_out[offset] = at_broker

    def resolved(self, floor: int) -> dict[int, T]:
        """Finished records that the broker does not know of yet, in order."""
        snapshot = Snapshot.decode(self.window.snapshot())
        with self._lock:
            return {
                offset: at_broker
                for offset, at_broker in self._handed_out.items()
                if offset <= floor or snapshot.done(offset)
            }

    def settle(self, offsets: Iterable[int]) -> None:
        """The broker has been sent these acks."""
        with self._lock:
            for offset in offsets:
                self._handed_out.pop(offset, None)
