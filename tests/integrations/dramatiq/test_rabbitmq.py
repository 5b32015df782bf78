"""Dramatiq's broker for RabbitMQ, on a real node."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pika
import pytest
from dramatiq import Worker
from dramatiq import worker as dramatiq_worker
from dramatiq.brokers.rabbitmq import RabbitmqBroker

from lastbit import Client
from lastbit.integrations.dramatiq import LastbitMiddleware, fan_out
from tests.integrations.workers import wait_until
from tests.support.brokers import RabbitMQ, Wire

pytestmark = pytest.mark.xdist_group("rabbitmq")


@pytest.fixture
def wire(rabbitmq: RabbitMQ) -> Iterator[Wire]:
    wire = Wire(rabbitmq.port)
    yield wire
    wire.close()


def test_no_ack_removes_another_message_after_a_lost_connection(
    rabbitmq: RabbitMQ, wire: Wire, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message runs while its connection is lost. The next connection delivers another message, with the same delivery
    tag, and the worker stops before that begins. Both messages are left."""
    monkeypatch.setattr(dramatiq_worker, "QUEUE_PREFETCH", 1)
    broker = RabbitmqBroker(url=f"amqp://guest:guest@127.0.0.1:{wire.port}/%2F", confirm_delivery=True)
    broker.add_middleware(LastbitMiddleware(client=client))
    has_begun, may_end = threading.Event(), threading.Event()
    begun: list[int] = []

    @dramatiq.actor(broker=broker, queue_name="tags")
    def work(number: int) -> None:
        begun.append(number)
        has_begun.set()
        assert may_end.wait(60)

    batch = fan_out([work.message(0), work.message(1)], broker=broker)
    worker = Worker(broker, queues={"tags"}, worker_timeout=50, worker_threads=1)
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as other:
        channel = other.channel()
        ready = lambda: channel.queue_declare("tags", passive=True).method.message_count  # noqa: E731
        try:
            worker.start()
            assert has_begun.wait(30)
            wire.cut()
            wait_until(lambda: ready() == 2, "the message is back in the queue")
            assert channel.basic_get("tags")[0].redelivered
            wait_until(lambda: ready() == 0, "the worker has connected again, and has the other message")
            stopping = threading.Thread(target=worker.stop)
            stopping.start()
            wait_until(lambda: not worker.workers[0].running, "no other message is begun")
            may_end.set()
            stopping.join(60)
            assert begun == [0]
            assert (batch.refresh().acked, batch.info.pending) == (1, 1)
            channel.basic_nack(1)
            wait_until(lambda: ready() == 2, "both messages are in the queue", 10)
        finally:
            may_end.set()
            channel.queue_delete("tags")
            broker.close()
