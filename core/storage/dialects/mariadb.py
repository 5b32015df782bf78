"""MariaDB and MySQL, and OceanBase (see `oceanbase`).

In an ack transaction, most of a statement's cost is not in the database but in the driver's parsing of columns and
rows, and in a thread switch for each round trip. So several statements are sent in one packet, and integers are
returned as one concatenated value instead of rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import ssl
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final

import pymysql
import sqlalchemy as sa
from pymysql.constants import CLIENT, CR
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError
from sqlalchemy.types import TypeEngine

from core import errors
from core.errors import Fault
from core.storage import engines, refusals
from core.storage.dialects import galera, oceanbase
from core.storage.dialects.dialect import (
    IDLE,
    LOCK_WAIT,
    NUMBERED,
    REASONS,
    SCHEMA,
    Dialect,
    Obstacle,
    Rows,
    announce,
    note_writes,
)
from core.storage.lock_order import LOCK_HEAD
from core.storage.numbering import Numbering

CONCATENATED: Final = 16 * 2**20
"""Maximum bytes of a concatenated value; each session sets it. 512 groups take about 20 KB."""
READ_TIMEOUT: Final = 60
"""Seconds to wait for a response."""
ROWS: Final = 24
"""Up to this number, rows are not concatenated. The server makes a temporary table to concatenate rows, which costs
about as much as parsing this number of rows in the driver."""
NUMBERS: Final = "lastbit.numbers"
"""The key in a connection's `info` for the ids that it gives to batches."""
UNLIMITED: Final = 2**63 - 1
"""Rows of a result, if there is no limit. OceanBase takes no larger number."""
LONGEST_NAME: Final = 64
"""Characters of a database's name."""


