"""What the streams of this process are doing: as numbers, and for prometheus_client.

    from prometheus_client import REGISTRY, start_http_server

    from lastbit.streams import metrics

    REGISTRY.register(metrics.Collector())
    start_http_server(9100)

A stream has the `name` of `run_ordered`, or that of its consumer group, and then a partition. Counting costs nothing
while no record fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lastbit.streams.window import AckWindow

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class StreamMetrics:
    """A stream, or a partition of a consumer group. `outstanding`: records that have come and are not done.
    `oldest_seconds`: how long ago the first of them came; 0 without one. `retries`, `dead_letters`: since the process
    began, also of earlier streams of this name."""

    stream: str
    partition: int | None
    outstanding: int
    oldest_seconds: float
    retries: int
    dead_letters: int


class Counts:
    """The windows of the running streams of one name and partition, and what has failed in them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: list[AckWindow] = []
        self._retries = 0
        self._dead_letters = 0

    def begin(self, window: AckWindow) -> None:
        with self._lock:
            # A window is closed when its partition is released or lost.
            self._windows = [*(other for other in self._windows if not other.closed), window]

    def end(self, window: AckWindow) -> None:
        with self._lock:
            self._windows = [other for other in self._windows if other is not window]

    def retry(self, count: int) -> None:
        with self._lock:
            self._retries += count

    def dead_letter(self) -> None:
        with self._lock:
            self._dead_letters += 1

    def read(self, stream: str, partition: int | None) -> StreamMetrics:
        with self._lock:
            windows = [window for window in self._windows if not window.closed]
            outstanding = sum(len(window.outstanding) for window in windows)
            oldest = max((window.oldest_age for window in windows), default=0.0)
            return StreamMetrics(stream, partition, outstanding, oldest, self._retries, self._dead_letters)


_counts: dict[tuple[str, int | None], Counts] = {}
_lock: Final = threading.Lock()


def counts_of(stream: str, partition: int | None) -> Counts:
    """For the streams themselves."""
    with _lock:
        return _counts.setdefault((stream, partition), Counts())


def snapshot() -> list[StreamMetrics]:
    """The streams that this process has run so far, by name and partition."""
    with _lock:
        known = list(_counts.items())
    return sorted(
        (counts.read(*key) for key, counts in known),
        key=lambda metrics: (metrics.stream, -1 if metrics.partition is None else metrics.partition),
    )


class Collector:
    """For the registry of prometheus_client. Raises `ImportError` without it.

    The labels `stream` and `partition`; the partition is empty outside a consumer group:

    | metric | is |
    |---|---|
    | `lastbit_stream_outstanding` | records that have come and are not done |
    | `lastbit_stream_oldest_seconds` | how long ago the first of them came |
    | `lastbit_stream_retries_total` | failures that are tried again |
    | `lastbit_stream_dead_letters_total` | records that were given up |
    """

    def __init__(self) -> None:
        from prometheus_client import core

        self._core = core

    def collect(self) -> Iterator[Metric]:
        gauge: Any = self._core.GaugeMetricFamily
        counter: Any = self._core.CounterMetricFamily
        found = snapshot()
        for kind, field, meaning in (
            (gauge, "outstanding", "Records that have come and are not done"),
            (gauge, "oldest_seconds", "Seconds since the first outstanding record came"),
            (counter, "retries", "Failures of records that are tried again"),
            (counter, "dead_letters", "Records that were given up"),
        ):
            family = kind(f"lastbit_stream_{field}", meaning, labels=["stream", "partition"])
            for metrics in found:
                partition = "" if metrics.partition is None else str(metrics.partition)
                family.add_metric([metrics.stream, partition], getattr(metrics, field))
            yield family
