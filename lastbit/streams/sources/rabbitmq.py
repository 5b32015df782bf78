"""RabbitMQ queues (classic and quorum) and streams. Needs pika: `pip install 'lastbit[rabbitmq]'`.

A queue forgets acked messages. Its offsets are delivery tags, which count the deliveries of one channel, so they are
invalid on the next channel. Messages that were not acked are delivered again from their old place in the queue, so the
order of a key holds across sessions as long as there is one consumer at a time.

A stream is a log: it keeps records according to its retention, its offsets are those of the log, and the reader must
store its own position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lastbit.errors import InvalidArgument, MissingExtra
from lastbit.streams.errors import SessionEnded
from lastbit.streams.sources.session import Done, Session
from lastbit.streams.sources.unsettled import Unsettled
from lastbit.streams.window import AckWindow

if TYPE_CHECKING:
    from pika.connection import Parameters

DEFAULT_PREFETCH = 1000


@dataclass(frozen=True, slots=True)
class Message:
    body: bytes
    headers: Mapping[str, Any]
    routing_key: str
    redelivered: bool
    """Whether the message was delivered before. Always False in streams."""
    properties: Any
    """pika's `BasicProperties`: content_type, message_id, timestamp and so on."""


class _Consumer(Session[tuple[int, Message]]):
    """A connection, a channel and a consumer that prefetches up to `prefetch` unacked messages."""

    def __init__(
        self, broker: str | Parameters, queue: str, prefetch: int, arguments: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import pika
            from pika.exceptions import AMQPError
        except ImportError as cause:
            raise MissingExtra("rabbitmq", "a source on RabbitMQ") from cause
        if not 1 <= prefetch <= 65_535:
            raise InvalidArgument(f"prefetch is 1 to 65,535, not {prefetch!r}")
        super().__init__(f"RabbitMQ queue {queue}")
        self._failures = AMQPError
        self._queue, self._prefetch, self._arguments = queue, prefetch, dict(arguments or {})
        self._channel: Any = None
        self._ending = False
        self._cause: BaseException | None = None
        self._consuming: Future[None] = Future()
        # Not pika's BlockingConnection: on closing, it rejects messages that were delivered and not read; see `_end`.
        self._connection = pika.SelectConnection(
            pika.URLParameters(broker) if isinstance(broker, str) else broker,
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._on_channel),
            on_open_error_callback=self._on_closed,
            on_close_callback=self._on_closed,
        )
        self._thread.start()
        self._consuming.result()

    def _on_channel(self, channel: Any) -> None:
        def consume(_: Any) -> None:
            channel.basic_consume(
                self._queue,
                self._on_message,
                arguments=self._arguments,
                callback=lambda _: self._consuming.set_result(None),
            )

        self._channel = channel
        channel.add_on_close_callback(lambda _, reason: self._lose(reason))
        channel.add_on_cancel_callback(
            lambda _: self._lose(ConnectionAbortedError("the broker cancelled the consumer; was the queue deleted?"))
        )
        channel.basic_qos(prefetch_count=self._prefetch, callback=consume)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        message = Message(body, properties.headers or {}, method.routing_key, method.redelivered, properties)
        self._inbox.put((method.delivery_tag, message))

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
            if not self._consuming.done():
                self._consuming.set_exception(self._cause or ConnectionAbortedError("no connection"))
        if self._cause is not None and not self._ending:
            raise self._cause

    def _hand_over(self, work: Callable[[], None]) -> None:
        self._connection.ioloop.add_callback_threadsafe(work)

    def _end(self, on_done: Done) -> None:
        self._ending = True
        if not self._connection.is_open:
            return  # it is closing already
        # pika would first cancel the consumer and reject messages that still arrive for it; a quorum queue puts those
        # behind all waiting ones, out of order. pika rejects none for an unknown consumer: then all messages
        # return with the channel to their old places.
        self._channel._consumers.clear()
        # Closing waits for the broker's reply, so the acks sent before have taken effect.
        self._connection.close()


class RabbitQueue(_Consumer):
    """Messages of a queue, as (delivery tag, `Message`). Pass its `window` and `commit` to `run_ordered`:

        with RabbitQueue(url, "orders") as orders:
            run_ordered(orders, handle, key=…, commit=orders.commit, window=orders.window)

    `broker` is a URL or pika's parameters; the queue must exist. At most `prefetch` messages are unacked at a time,
    which bounds memory, and throughput to `prefetch` messages per commit interval. Iterating raises `SessionEnded` when
    the connection, the channel or the consumer is lost; open a new source, and unacked messages are delivered again.
    """

    def __init__(self, broker: str | Parameters, queue: str, *, prefetch: int = DEFAULT_PREFETCH) -> None:
        self._unsettled: Unsettled[None] = Unsettled(AckWindow())
        super().__init__(broker, queue, prefetch)

    @property
    def window(self) -> AckWindow:
        return self._unsettled.window

    def __iter__(self) -> Iterator[tuple[int, Message] | None]:
        for delivery in self._received():
            if delivery is not None:
                self._unsettled.hand_out(delivery[0], None)
            yield delivery

    def commit(self, floor: int) -> None:
        """Ack all messages up to this tag, and finished ones above it. Raises `SessionEnded`, and sends nothing, if the
        channel of these messages is closed."""
        resolved = list(self._unsettled.resolved(floor))
        if resolved:
            self._ask(partial(self._ack, floor, resolved))
            self._unsettled.settle(resolved)

    def _ack(self, floor: int, resolved: list[int], on_done: Done) -> None:
        count = bisect_right(resolved, floor)
        try:
            if count:
                # Not `floor` itself: an already acked tag is unknown to the broker, which would close the channel.
                self._channel.basic_ack(resolved[count - 1], multiple=True)
            for tag in resolved[count:]:
                self._channel.basic_ack(tag)
            # Acks get no reply, but this request does; its reply proves that the broker has processed the acks.
            self._channel.basic_qos(prefetch_count=self._prefetch, callback=lambda _: on_done())
        except self._failures as cause:
            raise SessionEnded(self.name, str(cause)) from cause


class RabbitStream(_Consumer):
    """Records of a stream (x-queue-type: stream) after an offset, as (offset, `Message`):

        window = AckWindow.restore(saved)
        with RabbitStream(url, "orders", after=window.floor) as orders:
            run_ordered(orders, handle, key=…, window=window, commit=lambda floor: save(window.snapshot()))

    With `after=-1` it starts at the first retained record. The broker stores no position, so offsets stay valid across
    connections. Iterating raises `SessionEnded` when the connection is lost.
    """

    def __init__(
        self, broker: str | Parameters, stream: str, *, after: int = -1, prefetch: int = DEFAULT_PREFETCH
    ) -> None:
        self._after = after
        self._credit = max(1, prefetch // 2)
        super().__init__(broker, stream, prefetch, {"x-stream-offset": "first" if after < 0 else after + 1})

    def __iter__(self) -> Iterator[tuple[int, Message] | None]:
        for delivery in self._received():
            if delivery is None:
                yield None
                continue
            tag, message = delivery
            offset = message.headers["x-stream-offset"]
            # The broker delivers from the beginning of a chunk.
            if offset > self._after:
                self._after = offset
                yield offset, message
            if tag % self._credit == 0:
                self._hand_over(partial(self._give_credit, tag))

    def _give_credit(self, tag: int) -> None:
        """For streams, an ack only permits the broker to send as many records again."""
        if self._channel.is_open:
            self._channel.basic_ack(tag, multiple=True)
