"""The database's clock, in the test's hand: it stands still, and goes where it is told to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from core.db import Database

START = datetime(2026, 5, 4, 8, 0, tzinfo=UTC)


class Clock:
    """Of all transactions of this `Database`, from now on. SQLite's clock is a function of ours; MariaDB's is a
    variable of the session."""

    def __init__(self, database: Database) -> None:
        self.now = START
        if database.is_sqlite:

            @sa.event.listens_for(database.engine, "connect")
            def replace(connection: Any, _: object) -> None:
                connection.create_function("lastbit_now", 0, lambda: self.now.strftime("%Y-%m-%d %H:%M:%S.%f"))

            database.engine.dispose()  # those that are connected have the real one
        else:

            @sa.event.listens_for(database.engine, "begin")
            def set_it(connection: sa.Connection) -> None:
                connection.exec_driver_sql(f"SET timestamp = {self.now.timestamp():.6f}")

    def go(self, seconds: float) -> None:
        """Forward, or back."""
        self.now += timedelta(seconds=seconds)
