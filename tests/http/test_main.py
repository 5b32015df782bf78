"""The service as a process: when it refuses to start, how it stops, and two workers on one database."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import uvicorn
import uvloop
from uvicorn.config import STARTUP_FAILURE

from api.__main__ import LISTENERS, _greet_once_listening, configuration, listening
from core.settings import Settings
from core.storage import schema, tables
from core.storage.database import Database
from tests.support.exposition import eventually
from tests.support.servers import ROOT, ServiceProcess, free_port, run_module, running_service


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_module("api", "--port", str(free_port()), *arguments, environment={**os.environ, **environment})


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the server's configuration from changing this process's logging."""
    monkeypatch.setattr(uvicorn.Config, "configure_logging", lambda _: None)


def test_an_old_schema_is_refused_with_the_command_that_migrates_it(mariadb_url: str) -> None:
    """MariaDB is migrated by an operator; the service starts only afterwards."""
    refusal = run(LASTBIT_DATABASE_URL=mariadb_url)
    assert refusal.returncode == 1
    assert "python -m api migrate" in refusal.stderr
    assert "Traceback" not in refusal.stderr
    for _ in range(2):
        migration = run("migrate", "--database-url", mariadb_url)
        assert migration.returncode == 0
        assert f"@127.0.0.1:{sa.make_url(mariadb_url).port}/" in migration.stderr  # it names the database
    with running_service(mariadb_url) as running:
        assert httpx.get(f"{running.url}/readyz").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--prot", "18130"], "unrecognized arguments: --prot"),
        (
            ["serv"],
            "'serv' is not one of serve, migrate, check, openapi; "
            "the jobs are python -m jobs.janitor, python -m jobs.dispatcher",
        ),
    ],
)
def test_a_misspelled_option_or_command_is_named(arguments: list[str], problem: str) -> None:
    result = run_module("lastbit_server", *arguments)
    assert result.returncode == 2
    assert result.stderr.endswith(f"python -m api: error: {problem}\n")


@pytest.mark.parametrize("command", [["check", "--json"], ["check"], ["openapi"]])
@pytest.mark.parametrize(
    ("redirection", "cause"),
    [(">/dev/full", "No space left on device"), (">&-", "it is closed")],
    ids=["full", "closed"],
)
def test_output_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path, command: list[str], redirection: str, cause: str
) -> None:
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "api", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(shell, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, f"lastbit: standard output failed: {cause}\n")


def test_an_unreachable_database_is_reported() -> None:
    """With a message without the password, and exit status 1."""
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
        process = run("--database-url", sqlite_url, "--port", port, "--workers", workers)
    assert process.returncode == STARTUP_FAILURE
    assert f"can't listen on 127.0.0.1 at port {port}" in process.stderr
    assert "--port (LASTBIT_PORT)" in process.stderr


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_on_a_terminal_it_prints_its_url_and_the_next_command(tmp_path: Path, workers: str) -> None:
    """Three lines; elsewhere, where logs are JSON, none of them (see test_logs). The command is printed with its path
    if the shell would not find it."""
    terminal, terminal_end = os.openpty()
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "api", "--port", str(port), "--workers", workers],
        cwd=ROOT,
        env={**os.environ, "LASTBIT_DATABASE_URL": f"sqlite:///{tmp_path}/here.db", "PATH": os.defpath},
        stderr=terminal_end,
    )
    os.close(terminal_end)
    try:
        with open(terminal, encoding="utf-8") as reader:  # noqa: PTH123  # a file descriptor
            # The log of a worker that starts faster may come first.
            output = itertools.dropwhile(lambda line: "(batches: " not in line, iter(reader.readline, ""))
            lines = [line.rstrip() for line in itertools.islice(output, 3)]
        socket.create_connection(("127.0.0.1", port)).close()  # refused if the greeting came too early
    finally:
        process.terminate()
        process.wait(60)
    url = f"http://127.0.0.1:{port}"
    assert lines[0].endswith(f"at {url} (batches: {url}/, API: {url}/docs)")
    assert lines[1] == f"State is in the SQLite file {tmp_path}/here.db, which is new"
    command = re.fullmatch(r"Next, in another terminal: (\S+/bin/lastbit) (.+)", lines[2])
    assert command is not None, lines[2]
    assert command[2] == f"--url {url} open --key hello --items 3"
    assert (ROOT / command[1]).exists()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_its_log_names_its_address_and_the_database(sqlite_url: str, tmp_path: Path, workers: int) -> None:
    """And its first start says that a SQLite file is new: in another folder, or in a container without a volume, the
    service would otherwise seem to have lost its batches."""
    for log, addition in ((tmp_path / "first", ", which is new"), (tmp_path / "second", "")):
        running = ServiceProcess(sqlite_url, log=log, workers=workers)
        try:
            running.start()
            eventually(lambda log=log: '"serving"' in log.read_text(), True)
        finally:
            running.stop(signal.SIGTERM)
        (line,) = (line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "serving")
        assert line["url"] == running.url
        assert line["database"] == f"the SQLite file {sqlite_url.removeprefix('sqlite:///')}{addition}"


