"""The amounts that tallies add up, and what they are stored as."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from core import errors
from lastbit.ids import INTEGER_LIMIT

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
    """A sub-counter: the position up to which its source was counted, and its value. The position is (offset, child)
    if the source has entries, and a text if it has ranges."""

    topic: str
    partition: int
    generation: int
    offset: int | None
    child: int | None
    position: str | None
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
BY_RANGES: Final[Position] = (INTEGER_LIMIT, 0)
"""The guard of a sub-counter whose source has ranges. It is above each entry's position, so a release before 0027 takes
entries of such a source for repeats."""
SourceId = tuple[str, str, int, int]
"""Identifies a source: tally, topic, partition, generation."""


class Stored(NamedTuple):
    """Rows: of sub-counters, and of the sources that have ranges, with the position that each has reached."""

    counters: dict[Counter, Row]
    positions: dict[SourceId, str]


class Effect(NamedTuple):
    """What a call would change, and its result then."""

    changes: Stored
    result: Any


class Call(Protocol):
    """A call that adds to a tally."""

    @property
    def counters(self) -> Iterable[Counter]:
        """The sub-counters that it may change."""

    @property
    def sources(self) -> Iterable[SourceId]:
        """The sources whose positions it compares."""

    def effect(self, rows: Stored, after: Stored) -> Effect:
        """What it changes in `rows`, which calls before it may have changed to `after`. Raises `CoreError` if it is
        refused."""

    def place_of(self, key: str) -> str:
        """Where the call adds to the key: for a refusal."""


@dataclass(slots=True)
class Judged:
    """The calls' effects: the rows that they change, as they will be, and the outcome of each call."""

    outcomes: list[Any] = field(default_factory=list)
    """Results and `CoreError`s."""
    after: Stored = field(default_factory=lambda: Stored({}, {}))
    notable: set[Key] = field(default_factory=set)
    """Keys whose totals must be read; see the package."""
    moved: dict[Key, int] = field(default_factory=dict)
    """The sum of the amounts by which the calls changed a notable key, without their signs."""

    @property
    def refused(self) -> list[bool]:
        return [isinstance(outcome, errors.CoreError) for outcome in self.outcomes]


def check_sum(value: int, place: str, key: str) -> None:
    """Refuse what one source adds to a key if it is beyond the limit: `errors.InvalidRequest`."""
    if not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        raise errors.InvalidRequest(
            place, f"expected a sum within 2^53: this source's sum for {key!r} would be {value}"
        )
