"""Request ids, from the client to the log and back; each line of the log is JSON."""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from core import logs
from tests.http.test_batches import open_batch
from tests.mutants import mutant
from tests.support.exposition import eventually
from tests.support.servers import ServiceProcess, sqlite_file

MADE = re.compile("[0-9a-f]{32}")


class Logged:
    """A service, a client of it, its log and its database."""

    def __init__(self, running: ServiceProcess, http: httpx.Client, log: Path, database: Path) -> None:
        self.running = running
        self.http = http
        self.log = log
        self.database = database

    def lines(self) -> list[dict[str, Any]]:
        """The log so far; each line is a JSON object."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def of(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("request_id") == request_id]

    def change(self, statement: str) -> None:
        with contextlib.closing(sqlite3.connect(self.database)) as connection:
            connection.execute(statement)
            connection.commit()


@contextlib.contextmanager
def logging_to(log: Path) -> Iterator[Logged]:
    with sqlite_file() as url:
        running = ServiceProcess(url, log=log)
        try:
            running.start()
            with httpx.Client(base_url=running.url, timeout=30) as http:
                yield Logged(running, http, log, Path(url.removeprefix("sqlite:///")))
        finally:
            running.stop(signal.SIGKILL)


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    with logging_to(tmp_path / "log") as logged:
        yield logged


@pytest.mark.parametrize("given", ["a", "x" * 128, "!~ab:c-1"])
def test_a_clients_request_id_is_returned(sqlite_http: httpx.Client, given: str) -> None:
    """In answers and problems of every route, except successful acks."""
    headers = {"X-Request-Id": given}
    batch = sqlite_http.post("/v1/batches", json={"items": 1}, headers=headers)
    assert batch.headers["x-request-id"] == given
    for path in ("/v1/batches/999999", "/nowhere", "/v1/acks"):
        refusal = sqlite_http.get(path, headers=headers)
        assert (refusal.status_code // 100, refusal.headers["x-request-id"]) == (4, given)
    for _ in range(2):  # a cached head must still have its id
        refusal = sqlite_http.post("/v1/acks", json={"items": ["x"]}, headers=headers)
        assert (refusal.status_code, refusal.headers["x-request-id"]) == (422, given)
    acked = sqlite_http.post("/v1/acks", json={"items": [f"{batch.json()['id']}:0:0"]}, headers=headers)
    assert acked.status_code == 200
    assert "x-request-id" not in acked.headers


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "é".encode(), None])
def test_an_invalid_request_id_is_replaced(sqlite_http: httpx.Client, given: str | bytes | None) -> None:
    """With a new id for each request; no request is refused for it."""
    headers = {} if given is None else {"X-Request-Id": given}
    answers = [
        *(sqlite_http.get("/healthz", headers=headers) for _ in range(2)),
        *(sqlite_http.post("/v1/acks", json={"items": ["x"]}, headers=headers) for _ in range(3)),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 422, 422, 422]
    new_ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(new_ids) == 5
    assert all(MADE.fullmatch(entry) for entry in new_ids)


def test_requests_are_logged_once_and_acks_are_not(logged: Logged) -> None:
    """One line a request, with its id; the process's start and end are lines of the same kind."""
    batch = open_batch(logged.http, items=1)["id"]
    logged.http.post("/v1/acks", json={"items": [f"{batch}:0:0"]}, headers={"X-Request-Id": "an-ack"})
    logged.http.post("/v1/acks", json={"items": ["x"]}, headers={"X-Request-Id": "a-wrong-ack"})
    logged.http.get(f"/v1/batches/{batch}?wait=0", headers={"X-Request-Id": "look"})
    eventually(lambda: len(logged.of("look")), 1)
    (line,) = logged.of("look")
    assert line.pop("ms") >= 0
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "request",
        "level": "info",
        "method": "GET",
        "path": f"/v1/batches/{batch}",
        "status": 200,
        "request_id": "look",
    }
    assert logged.of("an-ack") == logged.of("a-wrong-ack") == []
    logged.running.stop()
    lines = logged.lines()
    assert all(line["timestamp"] and line["level"] and line["event"] for line in lines)
    server_events = [line["event"] for line in lines if line.get("logger") == "uvicorn.error"]
    assert any(event.startswith("Uvicorn running on") for event in server_events)
    assert any(event.startswith("Finished server process") for event in server_events)


@mutant("a-path-is-logged-whole", "api.problems:shortened", "len(path) <= LONGEST_PATH", "True")
def test_the_end_of_a_long_path_is_not_logged(logged: Logged) -> None:
    """Anybody can send one, also without a token."""
    path = f"/v1/{'x' * 8000}"
    assert logged.http.get(path, headers={"X-Request-Id": "long"}).status_code == 404
    eventually(lambda: len(logged.of("long")), 1)
    (line,) = logged.of("long")
    assert line["path"] == f"{path[:200]}…"


