"""Events that wait behind a parked event of their instance, if the process is strict.

An instance handles its events in the feed's order. If one of them is parked, or comes again from there, each later one
is parked too, without an error of its own. When the event in front is over, those that only wait behind it are appended
to the feed again, as a retry does. They come in order, and if one of them fails, the ones behind it wait again.

An instance's partition is locked until the commit, so nobody else parks or retries its events in between: their rows
need no locks of their own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from core import feed
from core.processes import inbox
from core.processes.inbox import Key, Status
from core.storage import dialects
from core.storage.statements import Pipeline, among, as_text

RELEASED: Final = 100
"""Maximum events that come again at once. The last of them releases the next ones."""

InstanceKey = tuple[str, str]
"""A process and an instance."""


@dataclass(slots=True)
class _Unsettled:
    """An event that is parked, or comes again. `waits`: it is parked only because of those in front of it."""

    position: int
    waits: bool


class Waiting:
    """The unsettled events of these instances, which the next round trip reads. They change in memory first; `write`
    stores which of them come again."""

    def __init__(self, pipeline: Pipeline, instances: Collection[InstanceKey]) -> None:
        self._pipeline = pipeline
        dialect = dialects.of(pipeline.tx)
        statuses = f"{dialect.literal(Status.PARKED)}, {dialect.literal(Status.RETRYING)}"
        self._rows = pipeline.query_keys(
            instances,
            lambda part: (
                "SELECT name, instance, event_id, position, status, error IS NULL FROM inbox "  # noqa: S608
                f"WHERE ({among(pipeline.tx, ('name', 'instance'), part)}) "
                f"AND status IN ({statuses})"
            ),
        )
        self._queues: dict[InstanceKey, dict[str, _Unsettled]] = {}
        """The unsettled events of each instance, by id."""
        self._released: list[Key] = []
        self._events: list[feed.NewEvent] = []

    def load(self) -> None:
        """Take what the round trip has read."""
        for process, instance, event, position, status, has_no_error in self._rows.rows():
            waits = bool(has_no_error) and as_text(status) == Status.PARKED
            queue = self._queues.setdefault((as_text(process) or "", as_text(instance) or ""), {})
            queue[as_text(event) or ""] = _Unsettled(position, waits)

    def is_behind(self, key: Key, position: int) -> bool:
        """Whether an earlier event of its instance is not settled."""
        queue = self._queues.get(key[:2], {})
        return any(event != key[2] and other.position < position for event, other in queue.items())

    def park(self, key: Key, position: int, *, waits: bool) -> None:
        self._queues.setdefault(key[:2], {})[key[2]] = _Unsettled(position, waits)

    def settle(self, key: Key) -> None:
        """The event was handled, or is late. Those that wait directly behind it come again."""
        queue = self._queues.get(key[:2])
        if not queue:
            return
        queue.pop(key[2], None)
        in_order = sorted(queue.items(), key=lambda entry: entry[1].position)
        for event, candidate in in_order[:RELEASED]:
            if not candidate.waits:
                break
            candidate.waits = False
            self._released.append((key[0], key[1], event))

    def has_events(self) -> bool:
        return bool(self._released)

    def write(self) -> None:
        """Store that the released events come again. Called after the inbox has stored those that were just parked."""
        if not self._released:
            return
        tx = self._pipeline.tx
        condition = among(tx, inbox.KEY, sorted(self._released))
        query = f"SELECT name, instance, event_id, event FROM inbox WHERE {condition}"  # noqa: S608
        rows = [[as_text(value) or "" for value in row] for row in self._pipeline.query(query).rows()]
        copies = {(process, instance, event): copy for process, instance, event, copy in rows}
        self._events = [inbox.retry_event(*key[:2], copies[key]) for key in self._released]
        status = dialects.of(tx).literal(Status.RETRYING)
        self._pipeline.later(f"UPDATE inbox SET status = {status} WHERE {condition}")  # noqa: S608

    def events(self) -> list[feed.NewEvent]:
        """The events that bring them again, in their order."""
        return self._events
