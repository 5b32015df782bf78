"""The snippets of docs/sources.md run, each against the broker that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import pika
import pytest
import redis as client

from lastbit.streams import Snapshot
from tests.streams.test_kafka import mock_cluster  # noqa: F401  # a fixture
from tests.support.brokers import RabbitMQ, RedisServer
from tests.support.servers import ROOT
from tests.test_docs import blocks

pytestmark = pytest.mark.xdist_group("rabbitmq")

CUSTOMERS = ("a", "b", "a")
Run = Callable[..., list[Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the snippet that contains a word, with a text replaced in it, until three records were handled."""
    monkeypatch.chdir(tmp_path)

    def running(word: str, old_text: str = "", new_text: str = "") -> list[Any]:
        (snippet,) = [block for block in blocks(ROOT / "docs/sources.md", "python") if word in block]
        assert old_text in snippet
        handled: list[Any] = []

        def handle(record: Any) -> None:
            handled.append(record)
            if len(handled) == len(CUSTOMERS) and "orders" in namespace:
                namespace["orders"].stop()

        namespace: dict[str, Any] = {"handle": handle}
        exec(snippet.replace(old_text, new_text), namespace)
        return handled

    return running


def test_the_snippet_on_a_file_runs(run: Run, tmp_path: Path) -> None:
    """And again, on the lines that were added since."""
    events = tmp_path / "events.csv"
    events.write_text("a,1\nb,1\na,2\n")
    assert sorted(run("events.csv")) == ["a,1", "a,2", "b,1"]
    events.write_text(events.read_text() + "b,2\n")
    assert run("events.csv") == ["b,2"]
    assert Snapshot.decode((tmp_path / "position").read_bytes()) == Snapshot(3, 3)


@pytest.mark.parametrize(("source", "queue"), [("RabbitQueue", "orders"), ("RabbitStream", "orders-log")])
def test_the_snippets_on_rabbitmq_run(rabbitmq: RabbitMQ, run: Run, source: str, queue: str) -> None:
    """A queue and a stream."""
    arguments = {"x-queue-type": "stream"} if source == "RabbitStream" else {"x-single-active-consumer": True}
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments=arguments)
        for customer in CUSTOMERS:
            channel.basic_publish("", queue, b"", pika.BasicProperties(headers={"customer": customer}))
        handled = run(source, "amqp://guest:guest@127.0.0.1:5672/%2F", rabbitmq.url)
        assert sorted(message.headers["customer"] for message in handled) == sorted(CUSTOMERS)
        channel.queue_delete(queue)


def test_the_snippet_on_redis_runs(redis: RedisServer, run: Run) -> None:
    """Nothing is pending when it returns."""
    with client.Redis.from_url(redis.url(), decode_responses=True) as commands:
        commands.flushall()
        for customer in CUSTOMERS:
            commands.xadd("orders", {"customer": customer})
        assert len(run("RedisStream", "redis://127.0.0.1:6379/0", redis.url())) == len(CUSTOMERS)
        assert commands.xpending("orders", "billing")["pending"] == 0


def test_the_snippet_on_kafka_runs(
    mock_cluster: tuple[confluent_kafka.Producer, str],  # noqa: F811
    run: Run,
) -> None:
    """With the real client."""
    producer, address = mock_cluster
    for customer in CUSTOMERS:
        producer.produce("orders", key=customer)
    assert producer.flush(30) == 0
    assert len(run("KafkaTopics", "127.0.0.1:9092", address)) == len(CUSTOMERS)
