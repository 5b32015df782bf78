"""Lastbit's tables beside the tables of a user: in a schema of PostgreSQL, or another database of MariaDB."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import sqlalchemy as sa

from core import errors
from core.batches.batch import Opening
from core.batches.search import Filter
from core.commits.combiner import Inline
from core.enlisted import mover
from core.service import Service
from core.storage import schema, statements, tables
from core.storage.checks import Verdict, check
from core.storage.database import Database
from core.storage.dialects import mariadb, oceanbase, postgresql
from core.tallies import Entry
from lastbit.embedded import Lastbit
from tests.conftest import Server, server_kind
from tests.guarantees.drivers.life import live
from tests.mutants import mutant
from tests.support.servers import MariaDB, run_module, running_service
from tests.support.waits import waits_for_a_lock

NAME = "Last bit of `our's` 100 %" if server_kind() == "oceanbase" else 'Last "bit" of `our\'s`, 100 %'
"""A name that has to be quoted. OceanBase can't drop a database whose name has a double quote or a comma."""
OUR_NAMES = [*tables.metadata.tables, "lastbit_version", "alembic_version"]


@pytest.fixture
def users_url(server_url: str) -> Iterator[str]:
    """The URL of a user's database. On MariaDB, a schema is another database of the server."""
    yield server_url
    with Database(server_url) as users:
        if users.url.get_backend_name() == "mysql":
            for name in (NAME, "last_bit", "one", "two"):
                execute(users, f"DROP DATABASE IF EXISTS {users.dialect.quoted(name)}".replace("%", "%%"))


def execute(database: Database, *statements: str) -> None:
    with database.engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


@pytest.fixture
def database(users_url: str) -> Iterator[Database]:
    """A schema beside the tables of a user, which have all our names. It doesn't exist yet."""
    with Database(users_url) as users:
        for table in OUR_NAMES:
            execute(users, f"CREATE TABLE {table} (mine VARCHAR(9))", f"INSERT INTO {table} VALUES ('untouched')")
    with Database(users_url, schema=NAME) as database:
        yield database


@mutant(
    "the-search-path-has-the-users-schema-too",
    "core.storage.dialects.postgresql:PostgreSQL.engine",
    "f\"; SELECT set_config('search_path', {_literal(self.quoted(schema))}, false)\"",
    'f"; SET search_path = public"',
    only="postgresql",
)
@mutant(
    "the-schema-is-the-urls-database",
    "core.storage.dialects.mariadb:MariaDB.located",
    "url.set(database=schema)",
    "url",
    only="mariadb",
)
@pytest.mark.mariadb
def test_the_tables_of_a_user_stay_untouched(database: Database, users_url: str) -> None:
    """Our own connections find only ours; on one of the user's, a qualified name finds them."""
    schema.migrate(database)
    schema.finish(database)
    live(database)
    with Database(users_url) as users, users.engine.connect() as connection:
        for table in OUR_NAMES:
            (row,) = connection.exec_driver_sql(f"SELECT * FROM {table}").all()
            assert row == ("untouched",)
        table = database.qualified("feed_head").replace("%", "%%")  # the driver takes one for a parameter
        (head,) = connection.exec_driver_sql(f"SELECT position FROM {table}").all()
    assert head[0] > 0


