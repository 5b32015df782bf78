"""Item ids: `batch:group:index`, three decimal integers. Converts between an id and the item's number.

All packages may import this module, and it imports none of them. An item's *number* is its 0-based position in the
batch. Its *group* is `number // group_size`, and its *index* `number % group_size`. A group is one bitfield in the
database, so an id identifies its row and bit.

Ids are strict: leading zeros, signs, blanks and non-ASCII digits are malformed. If `07:0:1` and `7:0:1` were the same
item, a set of ids would not be a set of items. Integers of 2^53 or more are malformed too, as JSON parsers that use
doubles would change them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, overload

DEFAULT_GROUP_SIZE: Final = 8192
MIN_GROUP_SIZE: Final = 64
MAX_GROUP_SIZE: Final = 32768
MAX_ITEMS: Final = 10**12
"""The maximum number of items in a batch."""
INTEGER_LIMIT: Final = 2**53
"""All integers in requests and responses are smaller than this."""

# The limited lengths protect int() from very long input. 16 digits may exceed 2^53, so the value is checked too.
_INTEGER = "(0|[1-9][0-9]{0,15})"
_ITEM_ID = re.compile(f"{_INTEGER}:{_INTEGER}:{_INTEGER}")
# Three integers of at most 15 digits, whose values need no check: a quick test for almost every id.
_SHORT_ID = re.compile("(?:0|[1-9][0-9]{0,14}):(?:0|[1-9][0-9]{0,14}):(?:0|[1-9][0-9]{0,14})")
# Possessive quantifiers, so that a long text is scanned only once. An id contains no \n.
_ONE = "(?>0|[1-9][0-9]{0,15}+)"
_ITEM_IDS = re.compile(f"(?>{_ONE}:{_ONE}:{_ONE}\n)*+{_ONE}:{_ONE}:{_ONE}")


class InvalidItemId(ValueError):
    """An item id is three decimal integers, `batch:group:index`, without signs, blanks or leading zeros."""

    def __init__(self, text: object) -> None:
        self.text = text
        literal = repr(text)
        if len(literal) > 80:
            literal = literal[:77] + "..."
        super().__init__(
            f"{literal} is not an item id: expected batch:group:index, three decimal integers below 2^53 without "
            "leading zeros, like 7:0:42"
        )


class ItemId(NamedTuple):
    """The parts of an item id. `str()` returns the id as text."""

    batch: int
    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which ids don't need

    def __str__(self) -> str:
        return f"{self.batch}:{self.group}:{self.index}"

    @classmethod
    def parse(cls, text: str) -> ItemId:
        """Parse an id. Raises `InvalidItemId`."""
        match = _ITEM_ID.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidItemId(text)
        batch, group, index = map(int, match.groups())
        if batch >= INTEGER_LIMIT or group >= INTEGER_LIMIT or index >= INTEGER_LIMIT:
            raise InvalidItemId(text)
        return cls(batch, group, index)

    @classmethod
    def check(cls, text: str) -> None:
        """Raises `InvalidItemId` where `parse` does, and is several times as fast."""
        if not isinstance(text, str) or _SHORT_ID.fullmatch(text) is None:
            cls.parse(text)

    @classmethod
    def parse_all(cls, texts: Sequence[str]) -> list[tuple[int, int, int]] | None:
        """Parse many ids, several times as fast as with `parse`. Returns None if any of them is malformed; use `parse`
        to find it."""
        text_lines = "\n".join(texts)
        if text_lines.count("\n") != len(texts) - 1 or not _ITEM_IDS.fullmatch(text_lines):
            return None
        numbers = list(map(int, text_lines.replace("\n", ":").split(":")))
        if max(numbers) >= INTEGER_LIMIT:
            return None
        return list(zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True))

    def number(self, group_size: int) -> int | None:
        """The item's position in its batch, or None if index ≥ group_size: such an id belongs to no item, and is never
        an alias of an item in the next group."""
        return self.group * group_size + self.index if self.index < group_size else None


def item_id(batch: int, number: int, group_size: int = DEFAULT_GROUP_SIZE) -> str:
    """The id of the item at `number` (0-based) in `batch`."""
    group, index = divmod(number, group_size)
    return f"{batch}:{group}:{index}"


def valid_group_size(group_size: int) -> bool:
    """Whether the group size is a multiple of 8 from 64 to 32768."""
    return MIN_GROUP_SIZE <= group_size <= MAX_GROUP_SIZE and group_size % 8 == 0


class ItemIds(Sequence[str]):
    """The ids of a run of numbers, as a lazy sequence: a billion ids take no memory.

    It behaves like a tuple of strings: `len`, indexing, slicing (a slice is lazy too), `in`, iteration, `==`.
    `in`, indexing and slicing take constant time.
    """

    __slots__ = ("batch", "group_size", "numbers")

    def __init__(self, batch: int, group_size: int, numbers: range) -> None:
        self.batch = batch
        self.group_size = group_size
        self.numbers = numbers
        """The items' numbers."""

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> ItemIds: ...
    def __getitem__(self, position: int | slice) -> str | ItemIds:
        if isinstance(position, slice):
            return ItemIds(self.batch, self.group_size, self.numbers[position])
        try:
            number = self.numbers[position]
        except IndexError:
            raise IndexError(f"position {position} is outside of {len(self)} item ids") from None
        return item_id(self.batch, number, self.group_size)

    def __iter__(self) -> Iterator[str]:
        batch, size = self.batch, self.group_size
        if self.numbers.step != 1:
            for number in self.numbers:
                yield f"{batch}:{number // size}:{number % size}"
            return
        number, stop = self.numbers.start, self.numbers.stop
        while number < stop:
            group, first = divmod(number, size)
            last = min(size, first + stop - number)
            prefix = f"{batch}:{group}:"
            for index in range(first, last):
                yield prefix + str(index)
            number += last - first

    def __reversed__(self) -> Iterator[str]:
        return iter(self[::-1])

    def __contains__(self, candidate: object) -> bool:
        return self._position(candidate) is not None

    def index(self, value: str, start: int = 0, stop: int | None = None) -> int:
        position = self._position(value)
        if position is None or position not in range(len(self))[slice(start, stop)]:
            raise ValueError(f"{value!r} is not among these item ids")
        return position

    def count(self, value: str) -> int:
        return int(value in self)

    def _position(self, candidate: object) -> int | None:
        try:
            item = ItemId.parse(candidate)  # type: ignore[arg-type]  # `in` accepts any object
        except InvalidItemId:
            return None
        number = item.number(self.group_size)
        if item.batch != self.batch or number is None or number not in self.numbers:
            return None
        return self.numbers.index(number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ItemIds):
            return NotImplemented
        if self.numbers != other.numbers:
            return False
        # Two empty runs are equal, even of different batches, like two empty tuples.
        return not self.numbers or (self.batch, self.group_size) == (other.batch, other.group_size)

    def __hash__(self) -> int:
        return hash((self.batch, self.group_size, self.numbers)) if self.numbers else hash(self.numbers)

    def __repr__(self) -> str:
        if len(self) <= 2:
            return f"<ItemIds {list(self)}>"
        return f"<ItemIds {self[0]} … {self[-1]}, {len(self):,} items>"
