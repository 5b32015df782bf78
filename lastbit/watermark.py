"""The first unresolved position, for a batch's watermark and a window's floor.

For a batch, positions are item numbers, and the bits are stored in groups. For a window, positions are indexes in
tracking order. Both have a resolved prefix and bits after it. Bits are never cleared, so the result never goes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Field(Protocol):
    """Nonzero means resolved: a bitarray (one bit per position) or a bytearray (one byte per position)."""

    def find(self, value: int, start: int, /) -> int: ...


Piece = tuple[int, int, Field | None]
"""First position, number of positions, and a field that marks the resolved ones; None: all are resolved."""


def first_unresolved(prefix: int, pieces: Iterable[Piece], end: int) -> int:
    """The smallest unresolved position from `prefix` to `end`; `end` if all are resolved.

    All positions below `prefix` are resolved. `pieces` must ascend. A position that no piece covers is unresolved.
    Iteration stops at the piece that contains the result.
    """
    position = prefix
    for start, length, field in pieces:
        if position < start or position >= end:
            break
        if field is not None:
            index = field.find(0, position - start)
            if 0 <= index < length:
                return min(start + index, end)
        position = max(position, start + length)
    return min(position, end)
