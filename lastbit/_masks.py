"""The encoding of item ids in requests: a list, or, for a run of numbers, one bitfield per group.

A billion ids as text are 20 GB. As bitfields they are 170 MB, made and sent in pieces. Everything here is lazy, and
each piece fits into one request.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from lastbit.errors import MalformedItem
from lastbit.ids import InvalidItemId, ItemId, ItemIds

MOST_ITEMS = 10_000
MOST_GROUPS = 4_096
MOST_BYTES = 8 * 2**20 - 64 * 2**10
"""Maximum bytes of bitfields in a request. The service accepts 8 MiB; the rest is room for the reason and the
punctuation."""

# With a larger step, a bitfield is longer than the list of ids: 64 bits are 11 characters of base64, an id about 15.
WIDEST_STEP = 64

Piece = dict[str, Any]


def pieces(ids: str | ItemId | Iterable[str | ItemId]) -> Iterator[Piece]:
    """Yields request bodies with `items` or `groups` for `ids`, each within the limits of one request.

    A collection is checked as a whole before this returns, and each id in it is sent once. An iterator is checked and
    deduplicated piece by piece, so it may be endless. Raises `MalformedItem`.
    """
    # Bytes and non-iterables are not ids, and get the error of a malformed id.
    if isinstance(ids, str | ItemId | bytes) or not isinstance(ids, Iterable):
        return iter([{"items": _checked([ids], 0)}])
    if isinstance(ids, ItemIds):
        if abs(ids.numbers.step) <= WIDEST_STEP:
            return _group_pieces(ids)
        return _item_pieces(iter(ids))
    if isinstance(ids, Collection):
        return _item_pieces(iter(list(dict.fromkeys(_checked(ids, 0)))))
    return _checked_pieces(iter(ids))


def checked(item: str | ItemId, position: int = 0) -> str:
    """The id as text. Raises `MalformedItem`."""
    text = str(item) if isinstance(item, ItemId) else item
    try:
        ItemId.check(text)
    except InvalidItemId as cause:
        raise MalformedItem(item, position) from cause
    return text


def _checked(ids: Iterable[str | ItemId], first: int) -> list[str]:
    return [checked(item, position) for position, item in enumerate(ids, first)]


def _item_pieces(ids: Iterator[str]) -> Iterator[Piece]:
    while piece := list(islice(ids, MOST_ITEMS)):
        yield {"items": piece}


def _checked_pieces(ids: Iterator[str | ItemId]) -> Iterator[Piece]:
    position = 0
    while piece := list(islice(ids, MOST_ITEMS)):
        yield {"items": list(dict.fromkeys(_checked(piece, position)))}
        position += len(piece)


def _group_pieces(ids: ItemIds) -> Iterator[Piece]:
    groups: list[Piece] = []
    size = 0
    for mask in masks(ids):
        length = len(mask["bits"]) + 80  # the longest batch and group number, names and punctuation
        if groups and (len(groups) == MOST_GROUPS or size + length > MOST_BYTES):
            yield {"groups": groups}
            groups, size = [], 0
        groups.append(mask)
        size += length
    if groups:
        yield {"groups": groups}


def masks(ids: ItemIds) -> Iterator[Piece]:
    """One `{batch, group, bits}` for each group that the run touches, in ascending order. `bits` is base64 of the
    bitfield up to its last set bit's byte, little-endian bit order."""
    numbers = ids.numbers if ids.numbers.step > 0 else ids.numbers[::-1]
    size = ids.group_size
    # A run of step 1 covers most groups fully, and these have the same mask.
    full = _encoded((1 << size) - 1)
    position = 0
    while position < len(numbers):
        group = numbers[position] // size
        # The number of elements below the group's end.
        end = min(len(numbers), -((numbers.start - (group + 1) * size) // numbers.step))
        part = numbers[position:end]
        if numbers.step == 1:
            low, high = part.start - group * size, part.stop - group * size
            bits = full if high - low == size else _encoded((1 << high) - (1 << low))
        else:
            bits = _encoded(sum(1 << (number - group * size) for number in part))
        yield {"batch": ids.batch, "group": group, "bits": bits}
        position = end


def _encoded(mask: int) -> str:
    return b64encode(mask.to_bytes((mask.bit_length() + 7) // 8, "little")).decode()
