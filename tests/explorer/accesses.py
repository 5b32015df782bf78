"""The rows and tables that a statement touches, and which statements of different sessions commute.

Two statements commute when executing them in either order has the same results. A session needs to stop only before a
statement that doesn't commute with something another session may still do: stopping before any other one only repeats
schedules. Statements of two transactions (READ COMMITTED) commute when one of these holds:

- They touch different tables, or rows with different primary keys.
- Neither writes, or one reads without a lock what the other has not committed yet. A COMMIT publishes what its
  transaction wrote and releases its locks, so that it commutes with nothing that touches those rows.
- Both transactions hold a common row lock at that point, so that they can't both be there. (Lock sets: Savage,
  Burrows, Nelson, Sobalvarro and Anderson, "Eraser", 1997.)
- The rows are already locked by the statement's own transaction.
"""

from __future__ import annotations

import enum
import functools
import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from core.storage import tables

NEW_IDS: Final = {
    table: 10_000_000 + 1_000_000 * place
    for place, table in enumerate(
        ("batches", "webhooks", "deliveries", "delivery_attempts", "count_outbox", "event_outbox")
    )
}
"""The tables whose ids the server generates, and where these begin: no two tables have the same, and the scene's own
ids are far below."""

ADVISORY: Final = "advisory"
"""The table that stands for PostgreSQL's advisory locks; a number is its only key."""

Row = tuple[str, tuple[str, ...]]
"""A table and the values of a primary key, as written in a statement."""
Key = tuple[frozenset[str] | None, ...]
"""For each column of the primary key, the values that a statement names; None means any value."""

_NAMES: Final = re.compile(r"\b(" + "|".join(tables.metadata.tables) + r")\b", re.IGNORECASE)
_WRITES: Final = re.compile(r"\s*(?:INSERT INTO|UPDATE|DELETE FROM)\s+`?(\w+)", re.IGNORECASE)
_VALUE: Final = r"(?:\d+|[xXE]?'[^']*')"
_INSERT: Final = re.compile(
    r"INSERT INTO `?\w+`? \(([^()]*)\) VALUES (.*?)(?: ON (?:DUPLICATE KEY|CONFLICT) .*| RETURNING .*)?$", re.DOTALL
)
_TUPLE: Final = re.compile(rf"\(((?:(?:{_VALUE}|NULL),\s*)*(?:{_VALUE}|NULL))\)")
_TIMES: Final = re.compile(r"UTC_TIMESTAMP\(6\)|\(\w+_timestamp\(\) AT TIME ZONE 'UTC'\)|@\w+")
_CAST: Final = re.compile(r"(?<=[\w'])::[A-Za-z]\w*(?:\(\d+\))?")
"""PostgreSQL's casts: the driver writes one after each parameter."""
_ESCAPED: Final = re.compile(r"\bE('[^'\\]*')")
"""PostgreSQL's escape strings that escape nothing."""
_HEX: Final = re.compile(r"\b[xX]'((?:[0-9A-Fa-f]{2})*)'")
"""How the service writes a text into a statement for MariaDB. SQLAlchemy quotes the same text."""
_ADVISORY: Final = re.compile(r"pg_advisory_xact_lock\((-?\d+)\)")
_GENERATED: Final = re.compile(r"1\d{7}")


class Kind(enum.Enum):
    READ = "read"
    """Without a lock: it sees committed data."""
    LOCK = "lock"
    WRITE = "write"
    PUBLISH = "publish"
    """By a COMMIT."""


@dataclass(frozen=True)
class Access:
    """One table that a statement touches; `held` are the rows that its transaction had locked before."""

    table: str
    key: Key | None
    kind: Kind
    held: frozenset[Row] = frozenset()


_CLASHES: Final = {
    Kind.READ: {Kind.WRITE},
    Kind.LOCK: {Kind.LOCK, Kind.WRITE},
    Kind.WRITE: {Kind.LOCK, Kind.WRITE},
    Kind.PUBLISH: {Kind.READ, Kind.LOCK, Kind.WRITE},
}
"""For each kind of pending statement, the kinds of other sessions' statements with which it doesn't commute."""


def clashes(due: Access, later_accesses: Iterable[Access]) -> bool:
    """Whether a pending statement doesn't commute with one that other sessions may still execute."""
    return any(
        due.table == other.table
        and other.kind in _CLASHES[due.kind]
        and _overlap(due.key, other.key)
        and (due.kind is Kind.PUBLISH or not due.held & other.held)
        for other in later_accesses
    )


