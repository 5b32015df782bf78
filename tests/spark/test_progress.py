"""The progress of `ack` while it runs, and the names of its jobs."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from lastbit import Client
from lastbit.spark import AckProgress, ack, bar, item_id
from tests.spark.conftest import CONNECT

pytestmark = pytest.mark.xdist_group("spark")

GROUPS = 30
ITEMS = GROUPS * 64


class Gate:
    """A proxy in front of the service. The third request with masks waits until `opened` is set, for at most a minute.

    With a request per task and two cores, it is the request of the third task, when one or two others have ended.
    """

    def __init__(self, real: httpx.Client) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.requests = 0
        self._real = real
        self._lock = threading.Lock()

    def __call__(self, seen: Any) -> Any:
        if seen.body and seen.body.get("groups"):
            with self._lock:
                self.requests += 1
                third = self.requests == 3
            if third:
                self.reached.set()
                self.opened.wait(60)
        answer = self._real.request(seen.method, seen.path, json=seen.body)
        return answer.status_code, {}, answer.json()


@pytest.fixture
def gate(spark: Any, service_url: str, scripted_service: Any) -> Iterator[Gate]:
    """Without merging small partitions, a frame's masks are in three partitions, the number that the session sets."""
    merging = "spark.sql.adaptive.coalescePartitions.enabled"
    spark.conf.set(merging, "false")
    with httpx.Client(base_url=service_url, timeout=60) as real:
        scripted_service.reply = gate = Gate(real)
        yield gate
        gate.opened.set()
    spark.conf.unset(merging)


def ids(spark: Any, client: Client) -> tuple[Any, Any]:
    batch = client.open(items=ITEMS, group_size=64, sealed=True)
    return batch, spark.range(ITEMS).select(item_id(batch.id, "id", 64).alias("item_id"))


def test_what_ended_tasks_sent_is_known_while_another_runs(
    spark: Any, client: Client, scripted_service: Any, gate: Gate
) -> None:
    """The third task ends only after the caller has seen the others' tasks, rows and groups."""
    batch, frame = ids(spark, client)
    states: list[AckProgress] = []

    def watch(state: AckProgress) -> None:
        states.append(state)
        if state.rows and state.completed_tasks and state.completed_tasks < state.tasks:
            gate.opened.set()

    report = ack(frame, url=scripted_service.url, progress=watch)
    assert gate.requests == 3
    assert any(0 < state.rows < ITEMS and 0 < state.completed_tasks < state.tasks == 3 for state in states), states
    assert all(state.rows == 64 * state.groups for state in states)
    assert (states[-1].rows, states[-1].groups) == (ITEMS, GROUPS)
    assert (report.applied, report.completed) == (ITEMS, (batch.id,))


def test_an_error_of_the_watcher_stops_no_ack(spark: Any, client: Client) -> None:
    """`ack` raises it, once everything has been sent."""
    batch, frame = ids(spark, client)

    def watch(state: AckProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ack(frame, url=client.url, progress=watch)
    assert batch.refresh().succeeded


@pytest.mark.skipif(CONNECT, reason="Connect has tags")
def test_jobs_have_a_description_and_the_callers_own_stays(
    spark: Any, client: Client, scripted_service: Any, gate: Gate
) -> None:
    """While they run, in Spark's list of jobs; afterwards, the thread's properties are as before."""
    context = spark.sparkContext
    names = ("spark.job.description", "spark.jobGroup.id")
    store = context._jsc.sc().statusStore()

    def running_description() -> str:
        assert gate.reached.wait(60)
        (job,) = (store.job(number) for number in context.statusTracker().getActiveJobsIds())
        gate.opened.set()
        return str(job.description().get())

    for own in (None, "nightly"):
        gate.requests = 0
        gate.opened.clear()
        gate.reached.clear()
        for name in names:
            context.setLocalProperty(name, own)
        try:
            descriptions: list[str] = []
            looking = threading.Thread(target=lambda texts=descriptions: texts.append(running_description()))
            looking.start()
            _, frame = ids(spark, client)
            ack(frame, url=scripted_service.url, progress=lambda state: None)
            looking.join()
            assert descriptions == [own or "lastbit.ack"]
            assert [context.getLocalProperty(name) for name in names] == [own, own]
        finally:
            for name in names:
                context.setLocalProperty(name, None)


@pytest.mark.skipif(not CONNECT, reason="classic sessions have descriptions")
def test_a_tag_interrupts_the_operation(spark: Any, client: Client, scripted_service: Any, gate: Gate) -> None:
    """Spark stops it by the tag; a second call sends the rest."""
    batch, frame = ids(spark, client)
    operations: list[str] = []

    def interrupt() -> None:
        assert gate.reached.wait(60)
        operations.extend(spark.interruptTag("lastbit.ack"))

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(Exception, match=r"(?i)cancel"):
        ack(frame, url=scripted_service.url)
    interrupting.join()
    gate.opened.set()
    assert len(operations) == 1
    assert "lastbit.ack" not in spark.getTags()
    ack(frame, url=client.url)
    assert batch.refresh().succeeded


STATE = AckProgress(stage=4, tasks=8, completed_tasks=2, rows=3_000_000, groups=367)


@pytest.fixture
def pace() -> bar.Pace:
    """Of a stage that began ten seconds before it is asked."""
    times = iter([0.0, 100.0, 100.0])
    pace = bar.Pace(lambda: next(times, 110.0))
    assert pace.words(AckProgress(stage=4, tasks=8)) == ""
    return pace


def test_rate_and_estimate_are_those_of_the_stage(pace: bar.Pace) -> None:
    """Two of eight tasks took ten seconds; a stage without an ended task has no estimate."""
    assert pace.words(STATE) == "300,000 rows/s, about 30 s left in this stage"
    assert pace.words(AckProgress(stage=4, tasks=8)) == ""


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures in both."""
    monkeypatch.setattr(bar, "EVERY", 0.0)
    for terminal in (True, False):
        screen = io.StringIO()
        with bar.bar(Console(file=screen, force_terminal=terminal, width=120)) as show:
            show(STATE)
        text = screen.getvalue()
        assert "ack: stage 4, 2 of 8 tasks" in text
        assert "3,000,000 rows, 367 groups sent" in text
        assert ("\x1b[" in text) is terminal
