"""Alembic's entry. `core.schema` passes the connection in; run by hand, `alembic` takes LASTBIT_DATABASE_URL."""

from __future__ import annotations

import os

from alembic import context

from core import tables
from core.db import Database


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
