"""A consumer of RabbitMQ as a process of its own: it empties a queue of no-op messages, and prints the seconds that
took, from before it connects until nothing is unacked.

    python -m bench.peer.rabbitmq_consumer {pika|lastbit} BROKER SERVICE QUEUE MESSAGES PREFETCH
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pika

from lastbit import Client
from lastbit.integrations import rabbitmq

WORKERS = 8


def usual(broker: str, queue: str, count: int, prefetch: int) -> None:
    """pika's usual consumer."""
    with pika.BlockingConnection(pika.URLParameters(broker)) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=prefetch)
        handled = 0

        def on_message(channel: Any, method: Any, properties: Any, body: bytes) -> None:
            nonlocal handled
            handled += 1
            channel.basic_ack(method.delivery_tag)
            if handled == count:
                channel.stop_consuming()

        channel.basic_consume(queue, on_message)
        channel.start_consuming()


def ours(broker: str, queue: str, count: int, prefetch: int, client: Client) -> None:
    stop = threading.Event()
    numbers = iter(range(1, count + 1))

    def handle(message: rabbitmq.Message) -> None:
        if next(numbers) == count:
            stop.set()

    rabbitmq.consume(broker, queue, handle, workers=WORKERS, prefetch=prefetch, stop=stop, lastbit=client)


def main(consumer: str, broker: str, service: str, queue: str, messages: str, prefetch: str) -> None:
    with Client(service) as client:
        start = time.perf_counter()
        if consumer == "pika":
            usual(broker, queue, int(messages), int(prefetch))
        else:
            ours(broker, queue, int(messages), int(prefetch), client)
        print(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
