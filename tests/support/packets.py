"""Watches a driver, for tests that break off before or after each statement and each COMMIT.

"After a statement" is the same as "before the next one", as nothing durable happens in between. If a COMMIT is sent
with the writes before it, there is a point between them, at which the server has executed the writes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import psycopg
import pymysql
import pytest

from core.storage.database import Database
from core.storage.dialects import mariadb, postgresql

COMMIT: Final = ";COMMIT"
"""The end of a packet of several statements with a COMMIT."""
BEFORE: Final = "before COMMIT"
AFTER: Final = "after COMMIT"


class Points(Protocol):
    """Gets notified of each point."""

    def passed(self, place: str) -> None: ...

    def is_next(self) -> bool:
        """Whether the test breaks off at the next point."""


def watch(points: Points, database: Database, patches: pytest.MonkeyPatch) -> None:
    """Notify of the points of all further transactions on this database's server."""
    if database.url.get_backend_name() == "postgresql":
        _watch_postgresql(points, patches)
    else:
        _watch_mariadb(points, patches)


def _watch_mariadb(points: Points, patches: pytest.MonkeyPatch) -> None:
    query, commit = pymysql.connections.Connection.query, mariadb._Connection.commit

    def execute_writes(connection: Any, packet: str) -> None:
        query(connection, packet.removesuffix(COMMIT))
        while connection._result.has_next:
            connection.next_result()

    def watched_query(connection: Any, sql: Any, unbuffered: bool = False) -> Any:
        text = sql if isinstance(sql, str) else sql.decode("utf-8", "replace")
        points.passed(f"before {text[:60]}")
        if text.endswith(COMMIT):
            if points.is_next():
                execute_writes(connection, text)
            points.passed(BEFORE)
        return query(connection, sql, unbuffered)

    def watched_commit(connection: Any) -> None:
        if not connection.has_ended:
            points.passed(BEFORE)
        commit(connection)
        points.passed(AFTER)

    patches.setattr(pymysql.connections.Connection, "query", watched_query)
    patches.setattr(mariadb._Connection, "commit", watched_commit)


def _watch_postgresql(points: Points, patches: pytest.MonkeyPatch) -> None:
    send, commit = postgresql._Connection.send, postgresql._Connection.commit

    def watched_send(connection: Any, text: str) -> Any:
        points.passed(f"before {text[:60]}")
        if text.endswith(COMMIT):
            if points.is_next():
                send(connection, text.removesuffix(COMMIT))
            points.passed(BEFORE)
        return send(connection, text)

    def watched(execute: Callable[..., Any]) -> Callable[..., Any]:
        def run(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
            points.passed(f"before {query[:60]}")
            return execute(cursor, query, *arguments, **options)

        return run

    def watched_commit(connection: Any) -> None:
        if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            points.passed(BEFORE)
        commit(connection)
        points.passed(AFTER)

    patches.setattr(postgresql._Connection, "send", watched_send)
    patches.setattr(postgresql._Connection, "commit", watched_commit)
    patches.setattr(psycopg.Cursor, "execute", watched(psycopg.Cursor.execute))
    patches.setattr(psycopg.Cursor, "executemany", watched(psycopg.Cursor.executemany))
