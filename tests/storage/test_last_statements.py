"""The last statements of a transaction, which go in one packet with the COMMIT: what is known after an error."""

from __future__ import annotations

import contextlib
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.storage import commit_marks, tables
from core.storage.database import Database
from core.storage.statements import Pipeline
from tests.mutants import mutant
from tests.support.packets import COMMIT

ROW = (
    "INSERT INTO tallies (tally, tally_key, topic, partition_no, generation, high_offset, high_child, value) "
    "VALUES ('t', 'k', '', 0, 0, 0, 0, 1)"
)


class Work:
    """Inserts a row. Its first run has a further statement between this and the COMMIT."""

    def __init__(self, *trouble: str) -> None:
        self.runs = 0
        self._trouble = trouble

    def __call__(self, tx: Connection) -> None:
        self.runs += 1
        pipeline = Pipeline(tx)
        pipeline.later(ROW, *(self._trouble if self.runs == 1 else ()))
        pipeline.finish()


def rows(database: Database) -> int:
    return database.read(lambda tx: int(tx.scalar(sa.select(sa.func.count()).select_from(tables.tallies)) or 0))


def refused(number: int) -> str:
    """A statement that a server refuses with this error."""
    return f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}"


@mutant(
    "a-statement-refused-before-the-commit-leaves-the-outcome-unknown",
    "core.storage.database:Database._judge",
    "committing = committing and not faults.is_before_commit(error)",
    "pass",
)
@pytest.mark.mariadb
@pytest.mark.parametrize(
    ("number", "error"),
    [
        pytest.param(1213, None, id="deadlock"),
        pytest.param(1062, None, id="duplicate"),
        pytest.param(1290, None, id="read-only"),
        pytest.param(1205, errors.LockTimeout, id="lock-wait"),
        pytest.param(1064, sa.exc.ProgrammingError, id="bug"),
    ],
)
def test_a_statement_refused_before_the_commit_has_committed_nothing(
    mariadb_database: Database, number: int, error: type[Exception] | None
) -> None:
    """It is judged like any other statement, so also work that must not be done twice begins again."""
    work = Work(refused(number))
    with pytest.raises(error) if error else contextlib.nullcontext():
        mariadb_database.write(work, lock_waits=0)
    assert work.runs == (1 if error else 2)
    assert rows(mariadb_database) == (0 if error else 1)


def test_a_duplicate_before_the_commit_begins_the_work_again(database: Database) -> None:
    work = Work(ROW)
    database.write(work)
    assert (work.runs, rows(database)) == (2, 1)


@mutant(
    "a-refused-commit-is-taken-for-a-refused-statement",
    "core.storage.faults:is_before_commit",
    '(None, "COMMIT")',
    "(None,)",
)
@pytest.mark.mariadb
def test_the_database_is_asked_for_the_outcome_of_a_refused_commit(
    mariadb_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even after the error of a lock wait, which before the COMMIT would be certain."""
    settle = commit_marks.settle
    with mariadb_database.engine.connect() as other:

        def settle_later(tx: Connection, mark: commit_marks.Mark) -> bool:
            other.exec_driver_sql("BACKUP STAGE END")
            return settle(tx, mark)

        monkeypatch.setattr(commit_marks, "settle", settle_later)
        work = Work("SET SESSION lock_wait_timeout = 0")
        for stage in ("START", "BLOCK_COMMIT"):
            other.exec_driver_sql(f"BACKUP STAGE {stage}")
        mariadb_database.write(work)
    assert (work.runs, rows(mariadb_database)) == (2, 1)


@mutant(
    "a-lost-answer-counts-as-a-commit",
    "core.storage.database:Database._transaction",
    "not self._was_committed(mark)",
    "False",
)
@pytest.mark.mariadb
def test_work_whose_connection_was_lost_before_the_commit_runs_again(mariadb_database: Database) -> None:
    work = Work("KILL CONNECTION_ID()")
    mariadb_database.write(work)
    assert (work.runs, rows(mariadb_database)) == (2, 1)


@mutant(
    "a-packet-that-ends-early-is-taken-for-a-commit",
    "core.storage.dialects.mariadb:MariaDB._send",
    "len(rows) < len(texts)",
    "False",
)
@pytest.mark.mariadb
def test_work_whose_packet_ends_before_the_commit_runs_again(
    mariadb_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without an error. The connection is not used again: its next user would commit the writes."""
    query = pymysql.connections.Connection.query
    work = Work()

    def cut_off(connection: Any, packet: Any, unbuffered: bool = False) -> Any:
        return query(connection, packet.removesuffix(COMMIT) if work.runs == 1 else packet, unbuffered)

    monkeypatch.setattr(pymysql.connections.Connection, "query", cut_off)
    mariadb_database.write(work)
    for _ in range(3):
        mariadb_database.write(lambda tx: tx.exec_driver_sql("SELECT 1"))
    assert (work.runs, rows(mariadb_database)) == (2, 1)


@mutant(
    "the-last-statements-of-a-failed-transaction-are-executed-by-the-next",
    "core.storage.database:Database._transaction",
    "(APPENDED, _AFTER, statements.LAST)",
    "(APPENDED, _AFTER)",
)
@pytest.mark.mariadb
def test_a_transaction_has_ended_after_its_last_statements(mariadb_database: Database) -> None:
    """The next ones on the same connection are its own transactions. One that fails executes no last statements."""

    def fail(tx: Connection) -> None:
        Work()(tx)
        raise errors.BatchNotFound(7)

    with pytest.raises(errors.BatchNotFound):
        mariadb_database.write(fail)
    deletions: list[None] = []

    def delete(tx: Connection) -> None:
        deletions.append(None)
        tx.execute(sa.delete(tables.tallies))

    for expected in (0, 1, 0):
        mariadb_database.write(Work() if expected else delete)
        assert mariadb_database.read(lambda tx: tx.exec_driver_sql("SELECT @@in_transaction").scalar()) == 0
        assert rows(mariadb_database) == expected
    assert len(deletions) == 2
