"""How a database finds the rows of a query."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core.storage.database import Database
from tests.support.waits import server


def analyze(database: Database, table: str) -> None:
    """Collect the statistics by which the database plans."""
    with database.engine.begin() as tx:
        tx.exec_driver_sql(f"ANALYZE {'TABLE ' if database.url.get_backend_name() == 'mysql' else ''}{table}")


def finds_nothing_by(database: Database, index: str, text: str, values: Any, most_rows: int = 10) -> None:
    """Assert that the query, which has no result, uses the index; on a server, that it reads at most `most_rows` rows
    and index entries. On SQLite `index` is a part of the plan."""
    with database.engine.connect() as tx:
        assert tx.exec_driver_sql(text, values).all() == []
        if not database.is_embedded:
            assert rows_read(tx, text, values) <= most_rows
        if database.url.get_backend_name() != "mysql":
            explain = "EXPLAIN QUERY PLAN" if database.is_embedded else "EXPLAIN"
            assert index in str(tx.exec_driver_sql(f"{explain} {text}", values).all())


def rows_read(tx: Connection, text: str, values: Any) -> int:
    """The number of rows and index entries that a server reads for a query; a few more if it groups its result."""
    if tx.dialect.name == "postgresql":
        [document] = tx.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", values).scalars()
        return _rows_of(document[0]["Plan"])
    if server(tx) == "oceanbase":
        pytest.skip("seekdb doesn't count the rows that it reads")
    tx.exec_driver_sql("FLUSH STATUS")
    tx.exec_driver_sql(text, values).all()
    counts = tx.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'").all()
    return sum(int(count) for _, count in counts)


def _rows_of(node: dict[str, Any]) -> int:
    """The rows that a plan's scans read, including those that they removed."""
    inner = sum(map(_rows_of, node.get("Plans", ())))
    if "Scan" not in node["Node Type"]:
        return inner
    names = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
    rows = round(node["Actual Loops"] * sum(node.get(name, 0) for name in names))
    # The rows of a bitmap are those whose index entries were read for it.
    return max(inner, rows) if node["Node Type"] == "Bitmap Heap Scan" else inner + rows


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
