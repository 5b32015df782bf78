"""Each alert fires when its fault is caused in a real service, and none does on a healthy one."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import httpx
import psycopg
import pytest

from core.storage import schema
from core.storage.database import Database
from lastbit import tokens
from lastbit.tokens import Role
from tests.conftest import Server, need, running_server
from tests.deploy.test_prometheus import rules
from tests.support import alerts
from tests.support.alerts import Reading
from tests.support.clocks import LIBRARY, WallClock
from tests.support.disks import full, small_disk
from tests.support.exposition import eventually, value
from tests.support.postgresql import PostgreSQL
from tests.support.receivers import Receiver, status
from tests.support.servers import ServiceProcess, run_module, running_service, sqlite_file

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


class Fires(Protocol):
    """Whether the alert fires when a healthy service has become what the reading shows, for so many minutes."""

    def __call__(self, alert: str, faulty: Reading, *, minutes: int = 60, healthy: Reading | None = None) -> bool: ...


@pytest.fixture(scope="module", autouse=True)
def promtool() -> None:
    need("prometheus", shutil.which("promtool") is not None)


def new_database(server: Server) -> str:
    """The URL of a database with the schema."""
    url = server.new_database()
    with Database(url) as database:
        schema.migrate(database)
    return url


@contextlib.contextmanager
def service(url: str, module: str = "api", **settings: str) -> Iterator[tuple[ServiceProcess, httpx.Client]]:
    settings = {"LASTBIT_LOG_LEVEL": "error", **settings}
    with (
        running_service(url, module=module, **settings) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        yield running, client


@pytest.fixture(scope="module")
def healthy() -> Reading:
    """A service with some work."""
    with sqlite_file() as url, service(url, LASTBIT_JANITOR_EVERY="1") as (_, client):
        batch = client.post("/v1/batches", json={"items": 3}).json()["id"]
        client.post("/v1/acks", json={"items": [f"{batch}:0:0"]})
        for job in ("janitor", "dispatcher", "deadlines"):
            eventually(lambda job=job: value(client, "lastbit_job_age_seconds", name=job) < 60, True)  # type: ignore[misc]
        return alerts.read(client)


@pytest.fixture
def fires(healthy: Reading, tmp_path: Path) -> Fires:
    usual = healthy

    def check(alert: str, faulty: Reading, *, minutes: int = 60, healthy: Reading | None = None) -> bool:
        return alert in alerts.fired(tmp_path, healthy or usual, faulty, minutes=minutes)

    return check


@pytest.fixture
def clock() -> Iterator[WallClock]:
    need("faketime", LIBRARY is not None)
    with tempfile.TemporaryDirectory(prefix="lastbit-clock-") as folder:
        Path(folder).chmod(0o755)  # a server with an account of its own reads it
        yield WallClock(Path(folder))


def test_none_fires_in_a_healthy_hour(healthy: Reading, tmp_path: Path) -> None:
    assert alerts.fired(tmp_path, healthy) == set()


def test_a_service_that_is_gone(sqlite_url: str, fires: Fires) -> None:
    with service(sqlite_url) as (running, client):
        running.stop(signal.SIGKILL)
        assert fires("LastbitDown", alerts.read(client))


def test_a_full_disk(fires: Fires) -> None:
    with small_disk(16) as disk, service(f"sqlite:///{disk}/lastbit.db") as (_, client), full(disk):
        # Small writes fit into the file of the log for a while.
        eventually(lambda: value(client, "lastbit_write_stall_seconds") > 2, True)
        faulty = alerts.read(client, lambda: client.post("/v1/batches", json={}))
        assert fires("LastbitNoWrites", faulty)
        assert fires("LastbitUnavailable", faulty)


@contextlib.contextmanager
def hanging_commits(server: Server) -> Iterator[None]:
    """On PostgreSQL they wait for a standby that doesn't exist; on MariaDB for a backup that has locked all tables."""
    if isinstance(server, PostgreSQL):
        with psycopg.connect(server.new_database(), autocommit=True) as administrator:
            administrator.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            administrator.execute("SELECT pg_reload_conf()")
        yield
        return
    with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("FLUSH TABLES WITH READ LOCK")
        yield


