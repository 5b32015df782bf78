"""Brings transactions to a known place: they stop before a statement, or wait for a lock on a server."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage.database import Database

ON_OCEANBASE: Final = "SELECT session_id FROM oceanbase.V$OB_LOCKS WHERE block = 1"
WAITING: Final = {
    "mysql": "SELECT trx_id FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    "oceanbase": ON_OCEANBASE,
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
}
"""A row for each session that waits for a lock, by server."""


def server(connection: Connection) -> str:
    """The key of the connection's server in WAITING."""
    return (
        "oceanbase"
        if getattr(connection.connection.dbapi_connection, "is_oceanbase", False)
        else connection.dialect.name
    )


def freeze_before(database: Database, *beginnings: str) -> tuple[threading.Event, threading.Event]:
    """Stop before each statement that begins like one of these. The first event tells that one has stopped, the second
    one lets all go on."""
    has_stopped, wake = threading.Event(), threading.Event()

    def freeze(connection: object, cursor: object, text: str, *_: object) -> None:
        if text.startswith(beginnings):
            has_stopped.set()
            wake.wait(60)

    sa.event.listen(database.engine, "before_cursor_execute", freeze)
    return has_stopped, wake


def waits_for_a_lock(database: Database, *calls: Future[Any]) -> bool:
    """Wait until as many sessions wait for a lock as there are calls; return False if a call ends before that."""
    with database.engine.connect() as watch:
        while len(watch.exec_driver_sql(WAITING[server(watch)]).all()) < len(calls):
            watch.rollback()  # so that the next answer is a new one
            # MariaDB repeats its last answer if it is asked more often than every tenth of a second.
            if wait(calls, 0.15, FIRST_COMPLETED).done:
                return False
    return True
