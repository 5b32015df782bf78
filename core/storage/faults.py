"""Trouble with the database, classified once: an expected conflict is retried often and soon, an outage seldom."""

from __future__ import annotations

import sqlite3
from typing import Final

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from core.errors import Fault

# Deadlock, which a lost certification is too, record changed since it was read, rolled back by group replication. Also
# at a COMMIT these say for certain that nothing was committed.
_CONFLICTS: Final = {1213, 1020, 3101}
# The last one: a statement has taken longer than it may, as `statements.run` limits those that lock.
_LOCK_WAITS: Final = {1205, 3572, 1969}
_SQLITE_OUTAGE: Final = {
    # Busy: there is one lock for the whole file, so whoever holds it keeps everybody out, not just one row's callers.
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}
_OUTAGES: Final = {
    # connecting, connection lost, server going down, too many connections, read-only, disk full
    *(2002, 2003, 2005, 2006, 2012, 2013, 2014, 2055),
    *(1040, 1042, 1043, 1047, 1053, 1077, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1290, 1792, 1836, 1927),
    *(1021, 1026, 1030, 1041, 1114, 1036, 3, 28),
    # trouble during a commit, like a node that loses its cluster there; a statement that somebody has ended
    *(1180, 1317),
}
_ELSEWHERE: Final = {1047, 1180, 1290, 1792, 1836}
"""Not a node of its cluster now, or read-only: what this server refuses, another one may take."""

_DONE_ALREADY: Final = {
    # a table, column, index or row that is there; one to be dropped that is not
    *(1050, 1060, 1061, 1062),
    *(1051, 1091),
}
_LOST: Final = {0, 2006, 2013, 2014, 2045, 2055, 1927, 4031}


class BeginAgain(Exception):  # it is an order, not an error
    """Raised by an operation that found the ground changed under it: roll back and run it from its start."""


def is_duplicate(error: IntegrityError) -> bool:
    """Whether a row with that key was there already (as against any other constraint)."""
    original = error.orig
    if isinstance(original, sqlite3.IntegrityError):
        return original.sqlite_errorcode in (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)
    return _mysql_code(error) == 1062


def is_done_already(error: DBAPIError) -> bool:
    """Whether a step of a migration fails because it was done before. Of MariaDB and MySQL: on SQLite it is undone with
    the others."""
    return _mysql_code(error) in _DONE_ALREADY


def _mysql_code(error: DBAPIError) -> int | None:
    args = getattr(error.orig, "args", ())
    return args[0] if args and isinstance(args[0], int) else None


def is_lost(error: Exception) -> bool:
    """Whether the connection of a driver's error is gone."""
    args: tuple[object, ...] = error.args
    return len(args) > 0 and args[0] in _LOST


def is_elsewhere(error: BaseException) -> bool:
    """Whether the server can't do now what another one behind the same address may."""
    return isinstance(error, DBAPIError) and _mysql_code(error) in _ELSEWHERE


def classify(error: BaseException) -> Fault | None:
    """What kind of trouble a driver's error is, or None where it is a bug of ours."""
    if isinstance(error, BeginAgain):
        return Fault.CONFLICT
    if isinstance(error, PoolTimeout):
        return Fault.OUTAGE
    if not isinstance(error, DBAPIError):
        return None
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        return Fault.OUTAGE if code in _SQLITE_OUTAGE else None
    code = _mysql_code(error) or 0
    if code in _CONFLICTS:
        return Fault.CONFLICT
    if code in _LOCK_WAITS:
        return Fault.LOCK_WAIT
    if code in _OUTAGES or error.connection_invalidated or isinstance(error, InterfaceError):
        return Fault.OUTAGE
    return None


def outage(cause: BaseException) -> str:
    """What a caller is told of an outage: nothing of the driver's own words, which may name hosts and users."""
    if isinstance(cause, PoolTimeout):
        return "all database connections are busy"
    code = _mysql_code(cause) if isinstance(cause, DBAPIError) else None
    return "the database can't be reached or takes no writes now" + (f" (its error {code})" if code else "")
