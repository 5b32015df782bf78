"""Pages that are bounded in bytes too: a thousand rows are small, unless somebody put 64 KiB into each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

BYTES: Final = 8 * 2**20
"""Of users' own text on a page. One row is always taken."""

T = TypeVar("T")


def within(rows: Iterable[T], size: Callable[[T], int], limit: int, most: int | None = None) -> tuple[list[T], bool]:
    """The first rows, at most `limit` and about `most` bytes of them; whether it stopped there, so that there may be
    more."""
    most = BYTES if most is None else most
    found: list[T] = []
    taken = 0
    for row in rows:
        taken += size(row)
        if found and taken > most:
            return found, True
        found.append(row)
        if len(found) == limit:
            return found, True
    return found, False


def stepwise(
    read: Callable[[T | None, int], Sequence[T]], size: Callable[[T], int], *, first: int = 100, most: int | None = None
) -> Iterator[T]:
    """All rows of `read(last, count)`, which reads `count` rows after `last`: a few at first, and larger steps where
    they turn out to be small, as the drivers keep all rows of a statement in memory."""
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
