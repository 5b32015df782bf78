"""`on_success` and `on_complete`, with real workers and a real Redis."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import pytest

from lastbit import BatchHandle, Client, InvalidArgument
from lastbit.integrations.rq import fan_out
from tests.integrations import workers
from tests.integrations.rq.conftest import READY
from tests.integrations.workers import Workers, wait_until
from tests.mutants import mutant

StartWorker = Callable[..., AbstractContextManager[Workers]]


@pytest.fixture
def app_name(monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"app-{uuid.uuid4()}"
    monkeypatch.setenv("TESTS_APP", name)
    return name


@pytest.fixture
def publishing(app: ModuleType, app_name: str) -> StartWorker:
    """Starts a worker process of a class of `tests.integrations.rq.publishing`."""

    def start(kind: str = "Forking", **environment: str) -> AbstractContextManager[Workers]:
        command = ("rq.cli", "worker", "--worker-class", f"tests.integrations.rq.publishing.{kind}")
        return workers.running(*command, prints=READY, **environment)

    return start


def ended(store: Any, batch: BatchHandle) -> list[str]:
    """What the jobs at the ends of this batch have noted, in their order."""
    return [
        word
        for batch_id, _, word in (entry.partition(":") for entry in store.lrange("ended", 0, -1))
        if batch_id == str(batch.id)
    ]


@pytest.mark.parametrize("kind", ["Forking", "Simple"])
@mutant(
    "a-worker-of-rq-leaves-its-endings-to-others",
    "lastbit.integrations.rq._worker:LastbitMixin.work",
    "self.endings",
    "False",
    case="Simple",
)
@mutant(
    "a-job-at-the-end-does-not-know-its-batch",
    "lastbit.integrations.rq._endings:message_id_of",
    "job_id.startswith('batch-')",
    "False",
    case="Simple",
)
def test_a_worker_enqueues_the_jobs_of_each_ending(
    app: ModuleType, publishing: StartWorker, app_name: str, store: Any, kind: str, client: Client
) -> None:
    """As many run as there are endings, and they know their batch; each in the queue of its fan-out."""
    calls: dict[str, Any] = {
        "on_success": (app.notes_its_batch, ("für",)),
        "on_complete": ("tests.integrations.rq.app.notes_its_batch", {"word": "x", "copies": 2}),
        "app_name": app_name,
        "client": client,
    }
    good = fan_out(app.queue, app.succeeds, [(1,), (2,)], **calls)
    bad = fan_out(app.queue, app.fails, [()], labels={"team": "search"}, **calls)
    cancelled_batch = fan_out(app.queue, app.succeeds, [(1,)], seal=False, **calls)
    cancelled_batch.cancel()
    with publishing(kind) as process:
        wait_until(lambda: len(ended(store, good)) == 2, "the first batch ends")
        wait_until(lambda: ended(store, bad), "the second batch ends")
        wait_until(lambda: ended(store, cancelled_batch), "the third batch ends")
        # RQ answers a request to stop with an exception, wherever it arrives: between two jobs, that may be a place
        # where RQ or redis-py catches all of them.
        wait_until(lambda: any("b" in each["flags"] for each in store.client_list()), "the worker waits for a job")
        assert process.stop() == 0
    assert (sorted(ended(store, good)), ended(store, bad), ended(store, cancelled_batch)) == (
        ["für", "xx"],
        ["xx"],
        ["xx"],
    )
    assert bad.refresh().labels["team"] == "search"
    assert not client.groups.get(f"process.endings.{app_name}").workers
    assert app.queue.fetch_job(f"batch-{good.id}-succeeded").result_ttl == 60


@pytest.mark.parametrize("kind", ["Forking", "Simple"])
def test_the_job_survives_the_worker_that_acks_last(
    app: ModuleType, publishing: StartWorker, app_name: str, store: Any, kind: str, client: Client
) -> None:
    """It is killed when the service has the ack."""
    options: Any = {"app_name": app_name, "client": client}
    batch = fan_out(app.queue, app.succeeds, [(1,)], on_success=(app.notes_its_batch, ("done",)), **options)
    with publishing(kind, TESTS_DIES="1") as victim:
        victim.wait()
    assert batch.refresh().succeeded
    with publishing(kind):
        wait_until(lambda: ended(store, batch), "the batch ends")
    assert set(ended(store, batch)) == {"done"}


@mutant(
    "a-worker-of-rq-enqueues-any-function",
    "lastbit.integrations.rq._endings:publish",
    "message['call'] not in allowed",
    "False",
)
def test_a_function_that_the_worker_does_not_name_is_parked(
    app: ModuleType, publishing: StartWorker, app_name: str, client: Client, store: Any
) -> None:
    """It never runs, however the batch was opened."""
    options: Any = {"app_name": app_name, "client": client}
    batch = fan_out(app.queue, app.succeeds, [(1,)], on_success=("os.getcwd", ()), **options)
    with publishing():
        name, instance = f"endings.{app_name}", f"batch:{batch.id}:succeeded"
        wait_until(lambda: list(client.processes.instances(name, status="parked")), "it is parked")
    assert "os.getcwd is not in `endings`" in (client.processes.get(name, instance).history[0].error or "")
    assert app.queue.fetch_job(f"batch-{batch.id}-succeeded") is None


def test_what_cannot_be_an_ending_is_refused_before_anything_is_enqueued(app: ModuleType, client: Client) -> None:
    batch = client.open()
    function = app.notes_its_batch
    for options, text in (
        ({"on_success": function}, "on_success: expected what to call and its arguments"),
        ({"on_success": (function, "chair")}, "on_success: expected what to call and its arguments"),
        ({"on_complete": (object(), ())}, "on_complete: expected a function"),
        ({"on_complete": (function, (object(),))}, "on_complete: the arguments must be JSON"),
        ({"on_complete": (function, ("x" * 1000,))}, "pass ids, not data"),
        ({"on_complete": (function, ()), "batch": batch}, "are for a new batch"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            fan_out(app.queue, app.succeeds, [(1,)], client=client, **options)
    assert not app.queue.count
