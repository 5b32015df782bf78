"""PostgreSQL. Decision 0023 examines all transactions for the differences to MariaDB.

A failed statement aborts the whole transaction, so nothing in core continues after one: the transaction begins again.
Several statements are sent as one simple query, at which the server stops at the first that fails. The BEGIN goes with
the first statements of a transaction, and the COMMIT with the last.

READ COMMITTED differs from MariaDB's in two ways:

* Each statement sees what was committed when it *began*, even if it then waits for a lock. It gets the newest version
  of a row that it waited for, and checks its condition again, but it doesn't see a row that was inserted in the
  meantime. So a decision that depends on other rows than the locked ones is made by a later statement.
* A row that another transaction has inserted but not committed is invisible, and a locking read doesn't wait for it.
  Inserting the same key waits. Where that isn't enough, `sum_locked` locks a number instead of rows.

Rows are locked in the order in which the plan returns them. So each locking SELECT has an ORDER BY, which the server
executes before it locks. The columns of a key never change, so the order stays right while it waits.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import math
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any, ClassVar, Final, Literal

import psycopg
import sqlalchemy as sa
from psycopg import generators, pq
from psycopg.abc import Buffer
from psycopg.adapt import Transformer
from psycopg.errors import Diagnostic
from psycopg.types.string import StrDumper, TextLoader
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, InterfaceError
from sqlalchemy.types import TypeEngine

from core import errors
from core.errors import Fault
from core.storage import engines, refusals
from core.storage.dialects.dialect import (
    IDLE,
    LOCK_WAIT,
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

SILENCE: Final = 60
"""Seconds without a response, after which a connection counts as lost."""
LONG: Final = 4096
"""Bytes up to which a text is a constant, which the planner can look up in its statistics."""
LONGEST_NAME: Final = 63
"""Bytes. The server shortens a longer name, so two could mean the same schema."""
_SPECIAL: Final = frozenset({"$user", "information_schema"})
"""Names that don't mean an ordinary schema in a search path, even if they are quoted. Others begin with `pg_`."""
MIGRATION: Final = 0x6C617374626974
"""The advisory lock of migrations: "lastbit"."""
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
_FAILED: Final = "a statement of the transaction has failed, so the server rolled back"
_FINE: Final = frozenset({pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK})

_FAULTS: Final = {
    # serialization failure, deadlock
    **dict.fromkeys(("40001", "40P01"), Fault.CONFLICT),
    # read-only transaction; a statement that was cancelled, a session that was ended
    **dict.fromkeys(("25006", "25P03", "25P04", "57014"), Fault.OUTAGE),
}
"""By SQLSTATE. Whole classes follow."""
_NO_LOCK: Final = "55P03"
_OUTAGES: Final = ("08", "53", "57P", "58")
"""The connection; insufficient resources, such as a full disk; shutdown and crash; errors of the operating system."""
_OBSTACLES: Final = (
    (r'permission denied for database "', Obstacle.NO_ACCESS),
    (r'database ".*" does not exist', Obstacle.NO_DATABASE),
    (r'authentication failed|no password supplied|role ".*" does not exist|no pg_hba.conf entry', Obstacle.REFUSED),
)
"""The texts of errors while connecting. The driver has no codes for them. If the server is set to another language, the
message for other errors contains its text."""


