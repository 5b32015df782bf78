"""A batch through RabbitMQ: a producer, two consumers, and the consumer of the dead letters, in one program.

    RABBITMQ_URL=amqp://guest:guest@127.0.0.1:5672/%2F LASTBIT_URL=http://127.0.0.1:8000 python -m examples.rabbitmq

It needs a service and a node. A real deployment runs producer and consumers as processes of their own.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pika

from lastbit import Client, LastbitError
from lastbit.integrations import rabbitmq

PICTURES = 1000
QUEUE, DEAD = "lastbit-example", "lastbit-example.dead"


def handle(message: rabbitmq.Message) -> None:
    """Stands for the work on a picture."""
    number = int(message.body)
    if number == 13:
        raise rabbitmq.Failed("the file is broken")
    if number == 400:
        raise OSError("this picture fails at each delivery")
    if number % 100 == 7 and not message.redelivered:
        raise OSError("this picture succeeds at its second delivery")


def declare(url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare(DEAD, durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_declare(
            QUEUE,
            durable=True,
            arguments={
                "x-queue-type": "quorum",
                "x-delivery-limit": 5,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": DEAD,
            },
        )


def delete(url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for queue in (QUEUE, DEAD):
            channel.queue_delete(queue)


def main() -> None:
    url = os.environ.get("RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672/%2F")
    declare(url)
    stop = threading.Event()
    try:
        with Client() as client, ThreadPoolExecutor() as executor:
            consumers = [
                *(executor.submit(rabbitmq.consume, url, QUEUE, handle, retry_delay=0.1, stop=stop) for _ in range(2)),
                executor.submit(rabbitmq.fail_dead_letters, url, DEAD, stop=stop),
            ]
            try:
                batch = rabbitmq.fan_out(url, QUEUE, map(str, range(PICTURES)), key="pictures", lastbit=client)
                result = batch.wait(60)
            finally:
                stop.set()
            for consumer in consumers:
                consumer.result()
            print(f"batch {result.id}: {result.acked} acked, {result.failed} failed, {result.pending} pending")
            for failed in batch.failed():
                for item, reason in failed.reasons.items():
                    print(f"  {item}: {reason}")
    finally:
        delete(url)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        try:
            main()
        except (LastbitError, pika.exceptions.AMQPError, TimeoutError) as error:
            raise SystemExit(f"lastbit rabbitmq: {error!r}") from error
