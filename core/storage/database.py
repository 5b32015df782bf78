"""The database: engines, sessions as we need them, and the one place that begins, commits, rolls back and retries.

Every operation of core takes the transaction (`Connection`) as an argument and never commits. `Database.write` is the
only function that does:

* what the server calls a conflict (deadlock, lost certification, changed row) is begun again, often and soon, and
  never reaches a caller as anything but a late answer; at a COMMIT too, as nothing was committed then;
* a lock wait (2 s, not the server's 50) is begun again a few times, then it is `LockTimeout`;
* an outage is tried again a few times over about a second, then it is `Unavailable`.

One case is neither: the connection breaks while the COMMIT is under way, and nobody knows whether it was done. Work
that finds its own traces when it is done twice says `repeatable=True` and is begun again; any other is `Unavailable`,
and the caller's Idempotency-Key sorts it out.
"""

from __future__ import annotations

import contextlib
import math
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import pymysql
import sqlalchemy as sa
import tenacity
from pymysql.constants import CLIENT
from sqlalchemy.engine import Connection, Engine, ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from core import errors, metrics
from core.storage import continuity, faults, galera, statements

T = TypeVar("T")

APPENDED: Final = "lastbit.appended"
"""In a connection's `info`: the feed's last position, where its transaction moved it."""
LOCK_WAIT: Final = 2
"""Seconds that a statement waits for a row."""
MOST_AGE: Final = 1800
"""Seconds after which a connection to a server is replaced."""
MOST_IDLE: Final = 300
"""Seconds without use after which it is: proxies and firewalls drop idle connections, some of them silently."""
_MADE: Final = "lastbit.made"
_USED: Final = "lastbit.used"


class _Faulted(Exception):  # it carries the trouble to the retry, and never leaves this module
    def __init__(self, fault: errors.Fault, cause: BaseException, *, committing: bool) -> None:
        self.fault = fault
        self.cause = cause
        self.committing = committing


def _count(retry: tenacity.RetryCallState) -> None:
    """Between two tries."""
    trouble = retry.outcome.exception() if retry.outcome else None
    if isinstance(trouble, _Faulted):
        metrics.RETRIED[trouble.fault].inc()


