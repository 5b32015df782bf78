"""Alembic's entry point. `core.storage.schema` passes a connection; the command `alembic` uses LASTBIT_DATABASE_URL."""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from alembic.ddl.mysql import MySQLImpl
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core.storage import faults, namespaces, tables
from core.storage.database import Database


class Resuming(MySQLImpl):
    """On MariaDB and MySQL, each data definition statement commits implicitly. So a migration that was killed, or
    stopped waiting for a table, starts again from its beginning and skips objects that already exist."""

    __dialect__ = "mysql"

    def _exec(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super()._exec(*arguments, **keywords)
        except DBAPIError as error:
            if faults.is_done_already(error):
                return None
            raise


def _run(connection: Connection, version_table: str) -> None:
    context.configure(
        connection=connection,
        version_table=version_table,
        target_metadata=tables.metadata,
        compare_type=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


connection = context.config.attributes.get("connection")
if connection is not None:
    _run(connection, context.config.attributes["version_table"])
else:
    url = os.environ.get("LASTBIT_DATABASE_URL", "sqlite:///lastbit.db")
    schema = os.environ.get("LASTBIT_DATABASE_SCHEMA")
    with Database(url, schema=schema) as database, database.engine.connect() as own:
        _run(own, namespaces.version_table(own))
        own.commit()
