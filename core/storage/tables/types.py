"""Types of columns that behave alike on all databases, and SQL functions with the same meaning on each."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from core.storage.dialects import of_sqlalchemy


class ByteText(TypeDecorator[str]):
    """Text that is compared by its bytes."""

    impl = sa.String
    cache_ok = True

    def __init__(self, characters: int, *, ascii_only: bool = False) -> None:
        super().__init__(characters)
        self.characters = characters
        self.ascii_only = ascii_only

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return of_sqlalchemy(dialect).byte_text_type(self.characters, ascii_only=self.ascii_only)

    def process_bind_param(self, value: str | None, dialect: Dialect) -> Any:
        return value.encode() if value is not None and of_sqlalchemy(dialect).sends_texts_as_bytes else value

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
    return f"{of_sqlalchemy(compiler.dialect).find}({compiler.process(element.clauses, **options)}) > 0"


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
        return of_sqlalchemy(dialect).timestamp_type()

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class utc_now(FunctionElement[datetime]):  # noqa: N801  # named like a SQL function
    """The database's clock. All replicas of the service use it, so their machines' clocks may differ."""

    type = Timestamp()
    inherit_cache = True


@compiles(utc_now)
def _utc_now(element: object, compiler: Any, **_: object) -> str:
    return of_sqlalchemy(compiler.dialect).now


def clock(tx: Connection) -> datetime:
    """The database's time. It is read by a separate statement, as a statement that waits for a lock has the time before
    the wait."""
    now: datetime = tx.execute(sa.select(utc_now())).scalar_one()
    return now


class Blob(TypeDecorator[bytes]):
    """Up to `size` bytes."""

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return of_sqlalchemy(dialect).blob_type(self.size)


class LongText(TypeDecorator[str]):
    """A text of up to 16 MiB."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return of_sqlalchemy(dialect).long_text_type()
