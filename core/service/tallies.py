"""Exact tallies: apply entries and ranges, read totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from core import tallies
from core.commits.operation import new_number, shared_number
from core.consumer_groups import positions
from core.service.writes import WriteService
from core.storage.database import Database
from core.tallies import reads

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


def apply_ranges_of(
    tally: str, ranges: Sequence[tallies.Range], fence: positions.Fence | None = None
) -> tallies.ApplyRanges:
    """The operation for `WriteService`; see `apply_of`. Calls of one source are in one queue: two have no row in
    common."""
    count = sum([1 + len(span.totals) for span in ranges])
    sources = [f"{span.topic}:{span.partition}:{tally}" for span in ranges[:1]]
    return tallies.ApplyRanges(
        batch=shared_number("source", *sources) if sources else new_number(),
        size=ENTRY_BYTES * count if count > SMALL else 0,
        cost=1 + ENTRY_COST * count,
        tally=tally,
        ranges=ranges,
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

    def apply_ranges(
        self, tally: str, ranges: Sequence[tallies.Range], fence: positions.Fence | None = None
    ) -> list[tallies.Counted]:
        """Apply the ranges that begin at the positions of their sources. With a `fence`, only if it holds. Raises
        `errors.InvalidRequest`, `SourceConflict`, `StaleEpoch`, `ConsumerGroupNotFound`; then none was applied."""
        counted: list[tallies.Counted] = self._writes.run(apply_ranges_of(tally, ranges, fence))
        return counted

    def get(self, tally: str, key: str) -> tallies.Value:
        """The key's total: 0, from no source, where nothing was added."""
        return self._database.read(reads.get, tally, key)

    def page(self, tally: str, prefix: str, after: str | None, limit: int) -> list[tallies.Value]:
        """The totals of the keys above `after` that begin with `prefix`."""
        return self._database.read(reads.page, tally, prefix, after, limit)

    def delete(self, tally: str) -> None:
        """Delete the totals and the guards against duplicates: entries that are sent again count again."""
        self._database.write_in_chunks(reads.remove_chunk, tally)
