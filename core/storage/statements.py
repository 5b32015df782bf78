"""Hot statements: several in one round trip, and rows as one text.

An ack transaction is a handful of small statements, and what they cost is not the database's work: it is SQLAlchemy's
constructs, the driver's parsing of columns and rows in Python, and a switch of threads for each round trip, while a
thousand callers wait. So here statements go to the driver as text, in one packet where nothing is decided between them,
and integers come back as one concatenated value instead of rows. The values in the text are integers and hexadecimal
digits of our own making; nothing that a client sent as text ever stands in it.

SQLite has no round trips: it runs the same statements one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import pymysql
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core.storage import faults

T = TypeVar("T")
Rows = Sequence[Sequence[Any]]

LOCK_WAIT: Final = "lastbit_lock_wait"
"""An option of a connection: seconds that a SELECT … FOR UPDATE may take, lock waits included."""
LIST: Final = 500
"""Values in one IN list: MariaDB turns a longer one into a subquery."""

CONCATENATED: Final = 16 * 2**20
"""Bytes of a concatenated value, at most; our sessions set it. 512 groups are some 20 KB."""
ROWS: Final = 24
"""Up to so many rows come as rows. To concatenate them the server makes a temporary table, which costs it about as much
as the driver's parsing of these."""


def chunks(values: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def run(tx: Connection, *statements: str) -> list[Rows]:
    """Execute the statements in their order, and return the rows of each; one that fails ends them.

    With the option `LOCK_WAIT`, MariaDB ends a SELECT … FOR UPDATE that takes longer: the server's own lock wait
    timeout is in whole seconds. MySQL has no such limit, so there the session's timeout holds.

    Raises SQLAlchemy's `DBAPIError` and its kinds, as if each had been executed by itself.
    """
    if tx.dialect.name == "sqlite":
        results = [tx.exec_driver_sql(statement) for statement in statements]
        return [result.all() if result.returns_rows else () for result in results]
    if not statements:
        return []
    text = ";".join(_hurried(tx, statements))
    driver = tx.connection.dbapi_connection
    assert driver is not None
    cursor = driver.cursor()
    rows: list[Rows] = []
    try:
        _announce(tx.dispatch.before_cursor_execute, tx, cursor, statements)
        cursor.execute(text)
        rows.append(cursor.fetchall())
        while cursor.nextset():
            rows.append(cursor.fetchall())
        _announce(tx.dispatch.after_cursor_execute, tx, cursor, statements)
    except pymysql.MySQLError as error:
        wrapped = DBAPIError.instance(
            text[:200],
            None,
            error,
            pymysql.MySQLError,
            dialect=tx.dialect,
            connection_invalidated=faults.is_lost(error),
        )
        # It may stand in the middle of its answers: nobody else should find it there.
        if not isinstance(error, pymysql.err.IntegrityError | pymysql.err.OperationalError) or faults.is_lost(error):
            tx.invalidate()
        raise wrapped from error
    finally:
        with contextlib.suppress(pymysql.MySQLError):
            cursor.close()
    return rows


def _hurried(tx: Connection, texts: Sequence[str]) -> Sequence[str]:
    seconds = tx.get_execution_options().get(LOCK_WAIT)
    if seconds is None or not getattr(tx.dialect, "is_mariadb", False):
        return texts
    hurry = f"SET STATEMENT max_statement_time={seconds} FOR "
    return [hurry + text if text.endswith(" FOR UPDATE") else text for text in texts]


def _announce(listeners: Iterable[Callable[..., object]], tx: Connection, cursor: Any, texts: Sequence[str]) -> None:
    """Who listens to the engine, as tracing does, hears of these statements too."""
    for listener in listeners:
        for text in texts:
            listener(tx, cursor, text, (), None, False)


def select(tx: Connection, columns: Sequence[str], rest: str, expected: int) -> str:
    """`SELECT columns FROM rest`, to be read with `records`. The values are never NULL and have no blanks; `expected`
    is about how many rows there will be."""
    if tx.dialect.name == "sqlite":
        return f"SELECT {', '.join(columns)} FROM {rest}"  # noqa: S608
    row = f"CONCAT_WS(' ', {', '.join(columns)})"
    if expected <= ROWS:
        return f"SELECT {row} FROM {rest}"  # noqa: S608
    return f"SELECT COUNT(*), GROUP_CONCAT({row} SEPARATOR ';') FROM {rest}"  # noqa: S608


def records(tx: Connection, rows: Rows) -> Sequence[Sequence[Any]]:
    """What `select` found: the values of each row, as they are from SQLite and as text from a server."""
    if tx.dialect.name == "sqlite":
        return rows
    if not rows or len(rows[0]) == 1:
        return [_text(row[0]).split(" ") for row in rows]
    count, text = rows[0]
    if not count:
        return ()
    found = [record.split(" ") for record in _text(text).split(";")]
    if len(found) != count:
        raise RuntimeError(f"{count} rows came as {len(found)}: group_concat_max_len is not as our session set it")
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
