"""Which numbers are ids of batches. Of several Lastbits side by side, each gives the numbers that leave a remainder of
its own when they are divided by the same number, so an id tells whose batch it is, and none is given twice.

It is chosen when the database is new, and stays: ids that were given before would belong to the wrong one.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

from core import errors

MOST: Final = 1000
"""Lastbits side by side. A thousand leave each one 9·10^12 ids below 2^53. On MariaDB and MySQL, the distance of ids is
at most 65,535, and a cluster multiplies it by the number of its nodes."""
_TEXT: Final = re.compile(r"(0|[1-9][0-9]{0,3})/([1-9][0-9]{0,3})")


class Numbering(NamedTuple):
    """`3/16` as a text: the ids that leave 3 when they are divided by 16."""

    remainder: int
    divisor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `errors.Misconfigured`."""
        match = _TEXT.fullmatch(text)
        numbering = None if match is None else cls(int(match[1]), int(match[2]))
        if numbering is None or not 2 <= numbering.divisor <= MOST or numbering.remainder >= numbering.divisor:
            raise errors.Misconfigured(
                f"the ids {text!r} can't be used: expected K/N such as 3/16, with N from 2 to {MOST} and K from 0 to "
                "N - 1, for ids that leave K when they are divided by N"
            )
        return numbering

    @property
    def first(self) -> int:
        """The lowest id, above 0."""
        return self.remainder or self.divisor

    def __str__(self) -> str:
        return f"{self.remainder}/{self.divisor}"
