"""SQLite: a file to which one transaction writes at a time. There are no round trips to save, so statements are
executed one by one."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from core import errors
from core.errors import Fault
from core.storage import engines
from core.storage.dialects.dialect import Code, Dialect, Rows

_OUTAGES: Final = {
    # BUSY is an outage, not a lock wait: the only lock of the file blocks all writers, not only those of one row.
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}


class FileRemoved(sqlite3.OperationalError):
    """The file that the first connection opened was removed or replaced."""

    sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    advice = (
        "the SQLite file was removed or replaced: put it back; or stop the service, remove the -wal and -shm files "
        "beside it, and start the service again"
    )


class _File(NamedTuple):
    """The file that the first connection has opened."""

    path: Path
    identity: tuple[int, int] | None

    def is_gone(self) -> bool:
        """Whether the file was removed or replaced."""
        try:
            return _identity(self.path) != self.identity
        except OSError:  # the folder may not be searched now; the file that is open works
            return False


class SQLite(Dialect):
    driver = "sqlite"
    default_port = 0
    is_embedded = True
    locks_rows = False
    locks_gaps = False
    patches_blobs = False
    now = clock = "lastbit_now()"
    greatest = "max"
    driver_error = sqlite3.Error
    duplicate = frozenset({"SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE"})
    begin_writing: ClassVar[dict[str, Any]] = {"lastbit_begin": "IMMEDIATE"}
    begin_snapshot = ""

    def one_time(self, tx: Connection) -> str:
        # In a larger statement, SQLite would call the function once for each place.
        return f"'{tx.exec_driver_sql('SELECT lastbit_now()').scalar_one()}'"

    def located(self, url: sa.URL, schema: str) -> sa.URL:
        raise errors.Misconfigured(
            f"an SQLite file has no schemas, got {schema!r}: its tables are in the file, beside yours if you have any"
        )

    def names(self, tx: Connection) -> list[str]:
        return list(tx.scalars(sa.text("SELECT lower(name) FROM sqlite_master WHERE type IN ('table', 'view')")))

    def engine(self, url: sa.URL, connections: int, lock_wait: int, schema: str | None) -> Engine:
        if url.database in (None, "", ":memory:") or "mode=memory" in str(url.database):
            raise errors.Misconfigured("SQLite in memory loses all data at the end; expected a file: sqlite:///PATH")
        try:
            engine = sa.create_engine(
                url,
                **engines.pool(connections),
                hide_parameters=True,
                connect_args={"timeout": lock_wait, "check_same_thread": False},
            )
        except FileNotFoundError as error:  # the path is relative to a folder that is gone
            raise errors.Misconfigured(
                f"the folder for the SQLite file {url.database} doesn't exist any more: change to another folder, or "
                "use an absolute path in LASTBIT_DATABASE_URL or --database-url"
            ) from error

        opened: _File | None = None

        @sa.event.listens_for(engine, "do_connect")
        def open_no_other_file(_: object, __: object, arguments: Sequence[str], ___: object) -> None:
            # Only the first connection may create the file: a later one would put an empty one in its place. Nor may it
            # open another file, as SQLite would replay the old one's `-wal` file into that.
            if opened is None:
                _create(arguments[0])
            elif opened.is_gone():
                raise FileRemoved("the file was removed or replaced")

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, _: object) -> None:
            nonlocal opened
            if opened is None:
                path = _path(connection)
                opened = _File(path, _identity(path))
            connection.isolation_level = None  # `begin` below executes BEGIN
            with contextlib.closing(connection.cursor()) as cursor:
                cursor.execute("PRAGMA journal_mode = WAL")
                cursor.execute("PRAGMA synchronous = FULL")
            # It is deterministic in SQLite's sense: constant during one statement.
            connection.create_function("lastbit_now", 0, _now, deterministic=True)

        @sa.event.listens_for(engine, "checkout")
        def check_file(*_: object) -> None:
            # SQLite would go on writing to a file that was removed or replaced, and nothing of that would be found
            # after a restart. It refuses such writes itself, but not in WAL mode.
            if opened is not None and opened.is_gone():
                raise sa.exc.DisconnectionError("the file was removed or replaced")  # the pool connects again

        @sa.event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            # A deferred transaction that reads first and then writes can fail with BUSY at any statement. So writing
            # transactions begin with IMMEDIATE.
            kind = connection.get_execution_options().get("lastbit_begin", "DEFERRED")
            connection.exec_driver_sql(f"BEGIN {kind}")

        return engine

    def origin(self, driver: Any) -> tuple[Any, ...]:
        return _identity(_path(driver)) or ()

    def fault(self, error: DBAPIError) -> Fault | None:
        return Fault.OUTAGE if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF in _OUTAGES else None

    def code(self, error: DBAPIError) -> Code | None:
        return getattr(error.orig, "sqlite_errorname", None)

    def guard(self, tx: Connection, column: sa.Column[int], keys: Sequence[tuple[str | int, ...]]) -> None:
        pass  # nobody else writes to the file

    def by_primary_key(self, table: str) -> str:
        return table

    def for_update(self, *key: str) -> str:
        return ""

    def lock_looked_up(self, table: str) -> str:
        return ""

    def look_up(self, tx: Connection, table: str, key: Sequence[str], rows: Sequence[str]) -> str:
        columns = ", ".join(key)
        source = f"(WITH look_up (place, {columns}) AS (VALUES {','.join(rows)}) SELECT * FROM look_up) look_up"  # noqa: S608
        return f"{source} CROSS JOIN {table} USING ({columns})"

    def sum_locked(
        self, tx: Connection, results: str, table: str, condition: str, group_by: str, names: Sequence[str]
    ) -> list[str]:
        return [f"SELECT {results} FROM {table} WHERE {condition} GROUP BY {group_by}"]  # noqa: S608

    def upsert(self, key: Sequence[str], columns: Sequence[str]) -> str:
        updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
        return f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}"

    def on_conflict(self, key: str) -> str:
        return f" ON CONFLICT ({key}) DO UPDATE SET"

    def text(self, digits: str) -> str:
        return f"CAST(x'{digits}' AS TEXT)"

    def run(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        results = [tx.exec_driver_sql(text) for text in texts]
        return [result.all() if result.returns_rows else () for result in results]

    def insert_batches(self, tx: Connection, columns: str, rows: Sequence[str]) -> list[str]:
        numbering = self.numbering(tx)
        if numbering is not None:
            # The file's own next id is one above the last. The INSERT reads that, as several may follow each other.
            first, distance = numbering.first, numbering.divisor
            last = f"(SELECT coalesce(max(seq), 0) FROM {self.name(tx, 'sqlite_sequence')} WHERE name = 'batches')"  # noqa: S608
            next_id = f"{first} + {distance} * (({last} - {first} + {distance}) / {distance})"
            columns = f"id, {columns}"
            rows = [f"({next_id} + {place * distance}, {row[1:]}" for place, row in enumerate(rows)]
        return super().insert_batches(tx, columns, rows)

    def insert_reason(self, table: str, reason: str, items: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
        columns = f"column1, column2, {self.text(reason.encode().hex())}, {self.now}"
        values = ",".join([f"({batch},{number})" for batch, number in items])
        yield [f"INSERT INTO {table} SELECT {columns} FROM (VALUES {values})"]  # noqa: S608


def _create(path: str) -> None:
    """Create the file, unless it exists, so that only this account can read it: it holds the secrets of webhooks.
    SQLite gives its `-wal` and `-shm` files the same mode. It reports an impossible path itself."""
    if not path.startswith("file:"):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _path(driver: Any) -> Path:
    """The absolute path of the file that a connection has opened."""
    return Path(driver.execute("PRAGMA database_list").fetchone()[2])


def _identity(path: Path) -> tuple[int, int] | None:
    """The file that is now at `path`; None if there is none."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
