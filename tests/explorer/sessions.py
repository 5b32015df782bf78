"""Sessions that stop before every statement: real code in a thread, each with its own connection.

A session runs one operation. Before each statement and before each COMMIT it reports to the explorer and waits to be
resumed, so at most one session executes at a time, except for those that wait for a lock on the server. The rows and
errors that a session has seen so far are stored as one digest.
"""

from __future__ import annotations

import hashlib
import math
import os
import queue
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NoReturn
from uuid import UUID

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
import structlog
import tenacity
from sqlalchemy.exc import DBAPIError

from core.acks import call, parents
from core.acks.parents import Payer
from core.batches import descendants, history, purge
from core.bits import journal
from core.bits.cache import BitfieldCache
from core.commits.combiner import Inline
from core.errors import CoreError, InconsistentBatch
from core.processes import inbox
from core.service import Service
from core.storage import commit_marks, database, statements, tables
from core.storage.database import Database
from core.storage.dialects import mariadb, postgresql
from core.webhooks import deliveries
from tests.explorer.accesses import ADVISORY, Access, Kind, Row, Statement, analyzed
from tests.support.locking import LockOrder, mogrified

PAUSED, RUNNING, BLOCKED, DONE = "paused", "running", "blocked", "done"
LOSS: Final = 5
"""This plus a session's number is the step in which its COMMIT takes effect, and the answer is lost."""
_MARKS: Final = tables.commit_marks.name
EVERY_TABLE = "*"
"""Among the tables that a step touched: it may depend on all tables, and on all locks."""
OLDER: Final = "2025-01-01 00:00:00.000000"
OLD: Final = "2026-01-01 00:00:00.000000"
LATER: Final = "2099-01-01 00:00:00.000000"
"""The times in a scene."""
_NEW_ID = re.compile(r"\b1\d{7}\b")
_HEX_ID = re.compile(r"31(?:3\d){7}")
"""The same in a text that a statement holds in hexadecimal."""
_YEARS = {"2025": "OLDER", "2026": "OLD", "2099": "LATER"}
_SCENE_TIME = re.compile(r"datetime\.datetime\((2025|2026|2099), 1, 1,[^)]*\)|(2025|2026|2099)-01-01 00:00:00(?:\.0+)?")
_TIME = re.compile(r"datetime\.datetime\([^)]*\)|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?")
_UPDATED = re.compile(r", updated_at = 'TIME'|\bupdated_at = 'TIME', ")


class Abandoned(Exception):
    """Raised in a session whose schedule is abandoned: it rolls back and finishes. (A BaseException would cost the
    session its connection: SQLAlchemy closes a connection on which it was interrupted.)"""


def normalized(text: str, ids: dict[str, str] | None = None) -> str:
    """The text without times, and with generated ids numbered in the order of appearance."""
    numbers = {} if ids is None else ids
    text = _TIME.sub("TIME", text)
    text = _HEX_ID.sub(lambda match: f" {bytes.fromhex(match[0]).decode()} ", text)
    return _NEW_ID.sub(lambda match: numbers.setdefault(match[0], f"new-{len(numbers) + 1}"), text)


def observed(text: str, ids: dict[str, str]) -> str:
    """The text without current times: `normalized`, except for the times of a scene, which decide whether a batch
    expires. A batch that is due and one that was updated must not look the same. Whether a transaction writes the time
    of an update twice depends on the clock: OceanBase's may stand still between two statements."""
    return _UPDATED.sub("", normalized(_SCENE_TIME.sub(lambda match: _YEARS[match[1] or match[2]], text), ids))


@dataclass(frozen=True, eq=False)
class Stop:
    """The state of a session between two steps. `Memory` keeps one object for equal states."""

    status: str
    next: str
    seen: bytes
    """A digest of everything that the session's statements have returned."""
    statements: int
    """The number of executed statements."""
    parts: int
    in_transaction: bool
    writing: bool
    has_written: bool
    due: Statement | None
    held: frozenset[Row]
    snapshot: bytes
    """On PostgreSQL, of a statement that waits: a digest of the contents that were committed when it began."""
    locks: Mapping[str, bytes]
    """For each table on which the transaction may hold locks, a digest of its statements there: of their texts, results
    and the contents that they saw."""
    result: Any
    error: BaseException | None


def chained(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).digest()


class PaysAtOnce(Payer):
    """Pays parents in the thread of the call that caused the payment: a session is one thread."""

    def pay(self, *children: int) -> Future[None]:
        bill = parents._Bill(set(children), math.inf)
        self._bills.append(bill)
        while not bill.paid.done():
            self._pay_level()
        return bill.paid


