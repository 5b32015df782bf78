"""The interface for the differences between databases."""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar, Final, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.types import TypeEngine

from core.errors import Fault
from core.storage.lock_order import LOCK_HEAD
from core.storage.numbering import Numbering

Rows = Sequence[Sequence[Any]]
Code = str | int

LOCK_WAIT: Final = "lastbit_lock_wait"
"""An option of a connection: seconds that a SELECT … FOR UPDATE may take, lock waits included; on PostgreSQL and
OceanBase, each of its lock waits. `lock_order.LOCK_HEAD` may take the session's full lock wait."""
SCHEMA: Final = "lastbit_schema"
"""An option of our own connections: the schema that the database was opened with, or None."""
IDLE: Final = 60
"""Seconds that a server waits for the next statement of a transaction; then it rolls back and closes the connection.
Otherwise a frozen process, or a lost machine, would keep its locks. MySQL has no such limit."""
HAS_WRITTEN: Final = "lastbit.has_written"
"""The key in a connection's `info` for whether its transaction has written."""
REASONS: Final = 4096
"""Maximum rows of one INSERT of reasons."""


NUMBERED: Final = "SET STATEMENT auto_increment_increment"
"""The beginning of an INSERT for which MariaDB chooses other ids than the session's."""


class Obstacle(Enum):
    """Why a database can't be opened."""

    UNREACHABLE = auto()
    REFUSED = auto()
    NO_DATABASE = auto()
    NO_ACCESS = auto()
    NO_PRIVILEGE = auto()
    READ_ONLY = auto()


