"""The one rule behind a batch's watermark and a window's floor: the first position that is not resolved. Pure.

Of a batch the positions are the numbers of its items and the bits lie in groups; of a window they are its places, in
the order in which they were tracked. Both know a prefix that is resolved and bits beyond it. Bits are never cleared, so
what this gives never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Field(Protocol):
    """Resolved where it is not 0: a bitarray (a bit a position) or a bytearray (a byte a position)."""

    def find(self, value: int, start: int, /) -> int: ...


Piece = tuple[int, int, Field | None]
"""A piece of the whole: its first position, how many it has, and which of them are resolved; None: all."""


def first_unresolved(prefix: int, pieces: Iterable[Piece], end: int) -> int:
    """The smallest position from `prefix` to `end` that is not resolved; `end` where all are.

    Everything below `prefix` is resolved. `pieces` ascend; a position that no piece covers is not resolved. No piece is
    asked for beyond the one that answers.
    """
    position = prefix
    for start, length, field in pieces:
        if position < start or position >= end:
            break
        if field is not None:
            found = field.find(0, position - start)
            if 0 <= found < length:
                return min(start + found, end)
        position = max(position, start + length)
    return min(position, end)
