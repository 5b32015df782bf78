"""Limits the bytes of a page: a thousand rows may have 64 KiB each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

BYTES: Final = 2**20
"""Maximum bytes of clients' text on a page, as JSON in UTF-8. A page always has at least one row, even a larger
one. While a page is read, encoded and sent, the process holds several copies of it."""

T = TypeVar("T")


def size_as_json(text: str | None) -> int:
    """The bytes of a text as JSON in UTF-8. A control character has six."""
    return 0 if text is None else size_of_json(json.dumps(text, ensure_ascii=False))


def size_of_json(text: str | None) -> int:
    """The bytes of JSON in UTF-8."""
    if text is None:
        return 0
    return len(text) if text.isascii() else len(text.encode())


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
    read: Callable[[T | None, int], Sequence[T]],
    size: Callable[[T], int],
    limit: int,
    *,
    first: int = 100,
    most: int | None = None,
) -> Iterator[T]:
    """At most `limit` rows of `read(last, count)`, which reads `count` rows after `last`. Reads a few at first, and
    then more at a time if the rows are small, as drivers keep all rows of a statement in memory."""
    most = BYTES if most is None else most
    last: T | None = None
    left, count = limit, min(first, limit)
    while True:
        rows = read(last, count)
        yield from rows
        left -= len(rows)
        if len(rows) < count or not left:
            return
        last = rows[-1]
        average = max(1, sum(map(size, rows)) // count)
        count = max(1, min(4 * count, most // average, left))
