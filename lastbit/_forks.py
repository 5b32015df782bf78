"""Threads don't survive a fork: only the thread that forks exists in the child."""

from __future__ import annotations

import os


def is_forked(process: int | None) -> bool:
    """Whether a thread that was started in `process` (a process id) is missing here, after a fork. None: no thread was
    started."""
    return process is not None and process != os.getpid()
