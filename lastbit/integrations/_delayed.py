"""Calls that are made a moment later, by one thread: an ack whose call has failed is sent again, a record is handled
again.

What could go wrong, and why it can't:

*A thread can't be started, as the process has too many.* So there is no timer for each outage. The thread is started
together with the adapter's other threads, which fail in the same way and are reported at once. If the adapter can't
begin with that, each call that is added tries to start it.

*A call is lost, or ends the thread.* An exception of a call, of any class, is logged, and the thread goes on.

*The process forks.* Threads don't survive that, and the calls are the parent's. A child process begins without any.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from lastbit._forks import is_forked

log = logging.getLogger("lastbit.integrations")


class DelayedCalls:
    """Makes each call `seconds` after it was added, in the order in which they were added."""

    def __init__(self, name: str, seconds: float) -> None:
        """`name`: the thread's."""
        self._name = name
        self._seconds = seconds
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        """Each call with the time at which it is due."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs. Raises `RuntimeError` if the system allows no more threads."""
        if is_forked(self._process):
            # The lock too: a thread of the parent may have held it at the fork.
            self._reset()
        with self._changed:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()  # may fail; then a later call tries again
                self._thread = thread

    def add(self, call: Callable[[], object]) -> bool:
        """Returns whether no other call waits. After `close`, nothing is done."""
        try:
            self.start()
        except RuntimeError as error:
            log.error("calls wait until a thread can be started, which is tried with the next one: %s", error)
        with self._changed:
            if self._closed:
                return False
            self._waiting.append((time.monotonic() + self._seconds, call))
            self._changed.notify()
            return len(self._waiting) == 1

    def close(self) -> int:
        """Make no more calls, and wait for the one that is being made. Returns the number of those that waited."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        return len(self._waiting)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except BaseException:  # the thread goes on
                log.exception("what was delayed has failed")

    def _next(self) -> Callable[[], object] | None:
        """Wait until a call is due, and return it; None if there will be none."""
        with self._changed:
            while not self._closed:
                pause = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if pause is not None and pause <= 0:
                    return self._waiting.popleft()[1]
                self._changed.wait(pause)
        return None
