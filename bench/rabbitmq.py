"""What tracking costs a consumer of RabbitMQ: the rate at which a queue of no-op messages is emptied.

Three consumers empty the same queue, with the same prefetch: pika's usual one (a `BlockingConnection`, one thread, an
ack for each message); `lastbit.integrations.rabbitmq.consume` on messages without an item; and the same on the items
of a batch. The clock runs from before the consumer connects until the queue is empty and nothing is unacked; tracked,
the batch is complete by then too. The broker keeps durable queues on disk, the service stores on MariaDB.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pika

from bench import measure
from bench.measure import Scale
from lastbit import Client
from lastbit.integrations import rabbitmq
from tests.support.brokers import RabbitMQ

QUEUE = "bench"
WORKERS = 8
PREFETCH = 1000
PATIENCE = 60
"""Seconds until a message that is not in its queue is missing."""
BODY = b'{"product": 4711, "path": "images/4711.png"}'
QUEUES: dict[str, dict[str, Any]] = {"classic": {}, "quorum": {"x-queue-type": "quorum"}}


def usual(broker: RabbitMQ, count: int) -> None:
    """pika's usual consumer."""
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        handled = 0

        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal handled
            handled += 1
            channel.basic_ack(method.delivery_tag)
            if handled == count:
                channel.stop_consuming()

        channel.basic_consume(QUEUE, on_message)
        channel.start_consuming()


def consumed(broker: RabbitMQ, count: int, client: Client) -> None:
    stop = threading.Event()
    numbers = iter(range(1, count + 1))

    def handle(message: rabbitmq.Message) -> None:
        if next(numbers) == count:
            stop.set()

    rabbitmq.consume(broker.url, QUEUE, handle, workers=WORKERS, prefetch=PREFETCH, stop=stop, lastbit=client)


def seconds(work: Callable[..., None], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def measured(channel: Any, broker: RabbitMQ, client: Client, kind: str, scale: Scale) -> Iterable[list[str]]:
    count = scale.requests
    rates: dict[str, list[float]] = {"pika": [], "untracked": [], "tracked": []}
    channel.queue_declare(QUEUE, durable=True, arguments=QUEUES[kind])

    def left() -> int:
        return int(channel.queue_declare(QUEUE, passive=True).method.message_count)

    def empty(name: str, work: Callable[..., None], *arguments: Any) -> None:
        wait_until_counted(channel, count)
        rates[name].append(count / seconds(work, *arguments))
        if left():
            raise RuntimeError(f"{left()} messages are left")

    for _ in range(scale.rounds):
        send_all(broker, [BODY] * count)
        empty("pika", usual, broker, count)
        send_all(broker, [BODY] * count)
        empty("untracked", consumed, broker, count, client)
        batch = rabbitmq.fan_out(broker.url, QUEUE, (BODY for _ in range(count)), lastbit=client)
        empty("tracked", consumed, broker, count, client)
        if not (batch.refresh().succeeded and batch.verify().ok):
            raise RuntimeError(f"the queue is empty, but the batch is {batch}")
    channel.queue_delete(QUEUE)
    for name, values in rates.items():
        ratios = [
            statistics.median(a / b for a, b in zip(values, rates[base], strict=True)) for base in ("pika", "untracked")
        ]
        yield [f"{kind}, {name}", f"{statistics.median(values):,.0f}", *(f"{ratio:.2f}" for ratio in ratios)]


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
        ["", "messages/s", "of pika's", "of untracked"],
        lines,
    )


if __name__ == "__main__":
    measure.alone(run)
