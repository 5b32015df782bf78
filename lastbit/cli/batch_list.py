"""The batches that `lastbit list` shows. The orders, which the service does not have, are applied here, in bounded
memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lastbit import _calls
from lastbit._drivers import Driver
from lastbit.models import Batch

PAGE = 1000

ORDERS: Mapping[str, tuple[Callable[[Batch], Any], bool]] = {
    "opened": (lambda batch: batch.id, True),
    "changed": (lambda batch: batch.updated_at, True),
    "items": (lambda batch: batch.items, True),
    "pending": (lambda batch: batch.pending, True),
    "failed": (lambda batch: batch.failed, True),
    "progress": (lambda batch: batch.resolved / batch.items if batch.items else 0.0, False),
    "key": (lambda batch: (batch.key is None, batch.key or ""), False),
}
"""By name of the order: the sort key, and whether the largest is first."""


class Reader:
    """Reads the batches of a selection. `params`: a `search.query`. `count` is called with the number of batches read
    so far."""

    def __init__(self, driver: Driver, params: list[tuple[str, str]], count: Callable[[int], None]) -> None:
        self._driver = driver
        self._params = params
        self._count = count
        self._read = 0

    def newest(self, limit: int, cursor: str | None) -> tuple[list[Batch], str | None]:
        """At most `limit` batches, newest first, and the cursor of the rest; None if there are no more."""
        shown: list[Batch] = []
        while True:
            page, cursor = self._page(limit - len(shown), cursor)
            self._seen(page)
            shown += page
            if cursor is None or len(shown) == limit:
                break
        # With some filters, a page may be empty and not the last.
        if cursor is not None and next(self._from(cursor), None) is None:
            cursor = None
        return shown, cursor

    def ordered(self, limit: int, order: str, is_reversed: bool) -> tuple[list[Batch], bool]:
        """The first `limit` batches in this order, and whether there are more. Reads all batches of the selection, but
        keeps only these in memory."""
        key, is_descending = ORDERS[order]
        pick = heapq.nlargest if is_descending != is_reversed else heapq.nsmallest
        batches = pick(limit + 1, self._from(None), key=key)
        return batches[:limit], len(batches) > limit

    def _from(self, cursor: str | None) -> Iterator[Batch]:
        while True:
            page, cursor = self._page(PAGE, cursor)
            self._seen(page)
            yield from page
            if cursor is None:
                return

    def _page(self, limit: int, cursor: str | None) -> tuple[list[Batch], str | None]:
        return self._driver.run(_calls.batch_page, self._params, min(limit, PAGE), cursor)

    def _seen(self, page: list[Batch]) -> None:
        self._read += len(page)
        self._count(self._read)
