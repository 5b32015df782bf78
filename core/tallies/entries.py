"""Entries: each belongs to one message, and is compared with the guard of its sub-counter."""

from __future__ import annotations

from collections.abc import Sequence

from core import errors
from core.tallies.model import Counter, Entry, Position, Row
from lastbit.ids import INTEGER_LIMIT
from lastbit.names import NO_NAMES

Places = dict[Counter, list[int]]
"""The indexes of each sub-counter's entries in its call, in their order."""


def by_counter(tally: str, entries: Sequence[Entry]) -> Places | errors.CoreError:
    counters: Places = {}
    place = 0
    try:
        for place, (key, _, topic, partition, generation, _, _) in enumerate(entries):
            counter = (tally, key, topic, partition, generation)
            places = counters.get(counter)
            if places is not None:
                places.append(place)
                continue
            if key in NO_NAMES:
                return errors.InvalidRequest(f"body.entries[{place}].key", "expected a key other than . and ..")
            key.encode()
            topic.encode()
            counters[counter] = [place]
    except UnicodeEncodeError:
        return errors.InvalidRequest(f"body.entries[{place}]", "expected Unicode text")
    return counters


def advance(before: Row, places: Sequence[int], entries: Sequence[Entry]) -> tuple[Row, int]:
    """Compare the entries with the guard one after the other. Return the new row, and the number of added entries."""
    start, value = before
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
    if not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        raise errors.InvalidRequest(
            f"body.entries[{places[-1]}].delta",
            f"expected a sum within 2^53: this source's sum for {entries[places[-1]].key!r} would be {value}",
        )
    return (guard, value), len(deltas)
