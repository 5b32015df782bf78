"""RabbitMQ, for messages that are items of a batch.

    from lastbit.integrations import rabbitmq

    rabbitmq.fan_out(url, "thumbnails", bodies, key="catalog-42")    # the producer: a message and an item for each body
    rabbitmq.consume(url, "thumbnails", handle, workers=8)           # a consumer process
    rabbitmq.fail_dead_letters(url, "thumbnails.dead")               # fails the items of dead letters

`pip install 'lastbit[rabbitmq]'` brings pika.

The id of a message's item is its message_id; bodies don't change. Messages with a message_id of their own have the
header `lastbit-item`. Messages without an item are handled too, unless `untracked="refuse"`.
Messages of a stream, whose order matters, are better read by `lastbit.streams`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Unpack

from lastbit import integrations
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients, client_of
from lastbit.failures import Redrive
from lastbit.integrations import Failed, FanOutOptions, Skipped
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._stopping import stopped_by_signals
from lastbit.integrations._untracked import UntrackedMessages, WhenUntracked
from lastbit.integrations._workers import ITEM, Workers, checked_workers
from lastbit.integrations.rabbitmq._consumer import Delivery, OnError, Options, run, settle_together
from lastbit.integrations.rabbitmq._messages import Body, Outgoing, death_of, identity, item_of
from lastbit.integrations.rabbitmq._publisher import Sender
from lastbit.models import Completed
from lastbit.streams.sources.amqp import Message

if TYPE_CHECKING:
    from pika.connection import Parameters

__all__ = [
    "ITEM",
    "Failed",
    "Message",
    "Outgoing",
    "Skipped",
    "consume",
    "fail_dead_letters",
    "fan_out",
    "item_of",
    "resend",
]

PREFETCH = 100
"""The default number of unacked messages for each consumer."""

Handler = Callable[[Message], object]


def fan_out(
    broker: str | Parameters,
    routing_key: str,
    bodies: Iterable[Body],
    *,
    exchange: str = "",
    batch: BatchHandle | int | None = None,
    identify: Callable[[Body], Any] | None = None,
    lastbit: Client | HasClients | None = None,
    **options: Unpack[FanOutOptions],
) -> BatchHandle:
    """Issue an item for each body and publish it as a message; then seal the batch and return it.

    `broker` is a URL or pika's parameters. With the default exchange, `routing_key` is the name of the queue. A body is
    bytes, a text, or an `Outgoing` with properties of its own; without them, messages are persistent. `lastbit`: the
    client of Lastbit, or a `lastbit.embedded.Lastbit`; by default a client for LASTBIT_URL and LASTBIT_TOKEN.

    `exchange` must route each message to one queue: of two copies, the first that is handled acks the item.

    Publisher confirms are on. Messages that the broker returns because no queue is bound to their key, that it refuses,
    or whose confirmation was lost with the connection are published again.

    Everything else is as in `lastbit.integrations.fan_out`, which takes the options of a new batch: with an idempotency
    key, a producer that was killed can be run again, with the same messages in the same order. Bodies, routing keys and
    headers are compared, or what `identify` returns. Raises what that raises (`MessagesRefused` if the broker accepts
    nothing for a minute), pika's errors if the broker refuses the connection or has no such exchange, and
    `MissingExtra`.
    """
    with Sender(broker, exchange, routing_key) as send:
        return integrations.fan_out(
            client_of(lastbit),  # not closed here: the handle uses it
            bodies,
            send,
            batch=batch,
            identify=identify or identity,
            **options,
        )


def resend(
    broker: str | Parameters,
    routing_key: str,
    redrive: Redrive,
    bodies: Iterable[Body],
    *,
    exchange: str = "",
    lastbit: Client | HasClients | None = None,
) -> int:
    """Publish the messages of a redrive's items again, and return their number. Store the redrive's position
    afterwards.

    `bodies` are all bodies of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`. Everything
    else is as in `fan_out`.
    """
    with Sender(broker, exchange, routing_key) as send:
        return integrations.resend(client_of(lastbit), redrive, bodies, send)


def consume(
    broker: str | Parameters,
    queue: str,
    handle: Handler,
    *,
    workers: int = 8,
    prefetch: int = PREFETCH,
    on_error: OnError = "requeue",
    retry_delay: float = 1.0,
    reject_failed: bool = False,
    skip_ended: bool = True,
    untracked: WhenUntracked = "handle",
    on_completed: Callable[[Completed], object] | None = None,
    stop: threading.Event | None = None,
    lastbit: Client | HasClients | None = None,
) -> None:
    """Call `handle` with each message of a queue, in `workers` threads, until SIGTERM or SIGINT or until `stop` is set.
    It returns when the running handlers have ended and their outcomes are stored.

    - The handler returns: the item is acked, and the message after the commit.
    - It raises `Failed(reason)`: the item is failed, and the message acked after the commit.
    - It raises `Skipped(reason)`: the item is skipped, and the message acked after the commit.
    - It raises anything else: the item stays pending, and the message is requeued.

    Args:
        broker: A URL, or pika's parameters.
        queue: A classic or quorum queue, which must exist.
        handle: Called from several threads at a time, with a `Message`.
        workers: The number of threads.
        prefetch: The number of messages that this consumer holds unacked: those that are handled, that wait for a
            worker or for their ack. For work of seconds, take two or three times `workers`, so that other processes get
            the rest; for work of less than a millisecond 1,000, for next to no work 4,000.
        on_error: What an exception of the handler means: `requeue` the message; `reject` it, so that the queue's
            dead-letter exchange gets it; or `fail` its item, with the exception as the reason.
        retry_delay: Seconds before a message is requeued.
        reject_failed: Reject the messages of failed items instead of acking them, so that the dead-letter exchange gets
            them.
        skip_ended: Don't handle messages of batches that were cancelled, have expired or were deleted: ack them.
        untracked: What happens to messages without an item's id: `handle` them; handle them, and `warn` in the log
            once; or `refuse` them, with one line as well: reject them, so that the queue's dead-letter exchange gets
            them.
        on_completed: Called with a `Completed` for each batch that an ack completes, before the message is acked; see
            `Client.acker`.
        stop: An event that ends it.
        lastbit: The client of Lastbit, or a `lastbit.embedded.Lastbit`; by default a client for LASTBIT_URL and
            LASTBIT_TOKEN.

    A lost connection is opened again. Raises:
        InvalidArgument: An argument is invalid.
        MissingExtra: pika is not installed.
        ServiceError: Lastbit refuses acks for good, for example the token.
        pika.exceptions.AMQPError: The first connection fails, or the broker refuses the account or has no such queue.
    """
    options = Options(
        workers, prefetch, on_error, retry_delay, reject_failed, skip_ended, UntrackedMessages(untracked, queue)
    )
    checked_workers(workers, handle)

    def handle_or_fail(message: Message) -> None:
        try:
            handle(message)
        except (Failed, Skipped):
            raise
        except Exception as error:
            raise Failed(reason_of(error)) from error

    _consume(broker, queue, handle_or_fail if on_error == "fail" else handle, options, on_completed, stop, lastbit)


def fail_dead_letters(
    broker: str | Parameters,
    queue: str,
    handle: Handler | None = None,
    *,
    prefetch: int = PREFETCH,
    retry_delay: float = 1.0,
    on_completed: Callable[[Completed], object] | None = None,
    stop: threading.Event | None = None,
    lastbit: Client | HasClients | None = None,
) -> None:
    """Consume a queue of dead letters: fail the items of its messages, with the last death and its count as the reason,
    and ack the messages. Runs until SIGTERM or SIGINT, or until `stop` is set.

    `handle` is called with each message first, for example to store its body elsewhere; if it raises, the message
    is requeued, and its item stays pending. An item that was acked before stays acked. `on_completed`: as in
    `consume`, for each batch whose last pending item fails here. Raises as `consume`.
    """

    if handle is not None:
        checked_workers(1, handle)

    def give_up(message: Message) -> None:
        if handle is not None:
            handle(message)
        raise Failed(death_of(message.headers))

    untracked = UntrackedMessages("warn", queue)
    options = Options(1, prefetch, "requeue", retry_delay, reject_failed=False, skip_ended=False, untracked=untracked)
    _consume(broker, queue, give_up, options, on_completed, stop, lastbit)


def _consume(
    broker: str | Parameters,
    queue: str,
    handle: Handler,
    options: Options,
    on_completed: Callable[[Completed], object] | None,
    stop: threading.Event | None,
    lastbit: Client | HasClients | None,
) -> None:
    stop = stop or threading.Event()
    with _client(lastbit) as client, stopped_by_signals(stop):
        workers: Workers[Delivery] = Workers(
            client,
            handle,
            options.workers,
            on_completed,
            gathered=options.gathered,
            skip_ended=options.skip_ended,
            untracked=options.untracked,
            settle=settle_together,
        )
        run(broker, queue, options, workers, stop)


def _client(lastbit: Client | HasClients | None) -> AbstractContextManager[Client]:
    """The client that was passed, or a new one that is closed at the end."""
    return Client() if lastbit is None else nullcontext(client_of(lastbit))
