"""Kafka, for records that are items of a batch, through your own client: confluent-kafka or kafka-python.

    from lastbit.integrations import kafka

    kafka.fan_out(producer, "pictures", values, key="catalog-42")                # a record and an item for each value
    kafka.consume(kafka.Confluent(consumer), ["pictures"], handle, workers=8)    # a consumer process
    kafka.fail_dead_letters(kafka.Confluent(consumer), ["pictures.dead"])        # fails the items of dead letters

The id of a record's item is its header `lastbit-item`; values don't change. Records without it are handled too, unless
`untracked="refuse"`. Records of one key are handled in any order here; where their order matters, use
`lastbit.streams`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

from lastbit import integrations
from lastbit.batch import BatchHandle
from lastbit.client import Client, HasClients, client_of
from lastbit.failures import Redrive
from lastbit.integrations import Failed, FanOutOptions, Skipped
from lastbit.integrations._stopping import stopped_by_signals
from lastbit.integrations._untracked import UntrackedMessages, WhenUntracked
from lastbit.integrations._workers import ITEM, Workers, checked_workers
from lastbit.integrations.kafka._consumer import DeadLetter, Delivery, Handler, Options, run
from lastbit.integrations.kafka._publisher import sender
from lastbit.integrations.kafka._records import Outgoing, Value, death_of, headers_of, item_of
from lastbit.models import Completed
from lastbit.streams.sources.kafka import CAPACITY, Confluent, KafkaClient, KafkaPython

__all__ = [
    "ITEM",
    "Confluent",
    "Failed",
    "KafkaPython",
    "Outgoing",
    "Skipped",
    "consume",
    "fail_dead_letters",
    "fan_out",
    "headers_of",
    "item_of",
    "resend",
]


def fan_out(
    producer: Any,
    topic: str,
    values: Iterable[Value],
    *,
    batch: BatchHandle | int | None = None,
    identify: Callable[[Value], Any] | None = None,
    lastbit: Client | HasClients | None = None,
    **options: Unpack[FanOutOptions],
) -> BatchHandle:
    """Issue an item for each value and publish it as a record; then seal the batch and return it.

    `producer` is a `confluent_kafka.Producer` or a `kafka.KafkaProducer`. A value is bytes, a text, or an `Outgoing`
    with a key, headers and a partition. `key` is that of the batch. `lastbit`: the client of Lastbit, or a
    `lastbit.embedded.Lastbit`; by default a client for LASTBIT_URL and LASTBIT_TOKEN.

    Each chunk is flushed. Records whose delivery the producer has given up are published again.

    Everything else is as in `lastbit.integrations.fan_out`, which takes the options of a new batch: with an idempotency
    key, a producer that was killed can be run again, with the same records in the same order. Values, keys, headers and
    partitions are compared, or what `identify` returns. Raises what that raises (`MessagesRefused` if nothing is
    delivered), `InvalidArgument`, and the producer's errors, for example for a record that is too large.
    """
    return integrations.fan_out(
        client_of(lastbit),
        values,
        sender(producer, topic),
        batch=batch,
        identify=identify,
        **options,
    )


def resend(
    producer: Any, topic: str, redrive: Redrive, values: Iterable[Value], *, lastbit: Client | HasClients | None = None
) -> int:
    """Publish the records of a redrive's items again, and return their number. Store the redrive's position afterwards.

    `values` are all values of the batch, in the order of its fan-outs; see `lastbit.integrations.resend`. Everything
    else is as in `fan_out`.
    """
    return integrations.resend(client_of(lastbit), redrive, values, sender(producer, topic))


def consume(
    client: KafkaClient,
    topics: Sequence[str],
    handle: Handler,
    *,
    workers: int = 8,
    attempts: int | None = 5,
    retry_delay: float = 0.5,
    dead_letter: DeadLetter | None = None,
    every: float = 1.0,
    capacity: int = CAPACITY,
    skip_ended: bool = True,
    untracked: WhenUntracked = "handle",
    on_completed: Callable[[Completed], object] | None = None,
    stop: threading.Event | None = None,
    lastbit: Client | HasClients | None = None,
) -> None:
    """Call `handle` with each record of the topics, in `workers` threads, until SIGTERM or SIGINT or until `stop` is
    set. It returns when the running handlers have ended and their offsets are committed.

    - The handler returns: the item is acked, and the offset may be committed.
    - It raises `Failed(reason)`: the item is failed, and the offset may be committed.
    - It raises `Skipped(reason)`: the item is skipped, and the offset may be committed.
    - It raises anything else: the record is handled again here. After `attempts` its item is failed, with the exception
      as the reason.

    Args:
        client: `Confluent(consumer)` or `KafkaPython(consumer)`, with automatic commits switched off. It is closed in
            the end.
        topics: The topics to subscribe.
        handle: Called from several threads at a time, with the client's own record. Records of one key may be handled
            at the same time.
        workers: The number of threads.
        attempts: The number of attempts at a record; None for no limit.
        retry_delay: Seconds before the second attempt; it doubles with each, up to 30. The worker waits meanwhile, and
            so does the committed offset of the partition.
        dead_letter: Called with the record and the exception before its item is failed, for example to publish it to a
            dead-letter topic. If it raises, the record is handled again.
        every: Seconds between commits of offsets.
        capacity: The number of records held beyond the first unfinished one.
        skip_ended: Don't handle records of batches that were cancelled, have expired or were deleted.
        untracked: What happens to records without an item's id: `handle` them; handle them, and `warn` in the log once;
            or `refuse` them, with one line as well: pass them to `dead_letter`, which is needed then.
        on_completed: Called with a `Completed` for each batch that an ack completes, before the offset is committed;
            see `Client.acker`.
        stop: An event that ends it.
        lastbit: The client of Lastbit, or a `lastbit.embedded.Lastbit`; by default a client for LASTBIT_URL and
            LASTBIT_TOKEN.

    Raises:
        InvalidArgument: An argument is invalid.
        ServiceError: Lastbit refuses acks for good, for example the token.
        lastbit.streams.SessionEnded: The Kafka client has failed; it is the cause.
        lastbit.streams.CommitFailed: Offsets could not be committed five times in a row.
    """
    checked_workers(workers, handle)
    options = Options(workers, attempts, retry_delay, every, capacity, dead_letter, skip_ended, untracked)
    _consume(client, topics, handle, options, on_completed, stop, lastbit)


def fail_dead_letters(
    client: KafkaClient,
    topics: Sequence[str],
    handle: Handler | None = None,
    *,
    reason: Callable[[Any], str | None] = death_of,
    retry_delay: float = 0.5,
    every: float = 1.0,
    on_completed: Callable[[Completed], object] | None = None,
    stop: threading.Event | None = None,
    lastbit: Client | HasClients | None = None,
) -> None:
    """Consume topics of dead letters, and fail the items of their records. Runs until SIGTERM or SIGINT, or until
    `stop` is set.

    `reason` returns the reason for a record; by default it is read from the header `lastbit-reason`, or from those of
    Spring and Kafka Connect. `handle` is called with each record first; if it raises, it is called again until it
    returns. An item that was acked before stays acked. `on_completed`: as in `consume`, for each batch whose last
    pending item fails here. Raises as `consume`.
    """
    if handle is not None:
        checked_workers(1, handle)

    def give_up(record: Any) -> None:
        if handle is not None:
            handle(record)
        raise Failed(reason(record))

    options = Options(1, None, retry_delay, every, CAPACITY, None, False)
    _consume(client, topics, give_up, options, on_completed, stop, lastbit)


def _consume(
    client: KafkaClient,
    topics: Sequence[str],
    handle: Handler,
    options: Options,
    on_completed: Callable[[Completed], object] | None,
    stop: threading.Event | None,
    lastbit: Client | HasClients | None,
) -> None:
    stop = stop or threading.Event()
    untracked = UntrackedMessages(options.untracked, ", ".join(topics))
    with Client() if lastbit is None else nullcontext(client_of(lastbit)) as connected, stopped_by_signals(stop):

        def make_workers(attempt: Handler) -> Workers[Delivery]:
            return Workers(
                connected,
                attempt,
                options.workers,
                on_completed,
                skip_ended=options.skip_ended,
                untracked=untracked,
            )

        run(client, topics, handle, options, stop, make_workers)