def _result(cursor: Any) -> tuple[list[object], int]:
    """The rows and the number of rows that a statement on PostgreSQL returned or changed."""
    result = cursor.pgresult or cursor.connection.last_result
    rows = [[result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)]
    return rows, result.command_tuples or 0


_own = threading.local()
"""`session` is the session that runs in this thread."""


def _random_bytes(count: int) -> bytes:
    """Bytes that differ between sessions and their transactions, but not between schedules."""
    session: Session | None = getattr(_own, "session", None)
    if session is None:
        return os.urandom(count)
    session.drawn += 1
    place = f"{session.number} {session.lives} {session.steps.count('COMMIT')} {session.drawn}"
    return hashlib.blake2b(place.encode(), digest_size=count).digest()


class Session:
    """One of the explorer's sessions; it runs one schedule after the other."""

    def __init__(self, number: int, url: str, reports: queue.SimpleQueue[Session]) -> None:
        self.number = number
        self.database = Database(url)
        self.service = Service(self.database, combiner=Inline)
        self.on_postgresql = self.database.url.get_backend_name() == "postgresql"
        self.thread_id = 0
        """The server's id for the connection."""
        self._reports = reports
        self._work: queue.SimpleQueue[tuple[str, Callable[[Session], Any]] | None] = queue.SimpleQueue()
        self._turn = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        engine = self.database.engine
        sa.event.listen(engine, "before_cursor_execute", self._before)
        sa.event.listen(engine, "after_cursor_execute", self._after)
        sa.event.listen(engine, "handle_error", lambda trouble: self._note(trouble.original_exception))
        sa.event.listen(engine, "commit", lambda tx: self._before(tx, None, "COMMIT", (), None, False))
        sa.event.listen(engine, "rollback", self._rolled_back)
        # Otherwise the first open on a connection would take a step more than the others.
        sa.event.listen(engine, "connect", lambda _, record: record.info.update({mariadb.NUMBERS: None}))
        if self.database.is_embedded:
            sa.event.listen(engine, "connect", self._watch_rows)
        self._exploring = False
        self.reset()
        self._thread.start()

    def reset(self) -> None:
        """Forget the last schedule; nothing is cached."""
        self.status = DONE
        self.next = ""
        self.result: Any = None
        self.error: BaseException | None = None
        self.disorder: list[str] = []
        """Its statements that broke the order of the locks."""
        self._lock_order = LockOrder()
        self.in_transaction = False
        self.writing = False
        self.written: set[str] = set()
        self.held: frozenset[Row] = frozenset()
        """The rows that the transaction has locked so far."""
        self.due: Statement | None = None
        """The statement before which the session has stopped; None for a COMMIT, or for a statement that names no
        table."""
        self.accesses: set[Access] = set()
        """All that the operation has touched."""
        self.parts = 0
        """The number of its transactions so far; statements after the last COMMIT count as one."""
        self.releases = False
        """Whether it may have let another session continue since its last stop: by a COMMIT or a ROLLBACK, or in a
        deadlock."""
        self.others_wait = False
        """Whether a session waited for a lock at the last step. Once this session may have let it continue, it stops
        before its next statement: two sessions that run at once don't repeat."""
        self._in_part = False
        self._inserted: frozenset[Row] = frozenset()
        self._snapshot = b""
        self._unpublished: set[Access] = set()
        self.steps: list[str] = []
        self.abandoned = False
        self.loses = False
        """Whether the answer to its next COMMIT is lost."""
        self._settles = False
        """Whether it asks for the outcome of that COMMIT."""
        self.drawn = 0
        """The number of random values that the transaction has drawn."""
        self.lives = 0
        """How many processes of the operation have died."""
        self._snapshot_is_due = False
        self._has_snapshot = False
        """Whether later reads of the transaction see the state at its first statement."""
        self.concerns: Callable[[Collection[Access]], bool] = bool
        """Whether the order makes a difference to the others; if not, the session doesn't stop."""
        self.stops_everywhere = False
        """Whether it stops before every statement, even if the order makes no difference."""
        self.taken: list[int] = []
        """The numbers of the sessions, in the order of their executed statements."""
        self.committing: Callable[[int, Collection[str]], None] = lambda number, rows: None
        """Called before each COMMIT, with the tables that the transaction has written."""
        self.touched: dict[str, bool] = {}
        """The tables on which the statements since the last stop depend; True if they also depend on locks there."""
        self.versions: Mapping[str, bytes] = {}
        """For each table a digest of what was committed to it; the explorer sets it."""
        self.locks: dict[str, bytes] = {}
        """See `Stop.locks`."""
        self._text = ""
        self._variable = ""
        """The last assignment of a variable that later statements contain by its name."""
        self._ids: dict[str, str] = {}
        self._digest = hashlib.blake2b(digest_size=12)
        self.service.acks._bitfields = BitfieldCache()
        # An abandoned schedule may leave it payments.
        self.service.acks._payer = PaysAtOnce(self.database, self.service.acks._flush_payment)
        self.service.batches._facts._facts.clear()

    @property
    def seen(self) -> bytes:
        """A digest of everything that the session's statements have returned."""
        return self._digest.digest()

    def stop(self) -> Stop:
        return Stop(
            status=self.status,
            next=self.next,
            seen=self.seen,
            statements=len(self.steps),
            parts=self.parts,
            in_transaction=self.in_transaction,
            writing=self.writing,
            has_written=bool(self.written),
            due=self.due,
            held=self.held,
            snapshot=self._snapshot if self.status == BLOCKED else b"",
            locks=dict(self.locks),
            result=self.result,
            error=self.error,
        )

    def start(self, name: str, operation: Callable[[Session], Any]) -> None:
        self.status = RUNNING
        self._work.put((name, operation))

    def go(self, *, loses: bool = False) -> None:
        """Let the session execute the statement before which it has stopped. With `loses`, that is a COMMIT, and its
        answer is lost."""
        self.status = RUNNING
        self.loses = loses
        self._turn.release()

    def close(self) -> None:
        self.abandoned = True
        if self.status == PAUSED:  # the search was interrupted
            self.go()
        self._work.put(None)
        self._thread.join()
        self.database.dispose()

    # In the session's own thread.

    def settling(self) -> None:
        """The next COMMIT ends a transaction that asks for the outcome of another COMMIT."""
        self._settles = True

    def note_error(self, error: BaseException | None) -> None:
        self._note(error)

    def _serve(self) -> None:
        _own.session = self
        while (work := self._work.get()) is not None:
            self._exploring = True
            try:
                self.result = work[1](self)
            except InconsistentBatch as error:  # wrong even if an order of the transactions has it too
                self.error = error
            except CoreError as error:
                self.result = error
            except Abandoned:
                pass
            except BaseException as error:  # noqa: BLE001  # reported as a finding
                self.error = error
            self._exploring = False
            self.status = DONE
            self._reports.put(self)

    def _before(self, tx: Any, cursor: Any, text: str, parameters: Any, _: object, executemany: bool) -> None:
        if not self._exploring:
            if tx is not None and text != "COMMIT":
                self.touched.update(dict.fromkeys(analyzed(text).tables, False))
            return
        if _MARKS in text or (self._settles and text == "COMMIT"):
            # Nobody else touches its row.
            self._settles = text != "COMMIT" and self._settles
            return
        if text.startswith(("SET ", "SHOW ", "DO ")):
            self._snapshot_is_due |= "REPEATABLE READ" in text
            if text.startswith("SET @"):
                self._variable = text
            return
        commits = text == "COMMIT"
        full = text if not parameters or executemany else mogrified(cursor, text, parameters)
        self.due = None if commits else analyzed(full)
        accesses = self._published() if self.due is None else self.due.accesses(self.held)
        is_covered = self.due is not None and self.due.is_covered(self.held)
        is_alone = self._is_alone(text, () if is_covered else accesses) and not (self.others_wait and self.releases)
        if not self.abandoned and not is_alone:
            self.next = text
            self.status = PAUSED
            self._reports.put(self)
            self._turn.acquire()
        if self.abandoned:
            if commits:  # a failed COMMIT would cost it its connection; the next scene removes its rows
                self.committing(self.number, self.written)
                return
            raise Abandoned
        self._text = full if full is not text else f"{text} {parameters!r}"
        if "@" in text:
            self._text += self._variable
        driver = tx.connection.dbapi_connection
        if hasattr(driver, "thread_id"):
            self.thread_id = driver.thread_id()
        elif self.on_postgresql:
            self.thread_id = driver.info.backend_pid
            # A statement keeps the snapshot with which it began, even after it has waited for a lock.
            names = sorted(self.due.tables if self.due and self.due.tables else self.versions)
            self._snapshot = chained([(name, self.versions.get(name)) for name in names])
        if not commits and self.database.dialect.locks_rows and (problem := self._lock_order.check(full)):
            self.disorder.append(problem)
        self._touch(text)
        self._chain("")
        self.steps.append(" ".join(text.split()))
        self.taken.append(self.number + LOSS if self.loses else self.number)
        if not self._in_part:
            self._in_part = True
            self.parts += 1
        if commits:
            self.committing(self.number, self.written)
            self.written.clear()
            self._ended()
            self._in_part = False
            return
        self.accesses.update(accesses)
        self.in_transaction |= not is_alone
        self.writing |= text == "BEGIN IMMEDIATE"
        self.releases |= not is_covered and any(access.kind is not Kind.READ for access in accesses)
        self._unpublished.update(Access(access.table, access.key, access.kind) for access in accesses)
        if self.due is not None and self.due.changed:
            self.written.add(self.due.changed)

    def _touch(self, text: str) -> None:
        """Note the tables on which the statement depends."""
        if self.due is None:
            for table in self.written:
                self.touched.setdefault(table, False)
        elif self.database.is_embedded and not self.stops_everywhere:
            # From its snapshot on, a transaction runs to its COMMIT in one step. Whether it may begin to write is known
            # before the step (`may_run`), and then nobody else writes.
            self.touched.update(dict.fromkeys(self.due.tables, False))
        elif self._has_snapshot:
            return
        elif self._snapshot_is_due or not self.due.tables:
            self.touched[EVERY_TABLE] = True
        else:
            locks = self.due.kind is not Kind.READ
            for table in self.due.tables:
                self.touched[table] = locks or self.touched.get(table, False)

    def _chain(self, observation: str) -> None:
        """Add a statement that may lock rows, or its result, to the digests of its tables."""
        if self.due is None or self.due.kind is Kind.READ:
            return
        seen = [(table, self.versions.get(table), self.locks.get(table)) for table in sorted(self.due.tables)]
        digest = chained(observed(self._text, self._ids), seen, observation)
        for table in self.due.tables:
            self.locks[table] = digest

    def _published(self) -> list[Access]:
        """The effects of a COMMIT on other sessions: written rows become visible, other rows are unlocked."""
        kinds = {Kind.WRITE: Kind.PUBLISH, Kind.LOCK: Kind.LOCK}
        return [
            Access(access.table, access.key, kinds[access.kind]) for access in self._unpublished if access.kind in kinds
        ]

    def _is_alone(self, text: str, accesses: Collection[Access]) -> bool:
        """Whether the statement's order relative to the other sessions makes no difference."""
        if self._snapshot_is_due or self.stops_everywhere or text.startswith("BEGIN"):
            return False
        if self._has_snapshot or (self.database.is_embedded and self.in_transaction):
            return text != "COMMIT"
        return not self.concerns(accesses)

    def _after(self, tx: Any, cursor: Any, text: str, *_: object) -> None:
        if not self._exploring or text.startswith(("SET ", "SHOW ", "DO ")) or _MARKS in text:
            return
        if self.on_postgresql:
            rows, count = _result(cursor)
            # Their order depends on where the last versions of the rows are, and so on earlier schedules.
            self._returned(rows if "ORDER BY" in text else sorted(rows, key=repr), count)
        elif hasattr(cursor, "_rows"):
            # 0 means that the row was the same before, 2 that it was not: if only its time differs, the clock decides.
            is_same = cursor.rowcount == 0 and "updated_at = VALUES(updated_at)" in text
            self._returned(cursor._rows, 2 if is_same else cursor.rowcount)
        else:
            self._note(cursor.rowcount)  # its rows are noted as they are read
        self._has_snapshot |= self._snapshot_is_due
        self._snapshot_is_due = text == "BEGIN DEFERRED"

    def _watch_rows(self, connection: Any, _: object) -> None:
        """SQLite's cursors don't show which rows they will return."""

        def noted(_: object, row: tuple[object, ...]) -> tuple[object, ...]:
            self._note(row)
            return row

        connection.row_factory = noted

    def _returned(self, rows: object, count: int) -> None:
        self._note((rows, count))
        if self.due is None or not self.due.exclusive:
            return
        rows_named = frozenset(self.due.rows)
        if self._text.startswith("INSERT"):
            if self.on_postgresql:
                # Others neither see these rows nor wait for them, except to insert the same ones.
                self._inserted |= rows_named - self.held
            self.held |= rows_named - self._inserted
        elif count == len(rows_named) or self.due.tables == {ADVISORY}:
            self.held |= rows_named - self._inserted

    def _rolled_back(self, tx: Any) -> None:
        self._ended()
        self.written.clear()
        self._snapshot_is_due = False

    def _ended(self) -> None:
        """Reset the state of the transaction."""
        self.in_transaction = self.writing = self._has_snapshot = False
        self.held = self._inserted = frozenset()
        self._lock_order = LockOrder()
        self._unpublished.clear()
        self.locks.clear()
        self.drawn = 0
        self.releases = True

    def _note(self, observation: object) -> None:
        if self._exploring:
            if isinstance(observation, psycopg.Error):
                # The other lines name processes and transactions.
                text = f"{observation.sqlstate} {str(observation).partition(chr(10))[0]}"
            else:
                text = repr(observation.args) if isinstance(observation, BaseException) else repr(observation)
            text = observed(text, self._ids)
            self._digest.update(text.encode())
            self._chain(text)


