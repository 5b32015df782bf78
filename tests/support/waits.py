"""Sessions that wait for a lock on a server."""

from __future__ import annotations

from sqlalchemy.engine import Connection

_WAITING = {
    "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
    "postgresql": (
        "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    ),
}


def waiting_sessions(tx: Connection) -> int:
    """How many sessions wait. MariaDB repeats its last answer if it is asked more often than every tenth of a second.
    Ends the transaction, so that the next answer is a new one."""
    count = int(tx.exec_driver_sql(_WAITING[tx.dialect.name]).scalar_one())
    tx.rollback()
    return count
