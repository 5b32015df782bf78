"""Lastbit's tables beside the tables of a user: in a schema of PostgreSQL, or another database of MariaDB."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core import errors
from core.storage import schema, tables
from core.storage.database import Database
from tests.conftest import KINDS
from tests.mutants import mutant

NAME = 'Last "bit" of `ours`'
"""A name that has to be quoted."""
SERVERS = [kind for kind in KINDS if kind != "sqlite"]


@pytest.fixture(params=SERVERS)
def shared_url(request: pytest.FixtureRequest) -> str:
    """The URL of a user's database, on each kind of server."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def database(shared_url: str) -> Iterator[Database]:
    """An empty schema beside the tables of a user, which have all our names."""
    with Database(shared_url) as users, users.engine.begin() as connection:
        kind = "DATABASE" if users.url.get_backend_name() == "mysql" else "SCHEMA"
        connection.exec_driver_sql(f"CREATE {kind} {users.dialect.quoted(NAME)}")
        for table in tables.metadata.tables:
            connection.exec_driver_sql(f"CREATE TABLE {table} (mine VARCHAR(9))")
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES ('untouched')")
    try:
        with Database(shared_url, schema=NAME) as database:
            yield database
    finally:
        with Database(shared_url) as users, users.engine.begin() as connection:
            if kind == "DATABASE":
                connection.exec_driver_sql(f"DROP DATABASE {users.dialect.quoted(NAME)}")


@mutant(
    "the-search-path-has-the-users-schema-too",
    "core.storage.dialects.postgresql:PostgreSQL.engine",
    'f"; SET search_path = {self.quoted(schema)}"',
    'f"; SET search_path = public, {self.quoted(schema)}"',
    only="postgresql",
)
@mutant(
    "the-schema-is-the-urls-database",
    "core.storage.dialects.mariadb:MariaDB.located",
    "url.set(database=schema)",
    "url",
    only="mariadb",
)
def test_the_tables_of_a_user_stay_untouched(database: Database, shared_url: str) -> None:
    """Our own connections find only ours; on one of the user's, a qualified name finds them."""
    schema.migrate(database)
    database.read(schema.check)
    with Database(shared_url) as users, users.engine.connect() as connection:
        for table in tables.metadata.tables:
            (row,) = connection.exec_driver_sql(f"SELECT * FROM {table}").all()
            assert row == ("untouched",)
        (head,) = connection.exec_driver_sql(f"SELECT position FROM {database.qualified('feed_head')}").all()
    assert head == (0,)


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
    ("url", "name", "where"),
    [("postgresql://db/app", "ü" * 31 + "x", "app"), ("mysql://db/app", "ü" * 64, "ü" * 64)],
)
def test_the_longest_name_is_taken(url: str, name: str, where: str) -> None:
    """PostgreSQL counts bytes, MariaDB counts characters, and has a database in place of a schema."""
    with Database(url, schema=name) as database:
        assert database.schema == name
        assert database.url.database == where
