"""Kafka: librdkafka's mock cluster."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

import confluent_kafka
import pytest

from lastbit import BatchHandle
from lastbit.integrations import kafka as adapter
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, consumed
from tests.integrations.kafka.conftest import committed, consumer


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 8
    follows: ClassVar = True
    skip_ended = True

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._cluster = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = self._cluster.list_topics(timeout=30).brokers.values()
        self._address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        self._topic = str(uuid.uuid4())
        self._sent = 0

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        self._sent += len(bodies)
        producer = confluent_kafka.Producer({"bootstrap.servers": self._address, "log_level": 0})
        return adapter.fan_out(producer, self._topic, bodies, seal=seal, lastbit=link.client)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        def run(**options: object) -> None:
            reader = consumer(self._address, "workers")
            adapter.consume(reader, [self._topic], lambda record: handle(record.value().decode()), **options)  # type: ignore[arg-type]

        return consumed(
            run, link, until, on_completed=on_completed, skip_ended=self.skip_ended, retry_delay=0, every=0.05
        )

    def left(self) -> int:
        return self._sent - committed(self._address, "workers", self._topic)
