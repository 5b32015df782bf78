"""Each alert fires when its fault is caused in a real service, and none does on a healthy one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import need
from tests.support import alerts
from tests.support.alerts import Reading
from tests.support.disks import full, small_disk
from tests.support.exposition import eventually, value
from tests.support.servers import ServiceProcess, running_service, sqlite_file

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def promtool() -> None:
    need("prometheus", shutil.which("promtool") is not None)


def client_of(service: ServiceProcess) -> httpx.Client:
    return httpx.Client(base_url=service.url, timeout=60)


@pytest.fixture(scope="module")
def healthy() -> Iterator[Reading]:
    """A service with some work."""
    with sqlite_file() as url, running_service(url) as running, client_of(running) as client:
        batch = client.post("/v1/batches", json={"items": 3}).json()["id"]
        client.post("/v1/acks", json={"items": [f"{batch}:0:0"]})
        yield alerts.read(client)


def test_none_fires_in_a_healthy_hour(healthy: Reading, tmp_path: Path) -> None:
    assert alerts.fired(tmp_path, healthy) == set()


def test_a_full_disk(healthy: Reading, tmp_path: Path) -> None:
    with (
        small_disk(16) as disk,
        running_service(f"sqlite:///{disk}/lastbit.db", LASTBIT_LOG_LEVEL="error") as running,
        client_of(running) as client,
        full(disk),
    ):
        eventually(lambda: value(client, "lastbit_write_stall_seconds") > 0, True)
        faulty = alerts.read(client)
    assert "LastbitNoWrites" in alerts.fired(tmp_path, healthy, faulty)
