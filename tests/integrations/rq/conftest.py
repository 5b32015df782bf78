"""A service, an empty Redis, and workers of RQ's own command."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest

from tests.integrations import workers
from tests.integrations.workers import Workers
from tests.support.brokers import RedisServer

COMMAND = ("rq.cli", "worker", "--worker-class", "lastbit.integrations.rq.LastbitWorker")
READY = "Listening on default"


@pytest.fixture
def app(store: Any, redis: RedisServer, service_url: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `tests.integrations.rq.app`, of the producer."""
    monkeypatch.setenv("TESTS_REDIS", redis.url(0))
    monkeypatch.setenv("RQ_REDIS_URL", redis.url(0))
    monkeypatch.setenv("LASTBIT_URL", service_url)
    return importlib.reload(importlib.import_module("tests.integrations.rq.app"))


StartWorker = Callable[..., AbstractContextManager[Workers]]


@pytest.fixture
def worker(app: ModuleType) -> StartWorker:
    """Starts a worker process, which inherits the environment."""
    return lambda **environment: workers.running(*COMMAND, prints=READY, **environment)
