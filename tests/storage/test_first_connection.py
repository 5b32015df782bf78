"""An engine's first connection breaks while SQLAlchemy asks the server for its version and settings."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql.base import PGDialect

from core import errors
from core.storage.database import Database
from tests.support.galera import until
from tests.support.postgresql import PostgreSQL


def one(tx: sa.Connection) -> Any:
    return tx.exec_driver_sql("SELECT 1").scalar_one()


def test_a_first_connection_that_breaks_is_an_outage(
    postgresql: PostgreSQL, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends each session soon after its beginning, as a server that shuts down does."""
    ask = PGDialect._set_backslash_escapes
    lives = False

    def ask_after_its_end(own: PGDialect, connection: sa.Connection) -> None:
        driver: Any = connection.connection.dbapi_connection
        if not lives:
            end(postgresql, driver.info.backend_pid)
        ask(own, connection)

    monkeypatch.setattr(PGDialect, "_set_backslash_escapes", ask_after_its_end)
    with Database(postgresql_url) as database:
        with pytest.raises(errors.Unavailable):
            database.read(one)
        with pytest.raises(errors.Unavailable):
            database.write(one)
        lives = True
        assert database.read(one) == 1


def end(server: PostgreSQL, pid: int) -> None:
    with contextlib.closing(server.connect()) as connection:
        connection.execute(f"SELECT pg_terminate_backend({pid})".encode())
        session = f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}".encode()
        until(lambda: connection.execute(session).fetchone() is None, 20, lambda: "the session goes on")
