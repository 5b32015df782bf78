"""RQ: a real Redis, and workers that don't fork."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import redis as redis_py
from rq import Queue, Retry

from lastbit import BatchHandle, Client
from lastbit.errors import LastbitError
from lastbit.failures import Redrive
from lastbit.integrations import Skipped
from lastbit.integrations import rq as adapter
from lastbit.integrations.rq import _worker
from lastbit.integrations.rq._unacked import noted
from tests.integrations.drivers import Handle, Link, OnCompleted, Until, repeated

_handles: list[Handle] = []


def task(body: str) -> None:
    _handles[-1](body)


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = False
    handlers: ClassVar = 1
    follows: ClassVar = True
    questions: ClassVar = 30
    loses_ids: ClassVar = False
    skipped: ClassVar = Skipped
    skip_ended = True

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._store = redis_py.Redis.from_url(request.getfixturevalue("redis").url(0))
        self._store.flushall()
        self._queue = Queue(connection=self._store)
        request.getfixturevalue("monkeypatch").setattr(_worker, "PATIENCE", 1.0)

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        calls = [(body,) for body in bodies]
        return adapter.fan_out(self._queue, task, calls, options={"retry": Retry(max=1)}, seal=seal, client=link.given)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        calls = [(body,) for body in bodies]
        return adapter.resend(self._queue, task, redrive, calls, options={"retry": Retry(max=1)}, client=link.given)

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        class Worker(adapter.LastbitSimpleWorker):
            def lastbit_client(self) -> Client:
                return link.given

        Worker.skip_ended = self.skip_ended
        _handles.append(handle)
        try:
            repeated(lambda: Worker([self._queue], connection=self._store).work(burst=True), until)
        except LastbitError as error:
            return error
        return None

    def left(self) -> int:
        return self._queue.count + len(noted(self._store, self._queue.name))
