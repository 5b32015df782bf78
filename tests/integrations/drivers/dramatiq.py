"""Dramatiq: a real Redis, and a worker in this process."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.brokers.redis import RedisBroker

from lastbit import BatchHandle
from lastbit.failures import Redrive
from lastbit.integrations import Failed
from lastbit.integrations.dramatiq import LastbitMiddleware, Skipped, fan_out, resend
from tests.integrations.drivers import Handle, Link, OnCompleted, Until
from tests.integrations.workers import wait_until


class Driver:
    pauses: ClassVar = True
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 2
    follows: ClassVar = True
    questions: ClassVar = 20
    loses_ids: ClassVar = False
    skipped: ClassVar = Skipped
    skip_ended = True

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._namespace = str(uuid.uuid4())
        self._broker = RedisBroker(url=request.getfixturevalue("redis").url(0), namespace=self._namespace)
        self._handle: Handle = lambda body: None

        def task(body: str) -> None:
            self._handle(body)

        self._actor: Any = dramatiq.actor(task, broker=self._broker, max_retries=1, min_backoff=1, throws=Failed)

    def _use(self, link: Link, on_completed: OnCompleted | None = None) -> None:
        """The broker is that of producer and worker, so its middleware changes."""
        self._broker.middleware = [each for each in self._broker.middleware if type(each) is not LastbitMiddleware]
        middleware = LastbitMiddleware(
            client=link.given, on_completed=on_completed, skip_ended=self.skip_ended, shutdown_timeout=1
        )
        self._broker.add_middleware(middleware)

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        self._use(link)
        return fan_out(map(self._actor.message, bodies), broker=self._broker, seal=seal)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        self._use(link)
        return resend(redrive, map(self._actor.message, bodies), broker=self._broker)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        self._use(link, on_completed)
        self._handle = handle
        worker = Worker(self._broker, worker_timeout=50, worker_threads=2)
        worker.start()
        try:
            wait_until(until, "the messages are handled")
        finally:
            worker.stop()
        return None

    def left(self) -> int:
        return sum(self._broker.client.hlen(f"{self._namespace}:{queue}.msgs") for queue in ("default", "default.DQ"))
