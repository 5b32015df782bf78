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


def check(batches: Collection[BatchHandle], count: int, handled: Collection[str]) -> None:
    """Every page has one item, in one of the batches, and was handled when the first of them was complete. `handled`:
    as noted by the handlers, read after the completion."""
    expected = pages(count)
    assert set(handled) == expected
    infos = [batch.refresh() for batch in batches]
    assert {info.state for info in infos} == {"complete"}
    assert sum(info.items for info in infos) == sum(info.acked for info in infos) == len(expected)
    assert all(batch.verify().ok for batch in batches)
