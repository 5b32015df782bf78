"""The database restarts, goes away, refuses, fills up or slows down; connections are cut; the service is stopped.

Always under load, with the same outcome: each request that got a 200 is stored, once; a request that couldn't be done
got a 503 or no answer; and once the failure is over, the work goes on without help.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from core.storage import schema
from core.storage.database import Database
from tests.conftest import Server, running_server, server_kind
from tests.guarantees.drivers.load import Load, check, open_shared
from tests.mutants import mutant
from tests.support.disks import SMALL_SERVER, full, small_disk
from tests.support.proxies import Cut, Proxy, proxied
from tests.support.servers import ServiceProcess, running_service

SOAK = "LASTBIT_SOAK" in os.environ
STOPS = 200 if SOAK else 10
KILLS = 200 if SOAK else 5

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(3600 if SOAK else 300)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for this module's tests, which damage it."""
    with running_server() as running:
        yield running


UnderLoad = Callable[..., contextlib.AbstractContextManager[tuple[Load, ServiceProcess]]]


@pytest.fixture
def under_load() -> UnderLoad:
    """A service on the database, perhaps `through` a proxy's URL, and clients; their answers are compared with the
    database afterwards."""

    @contextlib.contextmanager
    def run(url: str, proxy_url: str | None = None) -> Iterator[tuple[Load, ServiceProcess]]:
        with Database(url) as database:
            schema.migrate(database)
            shared_batch = open_shared(database)
            module = "tests.guarantees.programs.mutated_api"
            with running_service(proxy_url or url, module=module, LASTBIT_LOG_LEVEL="error") as running:
                with Load(running.url, shared_batch) as load:
                    load.reaches(40)
                    yield load, running
                    load.reaches(40)  # work goes on without help
                check(load, database)

    return run


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxied(server.port) as proxy_:
        yield proxy_


def through(proxy: Proxy, url: str) -> str:
    return url.replace(f":{proxy.target}/", f":{proxy.port}/")


def unavailable(load: Load, count: int = 5) -> None:
    """Wait until `count` more calls get a 503."""
    goal = load.statuses[503] + count
    load.wait_until(lambda: load.statuses[503] >= goal)


def test_a_database_that_restarts_under_load(under_load: UnderLoad, server: Server) -> None:
    """As in an upgrade of the database: calls get a 503 or wait, and then the work goes on."""
    with under_load(server.new_database()) as (load, _):
        for _ in range(2):
            server.stop()
            server.start()
            load.reaches(20)


def test_a_database_that_is_gone_for_a_while(under_load: UnderLoad, server: Server, proxy: Proxy) -> None:
    """The service is alive but not ready, and answers 503 with Retry-After; reads and metrics answer too."""
    url = server.new_database()
    with under_load(url, through(proxy, url)) as (load, running), httpx.Client(base_url=running.url) as client:
        proxy.leave()
        unavailable(load)
        assert client.get("/healthz").status_code == 200
        for path in ("/readyz", f"/v1/batches/{load.shared}"):
            response = client.get(path)
            assert (response.status_code, response.json()["code"]) == (503, "unavailable")
            assert int(response.headers["Retry-After"]) >= 1
        assert "lastbit_database_up 0.0" in client.get("/metrics").text
        proxy.come_back()
        load.reaches(20)
        # Not at once: probes of the same second share one answer.
        running.wait_until_ready(5)


PROBE_TIMEOUT = 5.0
"""Seconds that the image's health check waits."""


def test_a_database_that_falls_silent(under_load: UnderLoad, server: Server, proxy: Proxy) -> None:
    """No answer and no error, as behind a firewall: the service stays alive, and the work goes on afterwards."""
    url = server.new_database()
    with under_load(url, through(proxy, url)) as (load, running), httpx.Client(base_url=running.url) as client:
        proxy.fall_silent()
        assert client.get("/healthz").status_code == 200
        response = client.get("/readyz", timeout=PROBE_TIMEOUT)
        assert (response.status_code, response.json()["code"]) == (503, "unavailable")
        assert "lastbit_database_up 0.0" in client.get("/metrics").text
        proxy.speak()
        load.reaches(20)


