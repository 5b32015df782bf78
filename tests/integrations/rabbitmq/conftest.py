"""A real node, queues of each test's own, and consumers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pika
import pytest

from lastbit import Client
from lastbit.integrations import rabbitmq as adapter
from tests.support.brokers import RabbitMQ, Wire

Consuming = Callable[..., AbstractContextManager[threading.Event]]


@pytest.fixture
def channel(rabbitmq: RabbitMQ) -> Iterator[Any]:
    """A channel to declare, publish and look."""
    # A test that takes minutes doesn't answer heartbeats here.
    with pika.BlockingConnection(pika.URLParameters(f"{rabbitmq.url}?heartbeat=0")) as connection:
        yield connection.channel()


@pytest.fixture
def queue(channel: Any) -> Iterator[str]:
    """An empty quorum queue, whose dead letters go to the queue `work.dead` after three failed deliveries."""
    yield from declared(channel, {"x-queue-type": "quorum", "x-delivery-limit": 2})


@pytest.fixture
def classic(channel: Any) -> Iterator[str]:
    """An empty classic queue with the same dead letters."""
    yield from declared(channel, {})


@pytest.fixture
def unlimited(channel: Any) -> Iterator[str]:
    """An empty quorum queue without a limit of deliveries."""
    yield from declared(channel, {"x-queue-type": "quorum"})


def declared(channel: Any, arguments: dict[str, Any]) -> Iterator[str]:
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work.dead"}
    channel.queue_declare("work.dead", durable=True)
    channel.queue_declare("work", durable=True, arguments={**dead, **arguments})
    yield "work"
    channel.queue_delete("work")
    channel.queue_delete("work.dead")


@pytest.fixture
def wire(rabbitmq: RabbitMQ) -> Iterator[Wire]:
    wire = Wire(rabbitmq.port)
    yield wire
    wire.close()


def over(wire: Wire) -> str:
    return f"amqp://guest:guest@127.0.0.1:{wire.port}/%2F"


@contextmanager
def running(work: Callable[..., None], *arguments: Any, **options: Any) -> Iterator[threading.Event]:
    """Run a consumer in a thread; in the end, stop it and raise its error. Yields the event that stops it."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(work, *arguments, stop=stop, **options)
        try:
            yield stop
        finally:
            stop.set()
            future.result(60)


@pytest.fixture
def consuming(rabbitmq: RabbitMQ, client: Client) -> Consuming:
    """Runs `consume` on a queue."""

    def run(queue: str, handle: Callable[[Any], object], **options: Any) -> AbstractContextManager[threading.Event]:
        options = {"broker": rabbitmq.url, "retry_delay": 0, "lastbit": client, **options}
        return running(adapter.consume, options.pop("broker"), queue, handle, **options)

    return run


def left(channel: Any, queue: str) -> int:
    """The number of messages that are ready. The server returns those of a closed connection a moment later."""
    count: int = channel.queue_declare(queue, passive=True).method.message_count
    return count