@mutant(
    "a-caller-writes-to-tables-of-its-own",
    "core.storage.dialects.callers:_CallersDialect.name",
    "self.qualified(tx.schema, table)",
    "table",
)
@pytest.mark.mariadb
def test_a_callers_transaction_names_the_schema(database: Database, users_url: str) -> None:
    """The caller's connection finds its own tables of the same names, if they aren't named with ours."""
    with Database(users_url) as users, Lastbit(users_url, schema=NAME) as lastbit:
        lastbit.migrate()
        schema.finish(database)
        with users.engine.begin() as tx:
            batch = lastbit.open(tx, key="order-7", items=4)
            *_, item = lastbit.extend(tx, batch.id, 2)
        result = lastbit.once(item, lambda tx: tx.exec_driver_sql("UPDATE feed SET mine = 'applied'"))
        assert result.applied == 1
        with users.engine.begin() as tx:
            assert lastbit.fail(tx, f"{batch.id}:0:0", "broken").applied == 1
            assert lastbit.skip(tx, f"{batch.id}:0:1", "unused").applied == 1
            lastbit.seal(tx, batch.id)
        mover.sweep(database)
        stored = lastbit.client().batch(batch.id).refresh()
        assert (stored.acked, stored.failed, stored.skipped, stored.state) == (1, 1, 1, "sealed")
        with users.engine.connect() as connection:
            for table in OUR_NAMES:
                (row,) = connection.exec_driver_sql(f"SELECT * FROM {table}").all()
                assert row == ("applied" if table == "feed" else "untouched",)


@pytest.fixture
def app_url(server: Server, users_url: str) -> Iterator[str]:
    """The URL of a database for an account that may do nothing yet but connect."""
    url = sa.make_url(users_url)
    with Database(users_url) as administrator:
        if url.get_backend_name() == "mysql":
            execute(
                administrator, "CREATE USER app@'127.0.0.1'", f"GRANT SELECT ON {url.database}.* TO app@'127.0.0.1'"
            )
        else:
            execute(administrator, "CREATE ROLE app LOGIN")
        yield url.set(username="app").render_as_string()
        if url.get_backend_name() == "mysql":
            execute(administrator, "DROP USER app@'127.0.0.1'")
        else:
            execute(administrator, "DROP OWNED BY app", "DROP ROLE app")


def refusal(url: str, *arguments: str, schema_name: str | None = "last_bit") -> str:
    """The only line that a program prints, when it can't work."""
    schema_arguments = [] if schema_name is None else ["--database-schema", schema_name]
    process = run_module(*arguments, "--database-url", url, *schema_arguments)
    assert process.returncode == 1, process.stdout + process.stderr
    (line,) = process.stderr.splitlines()
    return line


@pytest.mark.mariadb
def test_who_may_not_create_the_schema_is_told_how_an_administrator_does(app_url: str, users_url: str) -> None:
    """The statements are executed here as they are printed; then the migration works, and so does the account."""
    line = refusal(app_url, "api", "migrate")
    assert "the user 'app' may not create the " in line
    statements = re.search(r": run (.*) with an account that may, and migrate again$", line)
    assert statements is not None
    with Database(users_url) as administrator:
        execute(administrator, *statements[1].split("; "))
    with Database(app_url, schema="last_bit") as database:
        schema.migrate(database)
        live(database)


@pytest.mark.mariadb
def test_what_the_account_lacks_is_named(app_url: str, users_url: str) -> None:
    """A schema that isn't there, that the account may not use, whose tables it may not read or write."""
    if app_url.startswith("mysql"):
        lacking = [
            ([], "has no access to the database 'last_bit'"),
            (["GRANT DELETE ON last_bit.* TO app@'127.0.0.1'"], "lacks a privilege"),
            (["GRANT SELECT ON last_bit.* TO app@'127.0.0.1'"], "lacks a privilege"),
        ]
    else:
        lacking = [
            ([], 'may not use the schema \'last_bit\': GRANT USAGE ON SCHEMA "last_bit" TO "app"'),
            (["GRANT USAGE ON SCHEMA last_bit TO app"], "lacks a privilege"),
            (["GRANT SELECT ON ALL TABLES IN SCHEMA last_bit TO app"], "lacks a privilege"),
        ]
    with Database(users_url, schema="last_bit") as database, Database(users_url) as administrator:
        schema.migrate(database)
        for grants, words in lacking:
            execute(administrator, *grants)
            assert words in refusal(app_url, "jobs.dispatcher", "--once")


@pytest.mark.mariadb
def test_a_schema_that_does_not_exist_is_told_from_a_missing_upgrade(users_url: str) -> None:
    assert "run `python -m api migrate`" in refusal(users_url, "jobs.janitor")


