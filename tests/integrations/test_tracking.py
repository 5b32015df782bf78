"""What a worker says at its start: that it tracks items, where, and what it saw of the service."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.programs import version
from lastbit import AsyncClient, Client
from lastbit.embedded import Lastbit
from lastbit.integrations import _tracking
from tests.integrations import workers
from tests.support.brokers import RedisServer

log = logging.getLogger("lastbit.integrations")

COMMANDS = {
    "celery": ("celery", "-A", "tests.integrations.celery.tasks", "worker", "--pool", "solo", "--loglevel", "INFO"),
    "dramatiq": ("dramatiq", "tests.integrations.dramatiq.app", "--processes", "1", "--threads", "1"),
    "rq": ("rq.cli", "worker", "--worker-class", "lastbit.integrations.rq.LastbitWorker"),
    "taskiq": ("taskiq", "worker", "--workers", "1", "tests.integrations.taskiq.app:broker"),
}


@pytest.mark.parametrize("library", COMMANDS)
def test_a_worker_says_where_it_tracks(library: str, store: Any, redis: RedisServer, service_url: str) -> None:
    """Before any item, with the log that its command shows by default, or at the level of its page."""
    url = redis.url(0)
    environment = {**dict.fromkeys(["TESTS_REDIS", "RQ_REDIS_URL", "TEST_BROKER", "TEST_NOTES"], url)}
    line = f"Lastbit tracks items at {service_url} (version {version()})"
    with workers.running(*COMMANDS[library], prints=line, LASTBIT_URL=service_url, **environment):
        pass


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port without a listener."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def test_it_is_said_once_for_each_service(
    service_url: str,
    unused_port: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without passwords; a service that can't be reached is a warning with the cause."""
    monkeypatch.setattr(_tracking, "_told", set())  # other tests of this process have told of the service
    caplog.set_level(logging.INFO, log.name)
    away = f"http://user:secret@127.0.0.1:{unused_port}"
    with Client(service_url) as client, Client(away) as lost, Lastbit(f"sqlite:///{tmp_path}/own.db") as own:
        for driver in (client.driver, lost.driver, own.client().driver) * 2:
            _tracking.announce(driver, log)
        own.migrate()
        _tracking._told.clear()
        _tracking.announce(own.client().driver, log)

    async def announce() -> None:
        async with AsyncClient(service_url) as client:
            for _ in range(2):
                await _tracking.announce_async(client.driver, log)

    asyncio.run(announce())
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    database = f"in the database sqlite:///{tmp_path}/own.db"
    assert said[0] == ("INFO", f"Lastbit tracks items at {service_url} (version {version()})")
    assert said[1][0] == said[2][0] == "WARNING"
    assert said[1][1].startswith(f"Lastbit tracks items at http://user:***@127.0.0.1:{unused_port}, but it can't be ")
    assert "refused" in said[1][1].lower()
    assert said[2][1].startswith(f"Lastbit tracks items {database}, but ")
    assert said[3:] == [("INFO", f"Lastbit tracks items {database} (version {version()})"), said[0]]
