"""What the service answers of tallies, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from lastbit.models import Json


@dataclass(frozen=True, slots=True)
class TallyApplied:
    """Of a call's entries: how many were added, and how many had been added before."""

    applied: int
    repeated: int

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["applied"], data["repeated"])


@dataclass(frozen=True, slots=True)
class SubCounter:
    """What one source has brought to a key, up to and with the message at (offset, child)."""

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
    """A key, its total, and the sub-counters that it is the sum of: none where nothing was ever added."""

    key: str
    value: int
    sources: tuple[SubCounter, ...]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["key"], data["value"], tuple(map(SubCounter.from_json, data["sources"])))
