"""The databases once more, for transactions of callers (see `core.enlisted`): the session is theirs, so statements
depend on none of its settings, change none, and are sent one by one. Tables are named with their schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from core.storage.dialects.dialect import REASONS, Dialect, Rows
from core.storage.dialects.mariadb import MariaDB
from core.storage.dialects.postgresql import PostgreSQL
from core.storage.dialects.sqlite import SQLite


class _CallersDialect(Dialect):
    """`tx` is a `core.enlisted.transaction.Transaction` in all methods."""

    patches_blobs = False  # a group's row is read anyway, and small

    def name(self, tx: Any, table: str) -> str:
        return self.qualified(tx.schema, table)

    def one_time(self, tx: Any) -> str:
        return self.now

    def run(self, tx: Any, texts: Sequence[str]) -> list[Rows]:
        rows: list[Rows] = tx.execute(texts) if texts else []
        return rows

    def finish(self, tx: Any, texts: Sequence[str]) -> list[Rows]:
        raise AssertionError("the caller commits")


class CallersPostgreSQL(_CallersDialect, PostgreSQL):
    def isolation(self, tx: Any) -> str:
        return "current_setting('transaction_isolation')"

    def blob(self, digits: str) -> str:
        return f"decode('{digits}', 'hex')"

    def flat(
        self, column: str, kind: Literal["plain", "text", "bytes", "time"] = "plain", *, nullable: bool = False
    ) -> str:
        if kind != "time":
            return super().flat(column, kind, nullable=nullable)
        expression = f"to_char({column}, 'YYYY-MM-DD\"T\"HH24:MI:SS.US')"
        return f"coalesce({expression}, '-')" if nullable else expression


class CallersMariaDB(_CallersDialect, MariaDB):
    quote = "`"

    def isolation(self, tx: Any) -> str:
        return "@@tx_isolation" if tx.dialect.is_mariadb else "@@transaction_isolation"

    def select(self, columns: Sequence[str], rest: str, expected: int) -> str:
        return Dialect.select(self, columns, rest, expected)

    def records(self, rows: Rows) -> Sequence[Sequence[Any]]:
        return [[value.decode() if isinstance(value, bytes) else value for value in row] for row in rows]

    def insert_reason(self, table: str, reason: str, items: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
        text = f"_utf8mb4 x'{reason.encode().hex()}'"
        for first in range(0, len(items), REASONS):
            values = ",".join(
                [f"({batch},{number},{text},{self.now})" for batch, number in items[first : first + REASONS]]
            )
            yield [f"INSERT INTO {table} VALUES {values}"]  # noqa: S608


class CallersSQLite(_CallersDialect, SQLite):
    now = clock = "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"

    def one_time(self, tx: Any) -> str:
        [[(time,)]] = self.run(tx, [f"SELECT {self.now}"])
        return f"'{time}'"
