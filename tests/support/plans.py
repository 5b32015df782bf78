"""How a database finds the rows of a query."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage.database import Database


def analyze(database: Database, table: str) -> None:
    """Collect the statistics by which the database plans."""
    with database.engine.begin() as tx:
        tx.exec_driver_sql(f"ANALYZE {'TABLE ' if database.url.get_backend_name() == 'mysql' else ''}{table}")


def finds_nothing_by(database: Database, index: str, text: str, values: Any, most_rows: int = 10) -> None:
    """Assert that the query, which has no result, uses the index; on MariaDB, that it reads at most `most_rows` rows
    and index entries."""
    with database.engine.connect() as tx:
        if database.url.get_backend_name() == "mysql":
            assert rows_read(tx, text, values) <= most_rows
        else:
            explain = "EXPLAIN QUERY PLAN" if database.is_embedded else "EXPLAIN"
            assert index in str(tx.exec_driver_sql(f"{explain} {text}", values).all())


def rows_read(tx: Connection, text: str, values: Any) -> int:
    """The number of rows and index entries that MariaDB reads for a query without a result."""
    tx.exec_driver_sql("FLUSH STATUS")
    assert tx.exec_driver_sql(text, values).all() == []
    counts = tx.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
    return sum(int(count) for _, count in counts)


@contextmanager
def executions(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """The texts and values of the statements that the database executes inside the block."""
    executed: list[tuple[str, Any]] = []

    def record(_: Any, __: Any, text: str, values: Any, *___: Any) -> None:
        executed.append((text, values))

    sa.event.listen(database.engine, "before_cursor_execute", record)
    try:
        yield executed
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", record)
