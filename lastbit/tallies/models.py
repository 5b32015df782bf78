"""The service's responses about tallies, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lastbit.models import Json


@dataclass(frozen=True, slots=True)
class TallyApplied:
    """The numbers of a call's entries that were added, and that had been added before."""

    applied: int
    repeated: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["applied"], data["repeated"])


@dataclass(frozen=True, slots=True)
class SubCounter:
    """The sum that one source has added to a key, up to and including the message at (offset, child)."""

    topic: str
    partition: int
    generation: int
    offset: int
    child: int
    value: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["topic"], data["partition"], data["generation"], data["offset"], data["child"], data["value"])


@dataclass(frozen=True, slots=True)
class TallyTotal:
    """A key of a tally and its total."""

    key: str
    value: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["key"], data["value"])


@dataclass(frozen=True, slots=True)
class TallyValue:
    """A key, its total, and the sub-counters that add up to it; none if nothing was ever added."""

    key: str
    value: int
    sources: tuple[SubCounter, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["key"], data["value"], tuple(map(SubCounter.from_json, data["sources"])))
