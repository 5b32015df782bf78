"""`on_success` and `on_complete`, with real workers and a real broker."""

from __future__ import annotations

import uuid
from types import ModuleType
from typing import Any

import dramatiq
import pytest

from lastbit import BatchHandle, Client, InvalidArgument
from lastbit.integrations.dramatiq import fan_out
from tests.integrations.dramatiq.conftest import StartWorker
from tests.integrations.workers import wait_until
from tests.mutants import mutant


@pytest.fixture(autouse=True)
def app_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """Set before the module of the actors is loaded, as that makes the middleware."""
    name = f"app-{uuid.uuid4()}"
    monkeypatch.setenv("TESTS_APP", name)
    return name


def runs(store: Any, batch: BatchHandle) -> dict[str, int]:
    """How often the message of each event has run."""
    prefix = f"batch:{batch.id}:"
    return {
        name.removeprefix(prefix): int(count)
        for name, count in store.hgetall("runs").items()
        if name.startswith(prefix)
    }


@mutant(
    "a-message-of-dramatiq-at-the-end-does-not-know-its-batch",
    "lastbit.integrations.dramatiq:LastbitMiddleware.before_process_message",
    "_current.replace(message.message_id)",
    "pass",
)
def test_a_worker_sends_the_messages_of_each_ending(
    app_name: str, app: ModuleType, worker: StartWorker, store: Any, client: Client
) -> None:
    """As many run as there are endings, each by its actor's queue and options."""
    messages = {
        "on_success": app.succeeds.message(1),
        "on_complete": app.succeeds.message_with_options(kwargs={"number": 2}, delay=1),
    }
    good = fan_out([app.succeeds.message(1), app.succeeds.message(2)], **messages)
    bad = fan_out([app.fails_at_first_if_wrong.message("wrong")], labels={"team": "search"}, **messages)
    cancelled_batch = fan_out([app.succeeds.message(1)], seal=False, **messages)
    cancelled_batch.cancel()
    with worker() as process:
        wait_until(lambda: runs(store, good) == {"succeeded": 1, "completed": 1}, "the first batch ends")
        wait_until(lambda: runs(store, bad) == {"completed": 1}, "the second batch ends")
        wait_until(lambda: runs(store, cancelled_batch) == {"cancelled": 1}, "the third batch ends")
        assert process.stop() == 0
    assert not client.groups.get(f"process.endings.{app_name}").workers
    assert bad.refresh().labels["team"] == "search"


def test_the_message_survives_the_worker_that_acks_last(app: ModuleType, worker: StartWorker, store: Any) -> None:
    """It is killed between the commit and the removal of the message."""
    batch = fan_out([app.killed_at_ack.message()], on_success=app.succeeds.message(1))
    with worker() as victim:
        wait_until(lambda: store.get("acks"), "the worker is killed")
        victim.kill()
    with worker():
        wait_until(lambda: runs(store, batch), "the message at the end runs")
    assert set(runs(store, batch)) == {"succeeded"}


def test_an_actor_that_no_worker_knows_is_parked(
    app_name: str, app: ModuleType, worker: StartWorker, client: Client
) -> None:
    missing = dramatiq.Message("default", "missing", (), {}, {})
    batch = fan_out([app.succeeds.message(1)], on_success=missing)
    with worker():
        name = f"endings.{app_name}"
        wait_until(lambda: list(client.processes.instances(name, status="parked")), "it is parked")
    details = client.processes.get(name, f"batch:{batch.id}:succeeded")
    assert "ActorNotFound: missing" in (details.history[0].error or "")


def test_what_cannot_be_an_ending_is_refused_before_anything_is_sent(app: ModuleType, client: Client) -> None:
    batch = client.open()
    message = app.succeeds.message
    for options, text in (
        ({"on_success": app.succeeds}, "on_success: expected a message"),
        ({"on_success": message(1) | message()}, "on_success: expected a message"),
        ({"on_complete": message(object())}, "on_complete: the arguments must be JSON"),
        ({"on_complete": message("x" * 1000)}, "pass ids, not data"),
        ({"on_complete": message(1), "batch": batch}, "are for a new batch"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            fan_out([message(1)], **options)
    assert not app.store.exists("dramatiq:default")