@pytest.fixture
def neighbours(users_url: str) -> Iterator[tuple[Database, Database]]:
    """Two applications in one database of PostgreSQL, or on one server of MariaDB."""
    with Database(users_url, schema="one") as database, Database(users_url, schema="two") as other:
        yield database, other


@mutant(
    "migrations-of-all-databases-take-turns",
    "core.storage.dialects.mariadb:_migration",
    "schema is None",
    "True",
    only="mariadb",
)
@mutant(
    "migrations-of-all-schemas-take-turns",
    "core.storage.dialects.postgresql:PostgreSQL.migrating",
    "MIGRATION if schema is None else _number(f'{schema}:migration')",
    "MIGRATION",
    only="postgresql",
)
@pytest.mark.mariadb
def test_migrations_of_two_schemas_do_not_wait_for_each_other(neighbours: tuple[Database, Database]) -> None:
    database, other = neighbours
    schema.migrate(database)
    with database.connection() as connection, database.dialect.migrating(connection):
        schema.migrate(other)
    for database in neighbours:
        database.read(schema.check)


@mutant(
    "a-schema-that-another-process-has-just-created-is-an-error",
    "core.storage.namespaces:create",
    "IntegrityError",
    "KeyError",
    only="postgresql",
)
def test_replicas_that_start_together_create_one_schema(postgresql_url: str) -> None:
    """PostgreSQL's IF NOT EXISTS doesn't see a schema that another transaction is creating."""
    with (
        Database(postgresql_url) as users,
        Database(postgresql_url, schema="one") as database,
        ThreadPoolExecutor(1) as pool,
        users.engine.begin() as connection,
    ):
        connection.exec_driver_sql("CREATE SCHEMA one")
        migration = pool.submit(schema.migrate, database)
        assert waits_for_a_lock(users, migration)
        connection.commit()
        migration.result(60)
        database.read(schema.check)


@mutant(
    "sums-of-all-schemas-take-turns",
    "core.storage.dialects.postgresql:PostgreSQL.sum_locked",
    'table if schema is None else f"{schema}:{table}"',
    "table",
    only="postgresql",
)
@pytest.mark.mariadb
def test_two_schemas_share_nothing(neighbours: tuple[Database, Database]) -> None:
    """Not the numbers that are locked for sums either: the same key of a tally in both schemas is two keys."""
    for database in neighbours:
        schema.migrate(database)
    database, other = neighbours
    entry = Entry("key", 7, "moves", 0, 0, 0, 0)
    services = [Service(database, combiner=Inline) for database in neighbours]
    for service in services:
        service.tallies.apply("tally", [entry])
    sums = ("SUM(value)", "tallies", "tally = 'tally'", "tally_key", ["tally:key"])
    with database.engine.connect() as tx:
        tx.begin()
        statements.run(tx, *database.dialect.sum_locked(tx, *sums))
        other.write(lambda tx: statements.run(tx, *other.dialect.sum_locked(tx, *sums)), lock_waits=0)
    services[0].batches.open(Opening(key="mine"))
    assert services[1].batches.page(Filter()).batches == []
    live(database)
    assert services[1].batches.page(Filter()).batches == []
    assert services[1].tallies.get("tally", "key").value == 7


@pytest.mark.mariadb
def test_without_a_schema_locks_are_those_of_earlier_releases(users_url: str) -> None:
    """A process of one may run beside this one during an upgrade."""
    with Database(users_url) as database, database.engine.connect() as tx:
        *locks, _ = database.dialect.sum_locked(tx, "SUM(value)", "tallies", "tally = 't'", "tally_key", ["t:k"])
    of_kinds = {"postgresql": ["SELECT pg_advisory_xact_lock(6339101919252111407)"], "oceanbase": [oceanbase.LOCK_SUMS]}
    assert locks == of_kinds.get(server_kind(), [])
    assert postgresql.MIGRATION == 0x6C617374626974
    assert mariadb._migration(None) == "lastbit_migrate"


