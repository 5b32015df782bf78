"""Producer and consumers on librdkafka's mock cluster, with a real service."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import confluent_kafka
import kafka as kafka_python
import pytest

from lastbit import Client, Completed, Retry
from lastbit.errors import InvalidArgument, MessagesRefused
from lastbit.integrations import Failed, _fan_out, _workers
from lastbit.integrations import kafka as adapter
from lastbit.integrations.kafka._consumer import Attempts, Consumer, Options
from lastbit.streams.sources.kafka import KafkaTopics, Place
from lastbit.streams.window import AckWindow
from tests.integrations.kafka.conftest import committed, consumer, records
from tests.integrations.rabbitmq.conftest import running
from tests.integrations.redrives import redriven
from tests.integrations.workers import reasons, wait_until
from tests.mutants import mutant
from tests.streams.kafka_broker import Attributes, Broker, RecordedClient
from tests.support.threads import no_more_threads


def test_each_value_is_sent_with_an_item(address: str, producer: confluent_kafka.Producer, client: Client) -> None:
    """Texts, bytes, and records with a key and headers; the batch is sealed."""
    values = ["Stuhl à 7", b"\x00", adapter.Outgoing(b"2", key="seven", headers={"team": "search"})]
    batch = adapter.fan_out(producer, "values", values, key="catalog", lastbit=client)
    messages = {message.value(): message for message in records(address, "values", 3)}
    assert [adapter.item_of(messages[value]) for value in ("Stuhl à 7".encode(), b"\x00", b"2")] == list(
        map(str, (f"{batch.id}:0:0", f"{batch.id}:0:1", f"{batch.id}:0:2"))
    )
    assert messages[b"2"].key() == b"seven"
    assert adapter.headers_of(messages[b"2"])["team"] == b"search"
    assert (batch.state, batch.items, batch.key) == ("sealed", 3, "catalog")


def test_kafka_python_publishes_too(address: str, client: Client) -> None:
    """With a version of the protocol that the mock cluster speaks."""
    own = kafka_python.KafkaProducer(bootstrap_servers=address, api_version=(2, 0))
    batch = adapter.fan_out(own, "python", ["0", "1"], lastbit=client)
    own.close()
    messages = records(address, "python", 2)
    assert {adapter.item_of(message) for message in messages} == {f"{batch.id}:0:0", f"{batch.id}:0:1"}


def test_a_producer_that_is_run_again_repeats_at_most_a_chunk(
    address: str, producer: confluent_kafka.Producer, client: Client
) -> None:
    """Same batch, same ids; everything that was not sent is sent."""
    run_key = str(uuid.uuid4())

    def values(dies_at: int) -> Iterator[str]:
        for number in range(100):
            if number == dies_at:
                raise KeyboardInterrupt
            yield str(number)

    options: dict[str, Any] = {"idempotency_key": run_key, "chunk": 10, "lastbit": client}
    for dies_at in (35, 65):
        with pytest.raises(KeyboardInterrupt):
            adapter.fan_out(producer, "rerun", values(dies_at), **options)
    batch = adapter.fan_out(producer, "rerun", values(-1), **options)
    end = sum(producer_end(address, "rerun"))
    pairs = Counter((int(record.value()), adapter.item_of(record)) for record in records(address, "rerun", end))
    assert sorted(pairs) == [(number, f"{batch.id}:0:{number}") for number in range(100)]
    assert pairs.total() <= 120


def test_redriven_records_are_published_again(address: str, producer: confluent_kafka.Producer, client: Client) -> None:
    """With their items and their own values."""
    values = [str(number) for number in range(5)]
    batch = adapter.fan_out(producer, "redriven", values, lastbit=client)
    items = [f"{batch.id}:0:{number}" for number in range(5)]
    client.fail([items[1], items[3]])
    assert adapter.resend(producer, "redriven", redriven(client, batch), values, lastbit=client) == 2
    found = Counter((record.value(), adapter.item_of(record)) for record in records(address, "redriven", 7))
    assert found == {(str(n).encode(), items[n]): 2 if n in (1, 3) else 1 for n in range(5)}


def producer_end(address: str, topic: str) -> list[int]:
    reader = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "reader"})
    try:
        partitions = reader.list_topics(topic, timeout=30).topics[topic].partitions
        return [reader.get_watermark_offsets(confluent_kafka.TopicPartition(topic, number))[1] for number in partitions]
    finally:
        reader.close()


def test_undelivered_records_are_published_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer gives them up; in the end, it is an error. Nothing counts as sent without a report."""
    monkeypatch.setattr(_fan_out, "PATIENCE", Retry(attempts=2, base=0.01))
    away = confluent_kafka.Producer({"bootstrap.servers": "127.0.0.1:1", "message.timeout.ms": 100, "log_level": 0})
    with pytest.raises(MessagesRefused) as refusal:
        adapter.fan_out(away, "values", ["0", "1"], lastbit=client)
    assert len(refusal.value.items) == 2


