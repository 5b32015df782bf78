"""PostgreSQL: locks, snapshots, the clock and the end of transactions, as decision 0023 relies on them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, tallies
from core.batches.batch import Opening
from core.batches.search import Filter
from core.commits.combiner import Inline
from core.service import Service
from core.storage import dialects, schema, statements, tables
from core.storage.database import Database
from tests.support import templates
from tests.support.postgresql import PostgreSQL


@pytest.fixture
def database(postgresql_url: str) -> Iterator[Database]:
    with Database(postgresql_url) as database:
        templates.migrate(database)
        yield database


def one(tx: Connection, text: str) -> object:
    return tx.exec_driver_sql(text).scalar_one()


def backend(tx: Connection) -> int:
    """The id of the session, which may wait for locks for a minute in this transaction."""
    tx.exec_driver_sql("SET LOCAL lock_timeout = '60s'")
    pid = one(tx, "SELECT pg_backend_pid()")
    assert isinstance(pid, int)
    return pid


def wait_until_it_waits(tx: Connection, pid: int) -> None:
    """Until the session waits for a lock."""
    while not one(tx, f"SELECT cardinality(pg_blocking_pids({pid}))"):
        pass


@contextlib.contextmanager
def running(work: Callable[[], object]) -> Iterator[list[object]]:
    """Run it in a thread; the list gets its result, or the error."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # the test judges it
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join()


def add_batches(database: Database, ids: tuple[int, ...]) -> None:
    """Batches that are stored in this order."""
    with database.engine.begin() as tx:
        for id in ids:
            tx.exec_driver_sql(
                "INSERT INTO batches (id, labels, group_size, items, acked, failed, state, full_prefix, open_count, "
                f"created_at, updated_at) VALUES ({id}, '{{}}', 8192, 0, 0, 0, 'open', 0, 0, now(), now())"
            )


def test_rows_are_locked_in_the_order_of_their_keys(database: Database) -> None:
    """Not in the order of the plan: a scan would find the row that was stored first. Otherwise two transactions that
    lock the same rows could wait for each other."""
    add_batches(database, (30, 20, 10))
    engine = database.engine
    with engine.connect() as holder, engine.connect() as locker, engine.connect() as admin:
        holder.exec_driver_sql("SELECT id FROM batches WHERE id = 20 FOR UPDATE")
        pid = backend(locker)
        for choice in ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"):
            locker.exec_driver_sql(f"SET LOCAL {choice} = off")
        locking = dialects.of(locker).for_update("id")
        text = statements.select(locker, ["id"], f"batches WHERE id IN (30, 20, 10){locking}", 3)
        with running(lambda: statements.run(locker, text)) as results:
            wait_until_it_waits(admin, pid)
            free = admin.exec_driver_sql("SELECT id FROM batches FOR UPDATE SKIP LOCKED").scalars().all()
            admin.rollback()
            holder.rollback()
        assert free == [30]
        assert [list(row) for row in results[0][0]] == [[10], [20], [30]]  # type: ignore[index]


def test_a_lock_that_was_waited_for_gives_the_newest_row_but_no_other_new_rows(database: Database) -> None:
    """The rest of the statement has the snapshot from before the wait. The next statement of the packet sees all."""
    add_batches(database, (1,))
    engine = database.engine
    with engine.connect() as holder, engine.connect() as locker, engine.connect() as admin:
        holder.exec_driver_sql("UPDATE batches SET items = 5 WHERE id = 1")
        holder.exec_driver_sql("INSERT INTO extends VALUES (1, 'key', 0, 5)")
        pid = backend(locker)
        extends = "SELECT count(*) FROM extends"
        locking = f"SELECT items, ({extends}) FROM batches WHERE id = 1{dialects.of(locker).for_update('id')}"
        with running(lambda: statements.run(locker, locking, extends)) as results:
            wait_until_it_waits(admin, pid)
            holder.commit()
        assert [list(map(tuple, rows)) for rows in results[0]] == [[(5, 0)], [(1,)]]  # type: ignore[attr-defined]


def test_the_clock_is_read_after_a_wait_and_now_before_it(database: Database) -> None:
    """`now` is the same in a whole packet. `clock` isn't before the end of the statements that precede it."""
    add_batches(database, (1,))
    engine = database.engine
    with engine.connect() as holder, engine.connect() as locker, engine.connect() as admin:
        holder.exec_driver_sql("SELECT id FROM batches WHERE id = 1 FOR UPDATE")
        pid = backend(locker)
        dialect = dialects.of(locker)
        texts = ("SELECT id FROM batches WHERE id = 1 FOR UPDATE", f"SELECT {dialect.now}", f"SELECT {dialect.clock}")
        with running(lambda: statements.run(locker, *texts)) as results:
            wait_until_it_waits(admin, pid)
            admin.rollback()
            during = one(admin, "SELECT clock_timestamp() AT TIME ZONE 'UTC'")
            holder.rollback()
        _, ((now,),), ((clock,),) = results[0]  # type: ignore[misc]
        assert isinstance(during, datetime)
        assert now < during < clock


