"""The service as a process: what it refuses to start on, how it stops, and two workers on one database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from uvicorn.config import STARTUP_FAILURE

from api.__main__ import LISTENERS, _greet_once_listening, configuration, listening
from core.settings import Settings
from core.storage import schema
from core.storage.database import Database
from tests.support.servers import ROOT, free_port, run_module, running_service


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_module("api", "--port", str(free_port()), *arguments, environment={**os.environ, **environment})


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's configuration leaves this process's logging as it is."""
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda _: None)


def test_an_old_schema_is_refused_with_the_command_that_mends_it(mariadb_url: str) -> None:
    """MariaDB is migrated by hand; the service does not start before, and starts after."""
    refusal = run(LASTBIT_DATABASE_URL=mariadb_url)
    assert refusal.returncode == 1
    assert "python -m api migrate" in refusal.stderr
    assert "Traceback" not in refusal.stderr
    assert run("migrate", "--database-url", mariadb_url).returncode == 0
    assert run("migrate", "--database-url", mariadb_url).returncode == 0
    with running_service(mariadb_url) as running:
        assert httpx.get(f"{running.url}/readyz").status_code == 200


def test_a_database_that_is_away_is_said_so() -> None:
    """In a sentence, without the password, exit status 1."""
    refusal = run("--database-url", "mysql://lastbit:secret@127.0.0.1:1/lastbit")
    assert refusal.returncode == 1
    assert "no database server can be reached at 127.0.0.1:1" in refusal.stderr
    assert "Traceback" not in refusal.stderr
    assert "secret" not in refusal.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_is_named_with_the_option_that_changes_it(sqlite_url: str, workers: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        refused = run("--database-url", sqlite_url, "--port", port, "--workers", workers)
    assert refused.returncode == STARTUP_FAILURE
    assert f"can't listen on 127.0.0.1 at port {port}" in refused.stderr
    assert "--port (LASTBIT_PORT)" in refused.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_on_a_terminal_it_says_where_it_is_and_what_to_type_next(tmp_path: Path, workers: str) -> None:
    """Three lines; elsewhere, where logs are JSON, none of them (see test_logs). The command is named by a path where
    the shell would not find it."""
    terminal, output = os.openpty()
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "api", "--port", str(port), "--workers", workers],
        cwd=ROOT,
        env={**os.environ, "LASTBIT_DATABASE_URL": f"sqlite:///{tmp_path}/here.db", "PATH": os.defpath},
        stderr=output,
    )
    os.close(output)
    try:
        with open(terminal, encoding="utf-8") as reader:  # noqa: PTH123  # a file descriptor
            lines = [reader.readline().rstrip() for _ in range(3)]
    finally:
        process.terminate()
        process.wait(60)
    url = f"http://127.0.0.1:{port}"
    assert lines[0].endswith(f"at {url} (batches: {url}/, API: {url}/docs)")
    assert lines[1] == f"State is in the SQLite file {tmp_path}/here.db"
    command = re.fullmatch(r"Next, in another terminal: (\S+/bin/lastbit) (.+)", lines[2])
    assert command is not None, lines[2]
    assert command[2] == f"--url {url} open --key hello --items 3"
    assert (ROOT / command[1]).exists()


def test_several_workers_greet_when_one_of_them_listens() -> None:
    """And not when the socket is bound: until a worker has started, connections are refused."""
    greeted = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Thread(target=_greet_once_listening, args=(listener, greeted.set), daemon=True).start()
        assert not greeted.wait(0.2)
        listener.listen()
        assert greeted.wait(30)


@pytest.mark.parametrize(
    "arguments",
    [["--workers", "0"], ["--port", "99999"], ["--port", "x"], ["--nope"], ["dance"]],
)
def test_wrong_use_is_exit_status_2(arguments: list[str]) -> None:
    """With a sentence that names the flag."""
    refusal = run(*arguments)
    assert refusal.returncode == 2
    assert "Traceback" not in refusal.stderr


def test_a_worker_may_take_its_time_to_start(quiet: None) -> None:
    """On a busy machine; with uvicorn's own patience each is killed while it still imports, and none ever serves."""
    assert configuration(Settings(workers=2)).timeout_worker_healthcheck >= 60