def _overlap(first: Key | None, other: Key | None) -> bool:
    if first is None or other is None:
        return True
    return all(a is None or b is None or a & b for a, b in zip(first, other, strict=True))


@dataclass(frozen=True)
class Statement:
    """The properties of a statement that the search needs."""

    tables: frozenset[str]
    kind: Kind
    key: Key | None
    """The key in the only table, if there is just one."""
    rows: tuple[Row, ...]
    """The rows in their order, if the statement names all of them by their whole primary keys."""
    exclusive: bool
    """Whether it locks exactly these rows, waiting for each."""

    def is_covered(self, locked_rows: frozenset[Row]) -> bool:
        """Whether its transaction already has locks on all of its rows, so that no other session can change them, or
        see its writes before the COMMIT."""
        return bool(self.rows) and locked_rows.issuperset(self.rows)

    def accesses(self, locked_rows: frozenset[Row]) -> list[Access]:
        """Its accesses in a transaction that has locked these rows."""
        changed_tables = {self.changed} if self.changed else self.tables if self.kind is Kind.LOCK else frozenset()
        return [
            Access(table, self.key, self.kind if table in changed_tables else Kind.READ, locked_rows)
            for table in sorted(self.tables)
        ]

    changed: str | None = None
    """The table that it writes."""


@functools.lru_cache(maxsize=100_000)
def analyzed(text: str) -> Statement:
    """Analyze a statement whose parameters are written into its text; otherwise no row is recognized."""
    if numbers := _ADVISORY.findall(text):
        locks_of_numbers = tuple((ADVISORY, (number,)) for number in numbers)
        return Statement(frozenset({ADVISORY}), Kind.LOCK, (frozenset(numbers),), locks_of_numbers, True)
    text = _CAST.sub("", _TIMES.sub("NULL", " ".join(text.split())))
    text = _HEX.sub(_quoted, _ESCAPED.sub(r"\1", text))
    names = frozenset(name.lower() for name in _NAMES.findall(text))
    match = _WRITES.match(text)
    table_name = match[1].lower() if match else None
    locks = " FOR UPDATE" in text or "LOCK IN SHARE MODE" in text
    kind = Kind.WRITE if table_name else Kind.LOCK if locks else Kind.READ
    key = _key(text, next(iter(names))) if len(names) == 1 else None
    rows: tuple[Row, ...] = ()
    if key is not None and all(key):
        (table,) = names
        combinations = itertools.product(*(sorted(values, key=_order) for values in key if values))
        rows = tuple((table, values) for values in combinations)
    waits = not any(words in text for words in ("SKIP LOCKED", "NOWAIT", "SHARE MODE"))
    return Statement(names, kind, key, rows, bool(rows) and kind is not Kind.READ and waits, table_name)


def _quoted(match: re.Match[str]) -> str:
    """The text in hexadecimal as it is quoted; unchanged if it would be written in several ways, or is no text."""
    content = bytes.fromhex(match[1])
    return f"'{content.decode()}'" if re.fullmatch(rb"[ -~]*", content) and not set(content) & set(b"'\\") else match[0]


def _order(value: str) -> tuple[int, int | str]:
    return (0, int(value)) if value.isdigit() else (1, value)


def _key(text: str, name: str) -> Key | None:
    table = tables.metadata.tables[name]
    columns = [column.name for column in table.primary_key]
    if insert := _INSERT.match(text):
        if any(isinstance(constraint, sa.UniqueConstraint) for constraint in table.constraints):
            return None
        return _inserted(insert[1], insert[2], columns)
    _, _, condition = text.partition(" WHERE ")
    if not condition or " OR " in condition or "SELECT" in condition:
        return None
    column = rf"(?<![\w`.])(?:`?{name}`?\.)?`?%s`? (?:= ({_VALUE})|IN \(([^()]*)\))"
    matches = (re.search(column % column_name, condition) for column_name in columns)
    return tuple(_values(match[1] or match[2]) if match else None for match in matches)


def _inserted(names: str, values: str, columns: Collection[str]) -> Key | None:
    places = [name.strip(" `") for name in names.split(",")]
    rows = [match.split(",") for match in _TUPLE.findall(values)]
    if not rows or _TUPLE.sub("", values).strip(", ") or any(column_name not in places for column_name in columns):
        return None
    return tuple(_values(",".join(row[places.index(column_name)] for row in rows)) for column_name in columns)


def _values(text: str) -> frozenset[str] | None:
    """The values of a list; None if one is generated, since it differs between schedules, or may be written in several
    ways."""
    values = frozenset(value.strip() for value in text.split(","))
    return None if any(_GENERATED.fullmatch(value) or "\\" in value for value in values) else values
