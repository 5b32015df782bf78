"""`on_success` and `on_complete`, with real workers and a real broker."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from lastbit import BatchHandle, InvalidArgument
from tests.integrations.celery.workers import Place
from tests.mutants import mutant
from tests.support.exposition import eventually

BROKERS = ["redis", pytest.param("rabbitmq", marks=[pytest.mark.slow, pytest.mark.xdist_group("rabbitmq")])]


@pytest.fixture
def place(new_place: Any, request: pytest.FixtureRequest) -> Place:
    broker = getattr(request, "param", "redis")
    place: Place = new_place(broker, options={"app_name": f"app-{uuid.uuid4()}"})
    return place


def runs(place: Place, batch: BatchHandle) -> dict[str, int]:
    """How often the task of each event has run."""
    events = ("succeeded", "completed", "cancelled")
    return {event: count for event in events if (count := place.runs(f"batch:{batch.id}:{event}"))}


@pytest.mark.parametrize("place", BROKERS, indirect=True)
@mutant(
    "a-task-of-celery-at-the-end-does-not-know-its-batch",
    "lastbit.integrations.celery.current:install",
    "item_of(task_id, sender.request) or task_id",
    "item_of(task_id, sender.request)",
    case="redis",
)
def test_a_worker_publishes_the_tasks_of_each_ending(place: Place) -> None:
    """As many have run as there are endings, a chain as its last task."""
    last_tasks = {
        "on_success": place.task("succeed", "für"),
        "on_complete": place.task("succeed") | place.task("succeed"),
    }
    good = place.lastbit.fan_out([place.task("succeed")] * 3, **last_tasks)
    bad = place.lastbit.fan_out([place.task("succeed"), place.task("fail")], labels={"team": "search"}, **last_tasks)
    cancelled_batch = place.lastbit.fan_out([place.task("succeed")], seal=False, **last_tasks)
    cancelled_batch.cancel()
    with place.worker() as worker:
        eventually(lambda: runs(place, good), {"succeeded": 1, "completed": 1})
        eventually(lambda: runs(place, bad), {"completed": 1})
        eventually(lambda: runs(place, cancelled_batch), {"cancelled": 1})
        assert worker.stop() == 0
    assert not place.client.groups.get(f"process.endings.{place.options['app_name']}").workers
    assert bad.refresh().labels["team"] == "search"


def test_the_task_survives_the_worker_that_acks_last(place: Place) -> None:
    """It is killed between the commit and the removal of the message."""
    batch = place.lastbit.fan_out([place.task("succeed")], on_success=place.task("succeed"))
    with place.worker(TEST_DIES="1") as victim:
        assert victim.process.wait(60) == -9
    with place.worker():
        eventually(lambda: runs(place, batch).get("succeeded", 0) > 0, True)


def test_a_task_that_no_worker_knows_is_parked(place: Place) -> None:
    batch = place.lastbit.fan_out([place.task("succeed")], on_success=place.task("missing"))
    with place.worker():
        name = f"endings.{place.options['app_name']}"
        eventually(lambda: len(list(place.client.processes.instances(name, status="parked"))), 1)
    details = place.client.processes.get(name, f"batch:{batch.id}:succeeded")
    assert "NotRegistered: 'missing'" in (details.history[0].error or "")


def test_what_cannot_be_an_ending_is_refused_before_anything_is_sent(place: Place) -> None:
    batch = place.client.open()
    tasks = [place.task("succeed")]
    for options, text in (
        ({"on_success": "succeed"}, "on_success: expected a signature"),
        ({"on_complete": place.task("succeed", object())}, "on_complete: the arguments must be JSON"),
        ({"on_complete": place.task("succeed", "x" * 1000)}, "pass ids, not data"),
        ({"on_complete": place.task("succeed"), "batch": batch}, "are for a new batch"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            place.lastbit.fan_out(tasks, **options)  # type: ignore[arg-type]
    assert not place.messages()
