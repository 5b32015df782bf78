"""Consumes a queue through pika: one thread serves the connection, workers handle, and acks return to that thread.

Things that could go wrong, and why they can't:

* An ack is sent on another channel than its delivery came from. A delivery belongs to its session; if that has ended,
  nothing is sent, and the broker delivers the message again.
* The connection is lost. Running handlers go on, and their items are acked to Lastbit. Their messages are delivered
  again in the next session, and their items count once. Messages that no handler has begun are left to the next
  session. Connecting is tried again until it succeeds or is refused.
* A message that always fails occupies the consumer. It is returned to its queue after a pause, during which it counts
  as unacked and no worker is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from lastbit.errors import InvalidArgument
from lastbit.integrations._untracked import UntrackedMessages
from lastbit.integrations._workers import Outcome, Workers
from lastbit.integrations.rabbitmq._messages import Tags, item_of
from lastbit.streams.errors import SessionEnded
from lastbit.streams.sources.amqp import Consumer, Message

if TYPE_CHECKING:
    from pika.connection import Parameters

log = logging.getLogger("lastbit.rabbitmq")

PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds before each attempt to connect again; the last one repeats."""
MOST_GATHERED: Final = 2000
LOOK: Final = 0.1
"""Seconds between checks for a stop."""

OnError = Literal["requeue", "reject", "fail"]


@dataclass(frozen=True, slots=True)
class Options:
    """See `consume`."""

    workers: int
    prefetch: int
    on_error: OnError
    retry_delay: float
    reject_failed: bool
    skip_ended: bool
    untracked: UntrackedMessages

    @property
    def gathered(self) -> int:
        """The number of waiting acks that are sent at once: half of the prefetch, so that the other half is handled
        meanwhile."""
        return min(MOST_GATHERED, max(1, self.prefetch // 2))

    def __post_init__(self) -> None:
        if not isinstance(self.prefetch, int) or not 1 <= self.prefetch <= 65_535:
            raise InvalidArgument(f"prefetch is 1 to 65,535, not {self.prefetch!r}")
        if self.on_error not in ("requeue", "reject", "fail"):
            raise InvalidArgument(f"on_error is 'requeue', 'reject' or 'fail', not {self.on_error!r}")
        if not 0 <= self.retry_delay <= 3600:
            raise InvalidArgument(f"retry_delay is 0 to 3600 seconds, not {self.retry_delay!r}")


class Delivery:
    """A message of a session."""

    __slots__ = ("item", "message", "received", "session", "tag")

    def __init__(self, session: QueueSession, tag: int, message: Message) -> None:
        self.session = session
        self.tag = tag
        self.message = message
        self.item = item_of(message.properties)
        self.received = time.monotonic()

    @property
    def is_stale(self) -> bool:
        return self.session.has_ended

    def settle(self, outcome: Outcome) -> None:
        self.session.settle([self.tag], outcome)


def settle_together(deliveries: Sequence[Delivery], outcome: Outcome) -> None:
    """Pass the outcome to the thread of each session, which is woken once."""
    by_session: dict[QueueSession, list[int]] = {}
    for delivery in deliveries:
        by_session.setdefault(delivery.session, []).append(delivery.tag)
    for session, tags in by_session.items():
        session.settle(tags, outcome)


class QueueSession(Consumer):
    """A connection with a consumer. `deliver` is called in its thread."""

    def __init__(
        self, broker: str | Parameters, queue: str, options: Options, deliver: Callable[[Delivery], object]
    ) -> None:
        self._options = options
        self._deliver = deliver
        self._tags = Tags()
        self._settled: list[tuple[list[int], Outcome]] = []
        self._settling = threading.Lock()
        super().__init__(broker, queue, options.prefetch, purpose="a consumer of RabbitMQ")

    def __iter__(self) -> Iterator[None]:
        """Yields from time to time until `stop()`. Raises `SessionEnded` when the session is lost."""
        for _ in self._received():
            yield

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def settle(self, tags: list[int], outcome: Outcome) -> None:
        """Pass the outcome to the session's thread, which sends all that wait together."""
        if self.has_ended:
            return
        with self._settling:
            is_first = not self._settled
            self._settled.append((tags, outcome))
        if is_first:
            self._hand_over(self._send)

    def _on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        message = Message(body, properties.headers or {}, method.routing_key, method.redelivered, properties)
        self._deliver(Delivery(self, method.delivery_tag, message))

    def _send(self) -> None:
        with self._settling:
            settled, self._settled = self._settled, []
        if not self._channel.is_open:
            return
        acks: list[int] = []
        for tags, outcome in settled:
            if outcome is Outcome.DONE or (outcome is Outcome.FAILED and not self._options.reject_failed):
                acks += tags
            elif outcome in (Outcome.FAILED, Outcome.REFUSED) or (
                outcome is Outcome.ERROR and self._options.on_error == "reject"
            ):
                for tag in tags:
                    self._return(tag, requeue=False)
            else:
                for tag in tags:
                    requeue = partial(self._return, tag, requeue=True)
                    self._connection.ioloop.call_later(self._options.retry_delay, requeue)
        for tag, multiple in self._tags.acks(acks):
            self._channel.basic_ack(tag, multiple)

    def _return(self, tag: int, *, requeue: bool) -> None:
        if self._channel.is_open:
            self._channel.basic_nack(tag, requeue=requeue)
            self._tags.add(tag)


def run(
    broker: str | Parameters, queue: str, options: Options, workers: Workers[Delivery], stop: threading.Event
) -> None:
    """Consume until `stop` is set or the workers have failed; then close them and the session."""
    session: QueueSession | None = None
    try:
        # The first connection is not tried again: a wrong address should be reported at once.
        session = QueueSession(broker, queue, options, workers.put)
        while session is not None and not _is_over(workers, stop):
            try:
                for _ in session:
                    if _is_over(workers, stop):
                        session.stop()
            except SessionEnded as error:
                log.warning("%s; connecting again", error)
                session.close()
                session = _reconnected(broker, queue, options, workers, stop)
    finally:
        workers.close()
        if session is not None:
            session.close()
    if workers.failure is not None:
        raise workers.failure


def _is_over(workers: Workers[Delivery], stop: threading.Event) -> bool:
    return stop.is_set() or workers.failure is not None


def _reconnected(
    broker: str | Parameters, queue: str, options: Options, workers: Workers[Delivery], stop: threading.Event
) -> QueueSession | None:
    """A new session; None if the consumer was stopped meanwhile. Raises pika's error if the broker refuses the account
    or has no such queue."""
    from pika import exceptions

    refusals = (exceptions.ProbableAuthenticationError, exceptions.ProbableAccessDeniedError)
    attempt = 0
    while True:
        until = time.monotonic() + PAUSES[min(attempt, len(PAUSES) - 1)]
        while time.monotonic() < until:
            if _is_over(workers, stop):
                return None
            time.sleep(LOOK)
        try:
            return QueueSession(broker, queue, options, workers.put)
        except refusals:
            raise
        except (exceptions.AMQPConnectionError, OSError) as error:
            log.warning("no connection to RabbitMQ; it is tried again: %r", error)
        attempt += 1
