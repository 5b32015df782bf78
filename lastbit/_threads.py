"""Threads that start together: if the process may have no more, those that were started must not go on without the
others."""

from __future__ import annotations

import threading
from collections.abc import Iterable


def join_started(threads: Iterable[threading.Thread], timeout: float | None = None) -> None:
    """Wait for those that were started, `timeout` seconds for each; `join` raises an error for the others."""
    for thread in threads:
        if thread.ident is not None:
            thread.join(timeout)
