"""RabbitMQ queues (classic and quorum) and streams. Needs pika: `pip install 'lastbit[rabbitmq]'`.

A queue forgets acked messages. Its offsets are delivery tags, which count the deliveries of one channel, so they are
invalid on the next channel. Messages that were not acked are delivered again from their old place in the queue, so the
order of a key holds across sessions as long as there is one consumer at a time.

A stream is a log: it keeps records according to its retention, its offsets are those of the log, and the reader must
store its own position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from lastbit.streams.errors import SessionEnded
from lastbit.streams.sources.amqp import Consumer, Message
from lastbit.streams.sources.session import Done
from lastbit.streams.sources.unsettled import Unsettled
from lastbit.streams.window import AckWindow

if TYPE_CHECKING:
    from pika.connection import Parameters

__all__ = ["Message", "RabbitQueue", "RabbitStream"]

DEFAULT_PREFETCH = 1000


class RabbitQueue(Consumer):
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


class RabbitStream(Consumer):
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
