"""Ends a consumer in order: by an event, or by the signals of a terminal and of a supervisor."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """In the main thread, the first SIGINT or SIGTERM sets the event; a second one has its former effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        # Not here: the interrupted code may hold the lock of the event, or one that `threading.Thread` needs.
        _thread.start_new_thread(stop.set, ())

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    former: dict[int, Any] = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        restore()
