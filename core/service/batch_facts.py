"""The facts of a batch that never change: its group size and its key."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from core.batches.batch import Fixed, fixed
from core.storage.database import Database

MOST: Final = 50_000
"""Batches whose facts are cached."""


def _begins(fact: Fixed | None, prefix: str) -> bool:
    return fact is not None and fact.key is not None and fact.key.startswith(prefix)


class BatchFacts:
    """A cache of `Fixed`, by batch. Thread-safe.

    A database never issues an id again, so no entry becomes wrong, unless the database is replaced by an older state of
    it (see `continuity`). Then the cache is replaced by an empty one, so facts that were being read are not kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._facts: dict[int, Fixed] = {}
        self._lock = threading.Lock()
        database.on_doubt(self._clear)

    def _clear(self) -> None:
        with self._lock:
            self._facts = {}

    def are_cached(self, batches: Iterable[int]) -> bool:
        """Whether `get` needs no database for these batches."""
        cache = self._facts
        return all(batch in cache for batch in batches)

    def get(self, batches: Collection[int]) -> Mapping[int, Fixed]:
        """The facts of those batches that exist."""
        cache = self._facts
        facts = {batch: cache[batch] for batch in batches if batch in cache}
        missing = set(batches) - facts.keys()
        if missing:
            rows = self._database.read(fixed, missing)
            facts |= rows
            with self._lock:
                if len(cache) <= MOST:
                    cache |= rows
                elif self._facts is cache:
                    self._facts = rows
        return facts

    def outside(self, batches: Collection[int], prefix: str) -> set[int]:
        """The batches that a caller limited to keys with `prefix` may not see: their key begins otherwise, they have
        none, or they don't exist."""
        facts = self.get(batches)
        return {batch for batch in batches if not _begins(facts.get(batch), prefix)}
