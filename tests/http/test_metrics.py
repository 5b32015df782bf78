"""The content of /metrics after real traffic, without a database, and with two workers; the dashboard reads nothing
else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.storage import schema
from core.storage.database import Database
from tests.http.test_acks import bits, send
from tests.http.test_batches import open_batch
from tests.mutants import mutant
from tests.support.exposition import eventually, families, value
from tests.support.servers import ROOT, MariaDB, running_service, sqlite_file


def acks(http: httpx.Client) -> dict[tuple[str, str], float]:
    samples = families(http)["lastbit_acks_total"].samples
    return {(sample.labels["verb"], sample.labels["result"]): sample.value for sample in samples}


def test_acks_are_counted_by_result(http: httpx.Client) -> None:
    """Items, not calls; an item that changes from failed to acked is applied. Held items are no cause for an alert."""
    batch = open_batch(http, items=10)["id"]
    open_batch(http, items=1, parent=f"{batch}:0:7")
    before = acks(http)
    send(http, items=[f"{batch}:0:0", f"{batch}:0:1"])
    send(http, items=[f"{batch}:0:1"], groups=[{"batch": batch, "group": 0, "bits": bits(2, 3, 12, 13, 14)}])
    send(http, "failures", items=[f"{batch}:0:4", f"{batch}:0:0"])
    send(http, items=[f"{batch}:0:4"])
    send(http, items=[f"{batch}:0:7", f"{batch}:0:10"])
    after = acks(http)
    assert {key: count - before[key] for key, count in after.items()} == {
        ("ack", "applied"): 5,
        ("ack", "repeated"): 1,
        ("ack", "held"): 1,
        ("ack", "rejected"): 4,
        ("fail", "applied"): 1,
        ("fail", "repeated"): 1,
        ("fail", "held"): 0,
        ("fail", "rejected"): 0,
        **{("skip", result): 0 for result in ("applied", "repeated", "held", "rejected")},
    }


def test_calls_are_counted_by_status_and_route(http: httpx.Client) -> None:
    """The ack routes on the fast path and off it; all others by their templates, so that paths create no series."""
    batch = open_batch(http, items=2)["id"]

    def counts() -> dict[str, float]:
        route = {"method": "GET", "route": "/v1/batches/{id}"}
        name = "lastbit_http_request_seconds_count"
        return {
            "acked": value(http, "lastbit_ack_requests_total", verb="ack", status="200"),
            "refused": value(http, "lastbit_ack_requests_total", verb="ack", status="422"),
            "wrong type": value(http, "lastbit_ack_requests_total", verb="fail", status="415"),
            "found": value(http, name, status="200", **route),
            "not found": value(http, name, status="404", **route),
            "with slashes": value(http, name, route="/v1/tallies/{tally}/{key}", status="200"),
            "nowhere": value(http, name, route="none", status="404"),
        }

    before = counts()
    for _ in range(2):
        send(http, items=[f"{batch}:0:0"])
        http.post("/v1/acks", json={"items": ["x"]})
        http.post("/v1/failures", content=b"x")
        http.get(f"/v1/batches/{batch}")
        http.get(f"/v1/batches/{batch + 10**9}")
        http.get(f"/{batch}")
        http.get(f"/v1/tallies/counted/{batch}/a")
    assert {name: count - before[name] for name, count in counts().items()} == dict.fromkeys(before, 2)
    assert str(batch) not in {
        sample.labels["route"] for sample in families(http)["lastbit_http_request_seconds"].samples
    }


@mutant("creation-times-are-exposed", "api.app:create", "omit_creation_times()", "None")
def test_a_counter_is_one_series(http: httpx.Client) -> None:
    """Without that of its creation time, which nothing reads."""
    assert "lastbit_acks_total" in families(http)
    assert not [name for name in families(http) if name.endswith("_created")]


@pytest.fixture
def calm_http() -> Iterator[httpx.Client]:
    """A service without background work, so that all transactions are the test's own."""
    with (
        sqlite_file() as url,
        running_service(url, LASTBIT_JANITOR_EVERY="0", LASTBIT_DISPATCHER_EVERY="0") as running,
        httpx.Client(base_url=running.url, timeout=70) as client,
    ):
        yield client


def test_a_flush_is_measured_with_its_transaction(calm_http: httpx.Client) -> None:
    """A call for two batches is two units in one flush, in one transaction that commits."""
    http = calm_http
    first, second = open_batch(http, items=1)["id"], open_batch(http, items=1)["id"]

    def counts() -> list[float]:
        return [
            value(http, "lastbit_flush_units_count"),
            value(http, "lastbit_flush_units_sum"),
            value(http, "lastbit_flush_wait_seconds_count"),
            value(http, "lastbit_transaction_seconds_count", outcome="committed"),
            value(http, "lastbit_transaction_seconds_count", outcome="rolled_back"),
        ]

    before = counts()
    send(http, items=[f"{first}:0:0", f"{second}:0:0"])
    http.post(f"/v1/batches/{10**9}/cancel")  # no such batch, so it is rolled back
    assert [now - previous for now, previous in zip(counts(), before, strict=True)] == [1, 2, 1, 1, 1]


