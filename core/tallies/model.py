"""The amounts that tallies add up, and what they are stored as."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from core import errors

LONGEST: Final = 255
"""Maximum characters of a key or a topic."""


class Entry(NamedTuple):
    """The amount that one message adds to one key."""

    key: str
    delta: int
    topic: str
    partition: int
    generation: int
    offset: int
    child: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The number of entries that were added, and of repeats."""

    applied: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Source:
    """A sub-counter: the last position of its source, and its value."""

    topic: str
    partition: int
    generation: int
    offset: int
    child: int
    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A key and its total, and for a single key also its sub-counters."""

    key: str
    value: int
    sources: tuple[Source, ...] = ()


# Plain tuples, as a call makes thousands of them. Texts sort like their bytes in the database.
Counter = tuple[str, str, str, int, int]
"""Identifies a sub-counter: tally, key, topic, partition, generation."""
Key = tuple[str, str]
"""Identifies a total: tally, key."""
Position = tuple[int, int]
"""Offset and child."""
Row = tuple[Position, int]
"""The guard, and the value."""
EMPTY: Final[Row] = ((-1, 0), 0)
Outcome: TypeAlias = Applied | errors.CoreError


@dataclass(slots=True)
class Judged:
    """The calls' effects: the rows that they change, as they will be, and the outcome of each call."""

    outcomes: list[Outcome] = field(default_factory=list)
    after: dict[Counter, Row] = field(default_factory=dict)
    notable: set[Key] = field(default_factory=set)
    """Keys whose totals must be read; see the module."""
    moved: dict[Key, int] = field(default_factory=dict)
    """The sum of the amounts by which the calls changed a notable key, without their signs."""

    @property
    def refused(self) -> list[bool]:
        return [isinstance(outcome, errors.CoreError) for outcome in self.outcomes]
