"""Classifies database errors. Conflicts are expected and are retried at once; outages are retried rarely."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

import psycopg
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, ResourceClosedError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from core.errors import Fault
from core.storage.lock_order import LOCK_HEAD

# Deadlock (also used for Galera's certification failures), record changed since last read, rolled back by group
# replication, table migrated since the snapshot began. Even if a COMMIT fails with these, nothing was committed.
_CONFLICTS: Final = {1213, 1020, 3101, 1412}
# The last one: a statement exceeded the time limit that `statements.run` sets for locking reads.
_LOCK_WAITS: Final = {1205, 3572, 1969}
_SQLITE_OUTAGE: Final = {
    # BUSY is an outage, not a lock wait: the only lock of the file blocks all writers, not only those of one row.
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}
_OUTAGES: Final = {
    # can't connect, connection lost, server shutting down, too many connections, read-only, disk full
    *(2002, 2003, 2005, 2006, 2012, 2013, 2014, 2055),
    *(1040, 1042, 1043, 1047, 1053, 1077, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1290, 1792, 1836, 1927),
    *(1021, 1026, 1030, 1041, 1114, 1036, 3, 28),
    # a failed commit, as when a node loses its cluster; a statement that was killed
    *(1180, 1317),
}
_ELSEWHERE: Final = {1047, 1180, 1290, 1792, 1836}
"""The node is not part of its cluster, or the server is read-only. Another server may accept the statement."""

_DONE_ALREADY: Final = {
    # the table, column, index or row exists already; the column or table to drop doesn't exist
    *(1050, 1060, 1061, 1062),
    *(1051, 1091),
}
_SQLSTATES: Final = {
    # serialization failure, deadlock
    **dict.fromkeys(("40001", "40P01"), Fault.CONFLICT),
    # read-only transaction; a statement that was cancelled, a session that was ended
    **dict.fromkeys(("25006", "25P03", "25P04", "57014"), Fault.OUTAGE),
}
"""Errors of PostgreSQL. Whole classes follow."""
_NO_LOCK: Final = "55P03"
_SQLSTATE_OUTAGES: Final = ("08", "53", "57P", "58")
"""The connection; insufficient resources, such as a full disk; shutdown and crash; errors of the operating system."""
_LOST: Final = {0, 2006, 2013, 2014, 2045, 2055, 1927, 4031}


class BeginAgain(Exception):  # a request to retry, not an error
    """Raised by an operation whose data changed while it ran: roll back and run it again from its start."""


class FileRemoved(sqlite3.OperationalError):
    """The SQLite file that the first connection opened was removed or replaced."""

    sqlite_errorcode = sqlite3.SQLITE_CANTOPEN


def is_duplicate(error: IntegrityError) -> bool:
    """Whether the error is a duplicate key, not another constraint."""
    original = error.orig
    if isinstance(original, sqlite3.IntegrityError):
        return original.sqlite_errorcode in (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)
    return _mysql_code(error) == 1062 or sqlstate(error) == "23505"


def is_done_already(error: DBAPIError) -> bool:
    """Whether a step of a migration failed because it was done before. Only on MariaDB and MySQL; SQLite rolls back an
    interrupted migration."""
    return _mysql_code(error) in _DONE_ALREADY


def _mysql_code(error: DBAPIError) -> int | None:
    args = getattr(error.orig, "args", ())
    return args[0] if args and isinstance(args[0], int) else None


def sqlstate(error: DBAPIError) -> str | None:
    """PostgreSQL's code of an error; None if the server sent none, or is another one."""
    return error.orig.sqlstate if isinstance(error.orig, psycopg.Error) else None


def server_error(error: DBAPIError) -> tuple[int, str]:
    """The number and the text of a server's error, or of the driver's."""
    args: Sequence[object] = getattr(error.orig, "args", ())
    return _mysql_code(error) or 0, str(args[1] if len(args) > 1 else error.orig)


def is_lost(error: Exception) -> bool:
    """Whether a driver's error means that the connection is lost."""
    args: tuple[object, ...] = error.args
    return len(args) > 0 and args[0] in _LOST


def is_elsewhere(error: BaseException) -> bool:
    """Whether another server behind the same address may accept a statement that this one refuses now."""
    return isinstance(error, DBAPIError) and (_mysql_code(error) in _ELSEWHERE or sqlstate(error) == "25006")


def is_before_commit(error: BaseException) -> bool:
    """Whether the server refused a statement that was sent together with a COMMIT. It executes nothing after that, so
    nothing was committed. If the connection was lost, nobody knows how far the server came."""
    return (
        isinstance(error, DBAPIError) and not error.connection_invalidated and error.statement not in (None, "COMMIT")
    )


def classify(error: BaseException) -> Fault | None:
    """Classify a driver's error. None: the error is a bug in this code."""
    if isinstance(error, BeginAgain):
        return Fault.CONFLICT
    # The second one: an engine's first connection died while SQLAlchemy asked the server for its version and settings.
    if isinstance(error, PoolTimeout | ResourceClosedError):
        return Fault.OUTAGE
    if not isinstance(error, DBAPIError):
        return None
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        return Fault.OUTAGE if code in _SQLITE_OUTAGE else None
    state = sqlstate(error)
    if state is not None:
        is_outage = state.startswith(_SQLSTATE_OUTAGES) or error.connection_invalidated
        return _lock_wait(error) if state == _NO_LOCK else _SQLSTATES.get(state, Fault.OUTAGE if is_outage else None)
    if isinstance(error.orig, psycopg.OperationalError):  # from the driver, such as a refused connection
        return Fault.OUTAGE
    code = _mysql_code(error) or 0
    if code in _CONFLICTS:
        return Fault.CONFLICT
    if code in _LOCK_WAITS:
        return _lock_wait(error)
    if code in _OUTAGES or error.connection_invalidated or isinstance(error, InterfaceError):
        return Fault.OUTAGE
    return None


def _lock_wait(error: DBAPIError) -> Fault:
    return Fault.HEAD_WAIT if error.statement == LOCK_HEAD else Fault.LOCK_WAIT


def outage(cause: BaseException) -> str:
    """The message for clients about an outage. It omits the driver's text, which may contain hosts and users."""
    if isinstance(cause, PoolTimeout):
        return "all database connections are busy"
    if not isinstance(cause, DBAPIError):
        code = None
    elif isinstance(cause.orig, FileRemoved):
        return (
            "the SQLite file was removed or replaced: put it back; or stop the service, remove the -wal and -shm files "
            "beside it, and start the service again"
        )
    else:
        code = _mysql_code(cause) or sqlstate(cause) or getattr(cause.orig, "sqlite_errorname", None)
    return "the database can't be reached or accepts no writes now" + (f" (its error {code})" if code else "")
