"""A process that freezes in the middle of a transaction, with the feed's head locked. Waked, it appends an event.

python -m tests.guarantees.programs.freezing URL
"""

from __future__ import annotations

import os
import signal
import sys

from sqlalchemy.engine import Connection

from core import feed
from core.storage.database import Database
from core.storage.dialects import mariadb, postgresql

LIMIT = 1
"""Seconds, instead of a minute, that the server waits for the next statement."""


def main(url: str) -> None:
    mariadb.IDLE = postgresql.IDLE = LIMIT  # type: ignore[misc]
    moments = iter([signal.SIGSTOP])

    def work(tx: Connection) -> None:
        feed.hold(tx)
        for moment in moments:
            print("frozen", flush=True)
            os.kill(os.getpid(), moment)
        feed.append(tx, [feed.NewEvent("late", "paid")])

    with Database(url) as database:
        database.write(work)


if __name__ == "__main__":
    main(sys.argv[1])
