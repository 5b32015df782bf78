"""Alembic's entry point. `core.storage.schema` passes a connection; the command `alembic` uses LASTBIT_DATABASE_URL."""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from alembic.ddl.mysql import MySQLImpl
from sqlalchemy.exc import DBAPIError

from core.storage import faults, tables
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


def _run(connection: object) -> None:
    context.configure(
        connection=connection,  # type: ignore[arg-type]
        target_metadata=tables.metadata,
        compare_type=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


connection = context.config.attributes.get("connection")
if connection is not None:
    _run(connection)
else:
    url = os.environ.get("LASTBIT_DATABASE_URL", "sqlite:///lastbit.db")
    with Database(url) as database, database.engine.connect() as own:
        _run(own)
        own.commit()
