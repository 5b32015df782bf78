"""Imported by interpreters that run under libfaketime (`tests.support.clocks.WallClock`). libfaketime has one defect:
it also shifts the end of a sleep that goes by a clock it leaves alone. After a jump back, `time.sleep` fails. Waits
with a lock are right."""

from __future__ import annotations

import threading
import time


def sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


time.sleep = sleep
