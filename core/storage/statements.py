"""Hot statements: several in one round trip, and rows as one text.

An ack transaction is a handful of small statements. Most of their cost is not in the database but in SQLAlchemy's
constructs, the driver's parsing, and a thread switch for each round trip. So statements go to the driver as text, in
one packet if none depends on the result of another. The values in the text are our own integers and hexadecimal digits,
never a client's text. How it is done depends on the database (see `dialects`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from core.storage import dialects, faults
from core.storage.dialects import Rows
from core.storage.dialects.dialect import HAS_WRITTEN, writes

T = TypeVar("T")
K = TypeVar("K", str, int, tuple[Any, ...])

LIST: Final = 500
"""Maximum values in one IN list. MariaDB turns a longer list into a subquery."""
TEXT: Final = 500_000
"""Approximate characters of the rows in one INSERT: half of the smallest default limit of a server."""
UPDATED: Final = 64
"""Maximum rows of one UPDATE. The server searches the CASE for each row, so the cost grows with the square of it."""
LAST: Final = "lastbit.last"
"""The key in a connection's `info` for the pipeline whose statements wait for the COMMIT."""


def chunks(values: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def packets(rows: Sequence[str]) -> Iterator[list[str]]:
    """The VALUES of rows, in parts for one INSERT each."""
    part: list[str] = []
    size = 0
    for row in rows:
        if part and size + len(row) > TEXT:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row)
    if part:
        yield part


def as_text(value: str | bytes | None) -> str | None:
    """The text in a driver's value."""
    return value.decode() if isinstance(value, bytes) else value


def as_time(value: str | datetime) -> datetime:
    """The time in a driver's value: the database stores times in UTC."""
    return (datetime.fromisoformat(value) if isinstance(value, str) else value).replace(tzinfo=UTC)


def inserts(table: str, columns: str, rows: Sequence[str], end: str = "") -> list[str]:
    """INSERTs of these VALUES. `end` follows each; see `Dialect.upsert`."""
    return [f"INSERT INTO {table} ({columns}) VALUES {','.join(part)}{end}" for part in packets(rows)]  # noqa: S608


def updates(table: str, changes: Mapping[int, Mapping[str, str]]) -> list[str]:
    """UPDATEs of rows, given by id: the new literals of their columns. A column that a row doesn't have stays."""
    texts = []
    for ids in chunks(sorted(id for id, literals in changes.items() if literals), UPDATED):
        by_column: dict[str, dict[int, str]] = {}
        for id in ids:
            for column, value in changes[id].items():
                by_column.setdefault(column, {})[id] = value
        assignments = [f"{column} = {_assigned(column, values, len(ids))}" for column, values in by_column.items()]
        texts.append(f"UPDATE {table} SET {', '.join(assignments)} WHERE id IN ({','.join(map(str, ids))})")  # noqa: S608
    return texts


def _assigned(column: str, values: Mapping[int, str], rows: int) -> str:
    """What the column becomes, in one UPDATE of this number of rows."""
    if len(values) == rows and len(set(values.values())) == 1:
        return next(iter(values.values()))
    cases = " ".join(f"WHEN {id} THEN {value}" for id, value in values.items())
    return f"CASE id {cases} ELSE {column} END"


def among(tx: Connection, columns: Sequence[str], keys: Collection[tuple[str | int, ...]]) -> str:
    """The condition that the columns have the values of one of the keys. Keys that differ in the last value alone share
    a list."""
    literal = dialects.of(tx).literal
    lists: dict[tuple[str | int, ...], list[str]] = {}
    for *first, last in keys:
        lists.setdefault(tuple(first), []).append(literal(last))
    conditions = []
    for first_values, values in lists.items():
        terms = [f"{column} = {literal(value)}" for column, value in zip(columns[:-1], first_values, strict=True)]
        conditions.append("(" + " AND ".join([*terms, f"{columns[-1]} IN ({','.join(values)})"]) + ")")
    return " OR ".join(conditions)


def run(tx: Connection, *statements: str) -> list[Rows]:
    """Execute the statements in their order, and return the rows of each. A statement that fails ends the call.

    With the option `dialects.dialect.LOCK_WAIT`, MariaDB ends a SELECT … FOR UPDATE that takes longer: the server's own
    lock wait timeout is in whole seconds. MySQL has no such limit, so there the session's timeout applies. PostgreSQL
    and OceanBase limit each lock wait. None of them limits `lock_order.LOCK_HEAD`.

    Raises SQLAlchemy's `DBAPIError` and its subclasses, as if each statement had been executed by itself.
    """
    return dialects.of(tx).run(tx, statements)