@pytest.mark.mariadb
def test_commits_that_hang_while_reads_work(mortal_server: Server, fires: Fires) -> None:
    url = new_database(mortal_server)
    with service(url) as (_, client), hanging_commits(mortal_server):
        eventually(lambda: value(client, "lastbit_write_stall_seconds") > 2, True)
        assert client.get("/v1/batches").status_code == 200
        assert client.get("/readyz").status_code == 503
        assert fires("LastbitNoWrites", alerts.read(client))


@pytest.mark.mariadb
def test_a_database_that_is_gone(mortal_server: Server, fires: Fires) -> None:
    url = new_database(mortal_server)
    with service(url) as (_, client):
        mortal_server.stop(signal.SIGKILL)
        eventually(lambda: value(client, "lastbit_database_up"), 0)
        faulty = alerts.read(client, lambda: client.post("/v1/batches", json={}))
    assert fires("LastbitDatabaseAway", faulty)
    assert fires("LastbitDatabaseUnsteady", faulty)


def test_an_event_loop_that_stalls(sqlite_url: str, fires: Fires) -> None:
    module = "tests.guarantees.programs.blocked_api"
    with (
        running_service(sqlite_url, module=module) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        assert running.process is not None
        running.process.send_signal(signal.SIGUSR1)
        eventually(lambda: value(client, "lastbit_event_loop_lag_seconds") > 1, True)
        assert fires("LastbitEventLoopStalls", alerts.read(client))


@pytest.mark.mariadb
def test_requests_that_wait_for_a_thread(mortal_server: Server, fires: Fires) -> None:
    """The database is silent, so all threads wait for it."""
    url = new_database(mortal_server)

    def ask(running: ServiceProcess) -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{running.url}/v1/webhooks", timeout=60)

    with service(url) as (running, client), mortal_server.frozen():
        threads = [threading.Thread(target=ask, args=(running,), daemon=True) for _ in range(60)]
        for thread in threads:
            thread.start()
        eventually(lambda: value(client, "lastbit_thread_wait_seconds") > 1, True)
        assert value(client, "lastbit_waiting_requests") > 0
        assert fires("LastbitThreadsBusy", alerts.read(client))


@contextlib.contextmanager
def memory_limit(pid: int, limit: int) -> Iterator[None]:
    """The process is in a control group with this limit, in bytes."""
    version_1 = Path("/sys/fs/cgroup/memory").is_dir()
    folder = Path("/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup") / f"lastbit-test-{pid}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
    except OSError as error:
        pytest.skip(f"may not make a control group with a limit: {error}")
    try:
        home = folder.parent / "cgroup.procs"
        (folder / "cgroup.procs").write_text(str(pid))
        yield
        home.write_text(str(pid))
    finally:
        folder.rmdir()


def test_memory_near_the_limit(sqlite_url: str, fires: Fires) -> None:
    with service(sqlite_url) as (running, client):
        assert running.process is not None
        used = int(value(client, "lastbit_resident_memory_bytes"))
        assert used > 2**20
        with memory_limit(running.process.pid, used * 21 // 20):
            eventually(lambda: value(client, "lastbit_memory_limit_bytes") < used * 11 / 10, True)
            assert fires("LastbitMemoryShort", alerts.read(client))


def test_connections_near_the_limit(sqlite_url: str, fires: Fires) -> None:
    with service(sqlite_url, LASTBIT_MAX_CONNECTIONS="20") as (running, client), contextlib.ExitStack() as stack:
        for _ in range(18):
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        eventually(lambda: value(client, "lastbit_connections") > 18, True)
        assert fires("LastbitConnectionsShort", alerts.read(client))


@pytest.mark.parametrize("damage", ["garbage", "gone"])
def test_a_token_file_that_cannot_be_read(sqlite_url: str, tmp_path: Path, fires: Fires, damage: str) -> None:
    secret = tokens.new()
    file = tmp_path / "tokens"
    file.write_text(tokens.known(secret, "metrics", [Role.READ]).line() + "\n")
    with service(sqlite_url, LASTBIT_TOKENS_FILE=str(file)) as (_, client):
        client.headers["Authorization"] = f"Bearer {secret}"
        assert value(client, "lastbit_tokens_unreadable") == 0
        if damage == "garbage":
            file.write_text("no token\n")
        else:
            file.unlink()
        eventually(lambda: value(client, "lastbit_tokens_unreadable"), 1)
        assert fires("LastbitTokensUnreadable", alerts.read(client))


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_of_the_service_that_is_set(sqlite_url: str, clock: WallClock, fires: Fires, days: int) -> None:
    with service(sqlite_url, **clock.environment) as (_, client):
        clock.jump(days)
        eventually(lambda: value(client, "lastbit_clock_step_seconds") > 80_000, True)
        assert fires("LastbitClockSet", alerts.read(client))


@pytest.mark.mariadb
@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_of_the_database_that_is_set(clock: WallClock, fires: Fires, days: int) -> None:
    with running_server(environment=clock.environment) as server, service(new_database(server)) as (_, client):
        assert abs(value(client, "lastbit_database_clock_ahead_seconds")) < 1
        clock.jump(days)
        eventually(lambda: value(client, "lastbit_database_clock_ahead_seconds") * days > 80_000, True)
        assert fires("LastbitClocksDisagree", alerts.read(client))


@pytest.mark.mariadb
def test_jobs_that_never_ran(mortal_server: Server, fires: Fires) -> None:
    with service(new_database(mortal_server)) as (_, client):
        faulty = alerts.read(client)
        assert fires("LastbitDispatcherSilent", faulty)
        assert fires("LastbitJanitorSilent", faulty, minutes=130)


@pytest.mark.mariadb
def test_jobs_that_ran_and_then_do_not(mortal_server: Server, fires: Fires) -> None:
    url = new_database(mortal_server)
    assert run_module("jobs.dispatcher", "--once", "--database-url", url).returncode == 0
    assert run_module("jobs.janitor", "--database-url", url).returncode == 0
    with service(url) as (_, client):
        faulty = alerts.read(client)
        assert not fires("LastbitDispatcherSilent", faulty, minutes=4)
        assert not fires("LastbitJanitorSilent", faulty, minutes=1400)
        assert fires("LastbitJanitorSilent", faulty, minutes=1600)


@pytest.mark.mariadb
def test_a_janitor_that_fails(clock: WallClock, tmp_path: Path, fires: Fires) -> None:
    """It refuses to work as long as the clocks differ by a day."""
    with running_server(environment=clock.environment) as server:
        url = new_database(server)
        clock.jump(1)
        assert run_module("jobs.janitor", "--database-url", url).returncode == 1
        with service(url) as (_, client):
            assert fires("LastbitJanitorSilent", alerts.read(client), minutes=130)


def test_one_receiver_that_hangs_beside_another(
    sqlite_url: str, clock: WallClock, receiver: Receiver, fires: Fires
) -> None:
    """By webhook: the one that always hangs doesn't hide the one that begins to."""
    with (
        service(sqlite_url, LASTBIT_WEBHOOKS_ALLOW_PRIVATE="true", **clock.environment) as (_, client),
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        hooks = [client.post("/v1/webhooks", json={"url": target}).json()["id"] for target in (url, receiver.url)]
        client.post("/v1/batches", json={"items": 1})
        receiver.wait_for(1)
        eventually(lambda: value(client, "lastbit_webhook_deliveries", state="pending"), 1)
        clock.jump(0.01)
        eventually(lambda: value(client, "lastbit_receivers_overdue"), 1)
        assert value(client, "lastbit_receiver_lag_seconds", webhook=str(hooks[0])) > 800
        assert value(client, "lastbit_receiver_lag_seconds", webhook=str(hooks[1])) == 0
        faulty = alerts.read(client)
        assert fires("LastbitReceiverLag", faulty)
        assert fires("LastbitReceiverOverdue", faulty, minutes=30)
        assert fires("LastbitWebhookLag", faulty)


def test_a_receiver_that_is_gone(sqlite_url: str, receiver: Receiver, fires: Fires) -> None:
    receiver.replies(status(410))
    with service(sqlite_url, LASTBIT_WEBHOOKS_ALLOW_PRIVATE="true") as (_, client):
        client.post("/v1/webhooks", json={"url": receiver.url})
        client.post("/v1/batches", json={"items": 1})
        eventually(lambda: value(client, "lastbit_webhook_deliveries", state="dead"), 1)
        assert fires("LastbitWebhookDead", alerts.read(client), minutes=10)


def test_batches_that_nobody_continues(sqlite_url: str, clock: WallClock, fires: Fires) -> None:
    """One that is idle for long hides no other."""
    with service(sqlite_url, **clock.environment) as (_, client):
        for days, count in ((1.1, 1), (2.3, 2)):
            client.post("/v1/batches", json={"items": 1, "sealed": True})
            client.post("/v1/batches", json={"items": 1})
            before = alerts.read(client)
            clock.jump(days)
            eventually(lambda count=count: value(client, "lastbit_idle_batches", state="sealed"), count)  # type: ignore[misc]
            faulty = alerts.read(client)
            assert fires("LastbitBatchIdle", faulty, healthy=before, minutes=30)
        assert fires("LastbitBatchNotSealed", faulty)
        assert fires("LastbitBatchNotComplete", faulty)


def test_a_consumer_group_without_workers(sqlite_url: str, fires: Fires) -> None:
    with service(sqlite_url) as (_, client):
        client.put("/v1/consumer-groups/orders", json={"partitions": 4})
        eventually(lambda: value(client, "lastbit_group_partitions", state="free"), 4)
        faulty = alerts.read(client)
    assert fires("LastbitNoWorker", faulty)
    assert fires("LastbitPartitionsFree", faulty)


def test_requests_that_are_refused_and_items_that_are_rejected(sqlite_url: str, fires: Fires) -> None:
    with service(sqlite_url, LASTBIT_MAX_CONNECTIONS="2") as (running, client):

        def send() -> None:
            client.post("/v1/acks", json={"items": ["7:0:0"]})
            sockets = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
            for connection in sockets:
                connection.close()

        faulty = alerts.read(client, send)
        assert fires("LastbitRefusing", faulty)
        assert fires("LastbitRejectedItems", faulty)


@pytest.mark.mariadb
def test_a_row_that_somebody_holds(mortal_server: Server, fires: Fires) -> None:
    url = new_database(mortal_server)
    with service(url) as (_, client), Database(url) as database:
        batch = client.post("/v1/batches", json={"items": 1}).json()["id"]
        with database.engine.begin() as holder:
            holder.exec_driver_sql(f"SELECT id FROM batches WHERE id = {batch} FOR UPDATE")
            acked = threading.Thread(
                target=client.post, args=("/v1/acks",), kwargs={"json": {"items": [f"{batch}:0:0"]}}
            )
            acked.start()
            with httpx.Client(base_url=client.base_url, timeout=60) as scraper:
                faulty = alerts.read(scraper)
        acked.join()
    assert fires("LastbitLockWaits", faulty)


NOT_CAUSED = {
    # A fault of the code.
    "LastbitInternalError",
    "LastbitTransactionBug",
    # Of clients that tests elsewhere imitate; `alerts.test.yml` has the values.
    "LastbitGroupFallsBehind",
    "LastbitProcessEventsParked",
    "LastbitStaleEpochs",
    "LastbitTimersOverdue",
    # Of a slow disk.
    "LastbitSlowAcks",
    "LastbitSlowTransactions",
}


def test_each_alert_is_caused_here_or_cannot_be() -> None:
    names = {rule["alert"] for rule in rules()}
    caused = set(re.findall(r'fires\("(\w+)"', Path(__file__).read_text()))
    assert caused | NOT_CAUSED == names
    assert not caused & NOT_CAUSED
