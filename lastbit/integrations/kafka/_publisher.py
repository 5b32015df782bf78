"""Publishes chunks through the caller's producer: a record counts as sent when its delivery was reported.

The clients retry by themselves for minutes (`delivery.timeout.ms`). A record that they give up is returned as refused,
and published again. Each chunk ends with a flush, so a record without a report is never taken for a sent one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lastbit.errors import InvalidArgument
from lastbit.integrations.kafka._records import Value, encoded, headers_with, outgoing

log = logging.getLogger("lastbit.kafka")

Pair = tuple[str, Value]
Send = Callable[[Sequence[Pair]], Sequence[Pair]]


def sender(producer: Any, topic: str) -> Send:
    """A function that publishes pairs of item id and value, and returns the refused ones. `producer` is a
    `confluent_kafka.Producer` or a `kafka.KafkaProducer`. Raises `InvalidArgument`."""
    if callable(getattr(producer, "produce", None)):
        return lambda pairs: _with_confluent(producer, topic, pairs)
    if not callable(getattr(producer, "send", None)):
        raise InvalidArgument(
            f"producer is a confluent_kafka.Producer or a kafka.KafkaProducer, not {type(producer).__name__}"
        )
    if producer.config["acks"] == 0:
        raise InvalidArgument("with acks=0 the broker reports no delivery: use acks='all'")
    return lambda pairs: _with_kafka_python(producer, topic, pairs)


def _with_confluent(producer: Any, topic: str, pairs: Sequence[Pair]) -> Sequence[Pair]:
    undelivered = {item for item, _ in pairs}
    error: Any = None

    def reported(item: str) -> Callable[[Any, Any], None]:
        def on_delivery(failure: Any, _: Any) -> None:
            nonlocal error
            if failure is None:
                undelivered.discard(item)
            else:
                error = failure

        return on_delivery

    for item, value in pairs:
        record = outgoing(value, item)
        options: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        while True:
            try:
                producer.produce(
                    topic,
                    value=encoded(record.value),
                    key=encoded(record.key),
                    headers=headers_with(item, record),
                    on_delivery=reported(item),
                    **options,
                )
                break
            except BufferError:  # the client's queue is full
                producer.poll(0.1)
        producer.poll(0)
    producer.flush()
    return _refused(pairs, undelivered, error)


def _with_kafka_python(producer: Any, topic: str, pairs: Sequence[Pair]) -> Sequence[Pair]:
    futures = []
    for item, value in pairs:
        record = outgoing(value, item)
        futures.append(
            (
                item,
                producer.send(
                    topic,
                    value=encoded(record.value),
                    key=encoded(record.key),
                    headers=headers_with(item, record),
                    partition=record.partition,
                ),
            )
        )
    producer.flush()
    failures = {item: future.exception for item, future in futures if not future.succeeded()}
    return _refused(pairs, set(failures), next(iter(failures.values()), None))


def _refused(pairs: Sequence[Pair], undelivered: set[str], error: Any) -> Sequence[Pair]:
    if undelivered:
        log.warning("%d records were not delivered, and are published again: %s", len(undelivered), error)
    return [pair for pair in pairs if pair[0] in undelivered]