def test_an_index_is_searched_for_what_is_due(database: Database) -> None:
    """`clock` changes while a statement runs, so the server would compare each row with it."""
    with database.engine.connect() as tx:
        tx.exec_driver_sql("SET LOCAL enable_seqscan = off")
        query = sa.select(tables.timers.c.token).where(tables.timers.c.due_at <= tables.utc_now())
        text = str(query.compile(tx, compile_kwargs={"literal_binds": True}))
        plan = "\n".join(tx.exec_driver_sql(f"EXPLAIN {text}").scalars())
    assert "Index Cond: (due_at <=" in plan


@pytest.mark.parametrize("is_last", [True, False])
def test_the_commit_of_a_failed_transaction_is_an_error(database: Database, is_last: bool) -> None:
    """The server answers with ROLLBACK, which the driver takes for a success."""

    def work(tx: Connection) -> None:
        statements.run(tx, "INSERT INTO extends VALUES (1, 'key', 0, 5)")
        with contextlib.suppress(sa.exc.DBAPIError):
            statements.run(tx, "SELECT 1 / 0")
        if is_last:
            statements.finish(tx)

    with pytest.raises((sa.exc.DBAPIError, psycopg.Error), match=r"rolled back|aborted"):
        database.write(work)
    assert database.read(lambda tx: one(tx, "SELECT count(*) FROM extends")) == 0
    database.write(lambda tx: statements.finish(tx, "INSERT INTO extends VALUES (1, 'key', 0, 5)"))
    assert database.read(lambda tx: one(tx, "SELECT count(*) FROM extends")) == 1


def test_a_sum_waits_for_another_that_is_not_committed(database: Database) -> None:
    """Two calls add sources to the same key. Neither can see or lock the other's row, so they lock a number."""
    engine = database.engine

    def add(tx: Connection, topic: str) -> list[dialects.Rows]:
        insert = f"INSERT INTO tallies VALUES ('t', 'k', '{topic}', 0, 0, 1, 0, 7)"
        sums = dialects.of(tx).sum_locked(tx, "SUM(value)", "tallies", "tally = 't'", "tally_key", ["t:k"])
        return statements.run(tx, insert, *sums)

    with engine.connect() as first, engine.connect() as second, engine.connect() as admin:
        first.begin()  # SQLAlchemy doesn't see the statements
        assert add(first, "screws")[-1] == [(7,)]
        pid = backend(second)
        with running(lambda: add(second, "bolts")) as results:
            wait_until_it_waits(admin, pid)
            first.commit()
        assert not isinstance(results[0], Exception), results[0]
        assert results[0][-1] == [(14,)]  # type: ignore[index]


def test_only_tallies_write_after_a_savepoint(database: Database) -> None:
    """ROLLBACK TO SAVEPOINT releases the locks that were acquired after it, unlike on MariaDB. `core.tallies` acquires
    those that it needs again in the next round."""
    core = Path(tallies.__file__).parents[1]
    uses = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if re.search(r"begin_nested|SAVEPOINT", path.read_text())
    }
    assert uses == {"tallies/writes.py", "storage/checks/postgresql.py"}
    sums = dialects.named("postgresql")
    assert sums is not None
    with database.engine.connect() as first, database.engine.connect() as second:
        text, _ = sums.sum_locked(first, "SUM(value)", "tallies", "tally = 't'", "tally_key", ["t:k"])
        statements.run(first, "SAVEPOINT tallies", text, "ROLLBACK TO SAVEPOINT tallies")
        second.exec_driver_sql("SET LOCAL lock_timeout = '1ms'")
        statements.run(second, text)


LONGEST = ("\0" * 255, "\1" * 255, "\0\1" * 127, "😀" * 255, "a\\'\"%:\n" + "é" * 200)