def test_a_database_that_is_slow(under_load: UnderLoad, server: Server, proxy: Proxy) -> None:
    """Each round trip takes 20 ms more: answers are late, but no call is refused."""
    url = server.new_database()
    with under_load(url, through(proxy, url)) as (load, _):
        proxy.delay = 0.02
        load.reaches(20)
        proxy.delay = 0
    assert set(load.statuses) <= {200, 201}
    assert load.lost == 0


def test_a_database_that_is_read_only(under_load: UnderLoad, server: Server) -> None:
    """Writes get a 503, reads are answered; afterwards writes work again."""
    url = server.new_database()
    with under_load(url, server.unprivileged(url)) as (load, running), server.read_only():
        unavailable(load)
        read = httpx.get(f"{running.url}/v1/batches/{load.shared}")
        assert (read.status_code, read.json()["state"]) == (200, "open")


@pytest.fixture
def server_on_a_small_disk() -> Iterator[tuple[Server, Path]]:
    with small_disk(128) as disk, running_server(folder=disk, options=SMALL_SERVER[server_kind()]) as running:
        yield running, disk


def test_a_full_disk_under_a_server(under_load: UnderLoad, server_on_a_small_disk: tuple[Server, Path]) -> None:
    """503 while it is full, and nothing that was answered is lost."""
    server, disk = server_on_a_small_disk
    with under_load(server.new_database()) as (load, _):
        with full(disk):
            unavailable(load)
        before = load.answered

        def recovers() -> bool:
            # PostgreSQL ends if it can't write its log, and an administrator starts it again.
            if server.process is not None and server.process.poll() is not None:
                server.start()
            return load.answered > before

        load.wait_until(recovers)


def test_a_full_disk_under_sqlite(under_load: UnderLoad) -> None:
    """503 while it is full, and nothing that was answered is lost."""
    with small_disk(8) as disk, under_load(f"sqlite:///{disk}/lastbit.db") as (load, _), full(disk):
        unavailable(load)


def test_connections_that_are_killed(under_load: UnderLoad, server: Server) -> None:
    """By an administrator or a timeout, all connections at once, several times: the service repeats its work, mostly
    unnoticed."""
    url = server.new_database()
    kills = 0
    with under_load(url) as (load, _):
        for _ in range(KILLS):
            kills += server.end_sessions(url)
            load.reaches(10)
    assert kills >= KILLS


@mutant(
    "a-lost-commit-counts-as-done",
    "core.storage.database:Database._transaction",
    "self._judge(tx, error, committing=committing)",
    """
        if committing:
            tx.invalidate()
            return done
        self._judge(tx, error, committing=committing)
    """,
)
@pytest.mark.parametrize("cut", ["before", "amid", "after"])
def test_connections_that_are_cut_at_the_commit(under_load: UnderLoad, server: Server, proxy: Proxy, cut: Cut) -> None:
    """The client can't know whether the commit was done. Either way it is done once, and exactly one call gets
    `newly`."""
    url = server.new_database()
    with under_load(url, through(proxy, url)) as (load, _):
        proxy.cut = cut
        load.reaches(5000 if SOAK else 60, 600)
        proxy.cut = None
    assert proxy.cuts >= 3


def test_a_service_that_is_stopped_under_load(under_load: UnderLoad, server: Server) -> None:
    """SIGTERM: calls under way are answered or not; no answer is wrong, and each process ends on its own."""
    with under_load(server.new_database()) as (load, running):
        for _ in range(STOPS):
            assert running.stop(signal.SIGTERM) == -signal.SIGTERM
            running.start()
            load.reaches(10)
    assert set(load.statuses) <= {200, 201, 503}
