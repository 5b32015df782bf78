"""A crawl whose end nobody knows in advance: handlers of pages find more pages, and add them to their batch."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator

from lastbit.batch import BatchHandle

LINKS = 3
"""The number of links of a page that has some: every fifth page, at random, but always the same ones."""


def links(page: str) -> list[str]:
    return [f"{page}.{number}" for number in range(LINKS)] if zlib.crc32(page.encode()) % 5 == 0 else []


def roots(count: int) -> Iterator[str]:
    return map(str, range(count))


def pages(count: int) -> set[str]:
    """All pages that can be reached from the roots."""
    found = set(roots(count))
    new = found
    while new:
        new = {link for page in new for link in links(page)}
        found |= new
    return found


def check(batch: BatchHandle, count: int, handled: Collection[str]) -> None:
    """Every page was handled when the batch was complete, and has one item. `handled`: as noted by the handlers, read
    after the completion."""
    expected = pages(count)
    info = batch.refresh()
    assert set(handled) == expected
    assert (info.items, info.acked, info.state) == (len(expected), len(expected), "complete")
    assert batch.verify().ok