@mutant(
    "a-lost-search-path-is-fine",
    "core.storage.checks.postgresql:_session",
    'expected["search_path"] = database.dialect.quoted(database.schema)',
    "pass",
    only="postgresql",
)
@pytest.mark.mariadb
def test_a_pooler_that_loses_the_schema_is_named(users_url: str) -> None:
    """One between the service and PostgreSQL that gives each transaction another session. MariaDB has no such
    setting."""
    with Database(users_url, schema="last_bit") as database:
        schema.migrate(database)
        if database.url.get_backend_name() == "postgresql":
            assert {finding.verdict for finding in check(database)} == {Verdict.FINE}
            sa.event.listen(database.engine, "checkout", lambda driver, *_: driver.execute("RESET search_path"))
            troubles = [finding for finding in check(database) if finding.about == "session"]
            assert 'search_path is "$user", public, not "last_bit"' in troubles[0].says


@pytest.mark.mariadb
def test_the_programs_take_the_schema_from_the_environment(database: Database, users_url: str) -> None:
    """The migration, the jobs and the service."""
    environment = {**os.environ, "LASTBIT_DATABASE_SCHEMA": NAME, "LASTBIT_DATABASE_URL": users_url}
    for arguments in (["api", "migrate"], ["jobs.janitor"], ["jobs.dispatcher", "--once"]):
        process = run_module(*arguments, environment=environment)
        assert process.returncode == 0, process.stderr
    with running_service(users_url, LASTBIT_DATABASE_SCHEMA=NAME) as service:
        answer = httpx.post(f"{service.url}/v1/batches", json={"items": 3})
    assert answer.status_code == 201
    with database.engine.connect() as connection:
        assert connection.scalar(sa.select(tables.batches.c["items"])) == 3


@pytest.mark.mariadb
def test_a_server_that_accepts_no_writes_is_named(server: Server, users_url: str) -> None:
    url = server.unprivileged(users_url) if isinstance(server, MariaDB) else users_url
    with server.read_only():
        line = refusal(url, "api", "migrate", schema_name=None)
    assert "accepts no writes (database " in line
    assert "set LASTBIT_DATABASE_URL to the primary" in line


def test_without_a_schema_names_are_not_qualified(database_url: str) -> None:
    with Database(database_url) as database:
        assert database.schema is None
        assert database.qualified("batches") == "batches"


@pytest.mark.parametrize(
    ("url", "name", "words"),
    [
        ("sqlite:///lastbit.db", "lastbit", "an SQLite file has no schemas"),
        ("postgresql://db/app", "", "has 1 to 63 bytes"),
        ("postgresql://db/app", "ü" * 32, "has 1 to 63 bytes"),
        ("postgresql://db/app", "a\0b", "has 1 to 63 bytes"),
        ("postgresql://db/app", "$user", "belongs to PostgreSQL"),
        ("postgresql://db/app", "pg_temp", "belongs to PostgreSQL"),
        ("postgresql://db/app", "information_schema", "belongs to PostgreSQL"),
        ("mysql://db/app", "", "has 1 to 64 characters"),
        ("mysql://db/app", "a" * 65, "has 1 to 64 characters"),
    ],
)
def test_an_unsuitable_name_is_refused(url: str, name: str, words: str) -> None:
    with pytest.raises(errors.Misconfigured, match=words):
        Database(url, schema=name)


@pytest.mark.parametrize(
    ("url", "name", "database_name"),
    [("postgresql://db/app", "ü" * 31 + "x", "app"), ("mysql://db/app", "ü" * 64, "ü" * 64)],
)
def test_the_longest_name_is_taken(url: str, name: str, database_name: str) -> None:
    """PostgreSQL counts bytes, MariaDB counts characters, and has a database in place of a schema."""
    with Database(url, schema=name) as database:
        assert database.schema == name
        assert database.url.database == database_name
