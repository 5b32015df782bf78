"""RabbitMQ: a real node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pika
import pytest

from lastbit import BatchHandle
from lastbit.failures import Redrive
from lastbit.integrations import Skipped
from lastbit.integrations import rabbitmq as adapter
from lastbit.integrations._untracked import WhenUntracked
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, consumed


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 8
    follows: ClassVar = True
    questions: ClassVar = 10
    loses_ids: ClassVar = True
    skipped: ClassVar = Skipped
    skip_ended = True
    untracked: WhenUntracked = "handle"

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._url = request.getfixturevalue("rabbitmq").url
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            channel = connection.channel()
            self._dead = channel.queue_declare("").method.queue
            dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": self._dead}
            self._queue = channel.queue_declare("", arguments=dead).method.queue

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        return adapter.fan_out(self._url, self._queue, bodies, seal=seal, lastbit=link.given)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        return adapter.resend(self._url, self._queue, redrive, bodies, lastbit=link.given)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        def run(**options: object) -> None:
            adapter.consume(self._url, self._queue, lambda message: handle(message.body.decode()), **options)  # type: ignore[arg-type]

        return consumed(
            run,
            link,
            until,
            on_completed=on_completed,
            skip_ended=self.skip_ended,
            untracked=self.untracked,
            retry_delay=0,
        )

    def left(self) -> int:
        return self._count(self._queue)

    def send_body(self, body: str, item: str | None) -> None:
        properties = pika.BasicProperties(headers=None if item is None else {adapter.ITEM: item})
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            connection.channel().basic_publish("", self._queue, body.encode(), properties)

    def refused(self) -> int:
        return self._count(self._dead)

    def _count(self, queue: str) -> int:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            count: int = connection.channel().queue_declare(queue, passive=True).method.message_count
            return count
