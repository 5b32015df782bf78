"""Limits the bytes of a page: a thousand rows may have 64 KiB each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

BYTES: Final = 8 * 2**20
"""Maximum bytes of clients' text on a page. A page always has at least one row, even a larger one."""

T = TypeVar("T")


def within(rows: Iterable[T], size: Callable[[T], int], limit: int, most: int | None = None) -> tuple[list[T], bool]:
    """The first rows, at most `limit` of them and about `most` bytes; and whether a limit was reached, so that there
    may be more."""
    most = BYTES if most is None else most
    page: list[T] = []
    size_so_far = 0
    for row in rows:
        size_so_far += size(row)
        if page and size_so_far > most:
            return page, True
        page.append(row)
        if len(page) == limit:
            return page, True
    return page, False


def stepwise(
    read: Callable[[T | None, int], Sequence[T]], size: Callable[[T], int], *, first: int = 100, most: int | None = None
) -> Iterator[T]:
    """All rows of `read(last, count)`, which reads `count` rows after `last`. Reads a few at first, and then more at a
    time if the rows are small, as drivers keep all rows of a statement in memory."""
    most = BYTES if most is None else most
    last: T | None = None
    count = first
    while True:
        rows = read(last, count)
        yield from rows
        if len(rows) < count:
            return
        last = rows[-1]
        average = max(1, sum(map(size, rows)) // count)
        count = max(1, min(4 * count, most // average))
