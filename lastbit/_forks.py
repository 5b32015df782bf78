"""Threads don't survive a fork: only the thread that forks exists in the child."""

from __future__ import annotations

import os

_process = os.getpid()
"""The id of this process. It is stored, as each ack compares it, and in some sandboxes a system call is slow."""


def _in_child() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_in_child)


def is_forked(process: int | None) -> bool:
    """Whether a thread that was started in `process` (a process id) is missing here, after a fork. None: no thread was
    started."""
    return process is not None and process != _process