def test_metrics_are_answered_without_the_database(mariadb: MariaDB, mariadb_url: str) -> None:
    """Its server is stopped: the process's own metrics arrive in time and show that it is unreachable; then it is
    back."""
    assert mariadb.process is not None
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url) as running, httpx.Client(base_url=running.url, timeout=30) as client:
        batch = open_batch(client, items=1)["id"]
        send(client, items=[f"{batch}:0:0"])
        eventually(lambda: value(client, "lastbit_open_batches"), 1)
        mariadb.process.send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: value(client, "lastbit_database_up"), 0)
            start = time.monotonic()
            result = families(client)
            assert time.monotonic() - start < 5
            assert "lastbit_open_batches" not in result  # unknown without the database
            assert [sample.value for sample in result["lastbit_database_up"].samples] == [0]
            assert acks(client)["ack", "applied"] == 1
        finally:
            mariadb.process.send_signal(signal.SIGCONT)
        eventually(lambda: value(client, "lastbit_database_up"), 1)
        assert value(client, "lastbit_open_batches") == 1


@contextlib.contextmanager
def stopped_process(pid: int) -> Iterator[None]:
    """Stop this process, so that others accept its connections."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_scrape_of_any_worker_includes_all_workers(mariadb_url: str, tmp_path: Path) -> None:
    """Counters are summed, also over a killed worker; values from the database are not. No file is left."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with running_service(mariadb_url, workers=2, TMPDIR=str(tmp_path)) as running:

        def client() -> httpx.Client:
            """A client with a new connection, which either worker may accept."""
            return httpx.Client(base_url=running.url, timeout=30)

        def applied() -> float:
            with client() as http:
                return acks(http)["ack", "applied"]

        with client() as http:
            batch = open_batch(http, items=10)["id"]
        eventually(lambda: len(running.worker_ids()), 2)
        pair = running.worker_ids()
        for other, numbers in zip(pair, ((0, 1, 2), (3, 4)), strict=True):
            with stopped_process(other), client() as http:
                for number in numbers:
                    send(http, items=[f"{batch}:0:{number}"])
        eventually(applied, 5)
        for other in pair:
            with stopped_process(other), client() as http:
                result = families(http)
                assert acks(http)["ack", "applied"] == 5
                assert [sample.value for sample in result["lastbit_open_batches"].samples] == [1]
                assert [sample.labels for sample in result["lastbit_database_up"].samples] == [{}]
        os.kill(pair[0], signal.SIGKILL)
        eventually(lambda: len(set(running.worker_ids()) - {pair[0]}), 2)
        assert applied() == 5
        assert list(tmp_path.iterdir())
        running.stop(signal.SIGTERM)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def measured(sqlite_http: httpx.Client) -> dict[str, Any]:
    """Each metric of a live service with some traffic: its type and its labels."""
    batch = open_batch(sqlite_http, items=1)["id"]
    send(sqlite_http, items=[f"{batch}:0:0"])
    sqlite_http.put("/v1/consumer-groups/orders", json={"partitions": 4})
    sqlite_http.put("/v1/processes/ship-order")
    # Gauges read from the database may be cached for a moment.
    eventually(lambda: bool(families(sqlite_http)["lastbit_process_events_parked"].samples), True)
    return {
        name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for name, family in families(sqlite_http).items()
    }


def test_the_table_of_metrics_matches_the_endpoint(measured: dict[str, Any]) -> None:
    """Names, types and labels of docs/metrics.md."""
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^- `(lastbit_\w+)` \((\w+)([^)]*)\)", page, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == measured


def test_the_dashboard_shows_all_metrics_and_no_others(measured: dict[str, Any]) -> None:
    """By names and labels that a live service prints, from a data source that the reader chooses."""
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    names = {
        name + suffix: name
        for name, (kind, _) in measured.items()
        for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
    }
    assert {entry["name"] for entry in dashboard["templating"]["list"]} >= {"datasource"}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    shown_metrics = set()
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            expression = target["expr"]
            used_names = set(re.findall(r"\blastbit_\w+", expression))
            assert used_names, expression
            assert used_names <= names.keys(), expression
            shown_metrics |= {names[entry] for entry in used_names}
            labels = {label for entry in used_names for label in measured[names[entry]][1]} | {"le", "job", "instance"}
            used_labels = set(re.findall(r"(\w+)=~?\"", expression)) | set(
                re.findall(r"{{(\w+)}}", target["legendFormat"])
            )
            used_labels |= {label for entry in re.findall(r"by \(([^)]*)\)", expression) for label in entry.split(", ")}
            assert used_labels <= labels, expression
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
    assert shown_metrics == measured.keys()
