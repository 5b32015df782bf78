"""Sessions outside the service that hold row locks on its database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from prometheus_client import REGISTRY

from core.storage.database import Database


@contextlib.contextmanager
def locked(database: Database, *batches: int, groups: bool = False) -> Iterator[None]:
    """Hold locks on the rows of the batches, or on those of their groups, in another session."""
    ids = ",".join(map(str, batches))
    if groups:
        with _held(database, f"SELECT batch_id FROM item_groups WHERE batch_id IN ({ids}) FOR UPDATE") as rows:
            assert rows >= len(batches)
            yield
    else:
        with _held(database, f"SELECT id FROM batches WHERE id IN ({ids}) FOR UPDATE") as rows:
            assert rows == len(batches)
            yield


@contextlib.contextmanager
def head_locked(database: Database) -> Iterator[None]:
    """Hold the lock on the feed's head, as a transaction does that appends and does not commit."""
    with _held(database, "SELECT position FROM feed_head FOR UPDATE") as rows:
        assert rows == 1
        yield


@contextlib.contextmanager
def _held(database: Database, query: str) -> Iterator[int]:
    """Hold the locks of the query. Yields the number of its rows."""
    engine = sa.create_engine(database.url, isolation_level="READ COMMITTED")
    with contextlib.closing(engine.connect()) as stranger:
        yield len(stranger.exec_driver_sql(query).all())
        stranger.rollback()
    engine.dispose()


def lock_waits() -> float:
    """The number of this process's transactions whose wait for a lock timed out, except for the feed's head."""
    return _transactions("count", "lock_wait")


def head_waits() -> tuple[float, float]:
    """The number of this process's transactions whose wait for the feed's head timed out, and their seconds."""
    return _transactions("count", "head_wait"), _transactions("sum", "head_wait")


def _transactions(measure: str, outcome: str) -> float:
    return REGISTRY.get_sample_value(f"lastbit_transaction_seconds_{measure}", {"outcome": outcome}) or 0.0
