"""Session settings, whatever the server's defaults; classification of errors; migrations both ways."""

from __future__ import annotations

import contextlib
import errno
import re
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import alembic.autogenerate
import alembic.command
import alembic.config
import pymysql
import pytest
import sqlalchemy as sa
from alembic.migration import MigrationContext
from sqlalchemy.engine import Connection

from core import errors
from core.batches.batch import Opening
from core.batches.search import Filter
from core.service import Service
from core.storage import faults, schema, tables
from core.storage.database import Database
from core.storage.dialects import mariadb, sqlite
from core.storage.engines import MOST_AGE, MOST_IDLE
from core.storage.namespaces import VERSION
from tests.mutants import mutant
from tests.support import templates
from tests.support.postgresql import PostgreSQL
from tests.support.servers import MariaDB, sqlite_file


def test_a_migration_waits_for_statements_of_any_length(mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building an index of a large table takes longer than any other statement may."""
    monkeypatch.setattr(mariadb, "READ_TIMEOUT", 0.5)
    statement = "SELECT SLEEP(1)"
    with Database(mariadb_url) as database, database.connection() as connection:
        with database.dialect.migrating(connection):
            assert connection.exec_driver_sql(statement).scalar() == 0
        with pytest.raises(sa.exc.OperationalError):
            connection.exec_driver_sql(statement)


def test_mariadb_sessions_have_our_settings(mariadb_database: Database) -> None:
    """READ COMMITTED, strict, UTC, and a short lock wait."""
    variables = "@@tx_isolation, @@sql_mode, @@time_zone, @@innodb_lock_wait_timeout, @@autocommit"
    row = mariadb_database.read(lambda tx: tx.exec_driver_sql(f"SELECT {variables}").one())
    assert (row[0], row[2], row[3]) == ("READ-COMMITTED", "+00:00", 2)
    assert "STRICT_ALL_TABLES" in row[1]


def test_sqlite_sessions_have_our_settings(sqlite_url: str) -> None:
    """WAL, and a commit that is on disk."""
    with Database(sqlite_url) as database:
        assert database.read(lambda tx: tx.exec_driver_sql("PRAGMA journal_mode").scalar()) == "wal"
        assert database.read(lambda tx: tx.exec_driver_sql("PRAGMA synchronous").scalar()) == 2


def test_a_snapshot_does_not_see_later_writes(database: Database) -> None:
    """Verify reads one, however long it takes."""

    def count(tx: Connection) -> object:
        return tx.exec_driver_sql("SELECT COUNT(*) FROM batches").scalar()

    def look_twice(tx: Connection) -> tuple[object, object]:
        before = count(tx)
        Service(database).batches.open(Opening())
        return before, count(tx)

    assert database.snapshot(look_twice) == (0, 0)
    assert database.read(count) == 1


def test_work_that_raises_is_rolled_back(database: Database) -> None:
    """It is rolled back, and the error is raised unchanged."""

    def work(tx: Connection) -> None:
        tx.execute(sa.insert(tables.extends).values(batch_id=1, idempotency_key="k", start=0, count=1))
        raise KeyError("k")

    with pytest.raises(KeyError):
        database.write(work)
    assert database.read(lambda tx: tx.execute(sa.select(tables.extends)).all()) == []


def test_work_is_retried_after_a_deadlock(mariadb_database: Database) -> None:
    """Two transactions lock two rows in opposite order; the server rolls one back, and both succeed."""
    with mariadb_database.engine.begin() as tx:
        for batch in (1, 2):
            tx.execute(sa.insert(tables.extends).values(batch_id=batch, idempotency_key="k", start=0, count=0))
    both_hold_one = threading.Barrier(2)
    attempts: list[int] = []

    def increment(tx: Connection, order: tuple[int, int]) -> None:
        attempts.append(order[0])
        for position, batch in enumerate(order):
            tx.exec_driver_sql(f"UPDATE extends SET count = count + 1 WHERE batch_id = {batch}")
            if position == 0 and len(attempts) <= 2:
                both_hold_one.wait(10)

    threads = [
        threading.Thread(target=mariadb_database.write, args=(lambda tx, o=order: increment(tx, o),))
        for order in ((1, 2), (2, 1))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(attempts) == 3
    counts = mariadb_database.read(lambda tx: tx.execute(sa.select(tables.extends.c["count"])).scalars().all())
    assert counts == [2, 2]


def test_a_held_lock_is_a_lock_timeout(mariadb_database: Database) -> None:
    """After as many waits as the caller allows, and not before."""
    service = Service(mariadb_database)
    batch = service.batches.open(Opening()).batch.id
    statement = f"SELECT id FROM batches WHERE id = {batch} FOR UPDATE"
    with mariadb_database.engine.begin() as holder:
        holder.exec_driver_sql(statement)
        with pytest.raises(errors.LockTimeout):
            mariadb_database.write(lambda tx: tx.exec_driver_sql(statement).all(), lock_waits=0)
    assert mariadb_database.write(lambda tx: tx.exec_driver_sql(statement).all(), lock_waits=0) == [(batch,)]


def test_an_unreachable_database_is_unavailable() -> None:
    """Named without its password, and without a driver's exception."""
    with Database("mysql://lastbit:secret@127.0.0.1:1/nowhere") as database:
        for call in (database.read, database.write, database.snapshot):
            with pytest.raises(errors.Unavailable) as exception:
                call(lambda tx: tx.exec_driver_sql("SELECT 1"))
            assert "secret" not in str(exception.value)
        assert "secret" not in repr(database)


def test_a_first_connection_that_dies_while_it_is_prepared_is_an_outage(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy asks the server for its version and settings then. It reports the loss in its own way."""
    with Database(mariadb_url) as database, monkeypatch.context() as patch:
        dialect = database.engine.dialect
        ask = dialect._get_default_schema_name  # type: ignore[attr-defined]

        def lose(connection: Connection) -> str:
            name: str = ask(connection)
            connection.invalidate()
            return name

        patch.setattr(dialect, "_get_default_schema_name", lose)
        for call in (database.read, database.write, database.snapshot):
            with pytest.raises(errors.Unavailable):
                call(lambda tx: tx.exec_driver_sql("SELECT 1"))
        with pytest.raises(errors.Unavailable), database.connection():
            pass
        patch.undo()
        assert database.read(lambda tx: tx.exec_driver_sql("SELECT 1").scalar()) == 1


def test_a_restart_of_the_server_is_survived() -> None:
    """The pooled connections are dead then; the next transaction opens a new one, and no committed data is lost."""
    server = MariaDB()
    if not server.available:
        pytest.skip("mariadb-server is not installed")
    try:
        server.install()
        server.start()
        with Database(server.new_database()) as database:
            schema.migrate(database)
            service = Service(database)
            first = service.batches.open(Opening(items=3), "key")
            server.stop()
            server.start()
            assert service.batches.open(Opening(items=3), "key").batch == first.batch
            server.stop()
            server.start()
            service.batches.delete(first.batch.id)
            server.stop()
            server.start()
            assert service.batches.open(Opening()).batch.id > first.batch.id
    finally:
        server.remove()


@pytest.mark.parametrize("jump", [-86_400, 86_400])
def test_connections_are_replaced_by_a_monotonic_clock(
    mariadb: MariaDB, mariadb_url: str, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    """The wall clock was wrong while connections broke, and is corrected: each connection is replaced once, not for
    each transaction until the clock has caught up; and no broken connection is tried twice."""
    opened_connections: list[object] = []
    wall = time.time

    def use(connections: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(connections):
                stack.enter_context(database.engine.connect()).exec_driver_sql("SELECT 1")

    with Database(mariadb_url) as database, contextlib.closing(mariadb.connect()) as admin:
        sa.event.listen(database.engine, "connect", lambda *_: opened_connections.append(None))
        use(8)
        assert len(opened_connections) == 8
        monkeypatch.setattr(time, "time", lambda: wall() + jump)
        use(8)
        assert len(opened_connections) == 8, "no connection may look too old because of the clock"
        with admin.cursor() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", [database.url.database])
            for (value,) in cursor.fetchall():
                cursor.execute(f"KILL CONNECTION {value}")
        with pytest.raises(sa.exc.OperationalError):
            use(1)
        use(8)  # the first broken connection makes all others count as broken
        monkeypatch.setattr(time, "time", wall)
        for _ in range(3):
            use(10)  # two that were opened at the right time
        assert len(opened_connections) == 18


def test_a_connection_that_is_old_is_replaced(mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server, a proxy or a firewall drops it: by its age, and earlier if it was idle."""
    connections: list[object] = []
    clock = time.monotonic
    with Database(mariadb_url) as database:
        sa.event.listen(database.engine, "connect", lambda *_: connections.append(None))

        def use(seconds: float) -> int:
            monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)
            database.read(lambda tx: tx.exec_driver_sql("SELECT 1"))
            return len(connections)

        seconds = range(0, MOST_AGE + 300, 200)
        assert [use(second) for second in seconds] == [1 if second < MOST_AGE else 2 for second in seconds]
        last = seconds[-1]
        assert use(last + MOST_IDLE - 10) == 2
        assert use(last + 2 * MOST_IDLE) == 3


def test_every_call_survives_killed_pooled_connections(mariadb_database: Database) -> None:
    """By an administrator, or because the server ended: the dead connection is detected and discarded, and the call is
    repeated."""

    def connection_id(tx: Connection) -> int:
        return int(tx.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one())

    for call in (mariadb_database.read, mariadb_database.snapshot, mariadb_database.write):
        result = call(connection_id)
        with contextlib.suppress(sa.exc.DBAPIError), sa.create_engine(mariadb_database.url).begin() as other:
            other.exec_driver_sql(f"KILL HARD {result}")
        assert call(connection_id) != result


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_commit_whose_answer_is_lost_is_not_repeated_blindly(sqlite_url: str, is_lost: bool) -> None:
    """SQLite loses no answer, but its COMMIT can fail: the call is unavailable, and was done once or not at all."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        breaks = 0

        def break_the_commit(connection: Connection) -> None:
            nonlocal breaks
            if not breaks:
                breaks += 1
                if is_lost:
                    connection.connection.dbapi_connection.commit()
                failure = sqlite3.OperationalError("the connection was lost")
                failure.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise sa.exc.OperationalError("COMMIT", {}, failure)

        sa.event.listen(database.engine, "commit", break_the_commit)
        service = Service(database)
        with pytest.raises(errors.Unavailable):
            service.batches.open(Opening(items=1))
        assert len(service.batches.page(Filter()).batches) == int(is_lost)
        breaks = 0
        with pytest.raises(errors.OutcomeUnknown):
            service.batches.open(Opening(items=2), "key")
        opening = service.batches.open(Opening(items=2), "key")
        assert len(service.batches.page(Filter()).batches) == int(is_lost) + 1
        assert opening.replayed == is_lost


@pytest.mark.parametrize(("number", "tries"), [(1213, 2), (3101, 2), (1180, 1), (1205, 1), (1047, 1)])
def test_a_refused_commit_is_retried_only_if_the_server_rules_out_its_effect(
    sqlite_url: str, number: int, tries: int
) -> None:
    """A deadlock, a cluster's way to refuse, left nothing: any work starts again. After any other error the outcome is
    unknown."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        refusals = 0

        def refuse(_: Connection) -> None:
            nonlocal refusals
            if not refusals:
                refusals += 1
                raise sa.exc.OperationalError("COMMIT", {}, pymysql.err.OperationalError(number, "refused"))

        sa.event.listen(database.engine, "commit", refuse)
        attempts: list[None] = []
        with contextlib.nullcontext() if tries == 2 else pytest.raises(errors.Unavailable):
            database.write(lambda tx: attempts.append(None))
        assert len(attempts) == tries


def test_a_rollback_that_fails_is_an_outage(sqlite_url: str) -> None:
    """Nothing was committed, whatever the reason for the rollback; the caller doesn't get the driver's error."""
    with Database(sqlite_url) as database:
        schema.migrate(database)

        def refuse(_: Connection) -> None:
            raise sa.exc.OperationalError("ROLLBACK", {}, pymysql.err.OperationalError(1047, "not ready"))

        def work(tx: Connection) -> None:
            tx.exec_driver_sql("SELECT 1")
            raise errors.BatchNotFound(7)

        sa.event.listen(database.engine, "rollback", refuse)
        for call in (database.write, database.read):
            with pytest.raises(errors.Unavailable):
                call(work)


def test_nothing_is_written_to_an_sqlite_file_that_was_removed(sqlite_url: str) -> None:
    """Nor to a new file in its place. Once it is back, everything that was answered is there."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        service = Service(database)
        service.batches.open(Opening(key="before"))
        path = Path(str(database.url.database))
        removed = path.rename(path.with_name("removed.db"))
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match="the SQLite file was removed or replaced: put it back"):
                service.batches.open(Opening(key="lost"))
        with pytest.raises(errors.Unavailable, match="the SQLite file was removed or replaced: put it back"):
            service.batches.page(Filter())
        assert not path.exists()
        removed.rename(path)
        service.batches.open(Opening(key="after"))
        assert [batch.key for batch in service.batches.page(Filter()).batches] == ["after", "before"]


@mutant(
    "a-file-that-replaces-the-open-one-is-opened",
    "core.storage.dialects.sqlite:_identity",
    "status.st_dev, status.st_ino",
    "()",
)
def test_a_file_that_replaces_an_open_one_is_left_alone(sqlite_url: str) -> None:
    """The `-wal` file of the old one is still there, and SQLite would replay it into the new one."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        service = Service(database)
        service.batches.open(Opening(key="old"))
        path = Path(str(database.url.database))
        copy = path.with_name("copy.db")
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", [str(copy)])
        service.batches.open(Opening(key="not in the copy"))
        copy.replace(path)
        content = path.read_bytes()
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match="the SQLite file was removed or replaced"):
                service.batches.open(Opening(key="new"))
    assert path.read_bytes() == content
    path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    with Database(sqlite_url) as database:
        assert [batch.key for batch in Service(database).batches.page(Filter()).batches] == ["old"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_an_open_sqlite_file_that_cannot_be_looked_at_is_used(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As when somebody changes the permissions of its folder."""
    with Database(sqlite_url) as database:
        schema.migrate(database)
        service = Service(database)
        service.batches.open(Opening(key="before"))

        def fail(_: Path) -> None:
            raise OSError(number, "")

        with monkeypatch.context() as patch:
            patch.setattr(sqlite, "_identity", fail)
            service.batches.open(Opening(key="after"))
        assert [batch.key for batch in service.batches.page(Filter()).batches] == ["after", "before"]


def test_a_file_in_the_place_of_the_folder_is_an_outage(sqlite_url: str) -> None:
    with Database(sqlite_url) as database:
        schema.migrate(database)
        folder = Path(str(database.url.database)).parent
        moved = folder.rename(folder.with_name(f"{folder.name}-moved"))
        folder.touch()
        with pytest.raises(errors.Unavailable, match="the SQLite file was removed or replaced"):
            Service(database).batches.page(Filter())
        folder.unlink()
        moved.rename(folder)
        assert Service(database).batches.page(Filter()).batches == []


def test_an_outage_of_sqlite_names_its_error(sqlite_url: str) -> None:
    def fill(tx: Connection) -> None:
        tx.exec_driver_sql("PRAGMA max_page_count = 1")  # as if the disk were full
        tx.exec_driver_sql("CREATE TABLE filler AS SELECT zeroblob(1000000) AS content")

    with Database(sqlite_url) as database:
        schema.migrate(database)
        with pytest.raises(errors.Unavailable, match=r"\(its error SQLITE_FULL\)"):
            database.write(fill)


def test_errors_are_classified_once() -> None:
    """The exception of a bug in this project is in none of the classes."""
    assert faults.classify(faults.BeginAgain()) is errors.Fault.CONFLICT
    assert faults.classify(ValueError()) is None
    assert faults.classify(sa.exc.TimeoutError()) is errors.Fault.OUTAGE


@pytest.mark.parametrize(
    ("url", "word"),
    [("oracle://x/y", "postgresql"), ("sqlite://", "file"), ("sqlite:///:memory:", "file"), ("nonsense", "URL")],
)
def test_an_invalid_url_is_refused(url: str, word: str) -> None:
    """At once, with a message."""
    with pytest.raises(errors.Misconfigured, match=word):
        Database(url)


def test_migrations_go_up_and_down_and_match_the_tables(database_url: str) -> None:
    """When they are new, and after the way down and up, `alembic check` finds no difference."""
    with Database(database_url) as database:
        templates.reflect_indexes(database)
        for _ in range(2):
            schema.migrate(database)
            with database.engine.connect() as connection:
                context = MigrationContext.configure(connection, opts={"compare_type": True, "version_table": VERSION})
                assert alembic.autogenerate.compare_metadata(context, tables.metadata) == []
            schema.migrate(database, "0016")


USERS_ENV = """
import sqlalchemy as sa
from alembic import context

with sa.create_engine(context.config.get_main_option("users_url")).begin() as connection:
    context.configure(connection=connection)
    context.run_migrations()
"""
USERS_REVISION = """
from alembic import context, op
from core.storage import schema
from core.storage.database import Database

revision, down_revision = "1", None

def upgrade():
    with Database(context.config.get_main_option("our_url")) as database:
        schema.migrate(database)
    op.execute("CREATE TABLE orders (id INTEGER)")
"""


@mutant("a-users-migration-loses-alembic", "core.storage.schema:_alembic_as_before", "module.update(names)", "")
def test_a_users_own_migration_can_migrate(database_url: str, tmp_path: Path) -> None:
    """Within one of its revisions. Alembic has one migration at a time, and goes on with the user's."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions/one.py").write_text(USERS_REVISION)
    (tmp_path / "env.py").write_text(USERS_ENV)
    users_url = f"sqlite:///{tmp_path}/users.db"
    config = alembic.config.Config()
    options = {"script_location": str(tmp_path), "users_url": users_url, "our_url": database_url}
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    alembic.command.upgrade(config, "head")
    assert sa.inspect(sa.create_engine(users_url)).has_table("orders")
    with Database(database_url) as database:
        database.read(schema.check)


def test_a_snapshot_that_is_older_than_an_index_is_read_again(mariadb_url: str) -> None:
    """A service goes on during a migration. The server can't use a new index for a snapshot that began before."""
    with Database(mariadb_url) as database, Database(mariadb_url) as other:
        schema.migrate(database, "0019")
        attempts: list[None] = []

        def read(tx: Connection) -> list[object]:
            attempts.append(None)
            tx.exec_driver_sql("SELECT position FROM feed_head").all()
            if len(attempts) == 1:
                schema.migrate(other, "0020")
            return list(tx.exec_driver_sql("SELECT id FROM batches WHERE state = 'open' AND expires_in < 1"))

        assert database.snapshot(read) == []
        assert len(attempts) == 2


def test_ids_are_not_reused_after_the_way_down_and_up(database: Database) -> None:
    """To drop a column, a migration could copy SQLite's table, and the copy would give deleted ids again."""
    service = Service(database)
    last = service.batches.open(Opening()).batch.id
    service.batches.delete(last)
    schema.migrate(database, "0016")
    schema.migrate(database)
    assert service.batches.open(Opening()).batch.id > last


def test_test_databases_match_the_migrations(database: Database, request: pytest.FixtureRequest) -> None:
    """They are copies of a migrated one, table by table, with the first rows."""

    def lines(database: Database) -> list[str]:
        if not database.is_embedded:
            dump = templates.dump(database)
        else:
            assert database.url.database is not None
            with contextlib.closing(sqlite3.connect(database.url.database)) as connection:
                dump = list(connection.iterdump())
        # The order in which indexes are created is not guaranteed.
        return sorted(line.rstrip(",") for text in dump for line in text.splitlines())

    kind = request.node.callspec.params["database_url"]
    server: MariaDB | PostgreSQL | None = None if database.is_embedded else request.getfixturevalue(kind)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(sqlite_file()) if server is None else server.new_database() for _ in range(2)]
        # The test's own database may be the one that was copied.
        template_copy, migration = (stack.enter_context(Database(url)) for url in urls)
        templates.migrate(template_copy)
        schema.migrate(migration)
        assert lines(template_copy) == lines(database) == lines(migration)


def test_an_older_schema_is_refused_and_a_newer_one_may_exclude_this_release(database_url: str) -> None:
    """Old code meets a newer schema during an upgrade, and on the way back. It works there until the schema excludes
    it."""
    with Database(database_url) as database:
        with pytest.raises(errors.Misconfigured, match="python -m api migrate"):
            database.read(schema.check)
        schema.migrate(database)
        database.read(schema.check)
        with database.engine.begin() as connection:
            connection.execute(sa.text(f"UPDATE {VERSION} SET version_num = 'from-the-future'"))
        database.read(schema.check)
        schema.migrate(database)
        with database.engine.begin() as connection:
            assert schema.current(connection) == "from-the-future"
            connection.execute(sa.text("UPDATE schema_support SET oldest = 'from-the-future'"))
        with pytest.raises(errors.Misconfigured, match="which requires a release that knows revision from-the-future"):
            database.read(schema.check)


def test_a_migration_excludes_old_releases_before_its_changes(database: Database) -> None:
    """From its first statement on, old code is not ready, whatever happens to the rest."""
    with database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE schema_support SET oldest = 'from-the-future'"))
    with pytest.raises(errors.Misconfigured, match="from-the-future"):
        database.read(schema.check)


def listening(database: Database, react: Callable[[str], None]) -> None:
    """Call `react` with each executed statement."""
    sa.event.listen(database.engine, "after_cursor_execute", lambda *event_args: react(event_args[2]))


def test_migrations_remove_nothing_and_change_tables_online(mariadb: MariaDB) -> None:
    """Existing tables keep working for the previous release, which still writes to them during the migration and after
    it. Decision 0014 lists the exceptions."""
    statements: list[str] = []
    with Database(mariadb.new_database()) as database:
        schema.migrate(database, "0016")
        listening(database, lambda statement: statements.append(" ".join(statement.split())))
        schema.migrate(database)
    own_tables = {words[2] for statement in statements if (words := statement.split())[:2] == ["CREATE", "TABLE"]}
    changes = [
        statement
        for statement in statements
        if re.match("(CREATE .*INDEX|ALTER|DROP|RENAME|TRUNCATE)", statement)
        and not own_tables
        & set(re.findall(r"(?:ON|TABLE) (\w+)", statement))  # a table that was just created has no users yet
    ]
    assert len(changes) == 19
    with Database(mariadb.new_database()) as database, database.engine.connect() as connection:
        schema.migrate(database, "0016")
        for change in changes:
            new_column = re.match(r"ALTER TABLE \w+ ADD COLUMN (?!.*NOT NULL(?!.*DEFAULT))", change)
            assert new_column or re.match("CREATE INDEX", change), change
            # The server refuses a change that it can't make this way.
            algorithm = ", ALGORITHM=INSTANT" if new_column else " ALGORITHM=INPLACE LOCK=NONE"
            connection.exec_driver_sql(change + algorithm)


class Killed(BaseException):
    """Stands for the death of the migrating process."""


@mutant("a-new-database-serves-earlier-releases", "core.storage.schema:_create", "newest()", '"0002"')
@mutant(
    "the-version-of-another-project-becomes-ours-after-a-kill",
    "core.storage.schema:_create",
    "_alembic(connection, command.ensure_version)",
    "",
)
@pytest.mark.parametrize("first", [None, "0016"])
def test_a_migration_killed_after_any_statement_is_finished_by_the_next(mariadb_url: str, first: str | None) -> None:
    """Data definition statements commit by themselves there, so half of it stays; the next one detects it and goes on.
    `first`: the revision of the database; None if it is new."""
    statements: set[str] = set()
    with Database(mariadb_url) as database, database.engine.begin() as connection:
        if first is not None:
            schema.migrate(database, first)
        # The user's own project has migrations as well.
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)")
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('5f3ab0c2d1e4')")

    def kill(statement: str) -> None:
        if statement.lstrip().startswith(("CREATE", "ALTER", "INSERT", "UPDATE")) and statement not in statements:
            statements.add(statement)
            raise Killed

    while True:
        with Database(mariadb_url) as database:
            listening(database, kill)
            before = len(statements)
            with contextlib.suppress(Killed):
                schema.migrate(database)
            if len(statements) == before:
                break
    assert len(statements) > (50 if first is None else 20)
    with Database(mariadb_url) as database:
        database.read(schema.check)
        with database.engine.connect() as connection:
            assert schema.serves_only(connection, schema.newest()), "no older release uses a new database"
            connection.exec_driver_sql("DROP TABLE alembic_version")
            context = MigrationContext.configure(connection, opts={"compare_type": True, "version_table": VERSION})
            assert alembic.autogenerate.compare_metadata(context, tables.metadata) == []
            for seed in (tables.feed_head, tables.callback_cursor, tables.schema_support):
                assert connection.scalar(sa.select(sa.func.count()).select_from(seed)) == 1


