"""What a process measures of itself, once a second and in a thread of its own, which runs when the event loop doesn't.

A scrape reaches one of several workers, so each leaves its values where the others find them (see `api.metrics`).
"""

from __future__ import annotations

from typing import Final

from api import metrics
from core.storage.database import Database

EVERY: Final = 1.0
"""Seconds between two measurements."""


class Signals:
    def __init__(self, database: Database) -> None:
        self._write_watch = database.write_watch

    def measure(self) -> None:
        metrics.WRITE_STALL.set(self._write_watch.stall())
