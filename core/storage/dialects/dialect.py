"""The interface for the differences between databases."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

Rows = Sequence[Sequence[Any]]


class Dialect(abc.ABC):
    """The differences. Statements are text without parameters; their values are integers, and bytes in hexadecimal."""

    is_embedded: ClassVar[bool]
    """The database is a file that only one service uses. The service migrates the schema when it starts, and runs the
    janitor and the dispatcher. Writing transactions run one after another."""
    locks_rows: ClassVar[bool]
    """Transactions lock the rows that they write. If not, they lock the whole database when they begin."""
    patches_blobs: ClassVar[bool]
    """An UPDATE can replace single bytes of a blob."""
    for_update: ClassVar[str]
    """The end of a SELECT that locks the rows it finds."""
    now: ClassVar[str]
    """The database's clock, in UTC, to the microsecond."""
    greatest: ClassVar[str]
    """The function that returns the largest of its arguments."""
    begin_writing: ClassVar[dict[str, Any]]
    """Execution options of a transaction that will write."""
    begin_snapshot: ClassVar[str]
    """The statement before a transaction whose reads all see the same state; "" if every transaction is one."""

    @abc.abstractmethod
    def one_time(self, tx: Connection) -> str:
        """The database's time, as an expression whose value is the same wherever it stands in one statement."""

    @abc.abstractmethod
    def engine(self, url: sa.URL, connections: int, lock_wait: int) -> Engine:
        """An engine with at most `connections` connections. Their statements wait up to `lock_wait` seconds for a lock.

        Raises `errors.Misconfigured` for an unsuitable URL.
        """

    @abc.abstractmethod
    def origin(self) -> Callable[[Any], tuple[Any, ...]]:
        """A function that returns what identifies the server or file behind a driver's connection."""

    @abc.abstractmethod
    def by_primary_key(self, table: str) -> str:
        """The table in a FROM clause, with a hint to use only its primary key."""

    @abc.abstractmethod
    def look_up(self, tx: Connection, table: str, key: Sequence[str], rows: Sequence[str]) -> str:
        """The rows of a table by primary key, in a FROM clause. `rows` are VALUES: each a place, which becomes the
        column `place`, and the columns of the key. If rows are locked, they are locked in this order."""

    @abc.abstractmethod
    def upsert(self, key: Sequence[str], columns: Sequence[str]) -> str:
        """The end of an INSERT that replaces `columns` in rows whose `key` exists."""

    @abc.abstractmethod
    def text(self, digits: str) -> str:
        """A literal of a text column, from the hexadecimal digits of its UTF-8 bytes."""

    @abc.abstractmethod
    def run(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        """See `statements.run`."""

    def finish(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        """See `statements.finish`."""
        return self.run(tx, texts)

    @abc.abstractmethod
    def select(self, columns: Sequence[str], rest: str, expected: int) -> str:
        """See `statements.select`."""

    @abc.abstractmethod
    def records(self, rows: Rows) -> Sequence[Sequence[Any]]:
        """See `statements.records`."""

    @abc.abstractmethod
    def insert_batches(self, tx: Connection, columns: str, rows: Sequence[str]) -> list[str]:
        """Statements that insert rows into `batches`. The result of the last one has the ids, for `batch_ids`, and the
        time of the INSERT."""

    @abc.abstractmethod
    def batch_ids(self, rows: Rows, count: int) -> list[int]:
        """The ids in the last result of `insert_batches`, in the order of its `count` rows: they ascend."""

    @abc.abstractmethod
    def insert_reason(self, tx: Connection, reason: str, items: Sequence[tuple[int, int]]) -> None:
        """Insert rows of `failures` for these items, (batch, number), all with the same reason."""
