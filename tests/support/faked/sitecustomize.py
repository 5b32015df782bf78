"""Imported by interpreters that run under libfaketime (`tests.support.clocks.WallClock`). libfaketime has one defect:
it also shifts the end of a sleep that uses a clock it otherwise leaves alone, so that `time.sleep` fails after a jump
back. Waits for a lock are unaffected."""

from __future__ import annotations

import threading
import time


def sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


time.sleep = sleep
