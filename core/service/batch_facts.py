"""The facts of a batch that never change: its group size and its key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from core.batches.batch import Fixed, fixed
from core.storage.database import Database

MOST: Final = 50_000
"""Batches whose facts are cached. Ids are never used again, so an entry never becomes wrong."""


def _begins(fact: Fixed | None, prefix: str) -> bool:
    return fact is not None and fact.key is not None and fact.key.startswith(prefix)


class BatchFacts:
    """A cache of `Fixed`, by batch."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._facts: dict[int, Fixed] = {}

    def are_cached(self, batches: Iterable[int]) -> bool:
        """Whether `get` needs no database for these batches."""
        return all(batch in self._facts for batch in batches)

    def get(self, batches: Collection[int]) -> Mapping[int, Fixed]:
        """The facts of those batches that exist."""
        facts = {batch: self._facts[batch] for batch in batches if batch in self._facts}
        missing = set(batches) - facts.keys()
        if missing:
            rows = self._database.read(fixed, missing)
            if len(self._facts) > MOST:
                self._facts.clear()
            self._facts |= rows
            facts |= rows
        return facts

    def outside(self, batches: Collection[int], prefix: str) -> set[int]:
        """The batches that a caller limited to keys with `prefix` may not see: their key begins otherwise, they have
        none, or they don't exist."""
        facts = self.get(batches)
        return {batch for batch in batches if not _begins(facts.get(batch), prefix)}