class Database:
    """A pool of at most `connections` connections to one database. Threads may share it; it connects when it is first
    used."""

    def __init__(self, url: str, *, connections: int = 50) -> None:
        try:
            self.url = sa.make_url(url)
        except sa.exc.ArgumentError as error:
            raise errors.Misconfigured(
                "the database URL can't be read; expected for example sqlite:///lastbit.db or "
                "mysql://user:password@127.0.0.1:3306/lastbit"
            ) from error
        self._on_append: list[Callable[[int], None]] = []
        self._on_doubt: list[Callable[[], None]] = []
        self.most_connections = connections
        backend = self.url.get_backend_name()
        if backend in ("mysql", "mariadb"):
            # One driver, one dialect name: what is compiled for "mysql" serves both servers.
            self.url = self.url.set(drivername="mysql+pymysql")
            self.engine, origin_of = _mysql_engine(self.url, connections), continuity.server
        elif backend == "sqlite":
            self.engine, origin_of = _sqlite_engine(self.url, connections), continuity.file
        else:
            raise errors.Misconfigured(f"{backend} is not supported; expected sqlite, mysql or mariadb")
        continuity.watch(self.engine, origin_of, self._doubt)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def write(
        self,
        work: Callable[[Connection], T],
        *,
        repeatable: bool = False,
        lock_waits: int = 4,
        lock_wait: float | None = None,
    ) -> T:
        """Run `work` in one transaction and commit it; return what it returned, after the commit.

        It may run several times, so it must not keep what it computed elsewhere. `lock_waits` is how many times a lock
        wait may end in vain; `lock_wait`, in seconds, how long one may take where that is less than `LOCK_WAIT` (see
        `statements.run`). Raises `errors.LockTimeout`, `errors.Unavailable`, or what `work` raised, rolled back.
        """
        waited = 0
        outages = 0

        def attempt() -> T:
            nonlocal waited, outages
            try:
                return self._once(work, lock_wait)
            except _Faulted as trouble:
                if trouble.fault is errors.Fault.OUTAGE:
                    outages += 1
                    if outages > 3 or (trouble.committing and not repeatable):
                        raise errors.Unavailable(faults.outage(trouble.cause)) from trouble.cause
                elif trouble.fault is errors.Fault.LOCK_WAIT:
                    waited += 1
                    if waited > lock_waits:
                        raise errors.LockTimeout("a row that the call needs is locked by somebody else") from None
                raise

        # Conflicts are part of normal life: sixty tries with jitter outlast any storm of them that we could provoke.
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Faulted),
            stop=tenacity.stop_after_attempt(60),
            wait=tenacity.wait_random_exponential(multiplier=0.005, max=0.4),
            before_sleep=_count,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Faulted as trouble:
            raise errors.Unavailable("too many transactions want the same rows") from trouble.cause

    def _once(self, work: Callable[[Connection], T], lock_wait: float | None = None) -> T:
        committing = False
        begun = time.perf_counter()
        outcome = metrics.ROLLED_BACK
        try:
            with self._connected() as tx:
                if self.is_sqlite:
                    tx = tx.execution_options(lastbit_begin="IMMEDIATE")
                elif lock_wait is not None:
                    tx = tx.execution_options(**{statements.LOCK_WAIT: lock_wait})
                try:
                    # Said here, not left to the first statement: SQLAlchemy doesn't see those of `statements`.
                    tx.begin()
                    tx.info.pop(APPENDED, None)
                    result = work(tx)
                    appended = tx.info.get(APPENDED)
                    committing = True
                    tx.commit()
                except BaseException as error:
                    self._judge(tx, error, committing=committing)
                    raise
            outcome = metrics.COMMITTED
            if appended is not None:
                for react in self._on_append:
                    react(appended)
            return result
        except _Faulted as trouble:
            outcome = metrics.TROUBLED[trouble.fault]
            raise
        finally:
            outcome.observe(time.perf_counter() - begun)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A connection of the pool. Whatever goes wrong with taking it, or with the rollback by which it is given back,
        is an outage, and nothing was committed. Raises `_Faulted`."""
        try:
            with self.engine.connect() as tx:
                yield tx
        except Exception as error:
            if isinstance(error, _Faulted) or faults.classify(error) is None:
                raise
            raise _Faulted(errors.Fault.OUTAGE, error, committing=False) from error

    def _judge(self, tx: Connection, error: BaseException, *, committing: bool) -> None:
        """Raise `_Faulted` for trouble with the database, and keep a connection out of the pool that is of no use."""
        fault = faults.classify(error)
        if committing and fault is errors.Fault.CONFLICT:
            self._rolled_back(tx)
        elif committing:
            # Nobody knows in which state it is now.
            tx.invalidate()
            fault = fault and errors.Fault.OUTAGE
        elif fault is errors.Fault.LOCK_WAIT and galera.is_apart(tx):
            tx.invalidate()
            fault = errors.Fault.OUTAGE
        elif faults.is_elsewhere(error):
            # The next connection may lead to a server that can.
            tx.invalidate()
        if fault is not None:
            raise _Faulted(fault, error, committing=committing) from error

    def _rolled_back(self, tx: Connection) -> None:
        """The server has, and said so at the COMMIT; the driver should know it too."""
        driver = tx.connection.dbapi_connection
        assert driver is not None
        try:
            driver.rollback()
        except Exception:  # noqa: BLE001  # the trouble that led here is told
            tx.invalidate()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads, each statement seeing what is committed when it begins."""
        return self._reading(work, "")

    def snapshot(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads, on one snapshot of the whole database."""
        # Said as a statement and not as SQLAlchemy's `isolation_level`, which it sets behind its own back: a connection
        # that is found dead there is neither classified as an outage nor taken out of the pool.
        return self._reading(work, "" if self.is_sqlite else "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    def _reading(self, work: Callable[[Connection], T], first: str) -> T:
        def attempt() -> T:
            with self._connected() as tx:
                try:
                    if first:
                        tx.exec_driver_sql(first)
                    return work(tx)
                except Exception as error:
                    self._judge(tx, error, committing=False)
                    raise

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Faulted),
            stop=tenacity.stop_after_attempt(4),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=0.5),
            before_sleep=_count,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Faulted as trouble:
            raise errors.Unavailable(faults.outage(trouble.cause)) from trouble.cause

    def on_append(self, react: Callable[[int], None]) -> None:
        """Call `react` after each commit that appended to the feed, with the feed's last position, in the thread that
        committed. It must not block or raise."""
        self._on_append.append(react)

    def on_doubt(self, react: Callable[[], None]) -> None:
        """Call `react` whenever the database may not be the one that was read before (see `continuity`), in the thread
        that finds it out. It must not block or raise."""
        self._on_doubt.append(react)

    def _doubt(self) -> None:
        for react in self._on_doubt:
            react()

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection for what is not one transaction, like a migration. Raises `errors.Unavailable`."""
        try:
            with self.engine.connect() as connection:
                yield connection
        except DBAPIError as error:
            if faults.classify(error) is errors.Fault.OUTAGE:
                raise errors.Unavailable(faults.outage(error)) from error
            raise

    def dispose(self) -> None:
        """Close the pool's connections."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def __repr__(self) -> str:
        return f"<Database {self.url.render_as_string(hide_password=True)}>"


class _Connection(pymysql.connections.Connection):  # type: ignore[misc]  # it has no types
    """PyMySQL's own reads all certificates of the machine for each connection that may use TLS, though it verifies none
    unless it is told to: a tenth of a second in which no other thread runs, fifty times after an outage. Here such
    connections share what it has read."""

    _shared: ssl.SSLContext | None = None

    def _create_ssl_ctx(self, wanted: Any) -> Any:
        if wanted:
            return super()._create_ssl_ctx(wanted)
        if _Connection._shared is None:
            _Connection._shared = super()._create_ssl_ctx(wanted)
        return _Connection._shared


def _pool(connections: int) -> dict[str, Any]:
    """Connections stay when they are given back: to make one takes longer than most transactions. Those that were used
    last are used first, so that the others grow old, and a crowd that is gone leaves no work behind."""
    return {"pool_size": connections, "max_overflow": 0, "pool_timeout": 10, "pool_use_lifo": True}


def _mysql_engine(url: sa.URL, connections: int) -> Engine:
    session = (
        "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
        f"innodb_lock_wait_timeout = {LOCK_WAIT}, group_concat_max_len = {statements.CONCATENATED}"
    )
    engine = sa.create_engine(
        url,
        isolation_level="READ COMMITTED",
        hide_parameters=True,  # an error's text ends up in logs; secrets are among the parameters
        **_pool(connections),
        # What ends here has been committed or rolled back already; another ROLLBACK would be a round trip for nothing.
        pool_reset_on_return=None,
        connect_args={
            "charset": "utf8mb4",
            "client_flag": CLIENT.MULTI_STATEMENTS,  # see `statements`
            "init_command": session,
            "connect_timeout": 5,
            "read_timeout": 60,
            "write_timeout": 60,
        },
    )

    @sa.event.listens_for(engine, "do_connect")
    def connect(_: object, __: object, arguments: Any, named: Any) -> _Connection:
        return _Connection(*arguments, **named)

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        galera.prepare(connection, record.info)

    _replace_old_connections(engine)
    return engine


def _replace_old_connections(engine: Engine) -> None:
    """Those that are older than `MOST_AGE` or idle for `MOST_IDLE`, and after one was found broken all that were made
    before.

    SQLAlchemy does both by the wall clock. One that was ahead when a connection broke, and was set right, would have it
    take all new connections for older than that: each transaction would make its own, until the clock has caught up.
    """
    broken = -math.inf

    @sa.event.listens_for(engine, "connect")
    def made(_: object, record: ConnectionPoolEntry) -> None:
        record.info[_MADE] = record.info[_USED] = time.monotonic()

    @sa.event.listens_for(engine, "checkin")
    def given_back(_: object, record: ConnectionPoolEntry) -> None:
        record.info[_USED] = time.monotonic()

    @sa.event.listens_for(engine, "handle_error")
    def look(trouble: ExceptionContext) -> None:
        nonlocal broken
        if trouble.is_disconnect and trouble.connection is not None and not trouble.connection.invalidated:
            trouble.invalidate_pool_on_disconnect = False
            if (
                trouble.connection.info[_MADE] > broken
            ):  # of those that were made together, the first one speaks for all
                broken = time.monotonic()

    @sa.event.listens_for(engine, "checkout")
    def check(_: object, record: ConnectionPoolEntry, __: object) -> None:
        made, now = record.info[_MADE], time.monotonic()
        if record.info[_USED] == made:
            return  # it has just been made; refused twice in a row, it would be an error of SQLAlchemy's
        if made <= broken or now - made > MOST_AGE or now - record.info[_USED] > MOST_IDLE:
            raise sa.exc.DisconnectionError("it may be broken")  # the pool makes a new one, and goes on


def _sqlite_engine(url: sa.URL, connections: int) -> Engine:
    if url.database in (None, "", ":memory:") or "mode=memory" in str(url.database):
        raise errors.Misconfigured("SQLite in memory forgets what it has answered; expected a file: sqlite:///PATH")
    engine = sa.create_engine(
        url,
        **_pool(connections),
        hide_parameters=True,
        connect_args={"timeout": LOCK_WAIT, "check_same_thread": False},
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        with contextlib.closing(connection.cursor()) as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = FULL")
        # Deterministic, as SQLite has it: the same throughout one statement.
        connection.create_function("lastbit_now", 0, _sqlite_now, deterministic=True)

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A deferred transaction that turns from reader to writer can fail with BUSY at any statement; so writers say
        # at once that they are.
        kind = connection.get_execution_options().get("lastbit_begin", "DEFERRED")
        connection.exec_driver_sql(f"BEGIN {kind}")

    return engine


def _sqlite_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
