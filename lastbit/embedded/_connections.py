"""Transactions of callers: connections of SQLAlchemy, Django and plain drivers, as statements of Lastbit need them.

A connection must be in a transaction that its owner ends. Lastbit only executes statements on it, one at a time and
without parameters, and leaves all of its settings as they are. Errors of the driver are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from lastbit import errors

Rows = Sequence[Sequence[Any]]

_BACKENDS: Final = {
    "psycopg": "postgresql",
    "psycopg2": "postgresql",
    "pymysql": "mysql",
    "MySQLdb": "mysql",
    "sqlite3": "sqlite",
}
"""The plain drivers, by the package of their connections."""
_VENDORS: Final = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite"}
"""Django's names of databases."""
_EXPECTED: Final = (
    "expected a Connection or Session of SQLAlchemy, a connection of Django, or one of psycopg, psycopg2, PyMySQL, "
    "mysqlclient or sqlite3"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller's connection. `execute` executes statements, and returns all rows of each as tuples."""

    backend: str
    execute: Callable[[Sequence[str]], list[Rows]]
    database: str | None
    """The name of the database, or the path of the file, if the connection tells it."""
    is_mariadb: bool = False


def caller_of(connection: Any) -> Caller:
    """Raises `InvalidArgument` for what is no connection, or is in no state for a transaction."""
    package = type(connection).__module__.partition(".")[0]
    if package == "sqlalchemy" or hasattr(connection, "exec_driver_sql") or hasattr(connection, "sync_session"):
        return _of_sqlalchemy(connection)
    if hasattr(connection, "in_atomic_block") and hasattr(connection, "vendor"):
        return _of_django(connection)
    backend = next((_BACKENDS[base] for base in _packages(connection) if base in _BACKENDS), None)
    if backend is None:
        raise errors.InvalidArgument(f"{_EXPECTED}; got {type(connection).__name__}")
    check(connection, backend)
    return _of_driver(connection, backend)


def _packages(connection: Any) -> list[str]:
    return [kind.__module__.partition(".")[0] for kind in type(connection).__mro__]


def _of_sqlalchemy(connection: Any) -> Caller:
    if hasattr(connection, "run_sync"):
        raise errors.InvalidArgument("an asynchronous connection is for the methods that begin with async_")
    if hasattr(connection, "get_bind") and hasattr(connection, "connection"):  # a Session, or a scoped one
        connection = connection.connection()
    if getattr(connection, "closed", False) or getattr(connection, "invalidated", False):
        raise errors.InvalidArgument("the connection is closed, so its transaction has ended")
    backend = connection.dialect.name
    driver = connection.connection.dbapi_connection
    check(driver, "mysql" if backend == "mariadb" else backend, sqlite_begins=True)

    def execute(text: str) -> Rows:
        result = connection.exec_driver_sql(text, execution_options={"no_parameters": True})
        return [tuple(row) for row in result] if result.returns_rows else []

    def execute_together(texts: Sequence[str]) -> list[Rows]:
        result = connection.exec_driver_sql(";".join(texts), execution_options={"no_parameters": True})
        if not result.returns_rows:
            return [()] * len(texts)
        rows = _all_rows(result.cursor)
        result.close()
        return rows

    dialect = connection.dialect
    sends_together = dialect.driver == "psycopg" and not dialect.is_async
    run = _in_few_packets(execute, execute_together) if sends_together else _one_by_one(execute)
    return Caller(backend, run, connection.engine.url.database, bool(getattr(dialect, "is_mariadb", False)))


def _one_by_one(execute: Callable[[str], Rows]) -> Callable[[Sequence[str]], list[Rows]]:
    return lambda texts: [execute(text) for text in texts]


def _in_few_packets(
    execute: Callable[[str], Rows], execute_together: Callable[[Sequence[str]], list[Rows]]
) -> Callable[[Sequence[str]], list[Rows]]:
    """Statements that all read, or all write, are sent together: a driver tells of the results of the first kind."""

    def run(texts: Sequence[str]) -> list[Rows]:
        reads = [text.startswith("SELECT") for text in texts]
        if len(texts) > 1 and (all(reads) or not any(reads)):
            return execute_together(texts)
        return [execute(text) for text in texts]

    return run


def _all_rows(cursor: Any) -> list[Rows]:
    """The rows of each of the statements that the cursor has executed."""
    rows = [[tuple(row) for row in cursor.fetchall()]]
    while cursor.nextset():
        rows.append([tuple(row) for row in cursor.fetchall()])
    return list(rows)


def _of_django(connection: Any) -> Caller:
    backend = _VENDORS.get(connection.vendor)
    if backend is None:
        raise errors.InvalidArgument(f"Lastbit does not work on {connection.vendor}: {_EXPECTED}")
    if not connection.in_atomic_block:
        raise errors.InvalidArgument("Django commits each statement here: call it within `with transaction.atomic():`")
    if getattr(connection, "needs_rollback", False):
        raise errors.InvalidArgument("an earlier statement of the transaction has failed: roll it back first")

    def execute(text: str) -> Rows:
        with connection.cursor() as cursor:
            cursor.execute(text)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    is_mariadb = bool(backend == "mysql" and connection.mysql_is_mariadb)
    return Caller(backend, _one_by_one(execute), str(connection.settings_dict.get("NAME") or "") or None, is_mariadb)


def check(connection: Any, backend: str, *, sqlite_begins: bool = False) -> None:
    """Raise `InvalidArgument` for a driver's connection that is closed, commits each statement by itself, or whose
    transaction has failed. `sqlite_begins`: a transaction of SQLite begins with the first statement."""
    closed = getattr(connection, "closed", None)  # a bool or a number; of PyMySQL `open`
    if closed or getattr(connection, "open", 1) in (0, False):
        raise errors.InvalidArgument("the connection is closed, so its transaction has ended")
    autocommit = getattr(connection, "autocommit", False)
    if backend == "mysql" and hasattr(connection, "get_autocommit"):
        has_begun = bool(getattr(connection, "server_status", 0) & 1)  # SERVER_STATUS_IN_TRANS
        autocommit = bool(connection.get_autocommit()) and not has_begun
    if backend == "sqlite":
        autocommit = connection.isolation_level is None and not connection.in_transaction and not sqlite_begins
    if autocommit is True:
        raise errors.InvalidArgument(
            "the connection commits each statement by itself (autocommit): begin a transaction first"
        )
    status = getattr(getattr(connection, "info", None), "transaction_status", None)
    if backend == "postgresql" and status is not None and int(status) == _FAILED:
        raise errors.InvalidArgument("an earlier statement of the transaction has failed: roll it back first")


_FAILED: Final = 3
"""PostgreSQL's INERROR."""


def _of_driver(connection: Any, backend: str) -> Caller:
    cursor_of = _cursors(connection)

    def execute(text: str) -> Rows:
        cursor = cursor_of()
        try:
            cursor.execute(text)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            cursor.close()

    def execute_together(texts: Sequence[str]) -> list[Rows]:
        cursor = cursor_of()
        try:
            cursor.execute(";".join(texts))
            return _all_rows(cursor) if cursor.description else [()] * len(texts)
        finally:
            cursor.close()

    run = _in_few_packets(execute, execute_together) if "psycopg" in _packages(connection) else _one_by_one(execute)
    is_mariadb = False
    if backend == "mysql":
        info = str(getattr(connection, "get_server_info", lambda: "")())
        is_mariadb = "mariadb" in info.lower()
    return Caller(backend, run, None, is_mariadb)


def _cursors(connection: Any) -> Callable[[], Any]:
    """Makes cursors that return tuples, whatever the connection's own do."""
    packages = _packages(connection)
    if "psycopg" in packages:
        rows = import_module("psycopg.rows")
        return lambda: connection.cursor(row_factory=rows.tuple_row)
    if "psycopg2" in packages:
        extensions = import_module("psycopg2.extensions")
        return lambda: connection.cursor(cursor_factory=extensions.cursor)
    for package in ("pymysql", "MySQLdb"):
        if package in packages:
            cursors = import_module(f"{package}.cursors")
            return lambda: connection.cursor(cursors.Cursor)

    def cursor() -> Any:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor

    return cursor
