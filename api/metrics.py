"""The content of /metrics: the process's own measurements, those of its sibling workers, and the database's gauges."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from core import errors, gauges
from core.batches.lifecycle import Verb
from core.probe import Probe
from core.storage.database import Database

ACKS: Final = Counter("lastbit_acks_total", "Items of acks, failures and skips that were answered", ["verb", "result"])
ACK_REQUESTS: Final = Counter("lastbit_ack_requests_total", "Calls of the ack routes", ["verb", "status"])
REQUESTS: Final = Histogram(
    "lastbit_http_request_seconds",
    "Calls of all other routes, long polls with their waiting",
    ["method", "route", "status"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60),
)
REFUSED: Final = Counter(
    "lastbit_refused_total", "Connections and requests that were refused, so that the service keeps serving", ["cause"]
)

RESULTS: Final = ("applied", "repeated", "held", "rejected")
"""Held items are rejected too, but they are no fault: an alert on rejected items must not count them."""
for _verb in Verb:
    ACK_REQUESTS.labels(_verb.value, "200")
    for _result in RESULTS:
        ACKS.labels(_verb.value, _result)

_CAUSES: Final = "acks bytes connections idle large rate requests share slow unread writes"
for _cause in _CAUSES.split():
    REFUSED.labels(_cause)


def _gauge(name: str, documentation: str, *, of_workers: Literal["livemax", "livesum"] = "livemax") -> Gauge:
    """A gauge that `api.signals` sets. `of_workers`: what becomes of the values of several ones."""
    return Gauge(f"lastbit_{name}", documentation, multiprocess_mode=of_workers)


WRITE_STALL: Final = _gauge(
    "write_stall_seconds",
    "Since the oldest write that waits, or that failed, and after which none was committed; 0 if writes get through",
)
LOOP_LAG: Final = _gauge("event_loop_lag_seconds", "Longest time in the last minute until the event loop reacted")
THREAD_WAIT: Final = _gauge("thread_wait_seconds", "Longest time in the last minute that a request waited for a thread")
WAITING_REQUESTS: Final = _gauge("waiting_requests", "Requests that wait for a thread", of_workers="livesum")
CONNECTIONS: Final = _gauge("connections", "Open connections of clients")
CONNECTIONS_LIMIT: Final = _gauge("connections_limit", "Maximum connections of clients to one process")
RESIDENT_MEMORY: Final = _gauge("resident_memory_bytes", "Resident memory of the workers", of_workers="livesum")
MEMORY_LIMIT: Final = _gauge("memory_limit_bytes", "The limit of the control group, or else the machine's memory")
TOKENS_UNREADABLE: Final = _gauge("tokens_unreadable", "1 if the file of tokens has changed and can't be read, else 0")
CLOCK_STEP: Final = _gauge(
    "clock_step_seconds", "Largest step of the machine's wall clock in the last hour, forward or back"
)

SHED: Final = REFUSED.labels("acks")
REFUSED_BY_OVERLOAD: Final = {verb: ACK_REQUESTS.labels(verb.value, "503") for verb in Verb}
"""Looked up once, so that refusals under overload cost very little."""

FRESH: Final = 3.0
"""Seconds for which gauges are reused after a reading."""
PATIENCE: Final = 2.0
"""Seconds that a scrape waits for the database. Prometheus's own time-out is ten seconds."""


class DatabaseGauges(Collector):
    """`core.gauges`, and whether they could be read."""

    def __init__(self, database: Database) -> None:
        self._probe: Probe[Sequence[Metric]] = Probe(
            "gauges", lambda: database.snapshot(gauges.read), patience=PATIENCE, fresh=FRESH
        )

    def collect(self) -> Iterable[Metric]:
        families: Sequence[Metric] | None = None
        with contextlib.suppress(errors.CoreError):
            families = self._probe.result()
        yield GaugeMetricFamily(
            "lastbit_database_up", "Whether the database answered this scrape", families is not None
        )
        yield from families or ()


def omit_creation_times() -> None:
    """Expose no second series for each counter, with its creation time. Applies to all metrics of the process, so it is
    for one that is the service's own."""
    disable_created_metrics()  # type: ignore[no-untyped-call]


def exposition(database: DatabaseGauges) -> bytes:
    """All metrics as Prometheus text. May block for up to `PATIENCE` seconds."""
    collector: Collector = REGISTRY
    if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        # Each worker writes to files in this folder, and a scrape may reach any worker. Files of workers that died are
        # kept, as their counts remain valid; but not those with their gauges.
        _forget_gauges_of_dead_workers(Path(folder))
        collector = CollectorRegistry()
        MultiProcessCollector(collector)  # type: ignore[no-untyped-call]
    return generate_latest(collector) + generate_latest(database)


def _forget_gauges_of_dead_workers(folder: Path) -> None:
    for file in folder.glob("gauge_live*_*.db"):
        worker = int(file.stem.rpartition("_")[2])
        if not Path(f"/proc/{worker}").exists():
            mark_process_dead(worker, str(folder))  # type: ignore[no-untyped-call]
