"""Exact tallies: apply entries, read totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from core import tallies
from core.commits.operation import shared_number
from core.consumer_groups import positions
from core.service.writes import WriteService
from core.storage.database import Database

SMALL: Final = 64
"""Up to this number of entries, a call's memory doesn't count."""
ENTRY_BYTES: Final = 400
"""Approximate bytes of an entry that waits."""
ENTRY_COST: Final = 2
"""The cost of an entry, in the unit of `lanes.FLUSH_COST`."""


def apply_of(tally: str, entries: Sequence[tallies.Entry], fence: positions.Fence | None = None) -> tallies.Apply:
    """The operation for `WriteService`. Calls of one tally are in one queue, so tallies take turns, and a tally whose
    rows stay locked is set aside."""
    count = len(entries)
    return tallies.Apply(
        batch=shared_number("tally", tally),
        size=ENTRY_BYTES * count if count > SMALL else 0,
        cost=1 + ENTRY_COST * count,
        tally=tally,
        entries=entries,
        fence=fence,
    )


class TallyService:
    def __init__(self, database: Database, write_service: WriteService) -> None:
        self._database = database
        self._writes = write_service

    def apply(
        self, tally: str, entries: Sequence[tallies.Entry], fence: positions.Fence | None = None
    ) -> tallies.Applied:
        """Apply all entries or none. With a `fence`, only if it holds. Raises `errors.InvalidRequest`, `OutOfOrder`,
        `StaleEpoch`, `ConsumerGroupNotFound`."""
        applied: tallies.Applied = self._writes.run(apply_of(tally, entries, fence))
        return applied

    def get(self, tally: str, key: str) -> tallies.Value:
        """The key's total: 0, from no source, where nothing was added."""
        return self._database.read(tallies.get, tally, key)

    def page(self, tally: str, prefix: str, after: str | None, limit: int) -> list[tallies.Value]:
        """The totals of the keys above `after` that begin with `prefix`."""
        return self._database.read(tallies.page, tally, prefix, after, limit)

    def delete(self, tally: str) -> None:
        """Delete the totals and the guards against duplicates: entries that are sent again count again."""
        self._database.write_in_chunks(tallies.remove_chunk, tally)
