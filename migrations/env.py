"""Alembic's entry. `core.storage.schema` passes the connection in; by hand, `alembic` takes LASTBIT_DATABASE_URL."""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from alembic.ddl.mysql import MySQLImpl
from sqlalchemy.exc import DBAPIError

from core import tables
from core.storage import faults
from core.storage.database import Database


class Resuming(MySQLImpl):
    """Data definition commits by itself on MariaDB and MySQL, statement by statement. So a migration that was killed,
    or could not wait for a table, begins again from its start, and finds there what it has made already."""

    __dialect__ = "mysql"

    def _exec(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super()._exec(*arguments, **named)
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
