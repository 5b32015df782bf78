"""Entries: each belongs to one message, and is compared with the guard of its sub-counter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from core import errors
from core.tallies.model import (
    BY_RANGES,
    EMPTY,
    Applied,
    Counter,
    Effect,
    Entry,
    Position,
    Row,
    SourceId,
    Stored,
    check_sum,
)
from lastbit.names import NO_NAMES


@dataclass(frozen=True, slots=True)
class EntriesCall:
    """Entries for a tally, all or none."""

    entries: Sequence[Entry]
    places: Mapping[Counter, Sequence[int]]
    """The indexes of each sub-counter's entries, in their order."""

    @classmethod
    def of(cls, tally: str, entries: Sequence[Entry]) -> Self:
        """Raises `errors.InvalidRequest` for an invalid key or topic."""
        return cls(entries, by_counter(tally, entries))

    @property
    def counters(self) -> Iterable[Counter]:
        return self.places

    @property
    def sources(self) -> Iterable[SourceId]:
        return ()

    def effect(self, rows: Stored, after: Stored) -> Effect:
        """Add the entries above their guards. Raises `errors.InvalidRequest`, `OutOfOrder`, `SourceConflict`."""
        count = 0
        steps: dict[Counter, Row] = {}
        for counter, places in self.places.items():
            before = after.counters.get(counter) or rows.counters.get(counter, EMPTY)
            row, added = advance(before, places, self.entries)
            if added:
                count += added
                steps[counter] = row
        return Effect(Stored(steps, {}), Applied(count, len(self.entries) - count))

    def place_of(self, key: str) -> str:
        place = max(place for place, entry in enumerate(self.entries) if entry.key == key)
        return f"body.entries[{place}].delta"


def by_counter(tally: str, entries: Sequence[Entry]) -> dict[Counter, list[int]]:
    """The indexes of each sub-counter's entries. Raises `errors.InvalidRequest`."""
    counters: dict[Counter, list[int]] = {}
    place = 0
    try:
        for place, (key, _, topic, partition, generation, _, _) in enumerate(entries):
            counter = (tally, key, topic, partition, generation)
            places = counters.get(counter)
            if places is not None:
                places.append(place)
                continue
            if key in NO_NAMES:
                raise errors.InvalidRequest(f"body.entries[{place}].key", "expected a key other than . and ..")
            key.encode()
            topic.encode()
            counters[counter] = [place]
    except UnicodeEncodeError:
        raise errors.InvalidRequest(f"body.entries[{place}]", "expected Unicode text") from None
    return counters


def advance(before: Row, places: Sequence[int], entries: Sequence[Entry]) -> tuple[Row, int]:
    """Compare the entries with the guard one after the other. Return the new row, and the number of added entries."""
    start, value = before
    if start == BY_RANGES:
        key, _, topic, partition, generation, _, _ = entries[places[0]]
        raise errors.SourceConflict(f"body.entries[{places[0]}]", key, (topic, partition, generation), "ranges")
    guard = start
    deltas: dict[Position, int] = {}
    for place in places:
        key, delta, _, _, _, offset, child = entries[place]
        position = offset, child
        if position > guard:
            guard = position
            value += delta
            deltas[position] = delta
        elif position > start:
            # It is above the stored guard, so it is only valid if this call has already added it.
            if position not in deltas:
                raise errors.OutOfOrder(f"body.entries[{place}]", key, position, guard)
            if deltas[position] != delta:
                raise errors.InvalidRequest(
                    f"body.entries[{place}].delta",
                    f"expected {deltas[position]}, the delta of the same message and key earlier in this call: a "
                    "message has one entry per key",
                )
    check_sum(value, f"body.entries[{places[-1]}].delta", entries[places[-1]].key)
    return (guard, value), len(deltas)
