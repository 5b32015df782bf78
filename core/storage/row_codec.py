"""The rows of a table as values of a dataclass or a named tuple. Each field is a column, and its type says how the
column is read and written. A new field needs no other place: it is read, inserted and updated like the others.

What reads and writes a column of this type is in `_CODECS`. A field of an enumeration is stored as its value. In a
column that may be NULL, the 0 of an `int` is stored as NULL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args, get_origin, get_type_hints

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from core.storage import statements
from core.storage.dialects import Dialect
from core.storage.statements import as_time


class Identified(Protocol):
    """The rows of a table whose primary key is `id`."""

    @property
    def id(self) -> int: ...


T = TypeVar("T", bound=Identified)

_NULL: Final = "-"


class _Codec(NamedTuple):
    """How a type is stored. `flat` is the kind of column for `statements.select`."""

    flat: Literal["plain", "text", "bytes", "time"]
    from_flat: Callable[[Any], Any]
    from_column: Callable[[Any], Any]
    """Reads what SQLAlchemy has converted already."""


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode()


def _same(value: Any) -> Any:
    return value


_CODECS: Final[Mapping[type, _Codec]] = {
    int: _Codec("plain", int, _same),
    bool: _Codec("plain", lambda digit: digit in (1, "1"), bool),
    str: _Codec("text", _text, _same),
    bytes: _Codec("bytes", bytes.fromhex, _same),
    datetime: _Codec("time", as_time, _same),
    Mapping: _Codec("text", lambda digits: json.loads(_text(digits)), json.loads),
}


def _codec_of(hint: Any) -> _Codec:
    """The codec of `T` or `T | None`."""
    options = set(get_args(hint))
    if NoneType in options:
        (hint,) = options - {NoneType}
    stored = get_origin(hint) or hint
    if issubclass(stored, StrEnum):
        of_value = {str(member): member for member in stored}.__getitem__
        return _Codec("plain", of_value, of_value)
    return _CODECS[stored]


def _is_count(hint: Any, column: sa.Column[Any]) -> bool:
    """Whether NULL stands for 0 in the column, so that a row with 0 takes no byte for it."""
    return hint is int and bool(column.nullable)


@dataclass(frozen=True, slots=True)
class _Column:
    field: str
    column: sa.Column[Any]
    codec: _Codec
    is_count: bool
    """NULL stands for 0."""


Condition = Callable[[Dialect], str]
"""A condition in SQL."""


class RowCodec(Generic[T]):
    """Reads and writes the rows of `table` as values of this kind, which may lack some of the columns. `names` has the
    columns whose name is not that of their field; `conditions` those that `statements.select` reads only on a
    condition, without which their fields are None. They come last."""

    def __init__(
        self,
        kind: type[T],
        table: sa.Table,
        names: Mapping[str, str] = MappingProxyType({}),
        conditions: Mapping[str, Condition] = MappingProxyType({}),
    ) -> None:
        self._of: Callable[..., T] = kind
        self._table = table
        self._columns = [
            _Column(field, column := table.c[names.get(field, field)], _codec_of(hint), _is_count(hint, column))
            for field, hint in get_type_hints(kind).items()
        ]
        self._counts = {column.column.name for column in self._columns if column.is_count}
        self._readers = [column.codec.from_flat for column in self._columns]
        self._names = [column.column.name for column in self._columns]
        self._conditions = conditions
        self._values = attrgetter(*[column.field for column in self._columns])
        self.columns: Final = [
            (sa.func.coalesce(column.column, 0) if column.is_count else column.column).label(column.field)
            for column in self._columns
        ]
        """For a SELECT of SQLAlchemy's, whose rows are arguments of `from_row`."""
        self._flat = cache(self._flat_columns)

    def expressions(self, dialect: Dialect) -> Sequence[str]:
        """The columns for `statements.select`, whose records are arguments of `from_record`. A driver parses one text
        faster than this number of columns."""
        unconditional, conditional = self._flat(dialect)
        if not conditional:
            return unconditional
        return [
            *unconditional,
            *[
                f"CASE WHEN {self._conditions[field](dialect)} THEN {flat} ELSE '{_NULL}' END"
                for field, flat in conditional
            ],
        ]

    def _flat_columns(self, dialect: Dialect) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """The columns that are always read, and the others with their fields."""
        flat = [
            (column.field, f"COALESCE({column.column.name}, 0)")
            if column.is_count
            else (
                column.field,
                dialect.flat(column.column.name, column.codec.flat, nullable=bool(column.column.nullable)),
            )
            for column in self._columns
        ]
        unconditional = tuple(text for field, text in flat if field not in self._conditions)
        return unconditional, tuple((field, text) for field, text in flat if field in self._conditions)

    def from_row(self, row: RowMapping) -> T:
        values = [(column.codec.from_column, row[column.field]) for column in self._columns]
        return self._of(*[None if value is None else read(value) for read, value in values])

    def from_record(self, record: Sequence[Any]) -> T:
        return self._of(
            *[None if value == _NULL else read(value) for read, value in zip(self._readers, record, strict=True)]
        )

    def values(self, value: T) -> dict[str, Any]:
        """The values by column."""
        values = dict(zip(self._names, self._values(value), strict=True))
        return values | {name: values[name] or None for name in self._counts}

    def updates(self, dialect: Dialect, changed: Iterable[tuple[T, T]], table: str | None = None) -> list[str]:
        """UPDATEs that write what differs between the two values of each row: before, and after. `table`: its name, if
        it needs a longer one."""
        changes: dict[int, dict[str, str]] = {}
        for before, after in changed:
            old, new = self.values(before), self.values(after)
            changes[after.id] = {name: dialect.literal(new[name]) for name in self._names if new[name] != old[name]}
        return statements.updates(table or self._table.name, changes)
