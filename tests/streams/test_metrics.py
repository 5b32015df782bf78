"""What streams show of themselves, on both runners and in a consumer group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from lastbit import Client
from lastbit.streams import AckWindow, Backoff, RecordFailed, metrics
from lastbit.streams.metrics import StreamMetrics
from tests.mutants import mutant
from tests.streams.group_workers import PATIENCE, Records, Worker, on_both_workers
from tests.streams.runners import Run, on_both_runners
from tests.support.exposition import eventually
from tests.support.servers import running_service, sqlite_file


def metrics_of(name: str) -> list[StreamMetrics]:
    return [each for each in metrics.snapshot() if each.stream == name]


@mutant(
    "a-retry-is-not-counted", "lastbit.streams._steps:Stream.partly_done", "self._counts.retry(len(waiting))", "None"
)
@mutant("a-dead-letter-is-not-counted", "lastbit.streams._steps:Stream.give_up", "self._counts.dead_letter()", "None")
@on_both_runners
def test_a_stream_shows_what_is_outstanding_and_what_has_failed(run: Run, request: pytest.FixtureRequest) -> None:
    """While it runs; and its failures afterwards, when another stream of its name begins."""
    name = request.node.name
    seen: list[StreamMetrics] = []

    def handle(record: int) -> None:
        if record == 2:
            raise ValueError("poison")
        if record == 4:
            seen.extend(metrics_of(name))

    def source() -> Any:
        yield from ((offset, offset) for offset in range(4))
        while window.outstanding:
            yield None
        yield 4, 4

    for expected_deaths in (1, 2):
        window = AckWindow()
        run(
            source(),
            handle,
            key=lambda record: record,
            retry=Backoff(first=0.0, tries=3),
            dead_letter=lambda record, error: None,
            window=window,
            name=name,
        )
        while_running = seen.pop()
        assert while_running == StreamMetrics(
            name, None, 1, while_running.oldest_seconds, 2 * expected_deaths, expected_deaths
        )
        assert 0 <= while_running.oldest_seconds < 60
        assert metrics_of(name) == [StreamMetrics(name, None, 0, 0.0, 2 * expected_deaths, expected_deaths)]


@mutant(
    "a-stream-that-has-ended-stays-in-the-metrics",
    "lastbit.streams._steps:Stream.leave_the_metrics",
    "self._counts.end(self._window)",
    "None",
)
@on_both_runners
def test_a_stream_that_fails_is_out_of_the_metrics(run: Run, request: pytest.FixtureRequest) -> None:
    """With its outstanding records."""

    def handle(record: int) -> None:
        raise ValueError("poison")

    with pytest.raises(RecordFailed):
        run([(0, 0), (1, 1)], handle, key=lambda record: record, name=request.node.name)
    assert metrics_of(request.node.name) == [StreamMetrics(request.node.name, None, 0, 0.0, 0, 0)]


def test_streams_of_one_name_are_added_up() -> None:
    """The oldest of all is shown. A window that another owner has taken over counts no more."""
    counts = metrics.counts_of("added-up", 3)
    now = 100.0
    windows = [AckWindow(clock=lambda: now) for _ in range(3)]
    for window in windows:
        counts.begin(window)
        window.track(0)
        now += 10
    windows[0].track(1)
    assert counts.read("added-up", 3) == StreamMetrics("added-up", 3, 4, 30.0, 0, 0)
    windows[0].close()
    assert counts.read("added-up", 3) == StreamMetrics("added-up", 3, 2, 20.0, 0, 0)


def test_prometheus_shows_them() -> None:
    """In the text format, with the labels that the docs name."""
    counts = metrics.counts_of("shown", 7)
    counts.retry(3)
    registry = CollectorRegistry()
    registry.register(metrics.Collector())
    lines = generate_latest(registry).decode().splitlines()
    assert 'lastbit_stream_outstanding{partition="7",stream="shown"} 0.0' in lines
    assert 'lastbit_stream_oldest_seconds{partition="7",stream="shown"} 0.0' in lines
    assert 'lastbit_stream_retries_total{partition="7",stream="shown"} 3.0' in lines
    assert 'lastbit_stream_dead_letters_total{partition="7",stream="shown"} 0.0' in lines


@on_both_workers
def test_the_partitions_of_a_worker_show_themselves(kind: type[Worker], request: pytest.FixtureRequest) -> None:
    """Each of its own, until it is released."""
    name = request.node.name
    records = Records(2, 3)
    may_go_on = threading.Event()

    def handle(record: tuple[int, int]) -> None:
        if record == (1, 0):
            assert may_go_on.wait(PATIENCE)
        records.done(record)

    def counts() -> list[tuple[int | None, int]]:
        return [(each.partition, each.outstanding) for each in metrics_of(name)]

    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:
        client.groups.create(name, partitions=2)
        with kind(service.url, name, "w1", records.read, handle, key=lambda record: record[0]) as worker:
            eventually(counts, [(0, 0), (1, 3)])
            (_, stuck) = metrics_of(name)
            assert stuck.oldest_seconds > 0
            may_go_on.set()
            eventually(counts, [(0, 0), (1, 0)])
        assert worker.error is None
