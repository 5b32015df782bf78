"""Databases with the current schema, copied from the first one that was migrated: a copy takes a hundredth of a second,
the migrations a fifth. `tests/storage/test_database.py` tests the migrations themselves, from every release."""

from __future__ import annotations

import contextlib
import sqlite3
from functools import cache
from pathlib import Path

import psycopg
import pymysql
from pymysql.constants import CLIENT

from core.storage import schema
from core.storage.database import Database
from tests.support.postgresql import dump_database
from tests.support.servers import sqlite_file

_mariadb: list[str] = []
"""The statements that create the tables and their first rows."""
_postgresql: list[str] = []


def migrate(database: Database) -> None:
    """Bring an empty database to the current schema."""
    if database.is_embedded:
        assert database.url.database is not None
        Path(database.url.database).write_bytes(_sqlite())
    elif database.url.get_backend_name() == "postgresql":
        _migrate_postgresql(database)
    elif _mariadb:
        connection = _connect(database, client_flag=CLIENT.MULTI_STATEMENTS)
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("; ".join(_mariadb))
            while cursor.nextset():
                pass
    else:
        schema.migrate(database)
        _mariadb.extend(dump(database))


def _migrate_postgresql(database: Database) -> None:
    if not _postgresql:
        schema.migrate(database)
        _postgresql.extend(dump(database))
        return
    url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as connection:
        # One simple query, which is one transaction.
        connection.execute("\n".join(_postgresql).encode())


@cache
def _sqlite() -> bytes:
    with sqlite_file() as url, Database(url) as database:
        schema.migrate(database)
        assert database.url.database is not None
        with contextlib.closing(sqlite3.connect(database.url.database)) as connection:
            return connection.serialize()


def _connect(database: Database, *, client_flag: int = 0) -> pymysql.Connection:
    url = database.url
    return pymysql.connect(
        host=url.host,
        port=url.port or 3306,
        user=url.username,
        database=url.database,
        autocommit=True,
        ssl_disabled=True,
        client_flag=client_flag,
    )


def dump(database: Database) -> list[str]:
    """The statements that turn an empty database on MariaDB or PostgreSQL into a copy of this one."""
    if database.url.get_backend_name() == "postgresql":
        url = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
        return dump_database(url).splitlines()
    statements = ["SET foreign_key_checks = 0"]
    with contextlib.closing(_connect(database)) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES")
        for (table,) in cursor.fetchall():
            cursor.execute(f"SHOW CREATE TABLE {table}")
            statements.append(cursor.fetchone()[1])
            cursor.execute(f"SELECT * FROM {table}")
            for row in cursor.fetchall():
                statements.append(cursor.mogrify(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row))
    return statements
