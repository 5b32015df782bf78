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
class RangeResult:
    """The result of a range. `status`: "applied"; "repeated", since it was added before; or "moved": nothing of it was
    added, since its source stands at `position` (None: nothing of it was counted) and not at the range's `after`."""

    status: str
    position: str | None = None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        return cls(data["status"], data.get("position"))


@dataclass(frozen=True, slots=True)
class SubCounter:
    """The sum that one source has added to a key, up to and including the message at (offset, child); if it is counted
    by ranges, up to `position`."""

    topic: str
    partition: int
    generation: int
    offset: int | None
    child: int | None
    value: int
    position: str | None = None

    @classmethod
    def from_json(cls, data: Json) -> Self:
        place = data["topic"], data["partition"], data["generation"], data["offset"], data["child"]
        return cls(*place, data["value"], data.get("position"))


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
