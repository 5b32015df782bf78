"""A service, an empty Redis, and workers of Dramatiq's own command."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import dramatiq
import pytest

from tests.integrations import workers
from tests.integrations.workers import Workers
from tests.support.brokers import RedisServer


@pytest.fixture
def app(store: Any, redis: RedisServer, service_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module `tests.integrations.dramatiq.app`, of the producer."""
    monkeypatch.setenv("TESTS_REDIS", redis.url(0))
    monkeypatch.setenv("LASTBIT_URL", service_url)
    module = importlib.import_module("tests.integrations.dramatiq.app")
    module = importlib.reload(module)
    yield module
    dramatiq.set_broker(None)  # type: ignore[arg-type]


StartWorker = Callable[..., AbstractContextManager[Workers]]


@pytest.fixture
def worker(app: ModuleType) -> StartWorker:
    """Starts a worker process with four threads, which inherits the environment."""

    def start(**environment: str) -> AbstractContextManager[Workers]:
        command = ["dramatiq", "tests.integrations.dramatiq.app", "--processes", "1", "--threads", "4"]
        return workers.running(*command, prints="ready for action", **environment)

    return start
