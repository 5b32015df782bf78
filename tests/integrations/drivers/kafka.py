"""Kafka: librdkafka's mock cluster."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import ClassVar

import confluent_kafka
import pytest

from lastbit import BatchHandle
from lastbit.failures import Redrive
from lastbit.integrations import Skipped
from lastbit.integrations import kafka as adapter
from lastbit.integrations._untracked import WhenUntracked
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, consumed
from tests.integrations.kafka.conftest import committed, consumer


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 8
    follows: ClassVar = True
    questions: ClassVar = 30
    loses_ids: ClassVar = True
    skipped: ClassVar = Skipped
    skip_ended = True
    untracked: WhenUntracked = "handle"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._cluster = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = self._cluster.list_topics(timeout=30).brokers.values()
        self._address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        self._topic = str(uuid.uuid4())
        self._sent = 0
        self._attempts = 0
        self._dead: list[bytes] = []

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        self._sent += len(bodies)
        return adapter.fan_out(self._producer(), self._topic, bodies, seal=seal, lastbit=link.given)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        producer = confluent_kafka.Producer({"bootstrap.servers": self._address, "log_level": 0})
        count = adapter.resend(producer, self._topic, redrive, bodies, lastbit=link.given)
        self._sent += count
        return count

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        def run(**options: object) -> None:
            reader = consumer(self._address, "workers")
            adapter.consume(reader, [self._topic], lambda record: handle(record.value().decode()), **options)  # type: ignore[arg-type]

        return consumed(
            run,
            link,
            until,
            on_completed=on_completed,
            skip_ended=self.skip_ended,
            untracked=self.untracked,
            dead_letter=self._bury if self.untracked == "refuse" else None,
            retry_delay=0,
            every=0.05,
        )

    def left(self) -> int:
        return self._sent - committed(self._address, "workers", self._topic)

    def send_body(self, body: str, item: str | None) -> None:
        self._sent += 1
        producer = self._producer()
        producer.produce(self._topic, body, headers={} if item is None else {adapter.ITEM: item})
        producer.flush()

    def refused(self) -> int:
        return len(self._dead)

    def _producer(self) -> confluent_kafka.Producer:
        return confluent_kafka.Producer({"bootstrap.servers": self._address, "log_level": 0})

    def _bury(self, record: confluent_kafka.Message, error: Exception) -> None:
        """At the second attempt."""
        self._attempts += 1
        if self._attempts == 1:
            raise ConnectionError("no broker takes it now")
        self._dead.append(record.value())
