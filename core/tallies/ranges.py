"""Ranges: what all messages between two positions of a source add up to. The source's own position is compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from core import errors
from core.tallies.model import BY_RANGES, Counter, Effect, Row, SourceId, Stored, check_sum
from lastbit.names import NO_NAMES

LONGEST_POSITION: Final = 128
"""Maximum bytes of a position."""


class Range(NamedTuple):
    """What the messages of a source after the position `after`, up to and including `upto`, add to each key."""

    topic: str
    partition: int
    generation: int
    after: str | None
    """None: the source's first message is the first one of the range."""
    upto: str
    totals: Mapping[str, int]


class Counted(NamedTuple):
    """The result of a range: `applied`; `repeated`, since it was applied before; or `moved`: it begins at another
    position than the one that its source has reached, which is `position`, and nothing of it was added."""

    status: str
    position: str | None = None


@dataclass(slots=True)
class _Chain:
    """The ranges of one source in a call. Each begins where the one before it ends."""

    places: list[int] = field(default_factory=list)
    """Their indexes in the call."""
    points: list[str | None] = field(default_factory=list)
    """The position before the first range, and those after each range."""


@dataclass(frozen=True, slots=True)
class RangesCall:
    """Ranges for a tally. Each is applied or not, whatever happens to those of other sources."""

    tally: str
    ranges: Sequence[Range]
    chains: Mapping[SourceId, _Chain]

    @classmethod
    def of(cls, tally: str, ranges: Sequence[Range]) -> Self:
        """Raises `errors.InvalidRequest` for an invalid key, topic or position."""
        chains: dict[SourceId, _Chain] = {}
        for place, span in enumerate(ranges):
            _check(f"body.ranges[{place}]", span)
            chain = chains.setdefault(_source_of(tally, span), _Chain(points=[span.after]))
            if span.after != chain.points[-1]:
                raise errors.InvalidRequest(
                    f"body.ranges[{place}].after",
                    f"expected {chain.points[-1]!r}, where the range of the same source before it ends",
                )
            if span.upto in chain.points:
                raise errors.InvalidRequest(
                    f"body.ranges[{place}].upto", "expected a position that the ranges before it don't have"
                )
            chain.places.append(place)
            chain.points.append(span.upto)
        return cls(tally, ranges, chains)

    @property
    def counters(self) -> Iterable[Counter]:
        return {
            (self.tally, key, span.topic, span.partition, span.generation)
            for span in self.ranges
            for key in span.totals
        }

    @property
    def sources(self) -> Iterable[SourceId]:
        return self.chains

    def effect(self, rows: Stored, after: Stored) -> Effect:
        """Add the ranges of each source from the position on that it has reached. Raises `errors.InvalidRequest`,
        `SourceConflict`."""
        steps: dict[Counter, Row] = {}
        positions: dict[SourceId, str] = {}
        results: dict[int, Counted] = {}
        for source, chain in self.chains.items():
            position = after.positions.get(source) or rows.positions.get(source)
            if position not in chain.points:
                results |= dict.fromkeys(chain.places, Counted("moved", position))
                continue
            count = chain.points.index(position)
            results |= dict.fromkeys(chain.places[:count], Counted("repeated"))
            for place in chain.places[count:]:
                self._add(place, steps, rows, after)
                positions[source] = self.ranges[place].upto
                results[place] = Counted("applied")
        return Effect(Stored(steps, positions), [results[place] for place in range(len(self.ranges))])

    def _add(self, place: int, steps: dict[Counter, Row], rows: Stored, after: Stored) -> None:
        """Add the sums of a range to `steps`."""
        span = self.ranges[place]
        for key, delta in span.totals.items():
            counter = self.tally, key, span.topic, span.partition, span.generation
            guard, value = (
                steps.get(counter) or after.counters.get(counter) or rows.counters.get(counter, (BY_RANGES, 0))
            )
            if guard != BY_RANGES:
                source = span.topic, span.partition, span.generation
                raise errors.SourceConflict(f"body.ranges[{place}]", key, source, "entries")
            value += delta
            check_sum(value, f"body.ranges[{place}].totals", key)
            steps[counter] = BY_RANGES, value

    def place_of(self, key: str) -> str:
        place = max(place for place, span in enumerate(self.ranges) if key in span.totals)
        return f"body.ranges[{place}].totals"


def _source_of(tally: str, span: Range) -> SourceId:
    return tally, span.topic, span.partition, span.generation


def _check(place: str, span: Range) -> None:
    """Raise `errors.InvalidRequest` unless the range can be stored."""
    for key in NO_NAMES:
        if key in span.totals:
            raise errors.InvalidRequest(f"{place}.totals", "expected keys other than . and ..")
    try:
        "".join(span.totals).encode()
        span.topic.encode()
        positions = [position.encode() for position in (span.after, span.upto) if position is not None]
    except UnicodeEncodeError:
        raise errors.InvalidRequest(place, "expected Unicode text") from None
    if not all(0 < len(position) <= LONGEST_POSITION for position in positions):
        raise errors.InvalidRequest(place, f"expected positions of 1 to {LONGEST_POSITION} bytes")
