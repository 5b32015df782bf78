"""Sessions outside the service that hold row locks on its database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pymysql
from prometheus_client import REGISTRY

from core.storage.database import Database


@contextlib.contextmanager
def locked(database: Database, *batches: int, groups: bool = False) -> Iterator[None]:
    """Hold locks on the rows of the batches, or on those of their groups, in another session."""
    url = database.url
    ids = ",".join(map(str, batches))
    with contextlib.closing(
        pymysql.connect(host=url.host, port=url.port, user=url.username, database=url.database)
    ) as stranger:
        with stranger.cursor() as cursor:
            if groups:
                cursor.execute(f"SELECT batch_id FROM item_groups WHERE batch_id IN ({ids}) FOR UPDATE")
                assert cursor.rowcount >= len(batches)
            else:
                cursor.execute(f"SELECT id FROM batches WHERE id IN ({ids}) FOR UPDATE")
                assert cursor.rowcount == len(batches)
        yield
        stranger.rollback()


def lock_waits() -> float:
    """The number of this process's transactions whose wait for a lock timed out."""
    return REGISTRY.get_sample_value("lastbit_transaction_seconds_count", {"outcome": "lock_wait"}) or 0.0
