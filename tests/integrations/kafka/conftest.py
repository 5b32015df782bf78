"""librdkafka's mock cluster, in this process, and consumers in threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from lastbit.integrations.kafka import Confluent


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster."""
    owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = owner.list_topics(timeout=30).brokers.values()
    yield ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    owner.flush(0)  # the cluster lives as long as its owner


@pytest.fixture
def producer(address: str) -> confluent_kafka.Producer:
    return confluent_kafka.Producer({"bootstrap.servers": address, "log_level": 0})


def consumer(address: str, group: str) -> Confluent:
    settings: dict[str, Any] = {
        "bootstrap.servers": address,
        "group.id": group,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "session.timeout.ms": 6000,  # the mock cluster keeps the partitions of a closed consumer for so long
        "heartbeat.interval.ms": 1000,
    }
    return Confluent(confluent_kafka.Consumer(settings))


def committed(address: str, group: str, topic: str) -> int:
    """The sum of the group's committed offsets."""
    reader = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": group})
    try:
        partitions = reader.list_topics(topic, timeout=30).topics[topic].partitions
        places = [confluent_kafka.TopicPartition(topic, number) for number in partitions]
        return sum(max(place.offset, 0) for place in reader.committed(places, timeout=30))
    finally:
        reader.close()


def records(address: str, topic: str, count: int) -> list[confluent_kafka.Message]:
    """The first `count` records of a topic."""
    reader = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "reader"})
    try:
        partitions = reader.list_topics(topic, timeout=30).topics[topic].partitions
        reader.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in partitions])
        messages: list[confluent_kafka.Message] = []
        while len(messages) < count:
            received_messages = reader.consume(count - len(messages), timeout=10)
            assert received_messages, f"{len(messages)} of {count} records"
            messages += received_messages
        return messages
    finally:
        reader.close()
