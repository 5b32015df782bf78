"""A session with RabbitMQ through pika: one connection with one channel, served by a thread.

Not pika's `BlockingConnection`: on closing, it rejects messages that were delivered and not read. A quorum queue puts
those behind all waiting ones, out of order, and counts a delivery for each. Here, unacked messages return with the
channel to their old places; see `Consumer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from lastbit.errors import InvalidArgument, MissingExtra
from lastbit.streams.sources.session import Done, Session

if TYPE_CHECKING:
    from pika.connection import Parameters

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    body: bytes
    headers: Mapping[str, Any]
    routing_key: str
    redelivered: bool
    """Whether the message was delivered before. Always False in streams."""
    properties: Any
    """pika's `BasicProperties`: content_type, message_id, timestamp and so on."""


class Channel(Session[T]):
    """`broker` is a URL or pika's parameters, `purpose` the feature that needs pika, for the error if that is
    missing. A subclass sets its own attributes before it calls this constructor, which returns once the subclass has
    called `_is_ready`, and raises the error of pika if the connection fails before that."""

    def __init__(self, broker: str | Parameters, name: str, purpose: str) -> None:
        try:
            import pika
            from pika.exceptions import AMQPConnectionError, AMQPError
        except ImportError as cause:
            raise MissingExtra("rabbitmq", purpose) from cause
        super().__init__(name)
        self._failures = AMQPError
        self._channel: Any = None
        self._ending = False
        self._cause: BaseException | None = None
        self._opening: Future[None] = Future()
        parameters = pika.URLParameters(broker) if isinstance(broker, str) else broker
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._on_channel_open),
            on_open_error_callback=self._on_closed,
            on_close_callback=self._on_closed,
        )
        self._thread.start()
        try:
            self._opening.result()
        except AMQPConnectionError as error:
            # pika's message is often empty.
            error.add_note(f"no connection to RabbitMQ at {parameters.host}:{parameters.port}: {error!r}")
            raise

    @abstractmethod
    def _on_channel(self, channel: Any) -> None:
        """Set up the open channel, then call `_is_ready`."""

    def _on_channel_open(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(lambda _, reason: self._lose(reason))
        self._on_channel(channel)

    def _is_ready(self) -> None:
        self._opening.set_result(None)

    def _lose(self, cause: BaseException) -> None:
        """Close the connection. Only the first cause is kept; later ones are consequences."""
        self._cause = self._cause or cause
        if self._connection.is_open:
            self._connection.close()

    def _on_closed(self, _: Any, cause: BaseException) -> None:
        self._cause = self._cause or cause
        self._connection.ioloop.stop()

    def _talk(self) -> None:
        try:
            self._connection.ioloop.start()
        finally:
            self._connection.ioloop.close()
            if not self._opening.done():
                self._opening.set_exception(self._cause or ConnectionAbortedError("no connection"))
        if self._cause is not None and not self._ending:
            raise self._cause

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._connection.ioloop.add_callback_threadsafe(work)

    def _end(self, on_done: Done) -> None:
        self._ending = True
        if self._connection.is_open:  # otherwise it is closing already
            # Closing waits for the broker's reply, so the acks sent before have taken effect.
            self._connection.close()


class Consumer(Channel[tuple[int, Message]]):
    """A consumer of a queue that prefetches up to `prefetch` unacked messages."""

    def __init__(
        self,
        broker: str | Parameters,
        queue: str,
        prefetch: int,
        arguments: Mapping[str, Any] | None = None,
        purpose: str = "a source on RabbitMQ",
    ) -> None:
        if not 1 <= prefetch <= 65_535:
            raise InvalidArgument(f"prefetch is 1 to 65,535, not {prefetch!r}")
        self._queue, self._prefetch, self._arguments = queue, prefetch, dict(arguments or {})
        super().__init__(broker, f"RabbitMQ queue {queue}", purpose)

    def _on_channel(self, channel: Any) -> None:
        def consume(_: Any) -> None:
            channel.basic_consume(
                self._queue, self._on_message, arguments=self._arguments, callback=lambda _: self._is_ready()
            )

        channel.add_on_cancel_callback(
            lambda _: self._lose(ConnectionAbortedError("the broker cancelled the consumer; was the queue deleted?"))
        )
        channel.basic_qos(prefetch_count=self._prefetch, callback=consume)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        message = Message(body, properties.headers or {}, method.routing_key, method.redelivered, properties)
        self._inbox.put((method.delivery_tag, message))

    def _end(self, on_done: Done) -> None:
        # pika would first cancel the consumer and reject messages that still arrive for it. It rejects none for an
        # unknown consumer: then all messages return with the channel to their old places.
        if self._connection.is_open:
            self._channel._consumers.clear()
        super()._end(on_done)
