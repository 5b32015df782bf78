"""Counts messages by ranges: adds up what they bring, and says from which position of its source to which.

What lies below the position that a source has reached was counted, by whomever. So if a range begins elsewhere, the
service's answer has the position; what it covers is left out, and the remaining messages are a range from there. The
messages themselves are kept until they are counted, so their sums can be computed again.

A position is the offset of a message, with its child if it has one. All messages that a republisher makes of one have
its offset, so a range may end between them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, NamedTuple

from lastbit import errors
from lastbit._arguments import whole
from lastbit._protocol import Flow, Service, in_path
from lastbit.chains import OFFSET_LIMIT, Source, SourceChain, TallyRange, range_source_of
from lastbit.tallies import calls

By = Literal["entry", "range"]
"""How messages are counted: each by itself, or added up."""
REMEMBERED: Final = 10_000
"""The number of a source's latest messages that are told apart from those that come too late."""
_POSITION: Final = re.compile(r"(0|[1-9][0-9]*)(?:/([1-9][0-9]*))?")

_Source = tuple[str, int, int]
"""Topic, partition, generation."""
_Position = tuple[int, int]
"""Offset and child."""


class Addition(NamedTuple):
    """What one message adds to one key."""

    source: _Source
    position: _Position
    key: str
    delta: int


def additions(deltas: Mapping[str, int], source: Source | SourceChain) -> list[Addition]:
    """What a message adds. Raises `InvalidArgument`."""
    topic, partition, offset, child, generation = range_source_of(source)
    whole("an offset", offset, 0, OFFSET_LIMIT)
    return [
        Addition((topic, partition, generation), (offset, child), in_path("a key", key), calls.delta_of(delta))
        for key, delta in deltas.items()
    ]


class Order:
    """The order in which the messages of each source were added. Those that come again are repeats; one that comes for
    the first time after a later one would be taken for a repeat, so it is refused."""

    def __init__(self) -> None:
        self._sources: dict[_Source, _Latest] = {}

    def check(self, additions: Iterable[Addition]) -> None:
        """Raises `InvalidArgument` for a message after a later one of its source."""
        for source, position in {(addition.source, addition.position) for addition in additions}:
            latest = self._sources.setdefault(source, _Latest(position))
            if not latest.add(position):
                raise errors.InvalidArgument(
                    f"offset {position[0]} of {source[0]!r}, partition {source[1]}, was added after a later one: by "
                    "ranges, messages are added in the order of their partition; use by='entry' in lanes"
                )


class _Latest:
    """The latest positions of one source. All before the lowest one may have been counted by others."""

    def __init__(self, position: _Position) -> None:
        self._lowest = self._highest = position
        self._known = {position}
        self._queue = deque([position])

    def add(self, position: _Position) -> bool:
        """Whether the position is a new one in order, or a repeat."""
        if position <= self._highest:
            return position < self._lowest or position in self._known
        self._highest = position
        self._known.add(position)
        self._queue.append(position)
        if len(self._queue) > REMEMBERED:
            self._known.remove(self._queue.popleft())
            self._lowest = self._queue[0]
        return True


class Counting:
    """Counts messages of any number of sources, and knows how far each was counted."""

    def __init__(self) -> None:
        self._reached: dict[_Source, _Position | None] = {}
        """Not there: unknown. None: nothing was counted."""

    def apply(self, service: Service, tally: str, waiting: Collection[Addition]) -> Flow[int]:
        """Count the messages that were not counted yet. The number of additions that were new as far as the answers
        tell. Raises `SourceRewound`."""
        count = 0
        while ranges := self._ranges(waiting):
            results = yield from calls.apply_ranges(service, tally, [span for span, _ in ranges.values()])
            for (source, (span, size)), result in zip(ranges.items(), results, strict=True):
                if result.status == "moved":
                    self._move(source, result.position)
                else:
                    self._reached[source] = _position_of(span.upto)
                    count += size if result.status == "applied" else 0
        return count

    def _ranges(self, waiting: Iterable[Addition]) -> dict[_Source, tuple[TallyRange, int]]:
        """What remains, as one range for each source, and the number of additions in it."""
        positions: dict[_Source, _Position] = {}
        deltas: dict[_Source, dict[tuple[_Position, str], int]] = {}
        for source, position, key, delta in waiting:
            position_before = self._reached.get(source)
            if position_before is None or position > position_before:
                positions[source] = max(position, positions.get(source, position))
                deltas.setdefault(source, {})[position, key] = delta  # a message may come twice
        ranges: dict[_Source, tuple[TallyRange, int]] = {}
        for source, upto in positions.items():
            totals: dict[str, int] = {}
            for (_, key), delta in deltas[source].items():
                totals[key] = totals.get(key, 0) + delta
            topic, partition, generation = source
            position_before = self._reached.get(source)
            after = None if position_before is None else _text_of(position_before)
            span = TallyRange(topic, partition, after, _text_of(upto), totals, generation)
            ranges[source] = span, len(deltas[source])
        return ranges

    def _move(self, source: _Source, text: str | None) -> None:
        position = None if text is None else _position_of(text)
        known_position = self._reached.get(source)
        if known_position is not None and (position is None or position < known_position):
            raise errors.SourceRewound(source[0], source[1], _text_of(known_position), text)
        self._reached[source] = position


def _text_of(position: _Position) -> str:
    offset, child = position
    return f"{offset}/{child}" if child else str(offset)


def _position_of(text: str) -> _Position:
    """Raises `InvalidArgument` for a position that no buffer has made."""
    match = _POSITION.fullmatch(text)
    if match is None:
        raise errors.InvalidArgument(
            f"a buffer compares offsets, and the source stands at {text!r}: use apply_ranges for its positions"
        )
    return int(match[1]), int(match[2] or 0)
