"""Every way in which a task can end, with taskiq's own worker processes and a real Redis."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
from taskiq.kicker import AsyncKicker

from lastbit import Client
from lastbit.failures import Redrive
from lastbit.integrations.taskiq import resend
from tests.integrations.redrives import redriven
from tests.integrations.taskiq.conftest import Send, StartWorker
from tests.integrations.workers import reasons_by_number as reasons
from tests.integrations.workers import wait_until


def unacked(store: Any) -> int:
    return int(store.xpending("taskiq", "taskiq")["pending"])


def test_each_ending_resolves_its_item(app: ModuleType, worker: StartWorker, send: Send, store: Any) -> None:
    """One batch with a task for each ending that needs no killing. A task that no worker has stays in the queue."""
    unknown: Any = AsyncKicker("unheard_of", app.broker, {})
    batch = send(
        (app.succeeds, (1,)),
        (app.succeeds_in_a_thread, {"number": 2}),
        (app.succeeds_at_the_third_run, ()),
        (app.exhausts_its_retries, ()),
        (app.fails, ()),
        (app.exceeds_its_time, ()),
        (app.is_rejected, ()),
        (app.is_requeued, ()),
        (app.succeeds.kicker().with_labels(priority=1), (3,)),
        (unknown, ()),
    )
    with worker():
        wait_until(lambda: batch.refresh().pending == 1, "all but one are resolved")
        wait_until(lambda: unacked(store) == 1, "the broker has acked them")
        assert [pending.start for pending in batch.pending()] == [9]
    assert reasons(batch) == {
        3: "ValueError: no such picture",
        4: "KeyError: 'picture'",
        5: "TimeoutError",
        6: "TaskRejectedError: Task was rejected",
    }
    runs = {int(item.split(":")[2]): int(count) for item, count in store.hgetall("runs").items()}
    assert runs == {0: 1, 2: 3, 3: 2, 4: 1, 7: 2, 8: 1}
    assert batch.verify().ok


def test_redriven_tasks_run_again(app: ModuleType, worker: StartWorker, send: Send, client: Client, store: Any) -> None:
    """Only the failed items run again, each with its own arguments."""
    calls = [(word,) for word in ("wrong", "right", "wrong", "right")]

    async def sending(redrive: Redrive) -> int:
        await app.broker.startup()
        count = await resend(app.fails_at_first_if_wrong, redrive, calls)
        await app.broker.shutdown()
        return count

    with worker():
        batch = send(*((app.fails_at_first_if_wrong, call) for call in calls))
        assert batch.wait(30).failed == 2
        assert asyncio.run(sending(redriven(client, batch))) == 2
        wait_until(lambda: batch.refresh().succeeded, "the failed items are acked")
    assert [int(store.hget("runs", f"{batch.id}:0:{number}")) for number in range(4)] == [2, 1, 2, 1]


@pytest.mark.slow
def test_a_killed_workers_messages_are_run_again_and_count_once(
    app: ModuleType, worker: StartWorker, send: Send, store: Any
) -> None:
    """SIGKILL in the middle of the work. The tasks stay pending until another worker gets them."""
    with worker() as first:
        batch = send(*[(app.waits_in_its_first_run, ("w",))] * 4, *[(app.succeeds, (1,))] * 4)
        for _ in range(4):
            store.blpop(["begun:w"], 30)
        wait_until(lambda: unacked(store) == 4, "the others have ended")
        first.kill()
    assert batch.refresh().pending == 4
    with worker():
        assert batch.wait(60).succeeded
    assert [int(store.hget("runs", f"{batch.id}:0:{number}")) for number in range(8)] == [2] * 4 + [1] * 4
    assert batch.verify().ok


@pytest.mark.slow
def test_a_worker_that_is_killed_between_the_two_acks_counts_once(
    app: ModuleType, worker: StartWorker, send: Send, store: Any
) -> None:
    """The item is acked, but its message comes again."""
    with worker() as first:
        batch = send((app.killed_at_ack, ()))
        wait_until(lambda: store.get("acks") == "1", "the process is about to end")
        first.kill()
    assert (batch.refresh().acked, unacked(store)) == (1, 1)
    with worker():
        wait_until(lambda: unacked(store) == 0, "the message is acked")
    assert store.hget("runs", f"{batch.id}:0:0") == "2"
    assert (batch.refresh().acked, batch.refresh().pending) == (1, 0)


@pytest.mark.slow
def test_a_worker_that_ends_before_a_task_leaves_its_message(
    app: ModuleType, worker: StartWorker, send: Send, store: Any
) -> None:
    """On SIGTERM, when the worker stops waiting for it."""
    with worker() as first:
        batch = send((app.waits_in_its_first_run, ("t",)))
        store.blpop(["begun:t"], 30)
        first.stop()
    assert batch.refresh().pending == 1
    with worker():
        assert batch.wait(60).succeeded
    assert store.hget("runs", f"{batch.id}:0:0") == "2"
