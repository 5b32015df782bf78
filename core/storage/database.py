"""The database: the one place that begins, commits, rolls back and retries transactions.

Every operation of core takes the transaction (`Connection`) as an argument and never commits. `Database.write` is the
only function that does:

* a conflict (deadlock, failed certification, changed row) is retried after milliseconds, up to 60 times; a caller
  notices only a delay, or after the last one `Contended`. The same at a COMMIT, as nothing was committed then;
* a lock wait (2 s, not the server's 50) is retried a few times, then `LockTimeout` is raised; after some for the
  feed's head, `Unavailable` (see `lock_order`);
* an outage is retried a few times over about a second, then `Unavailable` is raised.

On a server, the last statements of hot transactions and the COMMIT are one packet (`Pipeline.finish`). The server stops
at the first statement that fails. If that is one before the COMMIT, nothing was committed, and the error is treated
like that of any other statement.

When the connection breaks during a COMMIT or such a packet, the database tells in another connection whether it was
committed (see `commit_marks`). If so, the caller gets the result as if the answer had arrived, and what follows from it
is done; otherwise the work runs again. Only if the database can't be asked, or a COMMIT fails on SQLite, where no
answer gets lost, `OutcomeUnknown` is raised; clients then repeat the request with the same Idempotency-Key.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

import sqlalchemy as sa
import structlog
import tenacity
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from core import errors, metrics
from core.storage import commit_marks, continuity, dialects, faults, refusals, statements, write_probes
from core.storage.commit_marks import Mark
from core.storage.dialects.dialect import HAS_WRITTEN, SCHEMA
from core.storage.dialects.dialect import LOCK_WAIT as LOCK_WAIT_OPTION
from core.storage.write_watch import FAILING, WriteWatch

T = TypeVar("T")
Args = TypeVarTuple("Args")

APPENDED: Final = "lastbit.appended"
"""The key in a connection's `info` for the feed's last position, set by a transaction that appends."""
_AFTER: Final = "lastbit.after_commit"
"""The key in a connection's `info` for the calls of `after_commit`."""
LOCK_WAIT: Final = 2
"""Seconds that a statement waits for a row."""
HEAD_WAITS: Final = 4
"""How many lock waits for the feed's head may time out in one call, however few `lock_waits` it allows."""


log = structlog.get_logger(__name__)


class _Faulted(Exception):  # carries a fault to the retry loop; never leaves this module
    def __init__(self, fault: errors.Fault, cause: BaseException) -> None:
        self.fault = fault
        self.cause = cause


class _Unanswered(_Faulted):
    """The COMMIT got no answer, or none that tells its outcome."""


def _count(retry: tenacity.RetryCallState) -> None:
    """Count a retry."""
    trouble = retry.outcome.exception() if retry.outcome else None
    if isinstance(trouble, _Faulted):
        metrics.RETRIED[trouble.fault].inc()


def _retrying(attempts: int, multiplier: float, longest: float) -> tenacity.Retrying:
    """Runs a transaction again after a fault, at most `attempts` times in all, with random waits of up to `longest`
    seconds."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_Faulted),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(multiplier=multiplier, max=longest),
        before_sleep=_count,
        reraise=True,
    )


# Conflicts are normal. Sixty attempts with jitter outlasted every load that we could create.
_WRITES: Final = _retrying(60, multiplier=0.005, longest=0.4)
_READS: Final = _retrying(4, multiplier=0.05, longest=0.5)
_OUTCOMES: Final = _retrying(5, multiplier=0.05, longest=0.5)


def after_commit(tx: Connection, react: Callable[[], None]) -> None:
    """Call `react` after this transaction's commit, in the thread that committed. It must not block or raise."""
    tx.info.setdefault(_AFTER, []).append(react)


