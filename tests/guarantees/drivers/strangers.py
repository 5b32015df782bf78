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
    engine = sa.create_engine(database.url, isolation_level="READ COMMITTED")
    with contextlib.closing(engine.connect()) as stranger:
        if groups:
            rows = stranger.exec_driver_sql(f"SELECT batch_id FROM item_groups WHERE batch_id IN ({ids}) FOR UPDATE")
            assert len(rows.all()) >= len(batches)
        else:
            rows = stranger.exec_driver_sql(f"SELECT id FROM batches WHERE id IN ({ids}) FOR UPDATE")
            assert len(rows.all()) == len(batches)
        yield
        stranger.rollback()
    engine.dispose()


def lock_waits() -> float:
    """The number of this process's transactions whose wait for a lock timed out."""
    return REGISTRY.get_sample_value("lastbit_transaction_seconds_count", {"outcome": "lock_wait"}) or 0.0
