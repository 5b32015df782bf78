"""Migrations where others have tables or migrations of their own: they change nothing, or go on beside them."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from core import errors
from core.storage import schema, tables
from core.storage.database import Database
from tests.mutants import mutant


def execute(database: Database, *statements: str) -> None:
    with database.engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def names(database: Database) -> set[str]:
    """All tables and views where ours would be created."""
    with database.engine.connect() as connection:
        inspector = sa.inspect(connection)
        return {*inspector.get_table_names(), *inspector.get_view_names()}


@mutant("a-migration-adopts-what-it-finds", "core.storage.schema:_migrate", "_check_names(connection, before)", "")
@mutant(
    "a-table-with-some-of-our-columns-is-ours",
    "core.storage.namespaces:check_free",
    "_columns(tx, table) != following.get(table)",
    "not _columns(tx, table) <= following.get(table, frozenset())",
    only="mariadb",
)
@pytest.mark.parametrize("kind", ["TABLE", "VIEW"])
def test_nothing_is_migrated_where_others_have_one_of_our_names(database_url: str, kind: str) -> None:
    """Whichever it is. The message names it and says where else our tables may be."""
    with Database(database_url) as database:
        for name in [*tables.metadata.tables, *(["FEED"] if database.is_embedded else [])]:
            columns = "AS SELECT 1 AS id" if kind == "VIEW" else "(id BIGINT PRIMARY KEY, state VARCHAR(16))"
            execute(database, f"CREATE {kind} {name} {columns}")
            with pytest.raises(errors.Misconfigured) as refusal:
                schema.migrate(database)
            assert f"has a table {name.lower()!r} already, which isn't Lastbit's: name a" in str(refusal.value)
            assert names(database) == {name}
            execute(database, f"DROP {kind} {name}")
        schema.migrate(database)


@mutant(
    "a-table-is-ours-if-a-later-migration-makes-it",
    "core.storage.namespaces:check_free",
    "not dialect.done_already or _columns(tx, table) != following.get(table)",
    "not dialect.done_already or following.get(table, _columns(tx, table)) != _columns(tx, table)",
    only="mariadb",
)
def test_nothing_is_upgraded_where_others_have_a_name_that_becomes_ours(database_url: str) -> None:
    with Database(database_url) as database:
        schema.migrate(database, "0016")
        existing = names(database)
        for table in sorted(tables.metadata.tables.keys() - existing):
            execute(database, f"CREATE TABLE {table} (id BIGINT PRIMARY KEY)")
            with pytest.raises(errors.Misconfigured, match=f"has a table '{table}' already"):
                schema.migrate(database)
            execute(database, f"DROP TABLE {table}")
        assert names(database) == existing
        assert database.read(schema.current) == "0016"
        schema.migrate(database)
        database.read(schema.check)


@mutant(
    "the-version-of-another-project-is-ours",
    "core.storage.namespaces:version_table",
    'inspector.has_table("item_groups")',
    "True",
    ('{"batch_id", "group_no"} <= _columns(tx, "item_groups")', "True"),
)
@pytest.mark.parametrize("revision", ["0012", "5f3ab0c2d1e4"])
def test_a_project_beside_ours_has_its_own_migrations(database_url: str, revision: str) -> None:
    """They are Alembic's as well, and even its revisions may be called as ours are."""
    with Database(database_url) as database:
        execute(
            database,
            "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",
            f"INSERT INTO alembic_version VALUES ('{revision}')",
            "CREATE TABLE orders (id BIGINT PRIMARY KEY)",
        )
        with pytest.raises(errors.Misconfigured, match="has no schema, but"):
            database.read(schema.check)
        for _ in range(2):
            schema.migrate(database)
            database.read(schema.check)
            with database.engine.connect() as connection:
                assert connection.exec_driver_sql("SELECT * FROM alembic_version").all() == [(revision,)]
        execute(database, "DROP TABLE alembic_version")
        database.read(schema.check)


@mutant(
    "the-version-beside-a-table-of-our-name-is-ours",
    "core.storage.namespaces:version_table",
    '{"batch_id", "group_no"} <= _columns(tx, "item_groups")',
    "True",
)
def test_a_version_beside_a_table_with_our_most_particular_name_is_not_ours(database_url: str) -> None:
    with Database(database_url) as database:
        execute(
            database,
            "CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)",
            "INSERT INTO alembic_version VALUES ('0012')",
            "CREATE TABLE item_groups (id BIGINT PRIMARY KEY)",
        )
        with pytest.raises(errors.Misconfigured, match="has a table 'item_groups' already"):
            schema.migrate(database)
        assert names(database) == {"alembic_version", "item_groups"}


@mutant(
    "the-version-of-an-earlier-release-is-forgotten",
    "core.storage.namespaces:version_table",
    "EARLIER_VERSION if is_earlier else VERSION",
    "VERSION",
)
@pytest.mark.parametrize("revision", ["0016", "0020", "head", "9999"])
def test_a_database_of_an_earlier_release_keeps_its_version_table(database_url: str, revision: str) -> None:
    """Processes of that release look for it there. The last one is from a release after this."""
    with Database(database_url) as database:
        schema.migrate(database, "head" if revision == "9999" else revision)
        execute(database, "ALTER TABLE lastbit_version RENAME TO alembic_version")
        if revision == "9999":
            execute(database, "UPDATE alembic_version SET version_num = '9999'")
        schema.migrate(database)
        database.read(schema.check)
        expected = "9999" if revision == "9999" else schema.newest()
        assert database.read(schema.current) == expected
        assert "lastbit_version" not in names(database)
