"""A batch through Kafka: a producer and a consumer, in one program.

    KAFKA_BROKERS=127.0.0.1:9092 LASTBIT_URL=http://127.0.0.1:8000 python -m examples.kafka

It needs a service. Without KAFKA_BROKERS it runs on the mock cluster of confluent-kafka, in this process. A real
deployment runs producer and consumers as processes of their own.
"""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer

from lastbit import Client, LastbitError
from lastbit.integrations import kafka

PICTURES = 1000
TOPIC = "lastbit-example"


def handle(record: Any) -> None:
    """Stands for the work on a picture."""
    number = int(record.value())
    if number == 13:
        raise kafka.Failed("the file is broken")
    if number == 400:
        raise OSError("this picture fails at each attempt")


def main() -> None:
    mock: Producer | None = None
    brokers = os.environ.get("KAFKA_BROKERS")
    if brokers is None:
        mock = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = ",".join(f"{broker.host}:{broker.port}" for broker in mock.list_topics().brokers.values())
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"lastbit-example-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    stop = threading.Event()
    with Client() as client, ThreadPoolExecutor() as executor:
        producer = Producer({"bootstrap.servers": brokers})
        batch = kafka.fan_out(producer, TOPIC, map(str, range(PICTURES)), key="pictures", lastbit=client)
        running = executor.submit(
            kafka.consume, kafka.Confluent(consumer), [TOPIC], handle, attempts=3, retry_delay=0.1, stop=stop
        )
        try:
            result = batch.wait(60)
        finally:
            stop.set()
        running.result()
        print(f"batch {result.id}: {result.acked} acked, {result.failed} failed, {result.pending} pending")
        for failed in batch.failed():
            for item, reason in failed.reasons.items():
                print(f"  {item}: {reason}")
    if mock is not None:
        mock.flush(0)  # the cluster lives as long as its owner


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        try:
            main()
        except (LastbitError, KafkaException, TimeoutError) as error:
            raise SystemExit(f"lastbit kafka: {error!r}") from error