@pytest.mark.parametrize("text", LONGEST, ids=["zeros", "ones", "both", "wide", "quotes"])
def test_each_text_of_255_characters_is_a_key(service: Service, text: str) -> None:
    """PostgreSQL stores no U+0000; in its place are two characters, for which there is room."""
    batch = service.batches.open(Opening(key=text, items=1), "open").batch
    assert batch.key == service.batches.get(batch.id).key == text
    assert [row.key for row in service.batches.page(Filter(key=text)).batches] == [text]
    assert [row.key for row in service.batches.page(Filter(key_prefix=text[:-1])).batches] == [text]
    entry = tallies.Entry(text, 3, text, 0, 0, 1, 0)
    assert service.tallies.apply("t", [entry, entry]) == tallies.Applied(1, 1)
    assert service.tallies.apply("t", [entry]) == tallies.Applied(0, 1)


def test_keys_with_control_characters_keep_their_order(service: Service) -> None:
    keys = ["", "\0", "\0\0", "\0\1", "\0\2", "\1", "\1\0", "\1\1", "\2", "a", "a\0", "a\0b", "a\1", "ab"]
    for place, key in enumerate(reversed(keys)):
        service.tallies.apply("t", [tallies.Entry(key or "-", 1, "s", 0, 0, place, 0)])
    expected = sorted(key or "-" for key in keys)
    assert [total.key for total in service.tallies.page("t", "", None, 100)] == expected


def test_an_unreachable_server_is_unavailable(postgresql: PostgreSQL) -> None:
    """A closed port, and a database that doesn't exist: the driver has no code for either."""
    for url in (
        "postgresql://lastbit:secret@127.0.0.1:1/nowhere",
        f"postgresql://postgres@127.0.0.1:{postgresql.port}/no",
    ):
        with Database(url) as database:
            for call in (database.read, database.write, database.snapshot):
                with pytest.raises(errors.Unavailable) as exception:
                    call(lambda tx: tx.exec_driver_sql("SELECT 1"))
                assert "secret" not in str(exception.value)


def test_every_call_survives_ended_sessions(postgresql: PostgreSQL, database: Database) -> None:
    """By an administrator, or because the server ended: the dead connection is discarded, and the call is repeated."""
    for call in (database.read, database.snapshot, database.write):
        pid = call(backend)
        with contextlib.closing(postgresql.connect()) as admin:
            admin.execute(f"SELECT pg_terminate_backend({pid}, 60000)")
        assert call(lambda tx: statements.run(tx, "SELECT pg_backend_pid()")[0][0][0]) != pid


def test_work_whose_session_ends_within_the_last_packet_runs_again(postgresql: PostgreSQL, database: Database) -> None:
    """The packet holds the COMMIT. The server is asked how far it came."""
    add_batches(database, (1,))
    with database.engine.connect() as holder, database.engine.connect() as admin:
        holder.exec_driver_sql("SELECT id FROM batches WHERE id = 1 FOR UPDATE")

        def work(tx: Connection) -> None:
            pids.append(backend(tx))
            pipeline = statements.Pipeline(tx)
            pipeline.later("UPDATE batches SET items = 1 WHERE id = 1")
            pipeline.finish()
            started.set()

        pids: list[int] = []
        started = threading.Event()
        with running(lambda: database.write(work)) as results:
            assert started.wait(60)
            wait_until_it_waits(admin, pids[0])
            one(admin, f"SELECT pg_terminate_backend({pids[0]}, 60000)")
            holder.rollback()
        assert results == [None]
    assert len(pids) == 2
    assert database.read(lambda tx: one(tx, "SELECT items FROM batches")) == 1


def test_a_server_that_does_not_respond_counts_as_lost(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped. A migration waits longer, as it may rewrite a large table."""
    monkeypatch.setattr("core.storage.dialects.postgresql._Connection.silence", 1)
    pids: list[int] = []

    def work(tx: Connection) -> None:
        pids.append(backend(tx))
        if len(pids) == 1:
            os.kill(pids[0], signal.SIGSTOP)
        statements.run(tx, "SELECT 1")

    try:
        database.read(work)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert len(pids) == 2
    with database.connection() as connection, database.dialect.migrating(connection):
        connection.exec_driver_sql("SELECT pg_sleep(2)")


def test_a_database_with_old_string_settings_works(postgresql: PostgreSQL, postgresql_url: str) -> None:
    """Backslashes in plain strings would be escapes; the sessions' settings prevent it."""
    with contextlib.closing(postgresql.connect()) as admin:
        admin.execute(f"ALTER DATABASE {postgresql_url.rpartition('/')[2]} SET standard_conforming_strings = off")
        admin.execute(f"ALTER DATABASE {postgresql_url.rpartition('/')[2]} SET bytea_output = 'escape'")
    with Database(postgresql_url) as database:
        schema.migrate(database)
        service = Service(database, combiner=Inline)
        try:
            batch = service.batches.open(Opening(key="a\\b", items=9), "open").batch
            assert service.batches.get(batch.id) == batch
        finally:
            service.stop()
