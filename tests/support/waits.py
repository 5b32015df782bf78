"""Waiting until sessions wait for a lock on a server."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from core.storage.database import Database

_WAITING = {
    "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    "postgresql": (
        "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ),
}


def waits_for_a_lock(database: Database, *calls: Future[Any]) -> bool:
    """Wait until as many sessions wait for a lock as there are calls; return False if a call ends before that."""
    with database.engine.connect() as watch:
        while watch.exec_driver_sql(_WAITING[watch.dialect.name]).scalar_one() < len(calls):
            watch.rollback()  # so that the next answer is a new one
            # MariaDB repeats its last answer if it is asked more often than every tenth of a second.
            if wait(calls, 0.15, FIRST_COMPLETED).done:
                return False
    return True