@pytest.mark.parametrize("server", ["mariadb", "postgresql"])
def test_concurrent_migrations_do_not_fail(request: pytest.FixtureRequest, server: str) -> None:
    """Replicas that start together: one migrates, the others wait, none fails."""
    url = request.getfixturevalue(f"{server}_url")
    failures: list[BaseException] = []

    def migrate() -> None:
        try:
            with Database(url) as database:
                schema.migrate(database)
                database.read(schema.check)
        except BaseException as error:  # noqa: BLE001  # reported below
            failures.append(error)

    threads = [threading.Thread(target=migrate) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_keys_compare_by_bytes(service: Service) -> None:
    """Case, trailing blanks and composed characters make different keys, on every database."""
    names = ["job-a", "Job-A", "job-a ", "jöb-a", "jo\u0308b-a", "job-a\u0000"]
    ids = {
        name: service.batches.open(Opening(key=name), f"open-{position}").batch.id
        for position, name in enumerate(names)
    }
    for name, batch in ids.items():
        page = service.batches.page(Filter(key=name)).batches
        assert [(batch_.id, batch_.key) for batch_ in page] == [(batch, name)]
    batch = ids["job-a"]
    assert [service.batches.extend(batch, 1, key).start for key in ("k", "K", "k.", "k")] == [0, 1, 2, 0]
    assert service.batches.open(Opening(), "open-key").batch.id != service.batches.open(Opening(), "Open-Key").batch.id


@pytest.mark.mariadb
def test_new_connections_do_not_read_the_machines_certificates_again(
    mariadb_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading them blocks all threads for a tenth of a second, and after an outage all connections are new."""
    read: list[object] = []
    original = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: read.append(options) or original(**options))
    for _ in range(3):
        mariadb_database.dispose()
        assert mariadb_database.read(lambda tx: tx.exec_driver_sql("SELECT 1").scalar()) == 1
    assert len(read) <= 1


@mutant(
    "a-connections-first-use-drops-the-cache",
    "core.storage.engines:replace_old_connections",
    "record.info[_USED] == created",
    "False",
)
@pytest.mark.mariadb
def test_a_connection_opened_while_others_break_is_used(mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier connections are replaced; this one is new, whatever the clock shows: here it stands still."""
    monkeypatch.setattr("core.storage.engines.time", SimpleNamespace(monotonic=lambda: 5.0))
    with Database(mariadb_url) as database:
        with database.engine.connect() as victim, database.engine.connect() as killer:
            killer.exec_driver_sql(f"KILL {victim.exec_driver_sql('SELECT CONNECTION_ID()').scalar()}")
            with pytest.raises(sa.exc.DBAPIError):
                victim.exec_driver_sql("SELECT 1")
        assert database.read(lambda tx: tx.exec_driver_sql("SELECT 1").scalar()) == 1
