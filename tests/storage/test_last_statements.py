"""The last statements of a transaction, which go in one packet with the COMMIT: what is known after an error."""

from __future__ import annotations

import contextlib
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.acks.call import Call
from core.batches.batch import Opening
from core.batches.lifecycle import Verb
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import Pipeline
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


@pytest.mark.mariadb
def test_a_refused_commit_leaves_the_outcome_unknown(mariadb_database: Database) -> None:
    """Even with the error of a lock wait, which before the COMMIT would be certain."""
    with mariadb_database.engine.connect() as other:
        work = Work("SET SESSION lock_wait_timeout = 0")
        try:
            for stage in ("START", "BLOCK_COMMIT"):
                other.exec_driver_sql(f"BACKUP STAGE {stage}")
            with pytest.raises(errors.OutcomeUnknown):
                mariadb_database.write(work)
        finally:
            other.exec_driver_sql("BACKUP STAGE END")
    assert (work.runs, rows(mariadb_database)) == (1, 0)


@pytest.mark.mariadb
@pytest.mark.parametrize("repeatable", [False, True])
def test_a_connection_lost_before_the_commit_is_answered_leaves_the_outcome_unknown(
    mariadb_database: Database, repeatable: bool
) -> None:
    work = Work("KILL CONNECTION_ID()")
    with contextlib.nullcontext() if repeatable else pytest.raises(errors.OutcomeUnknown):
        mariadb_database.write(work, repeatable=repeatable)
    assert (work.runs, rows(mariadb_database)) == ((2, 1) if repeatable else (1, 0))


@pytest.mark.mariadb
@pytest.mark.parametrize("is_lost_before", [False, True])
def test_a_deletion_whose_commit_was_not_answered_finds_out(
    mariadb_database: Database, monkeypatch: pytest.MonkeyPatch, is_lost_before: bool
) -> None:
    """If its first step is committed, it goes on: a retry would be told that there is no such batch."""
    service = Service(mariadb_database, combiner=Inline)
    batch = service.batches.open(Opening(items=3)).batch.id
    service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)])).result()
    commit = pymysql.connections.Connection.commit

    def lost(connection: Any) -> None:
        monkeypatch.undo()
        if not is_lost_before:
            commit(connection)
        connection._force_close()
        raise pymysql.OperationalError(2013, "Lost connection to server during query")

    monkeypatch.setattr(pymysql.connections.Connection, "commit", lost)
    if is_lost_before:
        with pytest.raises(errors.OutcomeUnknown):
            service.batches.delete(batch)
        assert service.batches.get(batch).pending == 2
    else:
        service.batches.delete(batch)
        with mariadb_database.engine.connect() as connection:
            for table in (tables.batches, tables.item_groups):
                assert connection.scalar(sa.select(sa.func.count()).select_from(table)) == 0


@pytest.mark.mariadb
@pytest.mark.parametrize("repeatable", [False, True])
def test_a_packet_that_ends_before_the_commit_is_a_lost_connection(
    mariadb_database: Database, monkeypatch: pytest.MonkeyPatch, repeatable: bool
) -> None:
    """Even without an error. The connection is not used again: its next user would commit the writes."""
    query = pymysql.connections.Connection.query
    work = Work()

    def cut_off(connection: Any, packet: Any, unbuffered: bool = False) -> Any:
        return query(connection, packet.removesuffix(COMMIT) if work.runs == 1 else packet, unbuffered)

    monkeypatch.setattr(pymysql.connections.Connection, "query", cut_off)
    with contextlib.nullcontext() if repeatable else pytest.raises(errors.OutcomeUnknown):
        mariadb_database.write(work, repeatable=repeatable)
    for _ in range(3):
        mariadb_database.write(lambda tx: tx.exec_driver_sql("SELECT 1"))
    assert (work.runs, rows(mariadb_database)) == ((2, 1) if repeatable else (1, 0))


@pytest.mark.mariadb
def test_a_transaction_has_ended_after_its_last_statements(mariadb_database: Database) -> None:
    """The next ones on the same connection are its own transactions. One that fails executes no last statements."""

    def fail(tx: Connection) -> None:
        Work()(tx)
        raise errors.BatchNotFound(7)

    with pytest.raises(errors.BatchNotFound):
        mariadb_database.write(fail)
    for expected in (0, 1, 0):
        mariadb_database.write(Work() if expected else lambda tx: tx.execute(sa.delete(tables.tallies)))
        assert mariadb_database.read(lambda tx: tx.exec_driver_sql("SELECT @@in_transaction").scalar()) == 0
        assert rows(mariadb_database) == expected
