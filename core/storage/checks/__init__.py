"""Checks of a database's settings, for operators. They may run before the service starts and while it runs.

Each rule checks one thing. Its verdict is fine, unsafe (acks could be lost, or reads be stale) or broken (the service
can't work). Unless the verdict is fine, the finding advises what to do. The last check writes a mebibyte, and deletes
it: a full disk shows only then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors
from core.probe import Probe
from core.storage import opening, promises, write_probes
from core.storage.checks import every, mariadb, postgresql, sqlite
from core.storage.checks.every import clock_ahead
from core.storage.checks.findings import Finding, Verdict, as_json
from core.storage.database import Database
from core.storage.refusals import INSTEAD

__all__ = ["Finding", "Verdict", "as_json", "check", "clock_ahead"]


PATIENCE: Final = 10.0
"""Seconds that a write may take."""

_OF_SESSIONS: Final = frozenset({"isolation", "session"})
"""The findings about the settings of our sessions."""
_RULES: Final = {"mysql": mariadb.rules, "mariadb": mariadb.rules, "postgresql": postgresql.rules}
"""The checks of servers."""


def check(database: Database, *, workers: int = 1) -> list[Finding]:
    """All findings, the most important ones first. `workers` is the number of server processes that will run."""
    if database.is_embedded:
        file = sqlite.path_of(database.url.database or "").absolute()
        if not file.exists():
            return [
                Finding(
                    "database",
                    Verdict.BROKEN,
                    f"there is no file {file}",
                    "start the service, which creates it, or set LASTBIT_DATABASE_URL to another file",
                )
            ]
        return _run(database, lambda tx: sqlite.rules(tx, file))
    rules = _RULES[database.url.get_backend_name()]
    return _run(database, lambda tx: rules(tx, database, workers))


def _run(database: Database, rules: Callable[[Connection], Iterator[Finding]]) -> list[Finding]:
    try:
        with database.engine.connect() as tx:
            findings = list(rules(tx))
        if every.MAY_WRITE not in findings:
            return findings
        committed = _committed(database)
        findings = [committed if finding == every.MAY_WRITE else finding for finding in findings]
        # Sessions that something changes don't show what the server does in ours.
        is_ours = not any(found.about in _OF_SESSIONS and found.verdict is not Verdict.FINE for found in findings)
        return findings if database.is_embedded or not is_ours else [*findings, _promises(database)]
    except DBAPIError as error:
        return [Finding("database", Verdict.BROKEN, *opening.explain(database, error))]
    except errors.Misconfigured as error:
        says, _, advice = str(error).rpartition(": ")
        return [Finding("server", Verdict.BROKEN, says, advice)]


def _committed(database: Database) -> Finding:
    """Write and commit, as far as the account may."""
    try:
        write = functools.partial(database.write, write_probes.large)
        Probe("check", write, patience=PATIENCE, silence="no write was committed").result()
    except errors.CoreError as error:
        return Finding(
            "writes",
            Verdict.BROKEN,
            f"the account may write, but a write fails: {error}",
            "see the runbook: no write gets through; often a disk of the database is full",
        )
    return Finding("writes", Verdict.FINE, "the account may write to each table, and a write was committed")


def _promises(database: Database) -> Finding:
    broken = promises.broken(database, thorough=True)
    if not broken:
        return Finding("promises", Verdict.FINE, "the server locks rows, and skips locked ones, as it must")
    return Finding("promises", Verdict.BROKEN, f"the server doesn't keep a promise: {'; '.join(broken)}", INSTEAD)
