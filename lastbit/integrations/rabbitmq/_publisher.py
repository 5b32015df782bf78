"""Publishes with confirms: a message counts as sent when the broker has confirmed it.

Things that could go wrong, and why they can't:

* The broker drops a message because no queue is bound to its routing key. Each is published as mandatory, so the broker
  returns it, and it counts as refused.
* The broker refuses a message, for example of a full queue (`x-overflow: reject-publish`). It answers with a nack, and
  the message counts as refused.
* The connection is lost. Messages without a confirmation count as refused and are published again; some may be in the
  queue twice then, and their items count once.

Confirmations of a whole chunk are awaited together, so a round trip costs a chunk once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from lastbit.integrations.rabbitmq._messages import Body, Outgoing, item_of, outgoing, with_item
from lastbit.streams.errors import SessionEnded
from lastbit.streams.sources.amqp import Channel
from lastbit.streams.sources.session import Done

if TYPE_CHECKING:
    from pika.connection import Parameters

log = logging.getLogger("lastbit.rabbitmq")

Pair = tuple[str, Body]


class Publisher(Channel[None]):
    """A channel in confirm mode."""

    def __init__(self, broker: str | Parameters, exchange: str) -> None:
        self._exchange = exchange
        self._published = 0
        self._unconfirmed: dict[int, str] = {}
        self._refused: set[str] = set()
        self._on_done: Done | None = None
        super().__init__(broker, f"RabbitMQ exchange {exchange or '(default)'}", "a fan-out to RabbitMQ")

    def publish(self, messages: Sequence[tuple[str, str, Outgoing]]) -> set[str]:
        """Publish triples of item id, routing key and message, and wait for the confirmations. Returns the items whose
        message was refused. Raises `SessionEnded`; then `unconfirmed` has the items without an answer too."""
        prepared = [(key, _body(message), with_item(message.properties, item)) for item, key, message in messages]
        self._refused.clear()
        # Before the session's thread is asked, which may have ended: then all of them are without a confirmation.
        first = self._published + 1
        self._unconfirmed = {first + place: item for place, (item, _, _) in enumerate(messages)}
        self._published += len(messages)
        if prepared:
            self._ask(partial(self._publish, prepared))
        return set(self._refused)

    @property
    def unconfirmed(self) -> set[str]:
        """After the end of the session: items whose message was refused, or has no confirmation."""
        return self._refused.union(self._unconfirmed.values())

    def _on_channel(self, channel: Any) -> None:
        channel.add_on_return_callback(self._on_returned)
        channel.confirm_delivery(self._on_confirmed, callback=lambda _: self._is_ready())

    def _publish(self, prepared: Sequence[tuple[str, bytes, Any]], on_done: Done) -> None:
        self._on_done = on_done
        for routing_key, body, properties in prepared:
            self._channel.basic_publish(self._exchange, routing_key, body, properties, mandatory=True)

    def _on_confirmed(self, frame: Any) -> None:
        answer = frame.method
        tag = answer.delivery_tag
        tags = list(takewhile(tag.__ge__, self._unconfirmed)) if answer.multiple else [tag]  # they ascend
        items = [self._unconfirmed.pop(number) for number in tags if number in self._unconfirmed]
        if answer.NAME == "Basic.Nack":
            self._refused.update(items)
            log.warning("RabbitMQ refused %d messages; they are published again", len(items))
        if not self._unconfirmed and self._on_done is not None:
            callback, self._on_done = self._on_done, None
            callback()

    def _on_returned(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """The broker returns a message before it confirms it."""
        if not self._refused:
            log.warning(
                "RabbitMQ returned a message for routing key %r of exchange %r (%s); returned messages are published "
                "again. Is a queue bound to this key?",
                method.routing_key,
                method.exchange,
                method.reply_text,
            )
        item = item_of(properties)
        assert item is not None
        self._refused.add(item)


class Sender:
    """Publishes chunks, and connects again after a lost connection. Use it as a context manager."""

    def __init__(self, broker: str | Parameters, exchange: str, routing_key: str) -> None:
        self._broker = broker
        self._exchange = exchange
        self._routing_key = routing_key
        # The first connection is not tried again: a wrong address should be reported at once.
        self._publisher: Publisher | None = Publisher(broker, exchange)

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Publish the messages. Returns those that must be published again."""
        from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

        messages = []
        for item, body in pairs:
            message = outgoing(body, item)
            messages.append((item, message.routing_key or self._routing_key, message))
        try:
            if self._publisher is None:
                self._publisher = Publisher(self._broker, self._exchange)
            refused = self._publisher.publish(messages)
        except AMQPConnectionError as error:
            log.warning("no connection to RabbitMQ; it is tried again: %r", error)
            return pairs
        except SessionEnded as ended:
            assert self._publisher is not None
            publisher, self._publisher = self._publisher, None
            publisher.close()
            if isinstance(ended.__cause__, ChannelClosedByBroker):  # no such exchange, or no permission
                raise ended.__cause__ from None
            log.warning("%s; messages without a confirmation are published again", ended)
            refused = publisher.unconfirmed
        return [pair for pair in pairs if pair[0] in refused]

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _body(message: Outgoing) -> bytes:
    return message.body.encode() if isinstance(message.body, str) else message.body