def test_connections_are_taken_in_many_a_turn(quiet: None) -> None:
    """Of the event loop, whose turns are long when much is to be done."""
    crowd, creation, turns = 64, 0, 0

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal creation
            creation += 1

    async def take() -> None:
        nonlocal turns
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Taken, sock=entry, backlog=crowd) for entry in sockets]
        for _ in range(crowd):
            stack.enter_context(socket.create_connection(sockets[0].getsockname()))
        while creation < crowd:
            turns += 1
            await asyncio.sleep(0)
        for server in servers:
            server.close()

    sockets = listening(configuration(Settings(port=0)))
    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(take())
    assert turns <= crowd // LISTENERS + 4


def test_a_url_of_another_database_is_refused() -> None:
    """Naming what is supported."""
    refusal = run("--database-url", "postgresql://localhost/x")
    assert refusal.returncode == 1
    assert "sqlite, mysql or mariadb" in refusal.stderr


def test_a_stop_ends_long_polls_and_answers_what_is_under_way(sqlite_url: str) -> None:
    """SIGTERM: waiters are answered at once, with the batch as it is."""
    with running_service(sqlite_url) as running, httpx.Client(base_url=running.url, timeout=70) as client:
        batch = client.post("/v1/batches", json={"items": 1}).json()["id"]
        answers: list[httpx.Response] = []
        under_way = threading.Event()

        def wait() -> None:
            def begun(_: httpx.Request) -> None:
                under_way.set()

            with httpx.Client(base_url=running.url, timeout=70, event_hooks={"request": [begun]}) as waiter:
                answers.append(waiter.get(f"/v1/batches/{batch}?wait=60"))

        thread = threading.Thread(target=wait)
        thread.start()
        under_way.wait(10)
        while client.get("/healthz").status_code != 200:  # a round trip behind the waiter's own
            pass
        # uvicorn raises the signal again once all is answered, so that its parent sees what ended it.
        assert running.stop(signal.SIGTERM) == -signal.SIGTERM
        thread.join(10)
        assert not thread.is_alive()
        assert answers[0].json()["state"] == "open"


def test_the_embedded_service_is_its_own_janitor(sqlite_url: str) -> None:
    """On SQLite an idle batch ends in a named state without any cron, and who waits for it is told."""
    with running_service(sqlite_url, LASTBIT_JANITOR_EVERY="0.2") as running:
        batch = httpx.post(f"{running.url}/v1/batches", json={"items": 1, "expires_in": 1}).json()["id"]
        waited = httpx.get(f"{running.url}/v1/batches/{batch}?wait=60", timeout=70).json()
        assert (waited["state"], waited["pending"]) == ("expired", 1)


def test_two_workers_on_one_batch_are_exact(mariadb_url: str) -> None:
    """Each item is sent twice, through either worker; one call of all is told that it completed the batch."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url, workers=2) as running:
        batch = httpx.post(f"{running.url}/v1/batches", json={"group_size": 64, "items": 600, "sealed": True}).json()
        ids = [f"{batch['id']}:{n // 64}:{n % 64}" for n in range(600)] * 2

        def ack(part: list[str]) -> list[dict[str, Any]]:
            # A connection each, so that the kernel deals them out to both workers.
            with httpx.Client(base_url=running.url, timeout=30) as client:
                responses = [client.post("/v1/acks", json={"items": [item]}) for item in part]
            assert {response.status_code for response in responses} == {200}
            return [response.json() for response in responses]

        with ThreadPoolExecutor(16) as pool:
            answers = [answer for part in pool.map(ack, [ids[n::16] for n in range(16)]) for answer in part]
        assert sum(answer["applied"] for answer in answers) == 600
        assert sum(answer["repeated"] for answer in answers) == 600
        assert sum(replies["newly"] for answer in answers for replies in answer["completed"]) == 1
        assert httpx.get(f"{running.url}/v1/batches/{batch['id']}/verify").json()["ok"]


def test_a_long_poll_hears_of_what_another_process_ends(mariadb_url: str) -> None:
    """Two services on one database: the shared poll of one finds what the other has completed."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url) as first_one, running_service(mariadb_url) as other:
        batch = httpx.post(f"{first_one.url}/v1/batches", json={"items": 1, "sealed": True}).json()["id"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.get, f"{first_one.url}/v1/batches/{batch}?wait=60", timeout=70)
            httpx.post(f"{other.url}/v1/acks", json={"items": [f"{batch}:0:0"]})
            assert waiting.result(30).json()["state"] == "complete"
