"""The batches that `lastbit list` shows. The filter `--failed` and the orders, which the service does not have, are
applied here, page by page, in bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Selection:
    """The batches to list. The service applies `params`, a `search.query`; this module applies `failed`."""

    params: list[tuple[str, str]]
    failed: bool

    def matches(self, batch: Batch) -> bool:
        return not self.failed or batch.failed > 0


class Reader:
    """Reads the batches of a selection. `count` is called with the number of batches read so far."""

    def __init__(self, driver: Driver, selection: Selection, count: Callable[[int], None]) -> None:
        self._driver = driver
        self._selection = selection
        self._count = count
        self._read = 0

    def newest(self, limit: int, cursor: str | None) -> tuple[list[Batch], str | None]:
        """At most `limit` batches, newest first, and the cursor of the rest; None if there are no more."""
        shown: list[Batch] = []
        has_more = False
        while True:
            missing = limit - len(shown)
            page, following = self._page(PAGE if self._selection.failed else missing, cursor)
            while len(places := self._places(page)) > missing:
                # The cursor must belong to the last batch shown, so read the page again up to that batch. Batches may
                # have been opened or deleted in the meantime.
                has_more = True
                page, following = self._page(places[missing - 1] + 1, cursor)
            self._seen(page)
            shown += [page[place] for place in places]
            if following is None or len(shown) == limit:
                break
            cursor = following
        if following is not None and not has_more and next(self._matching(following), None) is None:
            following = None
        return shown, following

    def ordered(self, limit: int, order: str, is_reversed: bool) -> tuple[list[Batch], bool]:
        """The first `limit` batches in this order, and whether there are more. Reads all batches of the selection, but
        keeps only these in memory."""
        key, is_descending = ORDERS[order]
        pick = heapq.nlargest if is_descending != is_reversed else heapq.nsmallest
        batches = pick(limit + 1, self._matching(None), key=key)
        return batches[:limit], len(batches) > limit

    def _matching(self, cursor: str | None) -> Iterator[Batch]:
        while True:
            page, cursor = self._page(PAGE, cursor)
            self._seen(page)
            yield from filter(self._selection.matches, page)
            if cursor is None:
                return

    def _places(self, page: list[Batch]) -> list[int]:
        return [place for place, batch in enumerate(page) if self._selection.matches(batch)]

    def _page(self, limit: int, cursor: str | None) -> tuple[list[Batch], str | None]:
        return self._driver.run(_calls.batch_page, self._selection.params, min(limit, PAGE), cursor)

    def _seen(self, page: list[Batch]) -> None:
        self._read += len(page)
        self._count(self._read)
