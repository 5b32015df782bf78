"""Is this database fit to keep promises? What an operator is told before the service is, and after.

Each rule looks at one thing and says what it found: fine, unsafe (it works until the day it doesn't: an answer could be
lost, or a reading be stale) or broken (the service can't work like this); and, where it isn't fine, what to do. Nothing
is changed, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core.storage import faults
from core.storage.checks import server, sqlite
from core.storage.checks.every import clock_ahead
from core.storage.checks.findings import Finding, Verdict, as_json
from core.storage.database import Database

__all__ = ["Finding", "Verdict", "as_json", "check", "clock_ahead"]


def check(database: Database, *, workers: int = 1) -> list[Finding]:
    """All findings, in the order in which they matter. `workers` is how many processes will serve."""
    if database.is_embedded:
        file = sqlite.path_of(database.url.database or "")
        if not file.exists():
            return [
                Finding(
                    "database",
                    Verdict.BROKEN,
                    f"there is no file {file}",
                    "start the service, which makes it, or name the right one with LASTBIT_DATABASE_URL",
                )
            ]
        return _run(database, lambda tx: sqlite.rules(tx, file))
    return _run(database, lambda tx: server.rules(tx, database, workers))


def _run(database: Database, rules: Callable[[Connection], Iterator[Finding]]) -> list[Finding]:
    try:
        with database.engine.connect() as tx:
            return list(rules(tx))
    except (DBAPIError, sa.exc.TimeoutError) as error:
        if faults.classify(error) is None:
            raise
        return [
            Finding(
                "database",
                Verdict.BROKEN,
                faults.outage(error),
                "is it running, is the URL right, may this machine and this account connect?",
            )
        ]