class PostgreSQL(Dialect):
    driver = "postgresql+psycopg"
    default_port = 5432
    is_embedded = False
    locks_rows = True
    locks_gaps = False
    patches_blobs = True
    # The time when the packet arrived. It is constant, so an index can be searched for it.
    now = "(statement_timestamp() AT TIME ZONE 'UTC')"
    clock = "(clock_timestamp() AT TIME ZONE 'UTC')"
    greatest = "GREATEST"
    find = "STRPOS"
    driver_error = psycopg.Error
    duplicate = frozenset({"23505"})
    elsewhere = frozenset({"25006"})
    new_database = "ENCODING 'UTF8'"
    # Bitfields stay in their row, up to the size of a page, and are not compressed: writing them is faster.
    after_creation = (
        "ALTER TABLE item_groups ALTER COLUMN resolved SET STORAGE EXTERNAL",
        "ALTER TABLE item_groups ALTER COLUMN failed SET STORAGE EXTERNAL",
        "ALTER TABLE ack_journal ALTER COLUMN numbers SET STORAGE EXTERNAL",
    )
    begin_writing: ClassVar[dict[str, Any]] = {}
    begin_snapshot = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"

    def one_time(self, tx: Connection) -> str:
        return self.now

    def located(self, url: sa.URL, schema: str) -> sa.URL:
        if not 0 < len(schema.encode()) <= LONGEST_NAME or "\0" in schema:
            raise errors.Misconfigured(f"a schema's name has 1 to {LONGEST_NAME} bytes, got {schema!r}")
        if schema in _SPECIAL or schema.startswith("pg_"):
            raise errors.Misconfigured(f"the schema {schema!r} belongs to PostgreSQL: choose another name")
        return url

    def create_schema(self, tx: Connection, schema: str) -> None:
        query = sa.text("SELECT nspname FROM pg_namespace WHERE nspname = :name")
        if tx.execute(query, {"name": schema}).first() is None:
            tx.execute(sa.schema.CreateSchema(schema, if_not_exists=True))

    def new_schema(self, tx: Connection, schema: str) -> str:
        user = str(tx.exec_driver_sql("SELECT current_user").scalar_one())
        return f"CREATE SCHEMA {self.quoted(schema)} AUTHORIZATION {self.quoted(user)}"

    def lacks_usage(self, tx: Connection) -> bool:
        query = sa.text("SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = :name")
        return tx.scalar(query, {"name": tx.get_execution_options().get(SCHEMA)}) is False

    def names(self, tx: Connection) -> list[str]:
        place = "pg_namespace.oid = relnamespace AND nspname = current_schema()"
        return list(tx.scalars(sa.text(f"SELECT relname FROM pg_class JOIN pg_namespace ON {place}")))  # noqa: S608

    def engine(self, url: sa.URL, connections: int, lock_wait: int, schema: str | None) -> Engine:
        session = "; ".join(_session(lock_wait))
        if schema is not None:
            session += f"; SELECT set_config('search_path', {_literal(self.quoted(schema))}, false)"
        engine = sa.create_engine(
            url,
            **engines.pool(connections),
            hide_parameters=True,  # an error's text ends up in logs; secrets are among the parameters
            # Every transaction has ended when its connection is returned, so a ROLLBACK would be a useless round trip.
            pool_reset_on_return=None,
            use_native_hstore=False,
            connect_args={
                "connect_timeout": 5,
                "keepalives_idle": 30,
                "keepalives_interval": 10,
                "keepalives_count": 3,
                "tcp_user_timeout": SILENCE * 1000,
                # The texts of most statements differ, so prepared ones would seldom be used again.
                "prepare_threshold": None,
            },
        )

        @sa.event.listens_for(engine, "do_connect")
        def connect(_: object, __: object, arguments: Any, keywords: Any) -> _Connection:
            # The session is set up here, as SQLAlchemy executes its first statements before its event `connect`.
            connection = _Connection.connect(*arguments, **keywords)
            connection.lock_wait = lock_wait
            connection.add_notice_handler(connection.note)
            connection.adapters.register_dumper(str, _Dumper)
            for type in ("text", "varchar"):
                connection.adapters.register_loader(type, _Loader)
            for result in connection.send(session):
                _check(result)
            return connection

        engines.replace_old_connections(engine)
        return engine

    def origin(self, driver: Any) -> tuple[Any, ...]:
        """The server behind a connection: its identifier, its start, and its timeline, which changes when a
        standby is promoted or a backup restored."""
        timeline = "CASE WHEN pg_is_in_recovery() THEN '' ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END"
        with contextlib.closing(driver.cursor()) as cursor:
            cursor.execute(f"SELECT system_identifier, pg_postmaster_start_time(), {timeline} FROM pg_control_system()")  # noqa: S608
            origin: tuple[Any, ...] = cursor.fetchone()
        driver.rollback()
        return origin

    def refused(self, driver: Any) -> str | None:
        with contextlib.closing(driver.cursor()) as cursor:
            cursor.execute("SELECT version(), to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL")
            version, has_citus = cursor.fetchone()
            if has_citus:
                # A table that Citus only knows, or copies to all nodes, is as good as another.
                table = "to_regclass('item_groups')"
                cursor.execute(f"SELECT FROM pg_dist_partition WHERE logicalrelid = {table} AND partmethod <> 'n'")
            is_distributed = has_citus and cursor.fetchone() is not None
        driver.rollback()
        return refusals.of_postgresql(version, is_distributed=is_distributed)

    def byte_text_type(self, characters: int, *, ascii_only: bool) -> TypeEngine[Any]:
        # Other collations sort by language. Twice as wide, because `_stored` makes two characters of U+0000.
        return sa.String(characters * (1 if ascii_only else 2), collation="C")

    def fault(self, error: DBAPIError) -> Fault | None:
        state = self.code(error)
        if state is None:  # from the driver, such as a refused connection
            is_outage = isinstance(error.orig, psycopg.OperationalError) or isinstance(error, InterfaceError)
            return Fault.OUTAGE if is_outage or error.connection_invalidated else None
        if state == _NO_LOCK:
            return self.lock_wait(error)
        is_outage = state.startswith(_OUTAGES) or error.connection_invalidated
        return _FAULTS.get(state, Fault.OUTAGE if is_outage else None)

    def code(self, error: DBAPIError) -> str | None:
        """The server's; None if the driver has raised the error."""
        return error.orig.sqlstate if isinstance(error.orig, psycopg.Error) else None

    def text_of(self, error: DBAPIError) -> str:
        lines = str(error.orig).removeprefix("connection failed: ").splitlines()
        return lines[0] if lines else type(error.orig).__name__

    def obstacle(self, error: DBAPIError) -> Obstacle | None:
        state, text = self.code(error), str(error.orig)
        if state is not None:
            return {"42501": Obstacle.NO_PRIVILEGE, "25006": Obstacle.READ_ONLY}.get(state)
        for pattern, obstacle in _OBSTACLES:
            if re.search(pattern, text):
                return obstacle
        # Other errors of a server that responds, such as one that is starting, have a severity.
        return None if "FATAL" in text else Obstacle.UNREACHABLE

    def guard(self, tx: Connection, column: sa.Column[int], keys: Sequence[tuple[str | int, ...]]) -> None:
        pass  # one server has all locks

    @contextlib.contextmanager
    def migrating(self, connection: Connection) -> Iterator[None]:
        # A failed migration is rolled back as a whole. Two at once would still try to create the same tables.
        driver: Any = connection.connection.dbapi_connection
        schema = connection.get_execution_options().get(SCHEMA)
        number = MIGRATION if schema is None else _number(f"{schema}:migration")
        # Building an index of a large table takes longer. If the connection were given up, the server would roll back.
        driver.silence = math.inf
        try:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '60s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_lock({number})")
            connection.commit()
        except DBAPIError as error:
            if self.fault(error) is Fault.LOCK_WAIT:
                raise errors.Unavailable("another migration of this database is in progress") from error
            raise
        try:
            yield
        finally:
            if not connection.invalidated:  # a lost connection releases its lock
                connection.rollback()
                connection.exec_driver_sql(f"SELECT pg_advisory_unlock({number})")
                connection.commit()
                driver.silence = SILENCE

    def by_primary_key(self, table: str) -> str:
        return table

    def for_update(self, *key: str) -> str:
        return f"{' ORDER BY ' if key else ''}{', '.join(key)} FOR UPDATE"

    def lock_looked_up(self, table: str) -> str:
        return f" ORDER BY place FOR UPDATE OF {table}"

    def look_up(self, tx: Connection, table: str, key: Sequence[str], rows: Sequence[str]) -> str:
        columns = ", ".join(key)
        return f"(VALUES {','.join(rows)}) AS look_up (place, {columns}) JOIN {table} USING ({columns})"

    def sum_locked(
        self, tx: Connection, results: str, table: str, condition: str, group_by: str, names: Sequence[str]
    ) -> list[str]:
        # Rows can't be locked by a statement that sums them, and rows of others that aren't committed are invisible. So
        # a number is locked for each name. The next statement sees what the transactions that had locked it committed.
        schema = tx.get_execution_options().get(SCHEMA)
        source = table if schema is None else f"{schema}:{table}"
        numbers = sorted(_number(f"{source}:{name}") for name in names)
        locks = ", ".join(f"pg_advisory_xact_lock({number})" for number in numbers)
        return [f"SELECT {locks}", f"SELECT {results} FROM {table} WHERE {condition} GROUP BY {group_by}"]  # noqa: S608

    def upsert(self, key: Sequence[str], columns: Sequence[str]) -> str:
        updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
        return f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}"

    def on_conflict(self, key: str) -> str:
        return f" ON CONFLICT ({key}) DO UPDATE SET"

    def text(self, digits: str) -> str:
        content = _stored(bytes.fromhex(digits).decode()).encode()
        if len(content) > LONG:
            return f"convert_from({self.blob(content.hex())}, 'UTF8')"
        return f"E'{content.decode('latin-1').translate(_ESCAPES)}'"

    def blob(self, digits: str) -> str:
        return f"'\\x{digits}'::bytea"

    def time(self, text: str) -> str:
        return f"'{text}'::timestamp"

    def patch(self, column: str, changes: Sequence[tuple[int, bytes]]) -> str:
        blob = column
        for place, byte in changes:
            blob = f"set_byte({blob},{place},{byte[0]})"
        if not changes:
            return column
        # Beyond the end, it would be an error. A blob that stays as it is disagrees with its count, which is noticed.
        return f"CASE WHEN octet_length({column})>{max(place for place, _ in changes)} THEN {blob} ELSE {column} END"

    def flat(
        self, column: str, kind: Literal["plain", "text", "bytes", "time"] = "plain", *, nullable: bool = False
    ) -> str:
        digits = f"encode(convert_to({column}, 'UTF8'), 'hex')"
        pairs = f"regexp_replace({digits}, '(..)', ' \\1', 'g')"
        # Each 01 begins one of the pairs that `_stored` makes.
        read = f"replace(replace(replace({pairs}, ' 01 01', ' 00'), ' 01 02', ' 01'), ' ', '')"
        expression = {
            "plain": f"{column}::text" if nullable else column,
            "text": f"CASE WHEN strpos({column}, E'\\x01') = 0 THEN {digits} ELSE {read} END",
            "bytes": f"encode({column}, 'hex')",
            "time": f"replace({column}::text, ' ', 'T')",
        }[kind]
        return f"coalesce({expression}, '-')" if nullable else expression

    def run(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        if not texts:
            return []
        note_writes(tx, texts)
        driver: Any = tx.connection.dbapi_connection
        before = [_BEGIN] if driver.pgconn.transaction_status == pq.TransactionStatus.IDLE else []
        seconds = tx.get_execution_options().get(LOCK_WAIT)
        if seconds is not None:
            before.append(_lock_timeout(seconds))
        sent: list[str] = []
        places: list[int] = []
        for text in texts:
            if seconds is not None and text == LOCK_HEAD:
                before.append(_lock_timeout(driver.lock_wait))
            sent += [*before, text]
            places.append(len(sent) - 1)
            before = []
        results: list[pq.abc.PGresult] = []
        try:
            _announce(tx, driver, "before_cursor_execute", texts)
            results = driver.send(";".join(sent))
            _check(results[-1])
            if texts[-1] == "COMMIT" and results[-1].command_status != b"COMMIT":
                raise psycopg.errors.InFailedSqlTransaction(_FAILED)
            if len(results) < len(sent):
                raise psycopg.OperationalError(f"the server executed {len(results)} of {len(sent)} statements")
            rows = _rows(driver, [results[place] for place in places])
            _announce(tx, driver, "after_cursor_execute", texts)
        except psycopg.Error as error:
            # Nothing after the statement that failed was executed. If all have results, a listener failed.
            failed = texts[bisect.bisect_left(places, max(len(results) - 1, 0))]
            is_lost = driver.closed or driver.broken
            sqlalchemy_error = DBAPIError.instance(
                failed[:200], None, error, psycopg.Error, dialect=tx.dialect, connection_invalidated=is_lost
            )
            if is_lost:
                tx.invalidate()
            raise sqlalchemy_error from error
        return rows

    def finish(self, tx: Connection, texts: Sequence[str]) -> list[Rows]:
        return self.run(tx, [*texts, "COMMIT"])[:-1]

    def number_batches(self, numbering: Numbering) -> list[str]:
        first, distance = numbering.first, numbering.divisor
        column = f"ALTER COLUMN id SET START {first} SET INCREMENT {distance} RESTART"
        # After a restore, a person lets the ids start higher, and may get it wrong.
        check = f"ADD CONSTRAINT batches_ids CHECK (mod(id, {distance}) = {numbering.remainder})"
        return [f"ALTER TABLE batches {column}, {check}"]

    def distance_of_ids(self, tx: Connection) -> int | None:
        sequence = "pg_get_serial_sequence('batches', 'id')::regclass"
        query = f"SELECT seqincrement FROM pg_sequence WHERE seqrelid = {sequence}"  # noqa: S608
        distance: int | None = tx.exec_driver_sql(query).scalar()
        return distance

    def insert_reason(self, table: str, reason: str, items: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
        # The reason is sent once.
        columns = f"batch, number, {self.text(reason.encode().hex())}, {self.now}"
        for first in range(0, len(items), REASONS):
            values = ",".join(
                [f"({batch}::bigint,{number}::bigint)" for batch, number in items[first : first + REASONS]]
            )
            yield [f"INSERT INTO {table} SELECT {columns} FROM (VALUES {values}) AS items (batch, number)"]  # noqa: S608


def _session(lock_wait: int) -> list[str]:
    """Statements that set everything that an account or a database may have set otherwise, for its other users."""
    return [
        "SET default_transaction_isolation = 'read committed'",
        "SET timezone = 'UTC'",
        "SET datestyle = 'ISO'",
        "SET client_encoding = 'UTF8'",
        f"SET lock_timeout = '{lock_wait}s'",
        f"SET idle_in_transaction_session_timeout = '{IDLE}s'",
        # Long calls and long reads would be ended again at each retry.
        "SET statement_timeout = 0",
        "SELECT set_config(name, '0', false) FROM pg_settings WHERE name = 'transaction_timeout'",  # PostgreSQL 17
        "SET jit = off",  # compiling a statement takes longer than these statements take
        "SET standard_conforming_strings = on",  # otherwise the backslashes in `blob` would be escapes
        "SET client_min_messages = warning",  # one of them is that a COMMIT may be lost, see `_Connection.note`
    ]


def _number(name: str) -> int:
    """The number of an advisory lock, of which a database has one for all schemas."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _lock_timeout(seconds: float) -> str:
    return f"SET LOCAL lock_timeout = '{max(1, round(seconds * 1000))}ms'"


_ESCAPES: Final = {
    code: chr(code) if 0x20 <= code < 0x7F and chr(code) not in "'\\" else f"\\x{code:02x}" for code in range(256)
}
"""How a byte is written in an escape string."""


def _stored(text: str) -> str:
    """PostgreSQL stores no U+0000, which keys may contain. U+0000 becomes U+0001 U+0001, and U+0001 becomes U+0001
    U+0002: no two texts become equal, and their order stays the same."""
    if "\0" in text or "\1" in text:
        return text.replace("\1", "\1\2").replace("\0", "\1\1")
    return text


class _Dumper(StrDumper):
    """Sends a text as it is stored."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(_stored(obj))


class _Loader(TextLoader):
    """Reads a stored text."""

    def load(self, data: Buffer) -> str | bytes:
        text = super().load(data)
        if isinstance(text, str) and "\1" in text:
            return text.replace("\1\1", "\0").replace("\1\2", "\1")
        return text


def _check(result: pq.abc.PGresult) -> None:
    if result.status not in _FINE:
        raise psycopg.errors.error_from_result(result, encoding="utf-8")


def _rows(driver: _Connection, results: Sequence[pq.abc.PGresult]) -> list[Rows]:
    transformer = Transformer(driver)
    rows: list[Rows] = []
    for result in results:
        count = result.ntuples
        if count:
            transformer.set_pgresult(result)
            rows.append(transformer.load_rows(0, count, tuple))
        else:
            rows.append(())
    return rows


def _announce(tx: Connection, driver: _Connection, event: str, texts: Sequence[str]) -> None:
    listeners = getattr(tx.dispatch, event)
    if listeners:
        with driver.cursor() as cursor:
            announce(listeners, tx, cursor, texts)


class _Connection(psycopg.Connection[Any]):
    """A connection that doesn't wait for a response forever, and never takes a ROLLBACK for a COMMIT."""

    silence: float = SILENCE
    lock_wait: float
    """Seconds that the session waits for a lock."""
    _lacks_standby = False

    def note(self, notice: Diagnostic) -> None:
        """Notice a COMMIT that was cancelled while it waited for a synchronous standby: the server reports success."""
        self._lacks_standby |= notice.source_function == "SyncRepWaitForLSN"

    def send(self, text: str) -> list[pq.abc.PGresult]:
        """Execute statements as one simple query; the results up to the first error."""
        self.pgconn.send_query(text.encode())
        results: list[pq.abc.PGresult] = self.wait(generators.execute(self.pgconn))
        return results

    def wait(self, gen: Generator[Any, Any, Any], *_: Any, **__: Any) -> Any:
        try:
            result = super().wait(_limited(gen, self.silence), interval=1)
        except _Silence:
            self.close()
            raise psycopg.OperationalError(f"the server has not responded for {self.silence} s") from None
        if self._lacks_standby:
            self.close()  # as if it had been lost before the answer
            raise psycopg.OperationalError("the wait for the standby was cancelled, which may lack the commit")
        return result

    def commit(self) -> None:
        if self.pgconn.transaction_status == pq.TransactionStatus.INERROR:
            # The server would answer a COMMIT with ROLLBACK, which is not an error to the driver.
            raise psycopg.errors.InFailedSqlTransaction(_FAILED)
        super().commit()


class _Silence(Exception):
    """The server doesn't respond."""


def _limited(steps: Generator[Any, Any, Any], silence: float) -> Generator[Any, Any, Any]:
    """The driver's steps, resumed every second at the latest."""
    seconds = 0
    try:
        state = next(steps)
        while True:
            ready = yield state
            seconds = 0 if ready else seconds + 1
            if seconds >= silence:
                raise _Silence
            state = steps.send(ready)
    except StopIteration as end:
        return end.value
