"""OceanBase in its MySQL mode: session settings, lock waits, and codes of errors.

It speaks MySQL's protocol and names itself MySQL 5.7, so it is told by a variable that only it has; a proxy in front of
it may announce another version. It accepts MySQL's settings of time limits, and ignores them: by default, it ends each
statement after 10 s, a lock wait only with its statement, and a transaction without a next statement after a day. Its
own settings are in microseconds.

The limit of idle transactions ends a transaction, but not its session: the statements after it fail, and so does the
COMMIT. seekdb 1.4 applies it to some of them only.

Plain reads may be configured to be answered by a replica that lags behind. Ids that were just issued could be unknown
there, so our sessions read from the leader.

Two transactions that wait for each other may be found only by the lock wait's end.

A row that another transaction has inserted but not committed is invisible, and a locking read doesn't wait for it, as
on PostgreSQL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

from core.errors import Fault
from core.storage.dialects.dialect import IDLE

DAY: Final = 24 * 60 * 60
"""Seconds that a transaction may take, such as a backup's snapshot, and a statement of a migration."""
_MICROSECONDS: Final = 1_000_000
LOOK: Final = "SHOW VARIABLES LIKE 'ob_trx_lock_timeout'"
"""The statement whose result is empty on all other servers."""
LOCK_SUMS: Final = "SELECT id FROM schema_support WHERE id = 1 FOR UPDATE"
"""Locks a row that always exists and that only migrations write, before sums that no other transaction may get. Only
large totals are summed so, and seldom, so they may all take turns."""

# The transaction was rolled back, as after a wait for the next statement. A COMMIT that fails so has committed nothing.
_CONFLICTS: Final = {6002}
# In none of these is it certain that a COMMIT has failed.
_OUTAGES: Final = {
    # a statement took too long; no memory, no memory of the tenant; try again; a full disk, for data or for the log
    *(4012, 4013, 4030, 4023, 4184, 4264),
    # no leader: it moves, or there is no majority; another server doesn't answer; the session was killed
    *(4038, 4209, 4260, 4654, 4663, 4664, 4721, 4121, 4122, 4124, 4401, 5066),
    # the snapshot's versions are gone; the tables are being changed or moved
    *(4138, 4177, 4225, 4719, 4725),
    # the transaction took too long, was killed, is unknown to a restarted server, or must be rolled back; nobody knows
    # its outcome; another server gave no answer
    *(6210, 6211, 6212, 6213, 6222, 6223, 6224, 6225, 6230),
    # the server starts, or stops
    *(8001, 8002),
}


def prepare(driver: Any, lock_wait: int, statement: int) -> bool:
    """Check whether a new connection leads to OceanBase, and if so set up its session: the seconds that a lock wait and
    a statement may take."""
    with contextlib.closing(driver.cursor()) as cursor:
        cursor.execute(LOOK)
        if not cursor.fetchall():
            return False
        cursor.execute("SET SESSION " + ", ".join(f"{name} = {value}" for name, value in session(lock_wait, statement)))
        return True


def session(lock_wait: int, statement: int) -> list[tuple[str, str]]:
    """The settings of our sessions."""
    return [
        ("ob_trx_lock_timeout", f"{lock_wait * _MICROSECONDS}"),
        ("ob_query_timeout", f"{statement * _MICROSECONDS}"),
        ("ob_trx_idle_timeout", f"{IDLE * _MICROSECONDS}"),
        ("ob_trx_timeout", f"{DAY * _MICROSECONDS}"),
        ("ob_read_consistency", "STRONG"),
    ]


def statements_end_after(seconds: int) -> str:
    """The statement that sets it, for a session."""
    return f"SET SESSION ob_query_timeout = {seconds * _MICROSECONDS}"


def hurried(text: str, seconds: float) -> str:
    """A SELECT … FOR UPDATE whose lock waits end after this time, rounded up to tenths of a second."""
    return f"{text} WAIT {seconds}"


def numbered(distance: str, first: str) -> tuple[str, str]:
    """The statements before and after an INSERT that give its rows these ids: OceanBase ignores a hint in the INSERT.
    If that fails, the session's next rows have such ids as well."""
    names = ("increment", distance), ("offset", first)
    before = ", ".join(f"@lastbit_{name} = @@SESSION.auto_increment_{name}" for name, _ in names)
    begin = ", ".join(f"SESSION auto_increment_{name} = {value}" for name, value in names)
    end = ", ".join(f"SESSION auto_increment_{name} = @lastbit_{name}" for name, _ in names)
    return f"SET {before}, {begin}", f"SET {end}"


def packets(texts: Sequence[str]) -> list[list[str]]:
    """The statements, divided so that each locking read has a packet of its own.

    There it waits for a lock in a queue. Among others in a packet, it is tried again without a pause, thousands of
    times a second, as long as it waits (seen with seekdb 1.4).
    """
    parts: list[list[str]] = []
    for text in texts:
        if not parts or any(part.endswith(" FOR UPDATE") for part in (text, parts[-1][-1])):
            parts.append([text])
        else:
            parts[-1].append(text)
    return parts


def fault(code: int) -> Fault | None:
    """The kind of a fault, if it has a code of OceanBase's own. On other servers, these mean something else."""
    if code in _CONFLICTS:
        return Fault.CONFLICT
    return Fault.OUTAGE if code in _OUTAGES else None
