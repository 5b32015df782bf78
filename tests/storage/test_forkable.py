"""A database in a process that forks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from core.storage import schema
from core.storage.forkable import ForkableDatabase
from tests.mutants import mutant


@mutant(
    "a-transaction-begins-during-a-fork",
    "core.storage.forkable:ForkableDatabase._in_use",
    "self._changed.wait_for(lambda: not self._forks)",
    "None",
)
@mutant(
    "a-connection-to-a-file-is-open-during-a-fork",
    "core.storage.forkable:ForkableDatabase.pause",
    "self.engine.dispose()",
    "pass",
)
def test_nothing_is_open_and_nothing_begins_while_a_thread_forks(sqlite_url: str) -> None:
    """Two threads may fork at a time."""
    with ForkableDatabase(sqlite_url, connections=2) as database, ThreadPoolExecutor(1) as pool:
        schema.migrate(database)
        has_begun = threading.Event()
        assert database.pause()
        assert database.pause()
        assert database.engine.pool.checkedin() == 0  # type: ignore[attr-defined]
        reading = pool.submit(database.read, lambda tx: has_begun.set())
        database.resume()
        assert not has_begun.wait(0.3)
        database.resume()
        reading.result(30)
        assert has_begun.is_set()


def test_a_transaction_may_read_in_another_one_while_a_thread_forks(sqlite_url: str) -> None:
    """It has begun before, and the fork waits for it."""
    with ForkableDatabase(sqlite_url, connections=2) as database, ThreadPoolExecutor(1) as pool:
        schema.migrate(database)

        def read_again(_: object) -> str | None:
            forking.append(pool.submit(database.pause))
            while not database._forks:
                pass
            return database.read(schema.current)

        forking: list[object] = []
        assert database.read(read_again) == schema.newest()
        database.resume()
