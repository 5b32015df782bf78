"""RabbitMQ: a real node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pika
import pytest

from lastbit import BatchHandle
from lastbit.integrations import rabbitmq as adapter
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, consumed


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 8
    follows: ClassVar = True
    skip_ended = True

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._url = request.getfixturevalue("rabbitmq").url
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            self._queue = connection.channel().queue_declare("", auto_delete=False).method.queue

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        return adapter.fan_out(self._url, self._queue, bodies, seal=seal, lastbit=link.client)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        def run(**options: object) -> None:
            adapter.consume(self._url, self._queue, lambda message: handle(message.body.decode()), **options)  # type: ignore[arg-type]

        return consumed(run, link, until, on_completed=on_completed, skip_ended=self.skip_ended, retry_delay=0)

    def left(self) -> int:
        with pika.BlockingConnection(pika.URLParameters(self._url)) as connection:
            count: int = connection.channel().queue_declare(self._queue, passive=True).method.message_count
            return count
