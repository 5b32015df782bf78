"""When each job last succeeded. A job of a database server is a process of its own, with no metrics that anybody
scrapes, so it tells the database, where the service's gauges find it.

The times are rows of `commit_marks` with negative writers, which no connection has.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.storage import commit_marks, tables
from core.storage.database import Database

Job: TypeAlias = Literal["janitor", "dispatcher", "deadlines"]
WRITERS: Final[Mapping[Job, int]] = {"janitor": -1, "dispatcher": -2, "deadlines": -3}
EVERY: Final = 30.0
"""Seconds between two notes of one process. The dispatcher succeeds each second."""

T = TypeVar("T")


class JobRuns:
    """The successes of one job in this process."""

    def __init__(self, database: Database, job: Job) -> None:
        self._database = database
        self._writer = WRITERS[job]
        self._noted_at = -math.inf

    def succeeded(self) -> None:
        """Note it, unless this was done lately. If another process does it now, or the database is away, a later
        success is noted."""
        if time.monotonic() - self._noted_at < EVERY:
            return
        with contextlib.suppress(errors.Unavailable):
            self._database.write(commit_marks.note, self._writer, lock_waits=0)
            self._noted_at = time.monotonic()

    def noting(self, work: Callable[[], T]) -> Callable[[], T]:
        """The work, whose successes are noted."""

        def noted() -> T:
            result = work()
            self.succeeded()
            return result

        return noted


def ages(tx: Connection) -> dict[Job, float]:
    """The seconds since the last success of each job; infinite without any."""
    columns = tables.commit_marks.c
    rows = tx.execute(
        sa.select(columns.writer, columns.marked_at, tables.utc_now().label("now")).where(
            columns.writer.in_(WRITERS.values())
        )
    )
    found = {row.writer: max(0.0, (row.now - row.marked_at).total_seconds()) for row in rows}
    return {job: found.get(writer, math.inf) for job, writer in WRITERS.items()}
