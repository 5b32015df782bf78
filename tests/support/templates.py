"""Databases with the current schema, copied from the first one that was migrated: a copy takes a hundredth of a second,
the migrations a fifth. `tests/storage/test_database.py` tests the migrations themselves, from every release."""

from __future__ import annotations

import contextlib
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any, Final

import psycopg
import pymysql
from pymysql.constants import CLIENT

from core.storage import schema
from core.storage.database import Database
from tests.support.postgresql import dump_database
from tests.support.servers import sqlite_file

OF_INDEXES: Final = " BLOCK_SIZE 16384 LOCAL"
"""What OceanBase adds to an index, but not always to one of a copied database."""
TEMPLATE: Final = "lastbit_template"
_mariadb: list[str] = []
"""The statements that create the tables and their first rows."""
_postgresql: list[str] = []
_oceanbase: set[int] = set()
"""The ports of servers that have a migrated database of the name `TEMPLATE`."""


def migrate(database: Database) -> None:
    """Bring an empty database to the current schema."""
    if database.is_embedded:
        assert database.url.database is not None
        Path(database.url.database).write_bytes(_sqlite())
    elif database.url.get_backend_name() == "postgresql":
        _migrate_postgresql(database)
    else:
        _migrate_mysql(database)


def _migrate_mysql(database: Database) -> None:
    connection = _connect(database, client_flag=CLIENT.MULTI_STATEMENTS)
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute("SELECT VERSION()")
        ((version,),) = cursor.fetchall()
        if "OceanBase" in version:
            _fork(database, cursor)
        elif _mariadb:
            cursor.execute("; ".join(_mariadb))
            while cursor.nextset():
                pass
        else:
            schema.migrate(database)
            _mariadb.extend(dump(database))


def _fork(database: Database, cursor: pymysql.cursors.Cursor) -> None:
    """To create the tables takes OceanBase seconds; seekdb copies a whole database in less."""
    port = database.url.port
    assert port is not None
    if port not in _oceanbase:
        cursor.execute(f"CREATE DATABASE {TEMPLATE}")
        with Database(database.url.set(database=TEMPLATE)) as template:
            schema.migrate(template)
        _oceanbase.add(port)
    cursor.execute(f"DROP DATABASE {database.url.database}")
    cursor.execute(f"FORK DATABASE {TEMPLATE} TO {database.url.database}")


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
            statements.append(cursor.fetchone()[1].replace(OF_INDEXES, ""))
            cursor.execute(f"SELECT * FROM {table}")
            for row in cursor.fetchall():
                statements.append(cursor.mogrify(f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(row))})", row))
    return statements


def reflect_indexes(database: Database) -> None:
    """Let SQLAlchemy, which skips an index that it can't parse, see those of OceanBase."""
    dialect: Any = database.engine.dialect
    if dialect.name == "mysql":
        show = dialect._show_create_table
        dialect._show_create_table = lambda *arguments, **options: show(*arguments, **options).replace(OF_INDEXES, "")
