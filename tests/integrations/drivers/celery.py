"""Celery: a real Redis, and a worker in a thread."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import redis as redis_py
from celery import Celery, _state
from celery.platforms import EX_OK
from celery.worker import state
from celery.worker.worker import WorkController

from lastbit import BatchHandle
from lastbit.failures import Redrive
from lastbit.integrations.celery import Lastbit, Skipped
from lastbit.integrations.celery import worker as adapter
from tests.integrations.drivers import Handle, Link, OnCompleted, Until
from tests.integrations.workers import wait_until


class Driver:
    pauses: ClassVar = False
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 1
    follows: ClassVar = True
    questions: ClassVar = 30
    loses_ids: ClassVar = False
    skipped: ClassVar = Skipped
    skip_ended = True

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._url = request.getfixturevalue("redis").url(3)
        self._queue = str(uuid.uuid4())
        request.getfixturevalue("monkeypatch").setattr(adapter, "PATIENCE", 1.0)
        request.addfinalizer(lambda: setattr(state, "should_stop", None))

    def _app(self, link: Link, **options: Any) -> tuple[Lastbit, Any]:
        """An app and its task. Each client has its own, as a `Lastbit` belongs to one app."""
        app = Celery("tests", broker=self._url, set_as_current=False)
        app.conf.update(
            task_acks_late=True,
            task_default_queue=self._queue,
            broker_transport_options={"global_keyprefix": self._queue},
        )
        lastbit = Lastbit(app, **link.for_celery, **options)
        lastbit._new_client = lambda: link.client  # type: ignore[assignment]

        @app.task(name="task", shared=False, autoretry_for=(ConnectionError,), retry_kwargs={"countdown": 0})  # type: ignore[misc]
        def task(body: str) -> None:
            self._handle(body)

        return lastbit, task

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        lastbit, task = self._app(link)
        return lastbit.fan_out(map(task.s, bodies), seal=seal)

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        lastbit, task = self._app(link)
        return lastbit.resend(redrive, map(task.s, bodies))

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        self._handle = handle
        state.should_stop = None
        lastbit, _ = self._app(link, on_completed=on_completed, skip_ended=self.skip_ended)
        worker = WorkController(
            app=lastbit.app, pool="solo", without_heartbeat=True, without_mingle=True, without_gossip=True
        )

        def run() -> None:
            lastbit.app.set_current()  # as Celery's command does; retries need it
            worker.start()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_until(lambda: until() or not thread.is_alive(), "the messages are handled")
        finally:
            if state.should_stop is None:
                state.should_stop = EX_OK
            thread.join(60)
            _state._set_task_join_will_block(False)  # this process is no worker any more
        return worker.exitcode or None

    def left(self) -> int:
        with redis_py.Redis.from_url(self._url) as store:
            return int(store.llen(self._queue * 2)) + int(store.hlen(f"{self._queue}unacked"))
