"""Clocks that a test controls: the database's, which moves only when a test moves it; and the wall clock of whole
processes, which runs and can jump."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from core.storage.database import Database

START = datetime(2026, 5, 4, 8, 0, tzinfo=UTC)


class Clock:
    """The clock of all further transactions of this `Database`. On SQLite it is a user-defined function; on MariaDB it
    is a session variable, and on PostgreSQL functions that hide the server's."""

    def __init__(self, database: Database) -> None:
        self.now = START
        if database.is_embedded:

            @sa.event.listens_for(database.engine, "connect")
            def replace(connection: Any, _: object) -> None:
                connection.create_function("lastbit_now", 0, lambda: self.now.strftime("%Y-%m-%d %H:%M:%S.%f"))

            database.engine.dispose()  # existing connections have the real clock
        elif database.url.get_backend_name() == "postgresql":
            with database.engine.begin() as tx:
                tx.exec_driver_sql("CREATE SCHEMA clock")
                for name in ("statement_timestamp", "clock_timestamp"):
                    tx.exec_driver_sql(
                        f"CREATE FUNCTION clock.{name}() RETURNS timestamptz LANGUAGE sql STABLE "
                        "AS $$ SELECT current_setting('lastbit.now')::timestamptz $$"
                    )

            @sa.event.listens_for(database.engine, "begin")
            def shift(connection: sa.Connection) -> None:
                connection.exec_driver_sql("SET LOCAL search_path = clock, pg_catalog, public")
                connection.exec_driver_sql(f"SET LOCAL lastbit.now = '{self.now.isoformat()}'")

        else:

            @sa.event.listens_for(database.engine, "begin")
            def set_it(connection: sa.Connection) -> None:
                connection.exec_driver_sql(f"SET timestamp = {self.now.timestamp():.6f}")

    def go(self, seconds: float) -> None:
        """Move the clock forward, or back."""
        self.now += timedelta(seconds=seconds)


LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


class WallClock:
    """The wall clock of all processes that are started with its `environment`: libfaketime reads the offset from a
    file. Monotonic clocks are left alone, as they are when an operator sets a machine's time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self.jump(0)
        self.environment = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "PYTHONPATH": str(Path(__file__).parent / "faked"),
        }

    def jump(self, days: float) -> None:
        """Jump to this many days from the true time."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{days * 86_400:+.0f}")
        new.replace(self._file)