def test_a_misspelled_setting_is_reported(sqlite_url: str) -> None:
    """With the setting that it resembles. Variables of clients, of Kubernetes and of one's own files are ignored."""
    environment = {
        **dict.fromkeys(["LASTBIT_DATABASEURL", "LASTBIT_DB_URL", "LASTBIT_TOKEN_FILE", "lastbit_workrs"], "x"),
        **dict.fromkeys(["LASTBIT_TOKEN", "LASTBIT_URL", "LASTBIT_SERVICE_HOST", "LASTBIT_PORT_8000_TCP"], "x"),
        **dict.fromkeys(["LASTBIT_SERVICE_PORT", "LASTBIT_DATABASE_PASSWORD"], "x"),
    }
    output = run("check", "--database-url", sqlite_url, **environment).stderr
    assert [(line["name"], line["similar"]) for line in map(json.loads, output.splitlines())] == [
        ("LASTBIT_DATABASEURL", "LASTBIT_DATABASE_URL"),
        ("LASTBIT_DB_URL", "LASTBIT_DATABASE_URL"),
        ("LASTBIT_TOKEN_FILE", "LASTBIT_TOKENS_FILE"),
        ("lastbit_workrs", "LASTBIT_WORKERS"),
    ]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_it_runs_without_a_standard_error(sqlite_url: str, workers: str) -> None:
    """Closed by the program that started it, not redirected."""
    port = str(free_port())
    command = [sys.executable, "-m", "api", "--port", port, "--workers", workers, "--database-url", sqlite_url]
    with subprocess.Popen(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], cwd=ROOT) as process:
        try:

            def is_ready() -> bool:
                assert process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
                return False

            eventually(is_ready, True)
        finally:
            process.terminate()


def test_an_address_may_have_the_brackets_of_a_url(quiet: None) -> None:
    assert configuration(Settings(host="[::1]")).host == "::1"


def test_several_workers_greet_when_one_of_them_listens() -> None:
    """Not when the socket is bound: until a worker has started, connections are refused."""
    greeting = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        threading.Thread(target=_greet_once_listening, args=(listener, greeting.set), daemon=True).start()
        assert not greeting.wait(0.2)
        listener.listen()
        assert greeting.wait(30)


@pytest.mark.parametrize(
    "arguments",
    [["--workers", "0"], ["--port", "99999"], ["--port", "x"], ["--nope"], ["dance"]],
)
def test_wrong_use_is_exit_status_2(arguments: list[str]) -> None:
    """With a message that names the flag."""
    refusal = run(*arguments)
    assert refusal.returncode == 2
    assert "Traceback" not in refusal.stderr


def test_a_worker_may_take_its_time_to_start(quiet: None) -> None:
    """On a slow machine; with uvicorn's own time-out each worker would be killed during its imports, and none would
    serve."""
    assert configuration(Settings(workers=2)).timeout_worker_healthcheck >= 60


def test_a_worker_that_dies_while_its_response_is_awaited_is_replaced_at_once(mariadb_url: str) -> None:
    """And not after the minute that a slow worker may take."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url, workers=2) as running:
        assert running.process is not None
        eventually(lambda: len(running.worker_ids()), 2)
        worker, other = running.worker_ids()
        os.kill(worker, signal.SIGSTOP)
        parent = Path(f"/proc/{running.process.pid}/wchan")
        eventually(lambda: "poll" in parent.read_text(), True)  # the parent awaits the response
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: len({*running.worker_ids()} - {worker}), 2)
        assert other in running.worker_ids()


def test_many_connections_are_accepted_in_one_iteration(quiet: None) -> None:
    """The event loop accepts many connections in one iteration, as iterations are long under load."""
    crowd, accepted, iterations = 64, 0, 0

    class Taken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            nonlocal accepted
            accepted += 1

    async def accept_all() -> None:
        nonlocal iterations
        loop = asyncio.get_running_loop()
        servers = [await loop.create_server(Taken, sock=entry, backlog=crowd) for entry in sockets]
        for _ in range(crowd):
            stack.enter_context(socket.create_connection(sockets[0].getsockname()))
        while accepted < crowd:
            iterations += 1
            await asyncio.sleep(0)
        for server in servers:
            server.close()

    sockets = listening(configuration(Settings(port=0)))
    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(accept_all())
    assert iterations <= crowd // LISTENERS + 4


def test_a_url_of_another_database_is_refused() -> None:
    """The error names the supported ones."""
    refusal = run("--database-url", "oracle://localhost/x")
    assert refusal.returncode == 1
    assert "sqlite, mysql, mariadb or postgresql" in refusal.stderr


def test_a_stop_ends_long_polls_and_answers_what_is_under_way(sqlite_url: str) -> None:
    """SIGTERM: waiters are answered at once, with the batch's present state."""
    with running_service(sqlite_url) as running, httpx.Client(base_url=running.url, timeout=70) as client:
        batch = client.post("/v1/batches", json={"items": 1}).json()["id"]
        answers: list[httpx.Response] = []
        under_way = threading.Event()

        def trace(event: str, _: object) -> None:
            if event == "http11.send_request_headers.complete":
                under_way.set()

        def wait() -> None:
            with httpx.Client(base_url=running.url, timeout=70) as waiter:
                answers.append(waiter.get(f"/v1/batches/{batch}?wait=60", extensions={"trace": trace}))

        thread = threading.Thread(target=wait)
        thread.start()
        assert under_way.wait(30)
        while client.get("/healthz").status_code != 200:  # a round trip after the waiter's request
            pass
        # uvicorn raises the signal again after the last answer, so that its parent sees the cause.
        assert running.stop(signal.SIGTERM) == -signal.SIGTERM
        thread.join(10)
        assert not thread.is_alive()
        assert answers[0].json()["state"] == "open"


