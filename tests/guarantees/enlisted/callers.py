"""Callers of the verbs that run in a transaction of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from core.enlisted.transaction import Transaction
from core.storage.database import Database
from core.storage.dialects.dialect import note_writes

DRIVERS = {"sqlite": "sqlite", "mysql": "mysql+pymysql", "mariadb": "mysql+pymysql", "postgresql": "postgresql+psycopg"}


def engine_of(database: Database, **options: str) -> Engine:
    """An engine as a user makes it."""
    backend = database.url.get_backend_name()
    if backend in ("mysql", "mariadb"):
        options.setdefault("isolation_level", "READ COMMITTED")
    return sa.create_engine(database.url.set(drivername=DRIVERS[backend]), **options)


def over(connection: Connection) -> Transaction:
    """A transaction over a connection of SQLAlchemy's."""

    def execute(text: str) -> list[tuple[object, ...]]:
        note_writes(connection, [text])  # for commit marks, in sessions of ours that act as callers
        result = connection.exec_driver_sql(text, execution_options={"no_parameters": True})
        return [tuple(row) for row in result] if result.returns_rows else []

    is_mariadb = bool(getattr(connection.dialect, "is_mariadb", False))
    return Transaction(connection.dialect.name, lambda texts: [execute(text) for text in texts], is_mariadb=is_mariadb)


@contextmanager
def transaction(engine: Engine) -> Iterator[Transaction]:
    with engine.begin() as connection:
        yield over(connection)
