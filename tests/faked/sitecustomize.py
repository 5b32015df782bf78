"""Read by interpreters that run under libfaketime (`tests.clocks.WallClock`), which gets one thing wrong: it shifts the
end of a sleep that is told by a clock it leaves alone. After a jump back, `time.sleep` fails. Waits with a lock are
right."""

from __future__ import annotations

import threading
import time


def sleep(seconds: float) -> None:
    threading.Event().wait(seconds)


time.sleep = sleep
