"""Types of columns that behave alike on all databases, and SQL functions with the same meaning on each."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine


class ByteText(TypeDecorator[str]):
    """Text that is compared by its bytes. MariaDB's collations would equate `Job-A` with `job-a`, and `a` with `a `;
    PostgreSQL's would sort by language."""

    impl = sa.String
    cache_ok = True

    def __init__(self, characters: int, *, ascii_only: bool = False) -> None:
        super().__init__(characters)
        self.characters = characters
        self.ascii_only = ascii_only

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.VARBINARY(self.characters * (1 if self.ascii_only else 4)))
        if dialect.name == "postgresql":
            # Twice as wide, because U+0000 is stored as two characters (see `storage.dialects.postgresql`).
            return dialect.type_descriptor(sa.String(self.characters * (1 if self.ascii_only else 2), collation="C"))
        return dialect.type_descriptor(sa.String(self.characters))

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return value.encode() if value is not None and dialect.name in ("mysql", "mariadb") else value

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


def begins(column: sa.ColumnElement[str | None], prefix: str) -> sa.ColumnElement[bool]:
    """The condition that a `ByteText` begins with `prefix`. It is a range, which can use an index and needs no
    escaping."""
    after = _successor(prefix)
    at_least = column >= prefix
    return at_least if after is None else sa.and_(at_least, column < after)


def without_index(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    """The column, in a form for which the database uses no index."""
    return sa.func.coalesce(column, sa.null(), type_=column.type)


class holds(FunctionElement[bool]):  # noqa: N801  # named like a SQL function
    """The condition that a text contains another one, byte by byte. LIKE would ignore case on SQLite."""

    type = sa.Boolean()
    inherit_cache = True


@compiles(holds)
def _holds(element: holds, compiler: Any, **options: Any) -> str:
    return f"INSTR({compiler.process(element.clauses, **options)}) > 0"


@compiles(holds, "postgresql")
def _holds_postgresql(element: holds, compiler: Any, **options: Any) -> str:
    return f"STRPOS({compiler.process(element.clauses, **options)}) > 0"


def _successor(prefix: str) -> str | None:
    """The lowest text above all texts that begin with `prefix`, in the order of bytes (and of code points); None if
    there is none."""
    for place in range(len(prefix) - 1, -1, -1):
        code = ord(prefix[place]) + 1
        if code <= sys.maxunicode:
            # Skip surrogates, which are not characters.
            return prefix[:place] + chr(0xE000 if 0xD800 <= code <= 0xDFFF else code)
    return None


class Timestamp(TypeDecorator[datetime]):
    """An instant in UTC, to the microsecond. It is aware in Python and naive in the database."""

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(sa.DateTime())

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class utc_now(FunctionElement[datetime]):  # noqa: N801  # named like a SQL function
    """The database's clock. All replicas of the service use it, so their machines' clocks may differ."""

    type = Timestamp()
    inherit_cache = True


@compiles(utc_now, "mysql")
@compiles(utc_now, "mariadb")
def _utc_now_mysql(element: object, compiler: object, **_: object) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(utc_now, "postgresql")
def _utc_now_postgresql(element: object, compiler: object, **_: object) -> str:
    return "(statement_timestamp() AT TIME ZONE 'UTC')"


@compiles(utc_now, "sqlite")
def _utc_now_sqlite(element: object, compiler: object, **_: object) -> str:
    return "lastbit_now()"  # SQLite's own clock has only milliseconds; `storage.dialects.sqlite` registers this one


def clock(tx: Connection) -> datetime:
    """The database's time. It is read by a separate statement, as a statement that waits for a lock has the time before
    the wait."""
    now: datetime = tx.execute(sa.select(utc_now())).scalar_one()
    return now


def blob(size: int) -> TypeEngine[bytes]:
    return sa.LargeBinary().with_variant(mysql.VARBINARY(size), "mysql", "mariadb")
