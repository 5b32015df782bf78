"""A consumer ends in order when it is signalled."""

from __future__ import annotations

import subprocess
import sys

from tests.support.servers import ROOT

HOLDS_THE_LOCK = """
import signal
import threading

from lastbit.integrations._stopping import stopped_by_signals

class Event(threading.Event):
    def wait(self, timeout=None):
        with self._cond:  # as a wait does when it begins and ends
            signal.raise_signal(signal.SIGTERM)
        return super().wait(timeout)

stop = Event()
with stopped_by_signals(stop):
    assert stop.wait(30)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def test_a_signal_while_the_event_is_locked_ends_the_consumer() -> None:
    """The handler runs in the main thread, and would wait for a lock that the same thread holds."""
    subprocess.run([sys.executable, "-c", HOLDS_THE_LOCK], cwd=ROOT, check=True, timeout=60)
