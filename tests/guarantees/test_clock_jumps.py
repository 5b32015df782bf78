"""Wall clocks that jump by days, forward and back, under load: those of the service and its jobs, and the database's.

Nothing depends on the first. Leases, expiry and timers depend on the second (docs/database.md, "Clocks"): a jump makes
them early or late, and loses nothing.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy.engine import Connection

from core import janitor
from core.batches import expiry
from core.commits.combiner import Inline
from core.processes import timers
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from core.storage.statements import Pipeline
from lastbit import Client
from lastbit.errors import StaleEpoch
from lastbit.groups import Granted
from lastbit.streams import AckWindow
from tests.conftest import KINDS, need, running_server
from tests.guarantees.drivers.releases import Everything, assert_nothing_lost
from tests.support.clocks import LIBRARY, WallClock
from tests.support.receivers import Receiver
from tests.support.servers import ROOT, ServiceProcess, running_service, sqlite_file

pytestmark = [pytest.mark.slow, pytest.mark.mariadb, pytest.mark.timeout(300)]

PATIENT = 60.0
"""Seconds that a slow machine may take; a wait that followed the jumping clock would take days."""


@pytest.fixture
def clock() -> Iterator[WallClock]:
    need("faketime", LIBRARY is not None)
    with tempfile.TemporaryDirectory(prefix="lastbit-clock-") as folder:
        Path(folder).chmod(0o755)  # a server with an account of its own reads it
        yield WallClock(Path(folder))


def becomes(condition: Callable[[], bool]) -> None:
    end, pause = time.monotonic() + PATIENT, threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.1)


@contextlib.contextmanager
def waiting(url: str, batch: int, seconds: int = 2) -> Iterator[None]:
    """Meanwhile one client waits for the batch's end and another for events of a type that is never appended: for as
    long as they asked, neither longer nor shorter."""
    durations: dict[str, float] = {}

    def wait(path: str) -> None:
        start = time.monotonic()
        httpx.get(f"{url}/v1/{path}wait={seconds}", timeout=PATIENT).raise_for_status()
        durations[path] = time.monotonic() - start

    threads = [
        threading.Thread(target=wait, args=(path,)) for path in (f"batches/{batch}?", "events?after=0&type=none.such&")
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    assert len(durations) == 2
    assert all(seconds - 0.1 <= duration < PATIENT for duration in durations.values()), durations


def set_timer(database: Database, name: str, after: timedelta) -> None:
    def write(tx: Connection) -> None:
        pipeline = Pipeline(tx)
        changes = timers.TimerChanges()
        changes.change("clocks", "one", [timers.TimerChange(name, after)])
        changes.write(pipeline, tables.clock(tx))
        pipeline.flush()

    database.write(write)


def fired(database: Database) -> list[str]:
    """The names of the timers that have fired."""
    page = Service(database, combiner=Inline).feed.read(0, 1000, types=[timers.event_type("clocks")])
    return [str(event.data).partition('"timer":"')[2].partition('"')[0] for event in page.events]


def all_alive(*processes: ServiceProcess | subprocess.Popen[bytes]) -> bool:
    return all(
        (process.process if isinstance(process, ServiceProcess) else process).poll() is None for process in processes
    )  # type: ignore[union-attr]


def test_the_clock_of_the_service_and_its_jobs_may_jump(
    clock: WallClock, server_database: Database, server_url: str, receiver: Receiver
) -> None:
    """Clients see what they would see with the right time: no lease ends, no timer fires, nothing expires, waits last
    as long as they should, and receivers accept the webhooks' signatures."""
    environment = {"LASTBIT_WEBHOOKS_ALLOW_PRIVATE": "true", **clock.environment}

    def job(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"jobs.{name}", "--database-url", server_url]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.PIPE)

    with contextlib.ExitStack() as stack:
        service = stack.enter_context(running_service(server_url, **environment))
        dispatcher = stack.enter_context(job("dispatcher"))
        stack.callback(dispatcher.kill)
        client = stack.enter_context(Client(service.url))
        receiver.secrets.append(client.webhooks.create(receiver.url, types=["batch.completed"]).secret)
        idle = client.open(items=1, expires_in=3600)
        client.groups.create("clocks", partitions=2, ttl=PATIENT * 5)
        leases = client.groups.sync("clocks", "worker", "session").assigned
        set_timer(server_database, "in an hour", timedelta(hours=1))
        with Everything(service) as load:
            for days in (2, -4, 0):
                with waiting(service.url, load.shared):
                    load.reaches(2)  # by now both clients wait
                    clock.jump(days)
                    load.reaches(20)
                assert client.groups.sync("clocks", "worker", "session").assigned == leases
                set_timer(server_database, f"{days}", timedelta())
                becomes(lambda days=days: f"{days}" in fired(server_database))  # type: ignore[misc]
                if days:
                    with job("janitor") as rejected_job:
                        assert rejected_job.wait(PATIENT) == 1
                        assert rejected_job.stderr is not None
                        assert b"the database's clock differs from this machine's" in rejected_job.stderr.read()
            assert all_alive(service, dispatcher)
        assert client.batch(idle.id).refresh().state == "open"
        assert fired(server_database) == ["2", "-4", "0"]
        expected_ids = {f"batch:{batch}:completed" for batch in load.finished}
        becomes(lambda: expected_ids <= {webhook.id for webhook in list(receiver.got)})
        assert all(webhook.valid for webhook in receiver.got)
    assert_nothing_lost(load, server_url)


