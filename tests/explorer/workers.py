"""Processes that search, each on its own database server."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from core.storage import database
from tests import mutants
from tests.explorer.arena import Arena
from tests.explorer.combinations import Combination
from tests.explorer.databases import Explored, OnMariaDB, OnOceanBase, OnPostgreSQL, OnSQLite
from tests.explorer.search import Search
from tests.explorer.sessions import explored
from tests.support.oceanbase import running_oceanbase
from tests.support.postgresql import running_postgresql
from tests.support.servers import MariaDB, sqlite_file

SETTINGS = (
    "--innodb-flush-log-at-trx-commit=0",
    "--skip-innodb-doublewrite",
    "--innodb-buffer-pool-size=32M",
    "--innodb-stats-auto-recalc=0",
    "--eq-range-index-dive-limit=1",
)
"""Nothing here must survive a crash; the optimizer's statistics stay as they are set."""

POSTGRESQL_SETTINGS = (
    *("fsync=off", "synchronous_commit=off", "full_page_writes=off", "shared_buffers=32MB", "autovacuum=off"),
    # The tables are small, and seldom vacuumed or analyzed: indexes are used as in a large database.
    *("enable_seqscan=off", "jit=off", "deadlock_timeout=1ms"),
)


@contextmanager
def on_mariadb() -> Iterator[Explored]:
    server = MariaDB(options=SETTINGS)
    try:
        server.install()
        server.start()
        yield OnMariaDB(server)
    finally:
        server.remove()


@contextmanager
def on_postgresql() -> Iterator[Explored]:
    with running_postgresql(options=POSTGRESQL_SETTINGS) as server:
        yield OnPostgreSQL(server)


@contextmanager
def on_oceanbase() -> Iterator[Explored]:
    """It has no search for deadlocks: a lock wait ends one."""
    with running_oceanbase() as server, pytest.MonkeyPatch.context() as patches:
        patches.setattr(database, "LOCK_WAIT", 2)
        yield OnOceanBase(server)


@contextmanager
def on_sqlite() -> Iterator[Explored]:
    with sqlite_file() as url:
        yield OnSQLite(url)


DATABASES = {
    "mariadb": on_mariadb,
    "postgresql": on_postgresql,
    "oceanbase": on_oceanbase,
    "sqlite": on_sqlite,
}


_arena: Arena


def begin(database: str) -> None:
    """Start a worker process with its own server."""
    global _arena
    mutants.from_environment()
    resources = ExitStack()
    is_ready, must_end = False, False

    def end(*_: object) -> None:
        nonlocal must_end
        must_end = True
        if is_ready:
            resources.close()
            os._exit(1)

    # A pool ends by SIGTERM; by default that would leave the server running, also one that is starting.
    signal.signal(signal.SIGTERM, end)
    resources.enter_context(explored())
    _arena = Arena(resources.enter_context(DATABASES[database]()))
    multiprocessing.util.Finalize(None, resources.close, exitpriority=10)
    is_ready = True
    if must_end:
        end()


Task = tuple[Combination, int | None, bool]
"""A combination, the most preemptions of a schedule, and whether answers are lost."""


def name(task: Task) -> str:
    combination, preemptions, loses = task
    bound = f"{'any number of' if preemptions is None else preemptions} preemptions"
    return f"{combination}, {bound}{', lost answers' if loses else ''}"


def search(task: Task) -> tuple[str, dict[str, object]]:
    combination, preemptions, loses = task
    findings = Search(_arena, combination, preemptions, loses=loses).run()
    result = {
        "schedules": findings.schedules,
        "executed": findings.executed,
        "outcomes": findings.outcomes,
        "findings": list(map(str, findings.findings)),
    }
    return name(task), result