def test_an_unexpected_error_is_in_the_log_under_its_id(logged: Logged) -> None:
    """Once, with its traceback, whatever the route; the client gets the id and no details."""
    batch = open_batch(logged.http, items=1)["id"]
    logged.change(f"UPDATE batches SET labels = 'no JSON' WHERE id = {batch}")
    answer = logged.http.get(f"/v1/batches/{batch}", headers={"X-Request-Id": "broken"})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert answer.headers["x-request-id"] == "broken"
    eventually(lambda: [line["event"] for line in logged.of("broken")], ["request_failed", "request"])
    failed, request = logged.of("broken")
    assert (failed["level"], request["status"]) == ("error", 500)
    assert "Traceback" in failed["exception"]
    assert sum("Traceback" in json.dumps(line) for line in logged.lines()) == 1


def test_a_failed_ack_is_in_the_log_under_its_id(logged: Logged) -> None:
    """The ack routes log only failures that aren't the client's fault: one line, with its id."""
    batch = open_batch(logged.http, items=2)["id"]
    item = {"items": [f"{batch}:0:0"]}
    assert logged.http.post("/v1/acks", json=item).status_code == 200
    logged.change(f"UPDATE batches SET acked = 2 WHERE id = {batch}")  # one item is pending, though all are counted
    answer = logged.http.post("/v1/acks", json={"items": [f"{batch}:0:1"]}, headers={"X-Request-Id": "broken"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "broken")
    eventually(lambda: [line["event"] for line in logged.of("broken")], ["ack_failed"])
    assert f"batch {batch} is inconsistent" in logged.of("broken")[0]["error"]


@mutant(
    "a-log-that-cannot-be-written-ends-the-combiner",
    "core.logs:_StandardError.flush",
    "contextlib.suppress(OSError, ValueError)",
    "contextlib.suppress(ValueError)",
)
def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    """The disk with the log is full. Lines of the combiner, of requests and refusals are lost, and nothing else is."""
    with logging_to(Path("/dev/full")) as logged:
        broken, sound = (open_batch(logged.http, items=2)["id"] for _ in range(2))
        logged.http.post("/v1/acks", json={"items": [f"{broken}:0:0"]})
        logged.change(f"UPDATE batches SET acked = 2 WHERE id = {broken}")
        answers = [
            logged.http.post("/v1/acks", json={"items": [item]})
            for item in (f"{broken}:0:1", f"{sound}:0:0", f"{broken}:0:1", f"{sound}:0:1")
        ]
        assert [answer.status_code for answer in answers] == [500, 200, 500, 200]
        assert logged.http.get(f"/v1/batches/{sound}?wait=0").json()["acked"] == 2
        assert 'route="/v1/batches/{id}"' in logged.http.get("/metrics").text
        logged.running.stop()


def test_an_ack_that_has_to_be_sent_again_is_in_the_log_under_its_id(logged: Logged) -> None:
    """Another process keeps the database locked: 503, one line."""
    batch = open_batch(logged.http, items=1)["id"]
    with contextlib.closing(sqlite3.connect(logged.database, isolation_level=None)) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        answer = logged.http.post("/v1/acks", json={"items": [f"{batch}:0:0"]}, headers={"X-Request-Id": "later"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (503, "later")
    assert answer.headers["retry-after"] == "1"
    eventually(
        lambda: [(line["event"], line["level"]) for line in logged.of("later")], [("ack_unavailable", "warning")]
    )


def test_the_line_of_a_request_says_why_it_got_a_503(logged: Logged) -> None:
    """On the fast path and off it. The next request on the connection doesn't inherit it."""
    away = logged.database.rename(logged.database.with_name("away.db"))
    calls = (("POST", "/v1/batches", {}), ("PUT", "/v1/consumer-groups/orders", {"partitions": 1}))
    for name, (method, path, body) in enumerate(calls):
        answer = logged.http.request(method, path, json=body, headers={"X-Request-Id": f"away{name}"})
        assert answer.status_code == 503
    away.rename(logged.database)
    for name, (method, path, body) in enumerate(calls):
        answer = logged.http.request(method, path, json=body, headers={"X-Request-Id": f"back{name}"})
        assert answer.is_success
    reason = (
        "the SQLite file was removed or replaced: put it back; or stop the service, remove the -wal and -shm files "
        "beside it, and start the service again"
    )
    names = ("away0", "away1", "back0", "back1")
    eventually(
        lambda: [line.get("error") for name in names for line in logged.of(name)[-1:]], [reason, reason, None, None]
    )


def test_background_work_without_a_database_is_a_warning_without_a_traceback(logged: Logged) -> None:
    logged.database.rename(logged.database.with_name("away.db"))

    def failures() -> list[dict[str, Any]]:
        return [line for line in logged.lines() if line["event"] == "background_work_failed"]

    eventually(lambda: bool(failures()), True)
    assert {line["level"] for line in failures()} == {"warning"}
    assert "the SQLite file was removed or replaced" in failures()[0]["error"]
    assert not any("exception" in line for line in failures())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_traceback_on_a_terminal_shows_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables may hold passwords, and rendering all of them would block the event loop for seconds."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logs.configure("info")
    try:
        password = "".join(["s3", "cret"])  # not a literal in the source
        raise ValueError(len(password))
    except ValueError:
        structlog.get_logger().exception("request_failed")
    finally:
        structlog.reset_defaults()
    assert "ValueError: 6" in terminal.getvalue()
    assert "s3cret" not in terminal.getvalue()