@pytest.fixture(params=KINDS)
def jumping(request: pytest.FixtureRequest, clock: WallClock) -> Iterator[tuple[Database, ServiceProcess]]:
    """A database whose clock the test sets, and a service on it. SQLite uses the service's clock."""
    with contextlib.ExitStack() as stack:
        environment = {"LASTBIT_JANITOR_EVERY": "0.5"}
        if request.param == "sqlite":
            url = stack.enter_context(sqlite_file())
            environment |= clock.environment
        else:
            url = stack.enter_context(running_server(environment=clock.environment)).new_database()
        database = stack.enter_context(Database(url))
        schema.migrate(database)
        yield database, stack.enter_context(running_service(url, **environment))


def commit(client: Client, worker: str, lease: Granted) -> None:
    window = AckWindow()
    window.track(1)
    client.groups.commit("clocks", lease.partition, worker=worker, epoch=lease.epoch, snapshot=window.snapshot())


def run_jobs(database: Database) -> None:
    """On SQLite the service runs them itself."""
    if not database.is_embedded:
        janitor.run_once(database, expiry.Policy())
        timers.fire(database)


def test_the_clock_of_the_database_may_jump(jumping: tuple[Database, ServiceProcess], clock: WallClock) -> None:
    """Forward: idle batches expire and timers fire early, leases end and their holders are fenced. Backward: a lease
    lasts no longer than one acquired now. Either way each batch completes exactly once with one event, the feed has no
    gap, and waits last as long as they should."""
    database, service = jumping
    with Client(service.url) as client, Everything(service) as load:
        idle = client.open(items=1, expires_in=3600)
        client.groups.create("clocks", partitions=2, ttl=2)
        set_timer(database, "in an hour", timedelta(hours=1))
        first = client.groups.sync("clocks", "first", "1").assigned
        before = client.batch(load.shared).refresh().created_at

        with waiting(service.url, load.shared):
            load.reaches(2)
            clock.jump(2)
            load.reaches(20)
        second = client.groups.sync("clocks", "second", "2").assigned
        assert [lease.partition for lease in second] == [lease.partition for lease in first] == [0, 1]
        for old_lease, new_lease in zip(first, second, strict=True):
            assert new_lease.epoch > old_lease.epoch
            with pytest.raises(StaleEpoch):
                commit(client, "first", old_lease)
            commit(client, "second", new_lease)
        run_jobs(database)
        becomes(lambda: client.batch(idle.id).refresh().state == "expired")
        assert [rejection.reason for rejection in client.ack(f"{idle.id}:0:0").rejected] == ["expired"]
        becomes(lambda: fired(database) == ["in an hour"])
        newer = client.open().refresh()
        assert newer.created_at - before > timedelta(days=1)

        with waiting(service.url, load.shared):
            load.reaches(2)
            clock.jump(-4)
            load.reaches(20)
        older = client.open().refresh()
        assert older.created_at < before
        assert older.id > newer.id
        assert [batch.id for batch in client.batches() if batch.id in (newer.id, older.id)] == [
            older.id,
            newer.id,
        ]
        # A lease acquired in the future still ends after its ttl.
        becomes(lambda: len(client.groups.sync("clocks", "third", "3").assigned) == 2)
        run_jobs(database)

        clock.jump(0)
        load.reaches(20)
        assert all_alive(service)
    assert fired(database) == ["in an hour"]
    assert_nothing_lost(load, str(database.url.render_as_string(hide_password=False)))
