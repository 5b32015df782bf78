"""What a message carries: the id of its item, and after a dead-letter exchange the history of its deaths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastbit.errors import InvalidArgument
from lastbit.integrations._workers import ITEM

if TYPE_CHECKING:
    from pika import BasicProperties


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish, with properties of pika. `routing_key` replaces that of the fan-out."""

    body: bytes | str
    properties: BasicProperties | None = None
    routing_key: str | None = None


Body = bytes | str | Outgoing


def outgoing(body: Body, item: str) -> Outgoing:
    """Raises `InvalidArgument` if it isn't a body."""
    if isinstance(body, Outgoing):
        return body
    if isinstance(body, bytes | str):
        return Outgoing(body)
    raise InvalidArgument(f"item {item}: a body is bytes, a text or an Outgoing, not {body!r:.200}")


def item_of(headers: Mapping[str, Any] | None) -> str | None:
    """The id in the header; None if the message has none."""
    value = (headers or {}).get(ITEM)
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def death_of(headers: Mapping[str, Any] | None) -> str:
    """The reason of a dead letter, from the header that the broker adds: its last death, and how often that
    happened."""
    deaths = (headers or {}).get("x-death")
    if not isinstance(deaths, Sequence) or not deaths or not isinstance(deaths[0], Mapping):
        return "dead-lettered"
    death = deaths[0]
    count = death.get("count", 1)
    times = "once" if count == 1 else f"{count} times"
    return f"dead-lettered by queue {death.get('queue')}: {death.get('reason')}, {times}"


class Tags:
    """The delivery tags of a channel, which ascend from 1 without gaps: one ack can settle all up to a tag."""

    def __init__(self) -> None:
        self._floor = 0  # all tags up to it are settled
        self._above: set[int] = set()  # settled tags above it

    def add(self, tag: int) -> None:
        """Record a tag that was settled by something else than an ack."""
        self._above.add(tag)
        self._advance()

    def acks(self, tags: Sequence[int]) -> Iterator[tuple[int, bool]]:
        """The acks that settle these tags: pairs of a tag and whether it stands for all tags up to it."""
        if not self._above and tags and self._are_next(tags):
            self._floor += len(tags)
            yield self._floor, True
            return
        self._above.update(tags)
        self._advance()
        # The ack names one of these tags: the broker closes the channel if the tag was settled before.
        last = max((tag for tag in tags if tag <= self._floor), default=None)
        if last is not None:
            yield last, True
        for tag in tags:
            if tag > self._floor:
                yield tag, False

    def _are_next(self, tags: Sequence[int]) -> bool:
        """Whether these are the tags above the floor without a gap, in any order. It is so for most calls, and costs
        less to find out than to take each tag alone."""
        count = len(set(tags))
        return count == len(tags) and max(tags) == self._floor + count

    def _advance(self) -> None:
        while self._floor + 1 in self._above:
            self._floor += 1
            self._above.remove(self._floor)
