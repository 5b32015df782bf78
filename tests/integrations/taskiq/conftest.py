"""A service, an empty Redis, and workers of taskiq's own command."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest

from lastbit import Client
from lastbit.batch import BatchHandle
from lastbit.integrations.taskiq import fan_out
from tests.integrations import workers
from tests.integrations.workers import Workers
from tests.support.brokers import RedisServer

COMMAND = ("taskiq", "worker", "--workers", "1")
READY = "Listening started"


@pytest.fixture
def app(store: Any, redis: RedisServer, service_url: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `tests.integrations.taskiq.app`, of the producer."""
    monkeypatch.setenv("TESTS_REDIS", redis.url(0))
    monkeypatch.setenv("LASTBIT_URL", service_url)
    return importlib.reload(importlib.import_module("tests.integrations.taskiq.app"))


StartWorker = Callable[..., AbstractContextManager[Workers]]


@pytest.fixture
def worker(app: ModuleType) -> StartWorker:
    """Starts a worker process, which inherits the environment."""

    def start(**environment: str) -> AbstractContextManager[Workers]:
        command = (*COMMAND, "tests.integrations.taskiq.app:broker", "--wait-tasks-timeout", "1")
        return workers.running(*command, prints=READY, **environment)

    return start


Send = Callable[..., BatchHandle]


@pytest.fixture
def send(app: ModuleType, client: Client) -> Send:
    """Fans out calls, given as pairs of a task and its arguments, in one sealed batch."""

    async def sending(calls: tuple[tuple[Any, Any], ...]) -> int:
        await app.broker.startup()
        batch = None
        for task, arguments in calls:
            batch = await fan_out(task, [arguments], batch=batch, seal=False)
        assert batch is not None
        await batch.seal()
        await app.broker.shutdown()
        return batch.id

    return lambda *calls: client.batch(asyncio.run(sending(calls)))
