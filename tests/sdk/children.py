"""Run a function in a process forked from the test process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def in_a_child(use: Callable[[], object]) -> str:
    """The name of the exception that `use` raises in the child, or "nothing"; a child that hangs is killed after a
    minute."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        outcome = "nothing"
        try:
            use()
        except BaseException as error:  # noqa: BLE001  # its name is the result
            outcome = type(error).__name__
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        text = result.read()
    os.waitpid(child, 0)
    return text
