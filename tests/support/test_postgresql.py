"""The tests' PostgreSQL server itself: it starts again after each kind of end, with what was committed."""

from __future__ import annotations

import contextlib
import signal

import psycopg
import pytest

from tests.support.postgresql import PASSWORD_USER, PostgreSQL


def test_it_is_empty_and_sorts_by_language(postgresql: PostgreSQL, postgresql_url: str) -> None:
    with contextlib.closing(postgresql.connect(postgresql_url.rpartition("/")[2])) as connection:
        assert connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone() == (0,)
        assert connection.execute("SELECT 'a' < 'B', 'a' COLLATE \"C\" < 'B' COLLATE \"C\"").fetchone() == (
            postgresql.has_icu,
            False,
        )


def test_it_asks_one_user_for_a_password(postgresql: PostgreSQL) -> None:
    with contextlib.closing(postgresql.connect()) as connection:
        connection.execute(f"CREATE ROLE {PASSWORD_USER} LOGIN PASSWORD 'right'")
        try:
            for password in ("wrong", "right"):
                with (
                    pytest.raises(psycopg.OperationalError, match="password authentication failed")
                    if password == "wrong"
                    else contextlib.nullcontext()
                ):
                    psycopg.connect(
                        host="127.0.0.1", port=postgresql.port, user=PASSWORD_USER, password=password, dbname="postgres"
                    ).close()
        finally:
            connection.execute(f"DROP ROLE {PASSWORD_USER}")


def test_it_keeps_what_was_committed(mortal_postgresql: PostgreSQL) -> None:
    server = mortal_postgresql
    with contextlib.closing(server.connect()) as connection:
        connection.execute("CREATE TABLE ends (number integer)")
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        with contextlib.closing(server.connect()) as connection:
            connection.execute("INSERT INTO ends VALUES (%s)", (number,))
            server.stop(number)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        server.start()
    with contextlib.closing(server.connect()) as connection:
        assert connection.execute("SELECT count(*) FROM ends").fetchone() == (3,)
