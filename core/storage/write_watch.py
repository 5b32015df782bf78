"""Whether writes get through: since when one waits, or failed, and none was committed.

A database may answer reads while no write is committed: its disk is full, it became read-only, or its commits hang.
Such a *stall* begins when a write begins, and ends when any write is committed, or when none waits and none has failed
for the database's sake. So one locked row is no stall, as long as other writes are committed.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from core import errors

FRESH: Final = 5.0
"""Seconds for which a commit shows that writes get through."""
FAILING: Final = 10.0
"""Seconds for which a failure shows that they don't, unless one is committed."""


class WriteWatch:
    """The writes of one process, each of which is a context. Times are monotonic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self.failed_at: float | None = None
        """When the last write failed for the database's sake; None if one was committed since."""
        self._stalled_since: float | None = None
        self._committed_at = -math.inf

    def __enter__(self) -> None:
        """A write begins; the context has all its attempts."""
        with self._lock:
            self._running += 1
            if self._stalled_since is None:
                self._stalled_since = time.monotonic()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._lock:
            self._running -= 1
            if isinstance(error, SQLAlchemyError) or (isinstance(error, Exception) and errors.is_outage(error)):
                self.failed_at = time.monotonic()
            elif not self._running and self.failed_at is None:
                self._stalled_since = None

    def committed(self) -> None:
        """A transaction that has written something was committed."""
        with self._lock:
            self.failed_at = None
            # Other writes may wait, but the database works.
            self._stalled_since = self._committed_at = time.monotonic()

    def stall(self) -> float:
        """The seconds since the stall began; 0 without one."""
        since = self._stalled_since
        return 0.0 if since is None else time.monotonic() - since

    def is_fresh(self) -> bool:
        """Whether a write was committed lately."""
        return time.monotonic() - self._committed_at < FRESH
