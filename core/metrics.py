"""Prometheus metrics of a process's own work. Gauges that are read from the database are in `gauges`.

An ack takes microseconds, so nothing is measured per ack, only per flush, transaction or retry. All label values exist
from the start, at zero: a rate over a series that has just appeared misses its first increment.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Histogram

from core.errors import Fault

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

FLUSH_UNITS: Final = Histogram(
    "lastbit_flush_units",
    "Units (the parts of calls in one batch) in one flush",
    buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 4096),
)
FLUSH_WAIT: Final = Histogram(
    "lastbit_flush_wait_seconds", "Time that the oldest unit of a flush has waited", buckets=_SECONDS
)
_TRANSACTION: Final = Histogram(
    "lastbit_transaction_seconds",
    "Writing transactions, from the wait for a connection to the end of the COMMIT or the error",
    ["outcome"],
    buckets=_SECONDS,
)
_RETRIES: Final = Counter("lastbit_retries_total", "Transactions that were retried, whole or in parts", ["cause"])

COMMITTED: Final = _TRANSACTION.labels("committed")
ROLLED_BACK: Final = _TRANSACTION.labels("rolled_back")
"""Transactions whose work raised an error, mostly a refusal."""
TROUBLED: Final = {fault: _TRANSACTION.labels(fault.value) for fault in Fault}

RETRIED: Final = {fault: _RETRIES.labels(fault.value) for fault in Fault}
RETRIED_APART: Final = _RETRIES.labels("error")
"""A flush that fails for another reason than a database fault is retried batch by batch, so that only the faulty one
fails."""
MERGING_REFUSED: Final = _RETRIES.labels("merging")
"""Flushes that the database refuses, although it commits each of their batches by itself."""

STALE_EPOCHS: Final = Counter(
    "lastbit_stale_epochs_total", "Writes for a partition that were refused, because it has a new owner"
)

_PROCESS_EVENTS: Final = Counter(
    "lastbit_process_events_total", "Events that were handled for an instance of a process", ["outcome"]
)
PROCESS_EVENTS: Final = {
    outcome: _PROCESS_EVENTS.labels(outcome) for outcome in ("handled", "parked", "late", "repeated")
}
TIMERS_FIRED: Final = Counter("lastbit_timers_fired_total", "Timers of processes that were due and became events")