def test_wrong_arguments_are_reported_at_once(address: str, producer: confluent_kafka.Producer, client: Client) -> None:
    """Before anything is sent or handled."""
    with pytest.raises(InvalidArgument, match=r"producer is a confluent_kafka.Producer .* not str"):
        adapter.fan_out("127.0.0.1:9092", "values", [], lastbit=client)
    silent = kafka_python.KafkaProducer(bootstrap_servers=address, api_version=(2, 0), acks=0)
    with pytest.raises(InvalidArgument, match="with acks=0 the broker reports no delivery"):
        adapter.fan_out(silent, "values", [], lastbit=client)
    silent.close()
    with pytest.raises(InvalidArgument, match=r"item \d+:0:0: a value is bytes, a text or an Outgoing, not 7"):
        adapter.fan_out(producer, "values", [7], lastbit=client)  # type: ignore[list-item]
    unused: Any = None
    with pytest.raises(InvalidArgument, match="attempts is at least 1"):
        adapter.consume(unused, ["values"], print, attempts=0)
    with pytest.raises(InvalidArgument, match="workers is at least 1"):
        adapter.consume(unused, ["values"], print, workers=0)


@mutant(
    "a-record-is-given-up-at-its-first-error",
    "lastbit.integrations.kafka._consumer:Attempts.__call__",
    "attempt == self._options.attempts",
    "True",
)
def test_every_outcome_resolves_its_item(
    address: str, producer: confluent_kafka.Producer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Success, failure, retry then success, exhausted retries, dead letters, a cancelled batch, no item and an id that
    isn't one: nothing is pending, and all offsets are committed."""
    cancelled = adapter.fan_out(producer, "work", ["cancelled"], seal=False, lastbit=client)
    cancelled.cancel()
    producer.produce("dead", value="untracked")
    producer.produce("work", value="untracked")
    producer.produce("work", value="malformed", headers={"lastbit-item": "picture-7"})
    values = ["fails", "retried", "exhausted", *map(str, range(97))]
    batch = adapter.fan_out(producer, "work", values, key="catalog", lastbit=client)
    attempts: Counter[str] = Counter()
    completed = []

    def handle(record: confluent_kafka.Message) -> None:
        name = record.value().decode()
        attempts[name] += 1
        if name == "fails":
            raise Failed("no such picture")
        if name == "exhausted" or (name == "retried" and attempts[name] < 3):
            raise ConnectionError("the disk is full")

    def bury(record: confluent_kafka.Message, error: Exception) -> None:
        # Without the item: otherwise either consumer might be the one that fails it and completes the batch.
        producer.produce("dead", value=record.value(), headers={"lastbit-reason": str(error)})
        producer.flush()

    letters: list[bytes] = []
    with (
        running(
            adapter.fail_dead_letters,
            consumer(address, "undertaker"),
            ["dead"],
            lambda record: letters.append(record.value()),
            lastbit=client,
        ),
        running(
            adapter.consume,
            consumer(address, "workers"),
            ["work"],
            handle,
            attempts=3,
            retry_delay=0.01,
            dead_letter=bury,
            on_completed=completed.append,
            lastbit=client,
        ),
    ):
        result = batch.wait(30)
        wait_until(lambda: len(letters) == 3 and attempts.total() == 107, "all records are handled")
    assert (result.acked, result.failed, batch.verify().ok) == (98, 2, True)
    for number, reason in ((0, "no such picture"), (2, "the disk is full")):
        assert reason in reasons(batch)[f"{batch.id}:0:{number}"]
    assert attempts["retried"] == attempts["exhausted"] == 3
    assert sorted(letters) == [b"exhausted", b"fails", b"untracked"]
    assert [completion.key for completion in completed if completion.newly] == ["catalog"]
    assert "its batch was cancelled" in caplog.text
    assert "picture-7" in caplog.text
    assert committed(address, "workers", "work") == 103


@pytest.mark.slow
def test_a_dead_letter_fails_its_item(address: str, producer: confluent_kafka.Producer, client: Client) -> None:
    """Published by other software; the reason comes from its headers."""
    batch = client.open(items=2, sealed=True)
    for item, headers in (
        (batch.ids[0], {"__connect.errors.exception.message": "no schema"}),
        (batch.ids[1], {}),
    ):
        producer.produce("letters", value="x", headers={"lastbit-item": item, **headers})
    producer.flush()
    completed: list[Completed] = []
    with running(
        adapter.fail_dead_letters,
        consumer(address, "letters"),
        ["letters"],
        on_completed=completed.append,
        lastbit=client,
    ):
        batch.wait(30)
    assert [completion.batch for completion in completed if completion.newly] == [batch.id]
    assert reasons(batch) == {batch.ids[0]: "dead-lettered: no schema", batch.ids[1]: "dead-lettered"}


PLACE = Place("work", 0)


class WithHeaders(Attributes):
    headers = ()


@contextmanager
def rebalanced(
    handle: Callable[[RecordedClient, Attributes], None], client: Client, **changes: Any
) -> Iterator[tuple[RecordedClient, AckWindow]]:
    """A consumer of ten records on one partition, which are all that it may hold. `changes` are of its options."""
    broker = RecordedClient(
        Broker([WithHeaders("work", 0, offset, b"", b"") for offset in range(10)]), assigned=[PLACE]
    )
    options = Options(workers=1, attempts=3, retry_delay=0, every=60, capacity=10, dead_letter=None)
    options = replace(options, **changes)
    stop = threading.Event()
    with KafkaTopics(broker, ["work"], capacity=10) as source, ThreadPoolExecutor(1) as executor:
        consumer = Consumer(source, options, stop)
        attempts = Attempts(partial(handle, broker), options, consumer.over)
        future = executor.submit(consumer.run, _workers.Workers(client, attempts, 1, None))
        try:
            yield broker, consumer.window
        finally:
            stop.set()
            future.result(60)


def test_records_that_wait_are_not_begun_after_their_partition_was_revoked(client: Client) -> None:
    """Its next owner handles them, also if that is this consumer again; and they make room for others."""
    handled: list[int] = []
    has_begun, goes_on, all_handled = threading.Event(), threading.Event(), threading.Event()

    def handle(broker: RecordedClient, record: Attributes) -> None:
        handled.append(record.offset)
        has_begun.set()
        assert goes_on.wait(30)
        if record.offset == 9:
            all_handled.set()

    with rebalanced(handle, client) as (broker, window):
        assert has_begun.wait(30)
        wait_until(lambda: window.high == 9, "all are read")
        broker.rebalance("revoked", [PLACE])
        broker.rebalance("assigned", [PLACE])
        goes_on.set()
        assert all_handled.wait(30)
    # The one that was being handled when the partition was revoked is handled again.
    assert handled == [0, *range(10)]


def test_a_record_is_not_tried_again_after_its_partition_was_revoked(client: Client) -> None:
    """Its next owner tries it."""
    handled: list[int] = []

    def handle(broker: RecordedClient, record: Attributes) -> None:
        handled.append(record.offset)
        if len(handled) == 1:
            broker.rebalance("revoked", [PLACE])
        raise ConnectionError

    with rebalanced(handle, client) as (_, window):
        wait_until(lambda: handled and not window.outstanding, "the consumer has forgotten it")
    assert handled == [0]


def test_a_record_is_handled_again_though_no_thread_can_be_started(client: Client) -> None:
    """Its dead letter could not be published."""
    buried: list[int] = []

    def handle(broker: RecordedClient, record: Attributes) -> None:
        if record.offset == 7:
            raise ValueError

    def bury(record: Attributes, error: Exception) -> None:
        buried.append(record.offset)
        if len(buried) == 1:
            exhausted.enter_context(no_more_threads())
            raise ConnectionError
        exhausted.close()

    with ExitStack() as exhausted, rebalanced(handle, client, attempts=1, dead_letter=bury) as (_, window):
        wait_until(lambda: window.floor == 9, "all records have ended", 10)
    assert buried == [7, 7]
