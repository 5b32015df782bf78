"""`on_success` and `on_complete`, with real workers and a real broker."""

from __future__ import annotations

import asyncio
import uuid
from types import ModuleType
from typing import Any

import pytest
from taskiq import AsyncTaskiqDecoratedTask

from lastbit import BatchHandle, Client, InvalidArgument
from lastbit.integrations.taskiq import fan_out
from tests.integrations.taskiq.conftest import StartWorker
from tests.integrations.workers import wait_until
from tests.mutants import mutant


@pytest.fixture(autouse=True)
def app_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Set before the module of the tasks is loaded, as that makes the middleware."""
    name = f"app-{uuid.uuid4()}"
    monkeypatch.setenv("TESTS_APP", name)
    return name


def sent(app: ModuleType, client: Client, *fan_outs: dict[str, Any]) -> list[BatchHandle]:
    """The batches of these fan-outs."""

    async def send() -> list[int]:
        await app.broker.startup()
        batches = [(await fan_out(**options)).id for options in fan_outs]
        await app.broker.shutdown()
        return batches

    return [client.batch(batch) for batch in asyncio.run(send())]


def runs(store: Any, batch: BatchHandle) -> dict[str, int]:
    """How often the task of each event has run."""
    prefix = f"batch:{batch.id}:"
    counts = store.hgetall("runs")
    return {name.removeprefix(prefix): int(count) for name, count in counts.items() if name.startswith(prefix)}


@mutant(
    "a-task-of-taskiq-at-the-end-does-not-know-its-batch",
    "lastbit.integrations.taskiq:LastbitMiddleware.pre_execute",
    "_current.enter(message.task_id, None if watch is None else watch.batches)",
    "_current.enter(item, None if watch is None else watch.batches)",
)
def test_a_worker_sends_the_tasks_of_each_ending(
    app_name: str, app: ModuleType, worker: StartWorker, store: Any, client: Client
) -> None:
    """As many run as there are endings."""
    calls = {"on_success": (app.succeeds, (1,)), "on_complete": (app.succeeds, {"number": 2})}
    good, bad, cancelled_batch = sent(
        app,
        client,
        {"task": app.succeeds, "arguments": [(1,), (2,)], **calls},
        {"task": app.fails, "arguments": [()], "labels": {"team": "search"}, **calls},
        {"task": app.succeeds, "arguments": [(1,)], "seal": False, **calls},
    )
    cancelled_batch.cancel()
    with worker() as process:
        wait_until(lambda: runs(store, good) == {"succeeded": 1, "completed": 1}, "the first batch ends")
        wait_until(lambda: runs(store, bad) == {"completed": 1}, "the second batch ends")
        wait_until(lambda: runs(store, cancelled_batch) == {"cancelled": 1}, "the third batch ends")
        assert process.stop() == 0
    assert not client.groups.get(f"process.endings.{app_name}").workers
    assert bad.refresh().labels["team"] == "search"


def test_the_task_survives_the_worker_that_acks_last(
    app: ModuleType, worker: StartWorker, store: Any, client: Client
) -> None:
    """It is killed between the commit and the removal of the message."""
    (batch,) = sent(app, client, {"task": app.killed_at_ack, "arguments": [()], "on_success": (app.succeeds, (1,))})
    with worker() as victim:
        wait_until(lambda: store.get("acks"), "the worker is killed")
        victim.kill()
    with worker():
        wait_until(lambda: runs(store, batch), "the task at the end runs")
    assert set(runs(store, batch)) == {"succeeded"}


def test_a_task_that_no_worker_knows_is_parked(
    app_name: str, app: ModuleType, worker: StartWorker, client: Client
) -> None:
    missing = AsyncTaskiqDecoratedTask(app.broker, "missing", app.succeeds.original_func, {})
    (batch,) = sent(app, client, {"task": app.succeeds, "arguments": [(1,)], "on_success": (missing, (1,))})
    with worker():
        name = f"endings.{app_name}"
        wait_until(lambda: list(client.processes.instances(name, status="parked")), "it is parked")
    details = client.processes.get(name, f"batch:{batch.id}:succeeded")
    assert "this worker has no task missing" in (details.history[0].error or "")


def test_what_cannot_be_an_ending_is_refused_before_anything_is_sent(app: ModuleType, client: Client) -> None:
    batch = client.open()
    for options, text in (
        ({"on_success": app.succeeds}, "on_success: expected what to call and its arguments"),
        ({"on_success": (app.succeeds.kicker(), (1,))}, "on_success: expected a task"),
        ({"on_complete": (app.succeeds, (object(),))}, "on_complete: the arguments must be JSON"),
        ({"on_complete": (app.succeeds, ("x" * 1000,))}, "pass ids, not data"),
        ({"on_complete": (app.succeeds, (1,)), "batch": batch.id}, "are for a new batch"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            asyncio.run(fan_out(app.succeeds, [(1,)], **options))
    assert batch.refresh().items == 0
