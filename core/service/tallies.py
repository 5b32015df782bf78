"""Exact tallies: apply entries, read totals."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.engine import Connection

from core import tallies
from core.consumer_groups import positions
from core.storage.database import Database


class TallyService:
    def __init__(self, database: Database) -> None:
        self._database = database

    def apply(
        self, tally: str, entries: Sequence[tallies.Entry], fence: positions.Fence | None = None
    ) -> tallies.Applied:
        """Apply all entries or none. With a `fence`, only if it holds. Raises `errors.InvalidRequest`, `OutOfOrder`,
        `StaleEpoch`, `ConsumerGroupNotFound`."""

        def write(tx: Connection) -> tallies.Applied:
            if fence is not None:
                positions.fence(tx, fence.group, fence.partition, fence.worker, fence.epoch)
            return tallies.apply(tx, tally, entries)

        return self._database.write(write, repeatable=True)

    def get(self, tally: str, key: str) -> tallies.Value:
        """The key's total: 0, from no source, where nothing was added."""
        return self._database.read(tallies.get, tally, key)

    def page(self, tally: str, prefix: str, after: str | None, limit: int) -> list[tallies.Value]:
        """The totals of the keys above `after` that begin with `prefix`."""
        return self._database.read(tallies.page, tally, prefix, after, limit)

    def delete(self, tally: str) -> None:
        """Delete the totals and the guards against duplicates: entries that are sent again count again."""
        self._database.write_in_chunks(tallies.remove_chunk, tally)