def finish(tx: Connection, *statements: str) -> list[Rows]:
    """`run`, and on a server COMMIT in the same round trip. No statement may follow. What ends the transaction then
    sends nothing: `tx.commit()`, or the return of a connection that has only read."""
    return dialects.of(tx).finish(tx, statements)


def commit(tx: Connection, witness: str | None = None) -> None:
    """Commit, with the statements that `Pipeline.finish` has left and, if the transaction writes, the `witness` after
    them. Raises what `finish` and `tx.commit()` do; if `faults.is_before_commit`, nothing was committed."""
    pipeline: Pipeline = tx.info.pop(LAST, None) or Pipeline(tx)
    if witness is not None and (tx.info[HAS_WRITTEN] or pipeline.will_write()):
        pipeline.later(witness)
    pipeline.flush(is_last=True)
    tx.commit()


class Answer:
    """What a question has found: one query, or several for parts of a list of keys. They may not have been executed
    yet."""

    __slots__ = ("_missing", "_pipeline", "_results")

    def __init__(self, pipeline: Pipeline, queries: int) -> None:
        self._pipeline = pipeline
        self._missing = queries
        self._results: list[Rows] = []

    def take(self, rows: Rows) -> None:
        """Add the rows of the next query."""
        self._results.append(rows)
        self._missing -= 1

    def rows(self) -> Rows:
        """The rows; executes the waiting statements if a query is one of them."""
        if self._missing:
            self._pipeline.flush()
        if len(self._results) == 1:
            return self._results[0]
        return [row for rows in self._results for row in rows] if self._results else ()

    def records(self) -> Sequence[Sequence[Any]]:
        """The values of each row, if the queries are `select`s."""
        if self._missing:
            self._pipeline.flush()
        if not self._results:
            return ()
        read = dialects.of(self._pipeline.tx).records
        return [record for rows in self._results for record in read(rows)]


class Pipeline:
    """Sends the statements of one transaction in few round trips: they wait until the rows of one are needed.

    Raises `faults.BeginAgain` if a statement inserts a row that another transaction has inserted first.
    """

    PACKET: Final = 1_000_000
    """Approximate characters of waiting statements: within the smallest default limit of a server."""

    def __init__(self, tx: Connection) -> None:
        self.tx = tx
        self._waiting: list[tuple[str, Answer | None]] = []

    def later(self, *statements: str) -> None:
        """Execute the statements in the next round trip, in order. Those that don't fit into it are executed now."""
        if statements:
            self._add([(statement, None) for statement in statements])

    def query(self, *queries: str) -> Answer:
        """Execute the queries in the next round trip, as `later` does. Each has rows of the same columns."""
        answer = Answer(self, len(queries))
        if queries:
            self._add([(query, answer) for query in queries])
        return answer

    def query_keys(self, keys: Iterable[K], text: Callable[[list[K]], str]) -> Answer:
        """`query` for these keys, in their order: `text` makes the query for a part of them, of at most `LIST`."""
        return self.query(*map(text, chunks(sorted(keys), LIST)))

    def flush(self, *, is_last: bool = False) -> None:
        """Execute the waiting statements. `is_last`: the COMMIT follows."""
        if self._waiting:
            statements, self._waiting = self._waiting, []
            self._run(statements, is_last=is_last)

    def will_write(self) -> bool:
        """Whether one of the waiting statements writes."""
        return writes(text for text, _ in self._waiting)

    def finish(self) -> None:
        """Leave the waiting statements to the COMMIT, which then goes in the same round trip. The caller executes
        nothing else in this transaction. Rows that decide what is committed have been read by now."""
        self.tx.info[LAST] = self

    def _add(self, statements: list[tuple[str, Answer | None]]) -> None:
        self._waiting += statements
        while len(self._waiting) > 1 and sum([len(text) for text, _ in self._waiting]) > self.PACKET:
            self._run([self._waiting.pop(0)])

    def _run(self, statements: Sequence[tuple[str, Answer | None]], *, is_last: bool = False) -> None:
        execute = finish if is_last else run
        try:
            results = execute(self.tx, *[text for text, _ in statements])
        except IntegrityError as error:
            if faults.is_duplicate(error):
                raise faults.BeginAgain from error
            raise
        for (_, answer), rows in zip(statements, results, strict=True):
            if answer is not None:
                answer.take(rows)


def select(tx: Connection, columns: Sequence[str], rest: str, expected: int) -> str:
    """`SELECT columns FROM rest`, whose rows must be read with `records`. The values are never NULL and have no blanks.
    `expected` is about how many rows there will be."""
    return dialects.of(tx).select(columns, rest, expected)


def records(tx: Connection, rows: Rows) -> Sequence[Sequence[Any]]:
    """The values of each row that a `select` found: integers and bytes from SQLite, text from a server."""
    return dialects.of(tx).records(rows)
