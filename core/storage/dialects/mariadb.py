"""MariaDB and MySQL.

In an ack transaction, most of a statement's cost is not in the database but in the driver's parsing of columns and
rows, and in a thread switch for each round trip. So several statements are sent in one packet, and integers are
returned as one concatenated value instead of rows.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import pymysql
import sqlalchemy as sa
from pymysql.constants import CLIENT, CR
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from core import errors
from core.storage import continuity, engines, faults, galera
from core.storage.dialects.dialect import IDLE, LOCK_WAIT, REASONS, Dialect, Rows, announce, note_writes
from core.storage.lock_order import LOCK_HEAD

CONCATENATED: Final = 16 * 2**20
"""Maximum bytes of a concatenated value; each session sets it. 512 groups take about 20 KB."""
READ_TIMEOUT: Final = 60
"""Seconds to wait for a response."""
ROWS: Final = 24
"""Up to this number, rows are not concatenated. The server makes a temporary table to concatenate rows, which costs
about as much as parsing this number of rows in the driver."""


class MariaDB(Dialect):
    # MySQL's as well: both servers use the same driver and dialect, so compiled statements are shared.
    driver = "mysql+pymysql"
    default_port = 3306
    is_embedded = False
    locks_rows = True
    locks_gaps = True
    patches_blobs = True
    now = clock = "UTC_TIMESTAMP(6)"
    greatest = "GREATEST"
    begin_writing: ClassVar[dict[str, Any]] = {}
    begin_snapshot = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"

    def one_time(self, tx: Connection) -> str:
        return self.now

    def engine(self, url: sa.URL, connections: int, lock_wait: int) -> Engine:
        session = (
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
            f"innodb_lock_wait_timeout = {lock_wait}, group_concat_max_len = {CONCATENATED} "
            f"/*M! , idle_transaction_timeout = {IDLE} */"  # only MariaDB executes this comment
        )
        engine = sa.create_engine(
            url,
            isolation_level="READ COMMITTED",
            hide_parameters=True,  # an error's text ends up in logs; secrets are among the parameters
            **engines.pool(connections),
            # Every transaction has ended when its connection is returned, so a ROLLBACK would be a useless round trip.
            pool_reset_on_return=None,
            connect_args={
                "charset": "utf8mb4",
                "client_flag": CLIENT.MULTI_STATEMENTS,  # see `run`
                "init_command": session,
                "connect_timeout": 5,
                "read_timeout": READ_TIMEOUT,
                "write_timeout": 60,
            },
        )

        @sa.event.listens_for(engine, "do_connect")
        def connect(_: object, __: object, arguments: Any, keywords: Any) -> _Connection:
            # PyMySQL would encode the password as Latin-1, but statements such as CREATE USER are UTF-8.
            if isinstance(keywords.get("password"), str):
                keywords["password"] = keywords["password"].encode()
            try:
                return _Connection(*arguments, **keywords)
            except (TypeError, OSError) as error:  # an unknown option, or a file that can't be read
                raise errors.Misconfigured(f"the options of the database URL can't be used: {error}") from error

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, record: Any) -> None:
            galera.prepare(connection, record.info)

        engines.replace_old_connections(engine)
        return engine

    def origin(self) -> Callable[[Any], tuple[Any, ...]]:
        return continuity.server

    @contextlib.contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        # DDL commits implicitly, so a named lock keeps two processes from migrating at once. The wait for it is shorter
        # than that for a response.
        if connection.exec_driver_sql("SELECT GET_LOCK('lastbit_migrate', 50)").scalar() != 1:
            raise errors.Unavailable("another migration of this database is in progress")
        driver: Any = connection.connection.dbapi_connection
        # Building an index of a large table takes longer, and goes on if the connection is given up.
        driver._read_timeout = None
        before = connection.exec_driver_sql("SELECT @@SESSION.lock_wait_timeout").scalar()
        wait = connection.exec_driver_sql("SELECT @@SESSION.innodb_lock_wait_timeout").scalar()
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {wait}")
        try:
            yield
        finally:
            if not connection.invalidated:  # a lost connection releases its lock
                connection.rollback()
                connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {before}")
                connection.exec_driver_sql("SELECT RELEASE_LOCK('lastbit_migrate')")
                driver._read_timeout = READ_TIMEOUT

    def by_primary_key(self, table: str) -> str:
        return f"{table} FORCE INDEX (PRIMARY)"

    def for_update(self, *key: str) -> str:
        return " FOR UPDATE"  # the lists of keys are read in the order of the primary key

    def lock_looked_up(self, table: str) -> str:
        return " FOR UPDATE"

    def look_up(self, tx: Connection, table: str, key: Sequence[str], rows: Sequence[str]) -> str:
        separator = "," if getattr(tx.dialect, "is_mariadb", False) else ",ROW"
        values = ("" if separator == "," else "ROW") + separator.join(rows)
        columns = ", ".join(key)
        source = f"(WITH look_up (place, {columns}) AS (VALUES {values}) SELECT * FROM look_up) look_up"  # noqa: S608
        return f"{source} STRAIGHT_JOIN {self.by_primary_key(table)} USING ({columns})"

    def sum_locked(self, results: str, table: str, condition: str, group_by: str, names: Sequence[str]) -> list[str]:
        source = f"{self.by_primary_key(table)} WHERE {condition}"
        return [f"SELECT {results} FROM {source} GROUP BY {group_by} FOR UPDATE"]  # noqa: S608

    def upsert(self, key: Sequence[str], columns: Sequence[str]) -> str:
        return " ON DUPLICATE KEY UPDATE " + ", ".join(f"{column} = VALUES({column})" for column in columns)

    def on_conflict(self, key: str) -> str:
        return " ON DUPLICATE KEY UPDATE"

    def text(self, digits: str) -> str:
        return f"x'{digits}'"

    def patch(self, column: str, changes: Sequence[tuple[int, bytes]]) -> str:
        blob = column
        for place, byte in changes:
            blob = f"INSERT({blob},{place + 1},1,x'{byte.hex()}')"
        return blob

    def run(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        if galera.is_node(tx):
            return [rows for text in texts for rows in self._send(tx, [text])]
        return self._send(tx, texts) if texts else []

    def _send(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        """Execute the statements in one packet."""
        note_writes(tx, texts)
        text = ";".join(_hurried(tx, texts))
        driver = tx.connection.dbapi_connection
        assert driver is not None
        cursor = driver.cursor()
        rows: list[Rows] = []
        try:
            announce(tx.dispatch.before_cursor_execute, tx, cursor, texts)
            cursor.execute(text)
            rows.append(cursor.fetchall())
            while cursor.nextset():
                rows.append(cursor.fetchall())
            if len(rows) < len(texts):
                # A session that is killed between two statements may end the packet without an error. Its transaction
                # must not be continued by the connection's next user.
                raise pymysql.err.OperationalError(
                    CR.CR_SERVER_LOST, f"the server executed {len(rows)} of {len(texts)} statements"
                )
            announce(tx.dispatch.after_cursor_execute, tx, cursor, texts)
        except pymysql.MySQLError as error:
            # Nothing after the statement that failed was executed. If all have results, a listener failed.
            failed = texts[min(len(rows), len(texts) - 1)]
            converted = DBAPIError.instance(
                failed[:200],
                None,
                error,
                pymysql.MySQLError,
                dialect=tx.dialect,
                connection_invalidated=faults.is_lost(error),
            )
            # The connection may have unread responses, so it must not be used again.
            if not isinstance(error, pymysql.err.IntegrityError | pymysql.err.OperationalError) or faults.is_lost(
                error
            ):
                tx.invalidate()
            raise converted from error
        finally:
            with contextlib.suppress(pymysql.MySQLError):
                cursor.close()
        return rows

    def finish(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        rows = self.run(tx, [*texts, "COMMIT"])
        driver = tx.connection.dbapi_connection
        assert isinstance(driver, _Connection)
        driver.has_ended = True
        return rows[:-1]

    def select(self, columns: Sequence[str], rest: str, expected: int) -> str:
        row = f"CONCAT_WS(' ', {', '.join(columns)})"
        if expected <= ROWS:
            return f"SELECT {row} FROM {rest}"  # noqa: S608
        return f"SELECT COUNT(*), GROUP_CONCAT({row} SEPARATOR ';') FROM {rest}"  # noqa: S608

    def records(self, rows: Rows) -> Sequence[Sequence[Any]]:
        if not rows or len(rows[0]) == 1:
            return [_text(row[0]).split(" ") for row in rows]
        count, text = rows[0]
        if not count:
            return ()
        records = [record.split(" ") for record in _text(text).split(";")]
        if len(records) != count:
            raise RuntimeError(
                f"expected {count} concatenated rows, got {len(records)}: something has changed group_concat_max_len"
            )
        return records

    def insert_batches(self, tx: Connection, columns: str, rows: Sequence[str]) -> list[str]:
        insert = f"INSERT INTO batches ({columns}) VALUES {','.join(rows)}"  # noqa: S608
        if getattr(tx.dialect, "is_mariadb", False):
            return [f"{insert} RETURNING id, created_at"]
        # MySQL has no RETURNING. It gives the rows of one INSERT ids at equal distances, and remembers the first.
        look = "SELECT id, created_at, @@SESSION.auto_increment_increment FROM batches WHERE id = LAST_INSERT_ID()"
        return [insert, look]

    def batch_ids(self, rows: Rows, count: int) -> list[int]:
        if len(rows[0]) == 3:
            first, _, distance = rows[0]
            return [first + place * distance for place in range(count)]
        return sorted(row[0] for row in rows)

    def insert_reason(self, reason: str, items: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
        # The reason is sent once, in hexadecimal.
        name = f"SET @lastbit_reason = _utf8mb4 x'{reason.encode().hex()}'"
        for first in range(0, len(items), REASONS):
            values = ",".join(
                [f"({batch},{number},@lastbit_reason,{self.now})" for batch, number in items[first : first + REASONS]]
            )
            yield [name, f"INSERT INTO failures (batch_id, number, reason, failed_at) VALUES {values}"]  # noqa: S608


def _hurried(tx: Connection, texts: Sequence[str]) -> Sequence[str]:
    seconds = tx.get_execution_options().get(LOCK_WAIT)
    if seconds is None or not getattr(tx.dialect, "is_mariadb", False):
        return texts
    hurry = f"SET STATEMENT max_statement_time={seconds} FOR "
    return [hurry + text if text.endswith(" FOR UPDATE") and text != LOCK_HEAD else text for text in texts]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class _Connection(pymysql.connections.Connection):  # type: ignore[misc]  # it has no types
    """A connection that shares one TLS context, and knows whether a packet has ended its transaction.

    PyMySQL reads all certificates of the machine for each connection that may use TLS, even if it won't verify any.
    This holds the GIL for a tenth of a second, and after an outage fifty connections are made.
    """

    _shared: ssl.SSLContext | None = None
    has_ended = False
    """The last packet ended the transaction, so a COMMIT or ROLLBACK would be a useless round trip."""

    def query(self, sql: Any, unbuffered: bool = False) -> Any:
        self.has_ended = False
        return super().query(sql, unbuffered)

    def commit(self) -> None:
        if not self.has_ended:
            super().commit()

    def rollback(self) -> None:
        if not self.has_ended:
            super().rollback()

    def _create_ssl_ctx(self, settings: Any) -> Any:
        if settings:
            return super()._create_ssl_ctx(settings)
        if _Connection._shared is None:
            _Connection._shared = super()._create_ssl_ctx(settings)
        return _Connection._shared