def _drop(*_: object) -> NoReturn:
    """A log processor that drops everything: each abandoned session would log a traceback."""
    raise structlog.DropEvent


@contextmanager
def explored() -> Iterator[None]:
    """The code in the form that the explorer needs. Pipelined statements, and the COMMIT after the last ones, are
    executed one by one, so that a session can stop between them; retries don't pause; a session waits for a lock for as
    long as the explorer lets it; journals and deletion chunks are so small that a few items fill them; nothing is
    random."""
    original_run = statements.run

    def run(tx: Any, *texts: str) -> list[Sequence[Sequence[Any]]]:
        try:
            return [original_run(tx, text)[0] for text in texts]
        except DBAPIError as error:
            session: Session | None = getattr(_own, "session", None)
            if session is not None and session.on_postgresql:
                session.note_error(error.orig)  # SQLAlchemy doesn't know of it
            raise

    send = postgresql._Connection.send

    def send_and_keep(connection: Any, text: str) -> Any:
        results = send(connection, text)
        connection.last_result = results[-1]
        return results

    def losing(
        commit: Callable[[Any], None], close: Callable[[Any], None], error: Callable[[], Exception]
    ) -> Callable[[Any], None]:
        def commit_and_lose(connection: Any) -> None:
            commit(connection)
            session: Session | None = getattr(_own, "session", None)
            if session is not None and session.loses:
                session.loses = False
                close(connection)
                raise error()

        return commit_and_lose

    settle = commit_marks.settle

    def settling(tx: Any, mark: commit_marks.Mark) -> bool:
        session: Session | None = getattr(_own, "session", None)
        if session is not None:
            session.settling()
        return settle(tx, mark)

    write = Database.write

    def patiently(database: Database, *work: Any, lock_wait: float | None = None, **options: Any) -> Any:
        return write(database, *work, **options)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(history, "clock", lambda: 0.0)
        patches.setattr(statements, "run", run)
        patches.setattr(statements, "finish", run)
        patches.setattr(postgresql._Connection, "send", send_and_keep)
        for kind, close, error in (
            (mariadb._Connection, mariadb._Connection._force_close, partial(pymysql.OperationalError, 2013, "lost")),
            (postgresql._Connection, postgresql._Connection.close, partial(psycopg.OperationalError, "lost")),
        ):
            patches.setattr(kind, "commit", losing(kind.commit, close, error))
        patches.setattr(commit_marks, "settle", settling)
        patches.setattr(Database, "write", patiently)
        patches.setattr(tenacity.nap, "time", SimpleNamespace(sleep=lambda seconds: None))
        patches.setattr(database, "LOCK_WAIT", 600)
        # A session that stands still for seconds, on a busy machine, must not leave the descendants to the sweep.
        patches.setattr(descendants, "PATIENCE", 600)
        patches.setattr(purge, "CHUNK", 2)
        for name, value in {"FEW": 1, "LEAST": 3, "MOST": 3, "PORTION": 2}.items():
            patches.setattr(journal, name, value)
        chance = SimpleNamespace(urandom=_random_bytes, token_bytes=_random_bytes, shuffle=lambda values: None)
        chance.uuid4 = lambda: UUID(bytes=_random_bytes(16))
        patches.setattr(call, "os", chance)
        patches.setattr(deliveries, "secrets", chance)
        patches.setattr(deliveries, "random", chance)
        patches.setattr(inbox, "uuid", chance)
        structlog.configure(processors=[_drop])
        try:
            yield
        finally:
            structlog.reset_defaults()
