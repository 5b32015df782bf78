"""What the combiner needs to know of a call: its units, their outcomes, and its answer."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, TypeVar

Answer = TypeVar("Answer")

_numbers: Final = itertools.count(1)


class MergeableUnit(Protocol):
    """The part of a call that one queue holds. Units of one `batch` are applied in the order of their arrival."""

    @property
    def batch(self) -> int:
        """The batch whose rows it locks. A unit that locks no existing batch has a negative number of its own."""

    @property
    def size(self) -> int:
        """Approximate bytes in memory; 0 for a small unit."""

    @property
    def cost(self) -> int:
        """Approximate duration of its part of a flush, in the unit of `lanes.FLUSH_COST`."""

    @property
    def divisible(self) -> bool:
        """Whether `take` may be called: the unit needs more than half of a flush."""

    def groups(self) -> Set[int]:
        """The groups of the batch whose rows it locks."""

    def take(self, groups: int, cost: int) -> Any:
        """Remove and return a piece of at most this many groups and this cost."""

    def is_empty(self) -> bool:
        """Whether all of it was taken."""


class UnitOutcome(Protocol):
    """The outcome of one unit in a committed flush."""

    @property
    def error(self) -> Exception | None:
        """Why this unit alone had no effect."""

    @property
    def rest(self) -> Any:
        """The part of the unit for another transaction, as this one would have taken too long: a unit or None."""

    @property
    def paid(self) -> Future[None] | None:
        """Only if the unit ended a nested batch. Done when the parent's item is resolved, or left to the sweep."""


class Mergeable(Protocol[Answer]):
    """A call whose units may share transactions with those of others."""

    def measured(self) -> Sequence[Any]:
        """The call's units, on which `take` may be called."""

    def chunks(self) -> Sequence[Any]:
        """The call's units, in pieces that fit into a flush."""

    def new_answer(self) -> Answer:
        """An answer without outcomes."""

    def add(self, answer: Answer, outcome: Any) -> Answer:
        """The answer with the outcome of another unit, which had an effect."""


def new_number() -> int:
    """A `MergeableUnit.batch` for a call that locks no existing batch."""
    return -next(_numbers)


def shared_number(kind: str, name: str) -> int:
    """A `MergeableUnit.batch` for calls that lock the rows of one name, such as a tally. They are in one queue; if
    these rows stay locked, they are set aside together. Two names may have the same number."""
    return -(2**62) - zlib.crc32(f"{kind}:{name}".encode())


@dataclass(slots=True)
class Done:
    """The outcome of a call of a single unit: its value, or the reason why it had no effect."""

    value: Any = None
    error: Exception | None = None
    paid: Future[None] | None = None
    rest: None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """A call that is one unit, of one writing verb. Its answer is the value of its outcome."""

    batch: int = field(default_factory=new_number)
    """The batch that it changes; see `MergeableUnit.batch`."""
    size: int = 0
    cost: int = 1
    divisible: ClassVar[bool] = False

    @property
    def must_be_alone(self) -> bool:
        """Whether it needs a transaction of its own."""
        return False

    def groups(self) -> Set[int]:
        return frozenset()

    def take(self, groups: int, cost: int) -> Operation:
        raise AssertionError("it is not divisible")

    def is_empty(self) -> bool:
        return False

    def measured(self) -> list[Operation]:
        return [self]

    def chunks(self) -> list[Operation]:
        return [self]

    def new_answer(self) -> Any:
        return None

    def add(self, answer: Any, outcome: Done) -> Any:
        return outcome.value