class Database:
    """A pool of at most `connections` connections to one database. Threads may share it; it connects when it is first
    used.

    `schema` is where the tables are: on PostgreSQL a schema, on MariaDB and MySQL another database of the same server
    than the URL's. Without one, they are where the URL and the account's settings lead.
    """

    def __init__(self, url: str | sa.URL, *, schema: str | None = None, connections: int = 50) -> None:
        try:
            self.url = sa.make_url(url)
        except (sa.exc.ArgumentError, ValueError) as error:  # the second one: a port that isn't a number
            raise errors.Misconfigured(
                "the database URL can't be read; expected for example sqlite:///lastbit.db, "
                "mysql://user:password@127.0.0.1:3306/lastbit or postgresql://user:password@127.0.0.1:5432/lastbit"
            ) from error
        self._on_append: list[Callable[[int], None]] = []
        self._on_doubt: list[Callable[[], None]] = []
        self.write_watch = WriteWatch()
        self.most_connections = connections
        backend = self.url.get_backend_name()
        dialect = dialects.named(backend)
        if dialect is None:
            raise errors.Misconfigured(f"{backend} is not supported; expected sqlite, mysql, mariadb or postgresql")
        if not dialect.is_embedded:
            self.url = self.url.set(drivername=dialect.driver)
        self.schema = schema
        self.given_url = self.url
        if schema is not None:
            self.url = dialect.located(self.url, schema)
        self.dialect = dialect
        self.engine = dialect.engine(self.url, connections, LOCK_WAIT, schema)
        self.engine.update_execution_options(**{SCHEMA: schema})
        continuity.watch(self.engine, dialect.origin, self._doubt)
        if not dialect.is_embedded:
            refusals.watch(self.engine, dialect.refused)
            commit_marks.watch(self.engine)

    @property
    def is_embedded(self) -> bool:
        """The database is a file that only this service uses."""
        return self.dialect.is_embedded

    def qualified(self, table: str) -> str:
        """The name of a table of ours, for a statement on a connection that isn't ours."""
        return self.dialect.qualified(self.schema, table)

    def write(
        self,
        work: Callable[[Connection, Unpack[Args]], T],
        *args: *Args,
        lock_waits: int = 4,
        lock_wait: float | None = None,
    ) -> T:
        """Call `work(tx, *args)` in one transaction and commit it; return its result after the commit.

        `work` may run several times, but only one run is committed, so it must not store results elsewhere.
        `lock_waits` is how many lock waits may time out before `LockTimeout`; `lock_wait` shortens each to less than
        `LOCK_WAIT` seconds (see `statements.run`). Neither concerns the feed's head. Raises `errors.LockTimeout`,
        `errors.OutcomeUnknown`, `errors.Unavailable`, or what `work` raised, rolled back.
        """
        timeouts = 0
        head_waits = 0
        outages = 0

        def attempt() -> T:
            nonlocal timeouts, head_waits, outages
            try:
                return self._once(work, *args, lock_wait=lock_wait)
            except _Faulted as trouble:
                if trouble.fault is errors.Fault.OUTAGE:
                    outages += 1
                    if outages > 3:
                        raise errors.Unavailable(faults.outage(trouble.cause)) from trouble.cause
                elif trouble.fault is errors.Fault.LOCK_WAIT:
                    timeouts += 1
                    if timeouts > lock_waits:
                        raise errors.LockTimeout("a row that the call needs is locked by another transaction") from None
                elif trouble.fault is errors.Fault.HEAD_WAIT:
                    head_waits += 1
                    if head_waits > HEAD_WAITS:
                        raise errors.Unavailable("another transaction keeps the feed locked") from None
                raise

        with self.write_watch:
            try:
                return _WRITES(attempt)
            except _Faulted as trouble:
                raise errors.Contended("too many transactions want the same rows") from trouble.cause

    def _once(
        self,
        work: Callable[[Connection, Unpack[Args]], T],
        *args: *Args,
        lock_wait: float | None = None,
    ) -> T:
        started = time.perf_counter()
        outcome = metrics.ROLLED_BACK
        try:
            result, position, reactions = self._transaction(work, *args, lock_wait=lock_wait)
            outcome = metrics.COMMITTED
        except _Faulted as trouble:
            outcome = metrics.TROUBLED[trouble.fault]
            raise
        finally:
            outcome.observe(time.perf_counter() - started)
        if position is not None:
            for react in self._on_append:
                react(position)
        for reaction in reactions:
            reaction()
        return result

    def _transaction(
        self, work: Callable[[Connection, Unpack[Args]], T], *args: *Args, lock_wait: float | None
    ) -> tuple[T, int | None, list[Callable[[], None]]]:
        """Returns the result of the work, the feed's last position if it appended, and the calls of `after_commit`,
        when all is committed. Raises `_Faulted` if nothing is."""
        mark: Mark | None = None
        committing = False
        try:
            with self._connected() as tx:
                options = self.dialect.begin_writing
                if lock_wait is not None:
                    options = options | {LOCK_WAIT_OPTION: lock_wait}
                if options:
                    tx = tx.execution_options(**options)
                try:
                    # Explicitly, because SQLAlchemy doesn't see the statements that `statements` executes.
                    tx.begin()
                    for key in (APPENDED, _AFTER, statements.LAST):
                        tx.info.pop(key, None)
                    mark = None if self.is_embedded else commit_marks.new(tx)
                    written_before = self._written(tx)
                    result = work(tx, *args)
                    done = result, tx.info.get(APPENDED), tx.info.get(_AFTER, [])
                    committing = True
                    statements.commit(tx, None if mark is None else commit_marks.statement(tx, mark))
                    if self._written(tx) != written_before:
                        self.write_watch.committed()
                except BaseException as error:
                    self._judge(tx, error, committing=committing)
                    raise
        except _Unanswered as trouble:
            if mark is None:
                raise errors.OutcomeUnknown(faults.outage(trouble.cause)) from trouble.cause
            if not self._was_committed(mark):
                raise _Faulted(errors.Fault.OUTAGE, trouble.cause) from trouble.cause
            self.write_watch.committed()
        return done

    def _written(self, tx: Connection) -> int:
        """A number that grows when this connection writes."""
        if not self.is_embedded:
            return int(tx.info[HAS_WRITTEN])
        driver: Any = tx.connection.dbapi_connection
        return int(driver.total_changes)

    def _was_committed(self, mark: Mark) -> bool:
        """The outcome of a COMMIT without an answer. Raises `errors.OutcomeUnknown` if the database can't tell it."""

        def attempt() -> bool:
            with self._connected() as tx:
                try:
                    tx.begin()
                    was_committed = commit_marks.settle(tx, mark)
                    tx.commit()
                except Exception as error:
                    self._judge(tx, error, committing=False)
                    raise
                return was_committed

        try:
            was_committed = _OUTCOMES(attempt)
        except _Faulted as trouble:
            raise errors.OutcomeUnknown(faults.outage(trouble.cause)) from trouble.cause
        log.warning("commit_unanswered", committed=was_committed)
        return was_committed

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        """A connection from the pool. A failure to get one, or of the rollback when it is returned, counts as an
        outage: nothing was committed. Raises `_Faulted`."""
        try:
            with self.engine.connect() as tx:
                yield tx
        except Exception as error:
            if isinstance(error, _Faulted) or faults.classify(error) is None:
                raise
            raise _Faulted(errors.Fault.OUTAGE, error) from error

    def _judge(self, tx: Connection, error: BaseException, *, committing: bool) -> None:
        """Raise `_Faulted` if the error is a database fault, and keep unusable connections out of the pool."""
        fault = faults.classify(error)
        committing = committing and not faults.is_before_commit(error)
        if committing and fault is errors.Fault.CONFLICT:
            self._rolled_back(tx)
        elif committing:
            # The connection's state is unknown.
            tx.invalidate()
            if fault is not None:
                raise _Unanswered(errors.Fault.OUTAGE, error) from error
        elif faults.is_elsewhere(error):
            # The next connection may lead to a server that can do it.
            tx.invalidate()
        if fault is not None:
            raise _Faulted(fault, error) from error

    def _rolled_back(self, tx: Connection) -> None:
        """The server rolled back at the COMMIT; update the driver's state as well."""
        driver = tx.connection.dbapi_connection
        assert driver is not None
        try:
            driver.rollback()
        except Exception:  # noqa: BLE001  # the original error is reported
            tx.invalidate()

    def write_in_chunks(self, work: Callable[[Connection, Unpack[Args]], int], *args: *Args) -> int:
        """Call `write` with `work`, each time in a new transaction, until it returns 0 or False. Return the sum of the
        results."""
        total = 0
        while count := self.write(work, *args):
            total += count
        return total

    def check_writes(self) -> None:
        """Return if writes get through: if one was committed lately, or a small one is now; once one has failed, if a
        large one is. Raises the errors of `write`."""
        watch = self.write_watch
        failed_at = watch.failed_at
        if failed_at is None and watch.is_fresh():
            return
        if failed_at is not None and time.monotonic() - failed_at < FAILING:
            raise errors.Unavailable("a write has just failed")
        try:
            self.write(write_probes.small if failed_at is None else write_probes.large)
        except errors.Unavailable:
            watch.failed_at = failed_at or -math.inf  # so that the next check tries again at once
            raise

    def read(self, work: Callable[[Connection, Unpack[Args]], T], *args: *Args) -> T:
        """Call `work(tx, *args)`, which only reads; each statement sees what was committed when it began."""
        return self._reading("", work, *args)

    def snapshot(self, work: Callable[[Connection, Unpack[Args]], T], *args: *Args) -> T:
        """Call `work(tx, *args)`, which only reads, on one snapshot of the whole database."""
        # Not SQLAlchemy's `isolation_level`: if setting it finds the connection dead, SQLAlchemy neither reports an
        # outage nor removes the connection from the pool.
        return self._reading(self.dialect.begin_snapshot, work, *args)

    def _reading(self, first: str, work: Callable[[Connection, Unpack[Args]], T], *args: *Args) -> T:
        def attempt() -> T:
            with self._connected() as tx:
                try:
                    tx.begin()  # for the statements that SQLAlchemy doesn't see
                    if first:
                        tx.exec_driver_sql(first)
                    return work(tx, *args)
                except Exception as error:
                    self._judge(tx, error, committing=False)
                    raise

        try:
            return _READS(attempt)
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
        except SQLAlchemyError as error:
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

    def describe(self) -> str:
        """Where the data is, for people: the absolute path of a file, or user, host and database without password."""
        if not self.is_embedded:
            scheme = self.url.get_backend_name()
            server = self.url.set(drivername=scheme).render_as_string(hide_password=True)
            owner = "" if self.schema in (None, self.url.database) else f"the schema {self.schema!r} of "
            return f"{owner}the database {server}"
        return f"the SQLite file {Path(self.url.database or '').absolute()}"

    def __repr__(self) -> str:
        return f"<Database {self.url.render_as_string(hide_password=True)}>"
