"""A process that may start no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

MESSAGE = "can't start new thread"


@contextmanager
def no_more_threads(after: int = 0) -> Iterator[None]:
    """In this process, no thread can be started after the next `after` ones."""
    start = threading.Thread.start
    lock = threading.Lock()
    left = after

    def start_or_refuse(thread: threading.Thread) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_refused = left < 0
        if is_refused:
            raise RuntimeError(MESSAGE)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_refuse)
        yield


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Threads that are started meanwhile end within ten seconds."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread
