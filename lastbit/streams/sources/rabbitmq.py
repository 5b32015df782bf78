"""RabbitMQ: its queues, classic and quorum, and its streams. Needs pika: `pip install 'lastbit[rabbitmq]'`.

A queue forgets what was acked, and its offsets are delivery tags, which count the deliveries of one channel. When the
channel is gone, so are they: the same number means another message on the next one. What was not acked comes again,
from its old place in the queue, so the order of a key holds across sessions as long as there is one consumer at a time.

A stream is a log: it forgets nothing that its retention keeps, its offsets are those of the log, and where to go on is
for the reader to remember.
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
    """Whether it was handed out before. In streams always False."""
    properties: Any
    """pika's `BasicProperties`: content_type, message_id, timestamp and so on."""


class _Consumer(Session[tuple[int, Message]]):
    """A connection, a channel and a consumer, up to `prefetch` messages ahead of what is acked."""

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
        # Not pika's BlockingConnection, which rejects what was delivered and not taken whenever it closes; see `_end`.
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
        """The first cause is the one that counts; the others are its consequences."""
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

    def _end(self, done: Done) -> None:
        self._ending = True
        if not self._connection.is_open:
            return  # it is closing already
        # pika would first cancel the consumer, and reject what still comes for it; a quorum queue puts that behind all
        # that waits, out of order. What it doesn't know of, it doesn't reject: all goes back with the channel, to its
        # old place.
        self._channel._consumers.clear()
        # With an answer, so that acks that were sent are in force.
        self._connection.close()


class RabbitQueue(_Consumer):
    """Messages of a queue, as (delivery tag, `Message`). Give its `window` and its `commit` to `run_ordered`:

        with RabbitQueue(url, "orders") as orders:
            run_ordered(orders, handle, key=…, commit=orders.commit, window=orders.window)

    `broker` is a URL or pika's parameters; the queue exists. At most `prefetch` messages are not acked at a time, so it
    bounds memory, and throughput to `prefetch` in the interval of commits. Iterating raises `SessionEnded` when the
    connection, the channel or the consumer is lost; go on with a new one, and what was not acked comes again.
    """

    def __init__(self, broker: str | Parameters, queue: str, *, prefetch: int = DEFAULT_PREFETCH) -> None:
        self._unsettled: Unsettled[None] = Unsettled(AckWindow())
        super().__init__(broker, queue, prefetch)

    @property
    def window(self) -> AckWindow:
        return self._unsettled.window

    def __iter__(self) -> Iterator[tuple[int, Message] | None]:
        for received in self._received():
            if received is not None:
                self._unsettled.hand_out(received[0], None)
            yield received

    def commit(self, floor: int) -> None:
        """Ack all up to this tag, and what is done above it. Raises `SessionEnded`, and sends nothing, when the channel
        that handed it out is gone."""
        resolved = list(self._unsettled.resolved(floor))
        if resolved:
            self._ask(partial(self._ack, floor, resolved))
            self._unsettled.settle(resolved)

    def _ack(self, floor: int, resolved: list[int], done: Done) -> None:
        below = bisect_right(resolved, floor)
        try:
            if below:
                # Not `floor` itself: a tag that was acked before is unknown, and the broker closes the channel.
                self._channel.basic_ack(resolved[below - 1], multiple=True)
            for tag in resolved[below:]:
                self._channel.basic_ack(tag)
            # Acks are not answered, this is; by then the channel has passed them on, whatever happens to us.
            self._channel.basic_qos(prefetch_count=self._prefetch, callback=lambda _: done())
        except self._failures as cause:
            raise SessionEnded(self.name, str(cause)) from cause


class RabbitStream(_Consumer):
    """Records of a stream (x-queue-type: stream) after an offset, as (offset, `Message`):

        window = AckWindow.restore(saved)
        with RabbitStream(url, "orders", after=window.floor) as orders:
            run_ordered(orders, handle, key=…, window=window, commit=lambda floor: save(window.snapshot()))

    With `after=-1` from the first record that is kept. The broker remembers nothing of the reader, so offsets stay good
    when the connection is lost; iterating raises `SessionEnded` then.
    """

    def __init__(
        self, broker: str | Parameters, stream: str, *, after: int = -1, prefetch: int = DEFAULT_PREFETCH
    ) -> None:
        self._after = after
        self._credit = max(1, prefetch // 2)
        super().__init__(broker, stream, prefetch, {"x-stream-offset": "first" if after < 0 else after + 1})

    def __iter__(self) -> Iterator[tuple[int, Message] | None]:
        for received in self._received():
            if received is None:
                yield None
                continue
            tag, message = received
            offset = message.headers["x-stream-offset"]
            # A stream is read from the beginning of a chunk.
            if offset > self._after:
                self._after = offset
                yield offset, message
            if tag % self._credit == 0:
                self._hand_over(partial(self._give_credit, tag))

    def _give_credit(self, tag: int) -> None:
        """An ack is no more here than the permission to send as many again."""
        if self._channel.is_open:
            self._channel.basic_ack(tag, multiple=True)