def test_the_embedded_service_is_its_own_janitor(sqlite_url: str) -> None:
    """On SQLite an idle batch expires without a cron job, and its waiters are answered."""
    with running_service(sqlite_url, LASTBIT_JANITOR_EVERY="0.2") as running:
        batch = httpx.post(f"{running.url}/v1/batches", json={"items": 1, "expires_in": 1}).json()["id"]
        waited = httpx.get(f"{running.url}/v1/batches/{batch}?wait=60", timeout=70).json()
        assert (waited["state"], waited["pending"]) == ("expired", 1)


def test_a_stop_does_not_wait_for_the_end_of_the_janitors_pass(sqlite_url: str) -> None:
    """A pass over many batches takes far longer than a stop may take. The next process continues it."""
    ended = {"group_size": 64, "items": 0, "acked": 0, "failed": 0, "state": "complete", "full_prefix": 0}
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    with Database(sqlite_url) as database:
        schema.migrate(database)
        with database.engine.begin() as tx:
            row = {**ended, "labels": "{}", "open_count": 0, "created_at": long_ago, "updated_at": long_ago}
            tx.execute(sa.insert(tables.batches), [{**row, "ended_at": long_ago}] * 30_000)
        count = sa.select(sa.func.count()).select_from(tables.batches)
        with running_service(sqlite_url, LASTBIT_JANITOR_EVERY="0.1") as running:
            eventually(lambda: database.read(lambda tx: tx.scalar(count)) < 30_000, True)
            running.stop()
        assert database.read(lambda tx: tx.scalar(count)) > 0


def test_two_workers_on_one_batch_are_exact(mariadb_url: str) -> None:
    """Each item is sent twice, through either worker; exactly one call gets `newly`."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url, workers=2) as running:
        batch = httpx.post(f"{running.url}/v1/batches", json={"group_size": 64, "items": 600, "sealed": True}).json()
        ids = [f"{batch['id']}:{n // 64}:{n % 64}" for n in range(600)] * 2

        def ack(part: list[str]) -> list[dict[str, Any]]:
            # Separate connections, so that the kernel spreads them over both workers.
            with httpx.Client(base_url=running.url, timeout=30) as client:
                responses = [client.post("/v1/acks", json={"items": [item]}) for item in part]
            assert {response.status_code for response in responses} == {200}
            return [response.json() for response in responses]

        with ThreadPoolExecutor(16) as pool:
            answers = [answer for part in pool.map(ack, [ids[n::16] for n in range(16)]) for answer in part]
        assert sum(answer["applied"] for answer in answers) == 600
        assert sum(answer["repeated"] for answer in answers) == 600
        assert sum(completion["newly"] for answer in answers for completion in answer["completed"]) == 1
        assert httpx.get(f"{running.url}/v1/batches/{batch['id']}/verify").json()["ok"]


def test_a_long_poll_gets_a_completion_of_another_process(mariadb_url: str) -> None:
    """Two services on one database: the shared poll of one finds the other's completion."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url) as service, running_service(mariadb_url) as other:
        batch = httpx.post(f"{service.url}/v1/batches", json={"items": 1, "sealed": True}).json()["id"]
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(httpx.get, f"{service.url}/v1/batches/{batch}?wait=60", timeout=70)
            httpx.post(f"{other.url}/v1/acks", json={"items": [f"{batch}:0:0"]})
            assert waiting.result(30).json()["state"] == "complete"