# Deadlock (also used for Galera's certification failures), record changed since last read, rolled back by group
# replication, table migrated since the snapshot began. Even if a COMMIT fails with these, nothing was committed.
_CONFLICTS: Final = {1213, 1020, 3101, 1412}
# The last one: a statement exceeded the time limit that `run` sets for locking reads.
_LOCK_WAITS: Final = {1205, 3572, 1969}
_OUTAGES: Final = {
    # can't connect, connection lost, server shutting down, too many connections, read-only, disk full
    *(2002, 2003, 2005, 2006, 2012, 2013, 2014, 2055),
    *(1040, 1042, 1043, 1047, 1053, 1077, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1290, 1792, 1836, 1927),
    *(1021, 1026, 1030, 1041, 1114, 1036, 3, 28),
    # a failed commit, as when a node loses its cluster; a statement that was killed
    *(1180, 1317),
}
_LOST: Final = {0, 2006, 2013, 2014, 2045, 2055, 1927, 4031}
_OBSTACLES: Final = {
    **dict.fromkeys((2002, 2003, 2005), Obstacle.UNREACHABLE),
    **dict.fromkeys((1045, 1698), Obstacle.REFUSED),
    1049: Obstacle.NO_DATABASE,
    1044: Obstacle.NO_ACCESS,
    **dict.fromkeys((1142, 1143, 1227, 1370), Obstacle.NO_PRIVILEGE),
    **dict.fromkeys((1290, 1792, 1836), Obstacle.READ_ONLY),
}
_OF_OCEANBASE: Final = "of_oceanbase"
"""An attribute of the driver's errors: whether OceanBase has sent it."""
_IDENTITY: Final = ("hostname", "port", "server_id", "server_uid", "server_uuid")
"""Variables that identify a server. Each kind of server has some of these."""


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
    sends_texts_as_bytes = True
    driver_error = pymysql.MySQLError
    duplicate = frozenset({1062})
    # The table, column, index or row exists already; the column or table to drop doesn't exist.
    done_already = frozenset({1050, 1060, 1061, 1062, 1051, 1091})
    # The node is not part of its cluster, or the server is read-only.
    elsewhere = frozenset({1047, 1180, 1290, 1792, 1836})
    quote = "`"
    new_database = "CHARACTER SET utf8mb4"
    begin_writing: ClassVar[dict[str, Any]] = {}
    begin_snapshot = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"

    def one_time(self, tx: Connection) -> str:
        return self.now

    def located(self, url: sa.URL, schema: str) -> sa.URL:
        if not 0 < len(schema) <= LONGEST_NAME or "\0" in schema:
            raise errors.Misconfigured(f"a database's name has 1 to {LONGEST_NAME} characters, got {schema!r}")
        return url.set(database=schema)

    def create_schema(self, tx: Connection, schema: str) -> None:
        query = sa.text("SELECT schema_name FROM information_schema.schemata WHERE schema_name = :name")
        if tx.execute(query, {"name": schema}).first() is None:
            name = self.quoted(schema).replace("%", "%%")  # the driver takes a single one for a parameter
            tx.exec_driver_sql(f"CREATE DATABASE IF NOT EXISTS {name} {self.new_database}")

    def new_schema(self, tx: Connection, schema: str) -> str:
        user, _, host = str(tx.exec_driver_sql("SELECT CURRENT_USER()").scalar_one()).rpartition("@")
        # Here the name is a pattern.
        pattern = self.quoted(schema.replace("_", "\\_").replace("%", "\\%"))
        return (
            f"CREATE DATABASE {self.quoted(schema)} {self.new_database}; "
            f"GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX ON {pattern}.* TO '{user}'@'{host}'"
        )

    def names(self, tx: Connection) -> list[str]:
        name = "IF(@@lower_case_table_names = 0, table_name, LOWER(table_name))"
        return list(
            tx.scalars(sa.text(f"SELECT {name} FROM information_schema.tables WHERE table_schema = DATABASE()"))  # noqa: S608
        )

    def engine(self, url: sa.URL, connections: int, lock_wait: int, schema: str | None) -> Engine:
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
                "init_command": _session(lock_wait),
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
            connection.is_oceanbase = oceanbase.prepare(connection, lock_wait, READ_TIMEOUT)

        engines.replace_old_connections(engine)
        return engine

    def origin(self, driver: Any) -> tuple[Any, ...]:
        """The server behind a connection, and its start time. That is its clock minus its uptime; setting the clock
        moves both. Uses only SHOW: a node outside its cluster refuses anything else."""
        with contextlib.closing(driver.cursor()) as cursor:

            def show(subject: str) -> dict[str, str]:
                cursor.execute(f"SHOW {subject}")
                return dict(cursor.fetchall())

            names = ", ".join(f"'{name}'" for name in (*_IDENTITY, "timestamp"))
            for _ in range(3):
                variables = show(f"VARIABLES WHERE Variable_name IN ({names})")
                uptime = int(show("GLOBAL STATUS LIKE 'Uptime'")["Uptime"])
                now = int(float(show("VARIABLES LIKE 'timestamp'")["timestamp"]))
                if now == int(float(variables["timestamp"])):  # otherwise a second boundary passed in between
                    break
        return *(variables.get(name) for name in _IDENTITY), now - uptime

    def refused(self, driver: Any) -> str | None:
        with contextlib.closing(driver.cursor()) as cursor:
            cursor.execute("SHOW VARIABLES WHERE Variable_name IN ('version', 'version_comment', 'memsql_version')")
            variables = {name.lower(): value for name, value in cursor.fetchall()}
        # Vitess passes SHOW on to a MySQL server, and names itself only when a connection begins.
        return refusals.of_mysql(variables | {"greeting": driver.get_server_info()})

    def byte_text_type(self, characters: int, *, ascii_only: bool) -> TypeEngine[Any]:
        # Collations would equate `Job-A` with `job-a`, and `a` with `a `.
        return mysql.VARBINARY(characters * (1 if ascii_only else 4))

    def long_text_type(self) -> TypeEngine[str]:
        return mysql.MEDIUMTEXT()

    def blob_type(self, size: int) -> TypeEngine[bytes]:
        return mysql.VARBINARY(size)

    def timestamp_type(self) -> TypeEngine[datetime]:
        return mysql.DATETIME(fsp=6)

    def fault(self, error: DBAPIError) -> Fault | None:
        code = self.code(error)
        if code in _CONFLICTS:
            return Fault.CONFLICT
        if code in _LOCK_WAITS:
            return self.lock_wait(error)
        if code in _OUTAGES or error.connection_invalidated or isinstance(error, InterfaceError):
            return Fault.OUTAGE
        return oceanbase.fault(code) if getattr(error.orig, _OF_OCEANBASE, False) else None

    def code(self, error: DBAPIError) -> int:
        """The number of the server's error, or of the driver's; 0 if it has none."""
        args = getattr(error.orig, "args", ())
        return args[0] if args and isinstance(args[0], int) else 0

    def text_of(self, error: DBAPIError) -> str:
        args: Sequence[object] = getattr(error.orig, "args", ())
        return str(args[1] if len(args) > 1 else error.orig)

    def obstacle(self, error: DBAPIError) -> Obstacle | None:
        return _OBSTACLES.get(self.code(error))

    def guard(self, tx: Connection, column: sa.Column[int], keys: Sequence[tuple[str | int, ...]]) -> None:
        galera.guard(tx, column, keys)

    @contextlib.contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        # DDL commits implicitly, so a named lock keeps two processes from migrating at once. The wait for it is shorter
        # than that for a response.
        lock = _migration(connection.get_execution_options().get(SCHEMA))
        if connection.exec_driver_sql(f"SELECT GET_LOCK('{lock}', 50)").scalar() != 1:
            raise errors.Unavailable("another migration of this database is in progress")
        driver: Any = connection.connection.dbapi_connection
        # Building an index of a large table takes longer, and goes on if the connection is given up.
        driver._read_timeout = None
        if driver.is_oceanbase:
            connection.exec_driver_sql(oceanbase.statements_end_after(oceanbase.DAY))
        before = connection.exec_driver_sql("SELECT @@SESSION.lock_wait_timeout").scalar()
        wait = connection.exec_driver_sql("SELECT @@SESSION.innodb_lock_wait_timeout").scalar()
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {wait}")
        try:
            yield
        finally:
            if not connection.invalidated:  # a lost connection releases its lock
                connection.rollback()
                connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {before}")
                connection.exec_driver_sql(f"SELECT RELEASE_LOCK('{lock}')")
                driver._read_timeout = READ_TIMEOUT
                if driver.is_oceanbase:
                    connection.exec_driver_sql(oceanbase.statements_end_after(READ_TIMEOUT))

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

    def sum_locked(
        self, tx: Connection, results: str, table: str, condition: str, group_by: str, names: Sequence[str]
    ) -> list[str]:
        query = f"SELECT {results} FROM {self.by_primary_key(table)} WHERE {condition} GROUP BY {group_by}"  # noqa: S608
        return [oceanbase.LOCK_SUMS, query] if _is_oceanbase(tx) else [f"{query} FOR UPDATE"]

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
        packets: Sequence[Sequence[str]]
        if galera.is_node(tx):
            packets = [[text] for text in texts]
        elif _is_oceanbase(tx):
            packets = oceanbase.packets(texts)
        else:
            packets = [texts] if texts else []
        return [rows for packet in packets for rows in self._send(tx, packet)]

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
            sqlalchemy_error = DBAPIError.instance(
                failed[:200],
                None,
                error,
                pymysql.MySQLError,
                dialect=tx.dialect,
                connection_invalidated=_is_lost(error),
            )
            # The connection may have unread responses, so it must not be used again.
            if not isinstance(error, pymysql.err.IntegrityError | pymysql.err.OperationalError) or _is_lost(error):
                tx.invalidate()
            raise sqlalchemy_error from error
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
        table = self.name(tx, "batches")
        rest = f"INTO {table} ({columns}) VALUES {','.join(rows)}"
        numbers = self._numbers(tx)
        if getattr(tx.dialect, "is_mariadb", False):
            begin = "" if numbers is None else f"{NUMBERED}={numbers[0]}, auto_increment_offset={numbers[1]} FOR "
            return [f"{begin}INSERT {rest} RETURNING id, created_at"]
        # MySQL has no RETURNING. It gives the rows of one INSERT ids at equal distances, and remembers the first.
        look = f"FROM {table} WHERE id = LAST_INSERT_ID()"
        if numbers is None:
            return [f"INSERT {rest}", f"SELECT id, created_at, @@SESSION.auto_increment_increment {look}"]
        distance, first, is_oceanbase = numbers
        # A server that doesn't know the hint ignores it.
        look = f"SELECT id, created_at, {distance} {look} AND MOD(id, {distance}) = MOD({first}, {distance})"
        if is_oceanbase:
            begin, end = oceanbase.numbered(distance, first)
            return [begin, f"INSERT {rest}", end, look]
        hints = f"SET_VAR(auto_increment_increment={distance}) SET_VAR(auto_increment_offset={first})"
        return [f"INSERT /*+ {hints} */ {rest}", look]

    def _numbers(self, tx: Connection) -> tuple[str, str, bool] | None:
        """The distance of ids and the first one, if they are not the server's own, and whether it is OceanBase.
        Sessions may have numbers of their own: of a cluster's nodes, each gives other ids, and so it is among ours."""
        if NUMBERS not in tx.info:
            numbering = self.numbering(tx)
            tx.info[NUMBERS] = None if numbering is None else self._among(tx, numbering)
        numbers: tuple[str, str, bool] | None = tx.info[NUMBERS]
        return numbers

    def _among(self, tx: Connection, numbering: Numbering) -> tuple[str, str, bool]:
        distance, first = "@@SESSION.auto_increment_increment", "@@SESSION.auto_increment_offset"
        if not getattr(tx.dialect, "is_mariadb", False):  # a hint has literals alone
            [[(distance, first)], found] = self.run(tx, [f"SELECT {distance}, {first}", oceanbase.LOOK])
            first = numbering.first + numbering.divisor * ((first - 1) % distance)
            return str(numbering.divisor * distance), str(first), bool(found)
        # The server ignores a first one above the distance.
        own = f"MOD({first} - 1, {distance})"
        return f"{numbering.divisor} * {distance}", f"{numbering.first} + {numbering.divisor} * {own}", False

    def batch_ids(self, rows: Rows, count: int) -> list[int]:
        if not rows:
            raise RuntimeError("the server has given a batch an id that is not among those of --ids")
        if len(rows[0]) == 3:
            first, _, distance = rows[0]
            return [first + place * distance for place in range(count)]
        return sorted(row[0] for row in rows)

    def insert_reason(self, table: str, reason: str, items: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
        # The reason is sent once, in hexadecimal.
        name = f"SET @lastbit_reason = _utf8mb4 x'{reason.encode().hex()}'"
        for first in range(0, len(items), REASONS):
            values = ",".join(
                [f"({batch},{number},@lastbit_reason,{self.now})" for batch, number in items[first : first + REASONS]]
            )
            yield [name, f"INSERT INTO {table} VALUES {values}"]  # noqa: S608


def _session(lock_wait: int) -> str:
    """The statement that sets everything that a server may have set otherwise, for its other users."""
    settings = [
        "sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        "time_zone = '+00:00'",
        f"innodb_lock_wait_timeout = {lock_wait}",
        f"group_concat_max_len = {CONCATENATED}",
        f"sql_select_limit = {UNLIMITED}",
        "sql_big_selects = 1",
        "sql_safe_updates = 0",
        "unique_checks = 1",
        "completion_type = NO_CHAIN",
        "default_storage_engine = InnoDB",
    ]
    settings_of_mariadb = [f"idle_transaction_timeout = {IDLE}", "max_statement_time = 0"]
    # Only MariaDB executes this comment.
    return f"SET SESSION {', '.join(settings)} /*M! , {', '.join(settings_of_mariadb)} */"


def _migration(schema: str | None) -> str:
    """The name of the lock of migrations, of which the server has one for all databases."""
    if schema is None:
        return "lastbit_migrate"
    # The name of a lock may be no longer than that of a database.
    return f"lastbit_migrate_{hashlib.blake2b(schema.encode(), digest_size=16).hexdigest()}"


def _is_lost(error: Exception) -> bool:
    """Whether a driver's error means that the connection is lost."""
    return len(error.args) > 0 and error.args[0] in _LOST


def _hurried(tx: Connection, texts: Sequence[str]) -> Sequence[str]:
    seconds = tx.get_execution_options().get(LOCK_WAIT)
    if seconds is None:
        return texts
    is_oceanbase = _is_oceanbase(tx)
    if not is_oceanbase and not getattr(tx.dialect, "is_mariadb", False):
        return texts
    limit = f"SET STATEMENT max_statement_time={seconds} FOR "
    return [
        (oceanbase.hurried(text, seconds) if is_oceanbase else limit + text)
        if text.endswith(" FOR UPDATE") and text != LOCK_HEAD
        else text
        for text in texts
    ]


def _is_oceanbase(tx: Connection) -> bool:
    return bool(getattr(tx.connection.dbapi_connection, "is_oceanbase", False))


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
    is_oceanbase = False

    def _read_query_result(self, unbuffered: bool = False) -> Any:
        with self._marked_errors():
            return super()._read_query_result(unbuffered)

    def _read_ok_packet(self) -> Any:
        with self._marked_errors():
            return super()._read_ok_packet()

    @contextlib.contextmanager
    def _marked_errors(self) -> Iterator[None]:
        try:
            yield
        except pymysql.MySQLError as error:
            setattr(error, _OF_OCEANBASE, self.is_oceanbase)
            raise

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
