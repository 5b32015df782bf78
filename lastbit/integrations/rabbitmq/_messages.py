"""What a message carries: the id of its item, and after a dead-letter exchange the history of its deaths."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lastbit.errors import InvalidArgument
from lastbit.integrations import _messages
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


def identity(body: Body) -> Any:
    """What stands for a message in a rerun: body, routing key and headers, without the other properties, which may have
    ids and times."""
    if isinstance(body, Outgoing):
        return body.body, body.routing_key, body.properties and body.properties.headers
    return body


def item_of(properties: Any) -> str | None:
    """The id of a message's item: its header `lastbit-item`, or its `message_id` if it has no such header and that is
    an item's id. None if it belongs to no batch. `properties`: pika's, or a message of aio-pika."""
    value = properties.headers.get(ITEM) if properties.headers else None
    if value is None:
        return _messages.item_of(properties.message_id)
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def with_item(properties: Any, item: str) -> BasicProperties:
    """The properties with the item's id; without any, those of a persistent message. The header is for messages with a
    message_id of their own: with it, pika takes twice as long to decode the properties."""
    from pika import BasicProperties

    if properties is None:
        return BasicProperties(message_id=item, delivery_mode=2)
    if not isinstance(properties, BasicProperties):
        raise InvalidArgument(f"item {item}: properties are a pika.BasicProperties, not {properties!r:.200}")
    copied = copy.copy(properties)
    if properties.message_id is None and ITEM not in (properties.headers or {}):
        copied.message_id = item
    else:
        copied.headers = {**(properties.headers or {}), ITEM: item}
    return copied


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
