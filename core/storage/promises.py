"""What a server must do for Lastbit to keep its promises, and probes that show whether it does.

A probe uses rows of its own in `commit_marks`, which nobody else reads, and removes them. It fails only if it has seen
the server break a promise: a slow server can hide that, but not make a sound one look broken. A node of a Galera
cluster is not probed: behind one address, two sessions may lead to two nodes, where a lock of one holds nobody up on
the other (see `galera`).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError

from core import errors
from core.storage import dialects, faults, statements
from core.storage.database import LOCK_WAIT, Database
from core.storage.dialects import galera

HEAD_START: Final = 0.05
"""Seconds that a statement has to return although it must wait."""
LOCK_WAITS: Final = 3
"""How many times the lock timeout a statement may take."""
_MARK: Final = 2


@dataclass(frozen=True, slots=True)
class Promise:
    """`says`: what a server must do. `is_kept`: whether it does, as far as the probe sees."""

    says: str
    is_kept: Callable[[_Sessions], bool]


def broken(database: Database, *, thorough: bool) -> list[str]:
    """The promises that the server breaks; takes a quarter of a second, and if `thorough`, as long as a lock wait.
    Raises `DBAPIError` if it refuses a statement of a probe, and `errors.Unavailable`."""
    if database.is_embedded:
        return []
    with database.connection() as tx:
        if galera.is_node(tx):
            return []
    names = []
    for promise in (*_PROMISES, *(_THOROUGH if thorough else ())):
        with _sessions(database) as sessions:
            if not promise.is_kept(sessions):
                names.append(promise.says)
    return names


class _Sessions:
    """Two sessions, and two rows that are committed. `mine` is used in this thread, `other` in another one."""

    def __init__(self, mine: Connection, other: Connection, pool: ThreadPoolExecutor) -> None:
        self.mine = mine
        self.other = other
        self.row = secrets.randbits(62)
        self.second_row = self.row + 1
        self.missing_row = self.row + 2
        self._pool = pool

    def insert(self, *rows: int) -> str:
        values = ",".join(f"({row},{_MARK},{dialects.of(self.mine).now})" for row in rows)
        return f"INSERT INTO commit_marks (writer, mark, marked_at) VALUES {values}"  # noqa: S608

    def execute(self, statement: str) -> list[Any]:
        """The rows that the statement returns in my session, if any."""
        return _execute(self.mine, statement)

    def meanwhile(self, statement: str) -> Future[list[Any]]:
        """Execute a statement in the other session, which has a head start before this returns."""
        future = self._pool.submit(_execute, self.other, statement)
        with contextlib.suppress(TimeoutError, DBAPIError):
            future.result(HEAD_START)
        return future


@contextlib.contextmanager
def _sessions(database: Database) -> Iterator[_Sessions]:
    with (
        ThreadPoolExecutor(1) as pool,
        contextlib.closing(database.engine.connect()) as mine,
        contextlib.closing(database.engine.connect()) as other,
    ):
        sessions = _Sessions(mine, other, pool)
        mine.exec_driver_sql(sessions.insert(sessions.row, sessions.second_row))
        mine.commit()
        try:
            yield sessions
        finally:
            mine.rollback()  # first: the other one may wait for it
            pool.shutdown()
            other.rollback()
            rows = f"writer BETWEEN {sessions.row} AND {sessions.missing_row}"
            mine.exec_driver_sql(f"DELETE FROM commit_marks WHERE {rows}")  # noqa: S608
            mine.commit()


def _execute(tx: Connection, statement: str) -> list[Any]:
    result = tx.exec_driver_sql(statement)
    return list(result) if result.returns_rows else []


def _select(*rows: int) -> str:
    numbers = ",".join(map(str, rows))
    return f"SELECT writer, mark FROM commit_marks WHERE writer IN ({numbers}) ORDER BY writer"  # noqa: S608


def _update(row: int) -> str:
    return f"UPDATE commit_marks SET mark = {_MARK + 2} WHERE writer = {row}"  # noqa: S608


def _locks_rows(sessions: _Sessions) -> bool:
    lock = f"{_select(sessions.row)} FOR UPDATE"
    sessions.execute(lock)
    sessions.execute(_update(sessions.row))
    locked = sessions.meanwhile(lock)
    sessions.mine.commit()
    return locked.result() == [(sessions.row, _MARK + 2)]


def _skips_locked_rows(sessions: _Sessions) -> bool:
    sessions.execute(f"{_select(sessions.row)} FOR UPDATE")
    locked = sessions.meanwhile(f"{_select(sessions.row, sessions.second_row)} FOR UPDATE SKIP LOCKED")
    try:
        others = [writer for writer, _ in locked.result()]
    except DBAPIError as error:
        if faults.classify(error) is errors.Fault.LOCK_WAIT:
            return False
        raise
    return others == [sessions.second_row] and not sessions.execute(
        f"{_select(sessions.second_row)} FOR UPDATE SKIP LOCKED"
    )


def _holds_up_duplicates(sessions: _Sessions) -> bool:
    insert = sessions.insert(sessions.missing_row)
    sessions.execute(insert)
    insertion = sessions.meanwhile(insert)
    if insertion.done():
        return False
    sessions.mine.commit()
    try:
        insertion.result()
    except IntegrityError as error:
        return faults.is_duplicate(error)
    return False


def _stops_at_errors(sessions: _Sessions) -> bool:
    sessions.mine.begin()
    try:
        statements.run(sessions.mine, sessions.insert(sessions.row), _update(sessions.second_row))
    except IntegrityError:
        try:
            return sessions.execute(_select(sessions.second_row)) == [(sessions.second_row, _MARK)]
        except DBAPIError:  # on PostgreSQL, the whole transaction has failed
            return True
    return False


def _keeps_advisory_locks(sessions: _Sessions) -> bool:
    if sessions.mine.dialect.name != "postgresql":  # no transaction uses them on MariaDB and MySQL
        return True
    sessions.execute(f"SELECT pg_advisory_xact_lock({sessions.row})")
    [(is_locked_again,)] = sessions.meanwhile(f"SELECT pg_try_advisory_xact_lock({sessions.row})").result()
    return not is_locked_again


def _stops_waiting(sessions: _Sessions) -> bool:
    lock = f"{_select(sessions.row)} FOR UPDATE"
    sessions.execute(lock)
    locked = sessions.meanwhile(lock)
    try:
        locked.result(LOCK_WAITS * LOCK_WAIT)
    except DBAPIError as error:
        return faults.classify(error) is errors.Fault.LOCK_WAIT
    except TimeoutError:
        pass
    return False


_PROMISES: Final = (
    Promise("SELECT … FOR UPDATE waits for who has locked the row, and then reads what it wrote", _locks_rows),
    Promise("SELECT … FOR UPDATE SKIP LOCKED leaves out locked rows, and locks the others", _skips_locked_rows),
    Promise("an INSERT waits for a transaction that has inserted the same key", _holds_up_duplicates),
    Promise("of the statements in one packet, none is executed after one that has failed", _stops_at_errors),
    Promise("pg_advisory_xact_lock keeps others out until the transaction ends", _keeps_advisory_locks),
)
_THOROUGH: Final = (Promise("a wait for a lock ends with the session's lock timeout", _stops_waiting),)
