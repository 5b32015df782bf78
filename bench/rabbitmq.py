"""What tracking costs a consumer of RabbitMQ: the rate at which a queue of no-op messages is emptied.

Each consumer is a process of its own: pika's usual one (a `BlockingConnection`, one thread, an ack for each message);
`lastbit.integrations.rabbitmq.consume` on messages without an item; and the same on the items of a batch. The latter
two run with the default prefetch of 100, with 1,000, which such a consumer handles in a fortieth of a second, and with
4,000, as the docs say for work that takes next to no time. The clock runs from before the consumer connects until the
queue is empty and nothing is unacked; tracked, the batch is complete by then too. The broker keeps durable queues on
disk, the service stores on MariaDB.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pika

from bench import measure
from bench.measure import Scale
from lastbit import Client
from lastbit.integrations import rabbitmq
from tests.support.brokers import RabbitMQ

QUEUE = "bench"
USUAL = 1000
"""The prefetch of pika's consumer."""
PREFETCHES = (rabbitmq.PREFETCH, 1000, 4000)
TIMES_THE_REQUESTS = 3
"""A consumer that stops looks for it ten times a second, so a round must take seconds."""
PATIENCE = 60
"""Seconds until a message that is not in its queue is missing."""
BODY = b'{"product": 4711, "path": "images/4711.png"}'
QUEUES: dict[str, dict[str, Any]] = {"classic": {}, "quorum": {"x-queue-type": "quorum"}}


def seconds(consumer: str, broker: RabbitMQ, client: Client, count: int, prefetch: int) -> float:
    """The time in which the consumer empties the queue."""
    command = [sys.executable, "-m", "bench.peer.rabbitmq_consumer", consumer, broker.url, client.url, QUEUE]
    done = subprocess.run([*command, str(count), str(prefetch)], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def measured(channel: Any, broker: RabbitMQ, client: Client, kind: str, scale: Scale) -> Iterable[list[str]]:
    count = scale.requests
    rates: dict[tuple[str, int], list[float]] = {}
    channel.queue_declare(QUEUE, durable=True, arguments=QUEUES[kind])

    def empty(name: str, prefetch: int) -> None:
        wait_until_counted(channel, count)
        elapsed = seconds("pika" if name == "pika" else "lastbit", broker, client, count, prefetch)
        rates.setdefault((name, prefetch), []).append(count / elapsed)
        if left := int(channel.queue_declare(QUEUE, passive=True).method.message_count):
            raise RuntimeError(f"{left} messages are left")

    for _ in range(scale.rounds):
        send_all(broker, [BODY] * count)
        empty("pika", USUAL)
        for prefetch in PREFETCHES:
            send_all(broker, [BODY] * count)
            empty("untracked", prefetch)
            batch = rabbitmq.fan_out(broker.url, QUEUE, (BODY for _ in range(count)), lastbit=client)
            empty("tracked", prefetch)
            if not (batch.refresh().succeeded and batch.verify().ok):
                raise RuntimeError(f"the queue is empty, but the batch is {batch}")
    channel.queue_delete(QUEUE)
    for (name, prefetch), values in rates.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, rates[base], strict=True))
            for base in (("pika", USUAL), ("untracked", prefetch))
        ]
        shown = [f"{statistics.median(values):,.0f}", *(f"{ratio:.2f}" for ratio in ratios)]
        yield [f"{kind}, {prefetch:,}, {name}", *shown]


def send_all(broker: RabbitMQ, bodies: list[bytes]) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        for body in bodies:
            channel.basic_publish("", QUEUE, body, pika.BasicProperties(delivery_mode=2))
        # The end of a channel loses messages that a quorum queue doesn't have yet.
        wait_until_counted(channel, len(bodies))


def wait_until_counted(channel: Any, count: int) -> None:
    """The broker counts the messages of a queue with a delay."""
    deadline = time.monotonic() + PATIENCE
    while (messages := channel.queue_declare(QUEUE, passive=True).method.message_count) < count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the queue has {messages} messages, not {count}")
        time.sleep(0.01)  # there is no notification for a count


def run(scale: Scale) -> None:
    scale = replace(scale, requests=TIMES_THE_REQUESTS * scale.requests)
    broker = RabbitMQ()
    with measure.mariadb() as server, measure.lastbit_on(server) as service, Client(service.url) as client:
        try:
            broker.start()
            with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
                lines = [
                    line for kind in QUEUES for line in measured(connection.channel(), broker, client, kind, scale)
                ]
        finally:
            broker.remove()
    measure.show(
        f"rabbitmq: emptying a queue of {scale.requests:,} no-op messages, MariaDB (medians of {scale.rounds} rounds)",
        ["queue, prefetch", "messages/s", "of pika's", "of untracked"],
        lines,
    )


if __name__ == "__main__":
    measure.alone(run)