class Dialect(abc.ABC):
    """The differences. Statements are text without parameters; their values are integers, and bytes in hexadecimal."""

    driver: ClassVar[str]
    """SQLAlchemy's name of the dialect and its driver."""
    default_port: ClassVar[int]
    """The port of a server, if the URL has none."""
    is_embedded: ClassVar[bool]
    """The database is a file that only one service uses. The service migrates the schema when it starts, and runs the
    janitor and the dispatcher. Writing transactions run one after another, and no answer to a COMMIT can be lost."""
    locks_rows: ClassVar[bool]
    """Transactions lock the rows that they write. If not, they lock the whole database when they begin."""
    locks_gaps: ClassVar[bool]
    """A statement on a range of keys may wait for the next row after it."""
    patches_blobs: ClassVar[bool]
    """An UPDATE can replace single bytes of a blob."""
    now: ClassVar[str]
    """The database's time in UTC, to the microsecond, when the statement began, or the packet that it is part of."""
    clock: ClassVar[str]
    """The database's time in UTC, not before the end of the earlier statements of a packet."""
    greatest: ClassVar[str]
    """The function that returns the largest of its arguments."""
    find: ClassVar[str] = "INSTR"
    """The function that returns the place of a text in another one, by bytes; 0 if it isn't there."""
    sends_texts_as_bytes: ClassVar[bool] = False
    """The driver takes and returns texts that are compared by their bytes as bytes."""
    driver_error: ClassVar[type[Exception]]
    """The class of all errors of the driver."""
    duplicate: ClassVar[frozenset[Code]]
    """The codes for a duplicate key."""
    done_already: ClassVar[frozenset[Code]] = frozenset()
    """The codes of steps of a migration that were done before."""
    elsewhere: ClassVar[frozenset[Code]] = frozenset()
    """The codes of statements that another server behind the same address may accept."""
    quote: ClassVar[str] = '"'
    """The character before and after a name."""
    new_database: ClassVar[str] = ""
    """The options of a CREATE DATABASE."""
    after_creation: ClassVar[tuple[str, ...]] = ()
    """The statements that complete new tables."""
    begin_writing: ClassVar[dict[str, Any]]
    """Execution options of a transaction that will write."""
    begin_snapshot: ClassVar[str]
    """The statement before a transaction whose reads all see the same state; "" if every transaction is one."""

    @abc.abstractmethod
    def one_time(self, tx: Connection) -> str:
        """The database's time, as an expression whose value is the same wherever it stands in one statement."""

    def name(self, tx: Connection, table: str) -> str:
        """The table in a statement of this transaction, where that may be a caller's."""
        return table

    def isolation(self, tx: Connection) -> str:
        """The isolation level of a caller's transaction, as an expression; NULL if the database has but one."""
        return "NULL"

    @abc.abstractmethod
    def located(self, url: sa.URL, schema: str) -> sa.URL:
        """The URL of the database that has this schema. Raises `errors.Misconfigured` for an unsuitable name."""

    @abc.abstractmethod
    def engine(self, url: sa.URL, connections: int, lock_wait: int, schema: str | None) -> Engine:
        """An engine with at most `connections` connections. Their statements wait up to `lock_wait` seconds for a lock,
        and find tables in the `schema` alone; without one, where the account's settings say.

        Raises `errors.Misconfigured` for an unsuitable URL.
        """

    def create_schema(self, tx: Connection, schema: str) -> None:
        """Create the schema, unless it exists. `tx` is a transaction on the server, perhaps in another database. Raises
        `DBAPIError` if the account may not."""
        raise NotImplementedError

    def new_schema(self, tx: Connection, schema: str) -> str:
        """The statements with which an administrator creates the schema for the account of this connection."""
        raise NotImplementedError

    def lacks_usage(self, tx: Connection) -> bool:
        """Whether there is a schema, and the account may not see what is in it."""
        return False

    @abc.abstractmethod
    def names(self, tx: Connection) -> list[str]:
        """The names of all tables and views where a table would be created, as the database compares them."""

    def quoted(self, name: str) -> str:
        """A name in a statement."""
        return self.quote + name.replace(self.quote, 2 * self.quote) + self.quote

    def qualified(self, schema: str | None, table: str) -> str:
        """A table's name in a statement on any connection to the server."""
        return table if schema is None else f"{self.quoted(schema)}.{self.quoted(table)}"

    @abc.abstractmethod
    def origin(self, driver: Any) -> tuple[Any, ...]:
        """What identifies the server or file behind a driver's connection, and its start."""

    def refused(self, driver: Any) -> str | None:
        """The engine behind a driver's connection, if it is one of `refusals.REFUSED`."""
        return None

    def byte_text_type(self, characters: int, *, ascii_only: bool) -> TypeEngine[Any]:
        """A column for texts that are compared by their bytes."""
        return sa.String(characters)

    def long_text_type(self) -> TypeEngine[str]:
        """A column for texts of up to 16 MiB."""
        return sa.Text()

    def blob_type(self, size: int) -> TypeEngine[bytes]:
        """A column for up to `size` bytes."""
        return sa.LargeBinary()

    def timestamp_type(self) -> TypeEngine[datetime]:
        """A column for times to the microsecond, without a time zone."""
        return sa.DateTime()

    @abc.abstractmethod
    def fault(self, error: DBAPIError) -> Fault | None:
        """The kind of a fault of the database; None if the error is a bug in this code. Raised by this driver."""

    def lock_wait(self, error: DBAPIError) -> Fault:
        """The fault of a statement that has waited for a lock for too long."""
        return Fault.HEAD_WAIT if error.statement == LOCK_HEAD else Fault.LOCK_WAIT

    @abc.abstractmethod
    def code(self, error: DBAPIError) -> Code | None:
        """The error's code."""

    def text_of(self, error: DBAPIError) -> str:
        """The error's text, in one line."""
        return str(error.orig)

    def obstacle(self, error: DBAPIError) -> Obstacle | None:
        """Why the database of a server can't be opened; None for another error."""
        return None

    @abc.abstractmethod
    def guard(self, tx: Connection, column: sa.Column[int], keys: Sequence[tuple[str | int, ...]]) -> None:
        """Keep rows that the transaction has locked but won't write as they are until its commit. Where a lock holds on
        all servers, it is enough. `keys` are the rows' primary keys; `column` may be written, unchanged."""

    def migrating(self, connection: Connection) -> contextlib.AbstractContextManager[None]:
        """While it is open, no other migration of the database runs, and none waits long for a table that is in use.
        Raises `errors.Unavailable` if another one takes longer than a minute."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def by_primary_key(self, table: str) -> str:
        """The table in a FROM clause, with a hint to use only its primary key."""

    @abc.abstractmethod
    def for_update(self, *key: str) -> str:
        """The end of a SELECT that locks the rows it finds, in the order of their key; without one, in the order of the
        SELECT's ORDER BY."""

    @abc.abstractmethod
    def lock_looked_up(self, table: str) -> str:
        """The end of a SELECT from `look_up` that locks the rows of the table, in the order of their places."""

    @abc.abstractmethod
    def look_up(self, tx: Connection, table: str, key: Sequence[str], rows: Sequence[str]) -> str:
        """The rows of a table by primary key, in a FROM clause. `rows` are VALUES: each a place, which becomes the
        column `place`, and the columns of the key."""

    @abc.abstractmethod
    def sum_locked(
        self, tx: Connection, results: str, table: str, condition: str, group_by: str, names: Sequence[str]
    ) -> list[str]:
        """Statements of which the last one selects sums of groups of rows. Until the commit, no other transaction gets
        the sums of the groups with these `names`, so of two that have changed a group, one sees the other's changes."""

    @abc.abstractmethod
    def upsert(self, key: Sequence[str], columns: Sequence[str]) -> str:
        """The end of an INSERT that replaces `columns` in rows whose `key` exists."""

    @abc.abstractmethod
    def on_conflict(self, key: str) -> str:
        """What follows the VALUES of an INSERT of one row, before the assignments for a row that has its `key`
        already."""

    @abc.abstractmethod
    def text(self, digits: str) -> str:
        """A literal of a text column, from the hexadecimal digits of its UTF-8 bytes."""

    def blob(self, digits: str) -> str:
        """A literal of bytes, from their hexadecimal digits."""
        return f"x'{digits}'"

    def time(self, text: str) -> str:
        """A literal of a time in UTC, such as `2026-01-31 12:00:00.000000`."""
        return f"'{text}'"

    def literal(self, value: str | bytes | int | datetime | Mapping[str, str] | None) -> str:
        """A literal of a value. A text may be a client's, so it is sent in hexadecimal; the value of an enumeration is
        ours. A mapping is stored as JSON."""
        if value is None:
            return "NULL"
        if isinstance(value, str):
            return f"'{value}'" if isinstance(value, StrEnum) else self.text(value.encode().hex())
        if isinstance(value, int):
            return str(int(value))
        if isinstance(value, bytes):
            return self.blob(value.hex())
        if isinstance(value, datetime):
            return self.time(f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}")
        return self.text(json.dumps(dict(value), ensure_ascii=False).encode().hex())

    def row(self, values: Iterable[str | bytes | int | datetime | None]) -> str:
        """The VALUES of a row."""
        return f"({','.join(map(self.literal, values))})"

    def patch(self, column: str, changes: Sequence[tuple[int, bytes]]) -> str:
        """The column's blob with other bytes, each given with its place. A place beyond the end of the blob, which is
        damaged then, isn't an error. Only if it `patches_blobs`."""
        raise NotImplementedError

    def flat(
        self, column: str, kind: Literal["plain", "text", "bytes", "time"] = "plain", *, nullable: bool = False
    ) -> str:
        """A column for `statements.select`: texts and bytes in hexadecimal, times with a `T`, and `-` for NULL."""
        text = {"plain": column, "time": f"REPLACE({column}, ' ', 'T')"}.get(kind, f"HEX({column})")
        # Not COALESCE: SQLite's HEX of NULL is an empty text.
        return f"CASE WHEN {column} IS NULL THEN '-' ELSE {text} END" if nullable else text

    @abc.abstractmethod
    def run(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        """See `statements.run`."""

    def finish(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        """See `statements.finish`."""
        return self.run(tx, texts)

    def select(self, columns: Sequence[str], rest: str, expected: int) -> str:
        """See `statements.select`."""
        return f"SELECT {', '.join(columns)} FROM {rest}"  # noqa: S608

    def records(self, rows: Rows) -> Sequence[Sequence[Any]]:
        """See `statements.records`."""
        return rows

    def numbering(self, tx: Connection) -> Numbering | None:
        """Which numbers are ids of batches; None: all."""
        [[(text,)]] = self.run(tx, [f"SELECT batch_ids FROM {self.name(tx, 'schema_support')}"])  # noqa: S608
        return None if text is None else Numbering.parse(text if isinstance(text, str) else text.decode())

    def number_batches(self, numbering: Numbering) -> list[str]:
        """Statements that let the new table of batches have such ids; none where `insert_batches` does."""
        return []

    def distance_of_ids(self, tx: Connection) -> int | None:
        """How far apart the ids are that the table gives to batches; None where `insert_batches` knows it."""
        return None

    def insert_batches(self, tx: Connection, columns: str, rows: Sequence[str]) -> list[str]:
        """Statements that insert rows into `batches`. The result of the last one has the ids, for `batch_ids`, and the
        time of the INSERT."""
        table = self.name(tx, "batches")
        return [f"INSERT INTO {table} ({columns}) VALUES {','.join(rows)} RETURNING id, created_at"]  # noqa: S608

    def batch_ids(self, rows: Rows, count: int) -> list[int]:
        """The ids in the last result of `insert_batches`, in the order of its `count` rows: they ascend."""
        return sorted(row[0] for row in rows)

    @abc.abstractmethod
    def insert_reason(self, table: str, reason: str, items: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
        """Statements that insert rows for these items, (batch, number), with the same reason. `table`: its name with
        its columns. Each list is to be sent in one packet."""


def writes(texts: Iterable[str]) -> bool:
    """Whether one of the statements writes."""
    return any(text.startswith(("INSERT", "UPDATE", "DELETE", NUMBERED)) for text in texts)


def note_writes(tx: Connection, texts: Iterable[str]) -> None:
    """Note whether one of these statements, which the transaction executes, writes."""
    if writes(texts):
        tx.info[HAS_WRITTEN] = True


def announce(listeners: Iterable[Callable[..., object]], tx: Connection, cursor: Any, texts: Sequence[str]) -> None:
    """Call the engine's listeners, such as tracing, for each of these statements."""
    for listener in listeners:
        for text in texts:
            listener(tx, cursor, text, (), None, False)
