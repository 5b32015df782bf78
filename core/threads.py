"""Threads that serve many callers, and must not end before they are stopped."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable

from core import errors


def start(run: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread. Raises `errors.Unavailable` if the system allows no more threads; later it may."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise errors.Unavailable("the system allows no more threads") from error
    return thread


class QueueThread(abc.ABC):
    """A queue, and the thread that serves it. The thread starts when it is first needed."""

    def __init__(self, name: str, lock: threading.Lock | None = None) -> None:
        self.wake = threading.Condition(lock)
        """Its lock protects the queue. Notify it when something was added."""
        self.stopping = False
        self._name = name
        self._thread: threading.Thread | None = None

    @abc.abstractmethod
    def _serve(self) -> None:
        """Runs in the thread. Ends when the queue is empty and the thread is `stopping`."""

    def start(self) -> None:
        """Start the thread, unless it is running. Called under the lock. Raises `errors.Unavailable`."""
        if self._thread is None:
            self._thread = start(self._serve, name=self._name)

    def stop(self) -> None:
        """Serve what waits, and end the thread. Nothing may be added any more."""
        with self.wake:
            self.stopping = True
            self.wake.notify_all()
        if self._thread is not None:
            self._thread.join()
