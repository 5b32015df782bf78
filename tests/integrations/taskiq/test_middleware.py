"""The middleware in the test's own process, with taskiq's broker for tests, as users test their tasks."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import taskiq
from taskiq import InMemoryBroker, NoResultError, SimpleRetryMiddleware
from taskiq_redis import ListQueueBroker, RedisStreamBroker

from lastbit import AsyncClient, Completed, errors
from lastbit.batch import AsyncBatchHandle
from lastbit.integrations import Skipped
from lastbit.integrations import taskiq as taskiq_adapter
from lastbit.integrations.taskiq import LastbitMiddleware, fan_out
from tests.integrations.conftest import TOKEN
from tests.mutants import mutant

Scenario = Callable[[InMemoryBroker], Coroutine[Any, Any, AsyncBatchHandle]]


def in_memory(service_url: str, scenario: Scenario, *others: Any, in_place: bool = False, **options: Any) -> Any:
    """The counts (acked, failed, pending) of the scenario's batch, after all tasks have ended."""

    async def run() -> tuple[int, int, int]:
        broker = InMemoryBroker(await_inplace=in_place)
        lastbit = LastbitMiddleware(service_url, **options)
        broker.add_middlewares(*others, lastbit)
        try:
            batch = await scenario(broker)
            while broker._running_tasks:  # a retry is a task that another one starts
                await broker.wait_all()
            info = await batch.refresh()
            return info.acked, info.failed, info.pending
        finally:
            await lastbit.shutdown()

    return asyncio.run(run())


def test_tasks_on_the_in_memory_broker_resolve_their_items(service_url: str) -> None:
    """The completion is reported, also to a coroutine function. `wait_all` returns after that."""
    completed: list[Completed] = []

    async def publish(completion: Completed) -> None:
        completed.append(completion)

    async def scenario(broker: InMemoryBroker) -> AsyncBatchHandle:
        @broker.task
        async def double(number: int) -> int:
            if number < 0:
                raise ValueError(f"{number} is negative")
            return 2 * number

        await double.kiq(5)  # not an item's
        batch = await fan_out(double, ((number,) for number in (3, -1, 4)), key="in memory")
        await broker.wait_all()
        failed = [completion async for completion in batch.failed()]
        assert [dict(completion.reasons) for completion in failed] == [
            {f"{batch.id}:0:1": "ValueError: -1 is negative"}
        ]
        return batch

    assert in_memory(service_url, scenario, on_completed=publish) == (2, 1, 0)
    # Sealing may have completed the batch, which is the producer's to act on.
    assert [completion.newly for completion in completed].count(True) <= 1


@mutant(
    "a-retried-task-is-resolved",
    "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
    "run is not None and run.was_sent",
    "False",
)
@pytest.mark.parametrize("no_result_on_retry", [True, False])
def test_a_retried_task_stays_pending_until_its_last_run(service_url: str, no_result_on_retry: bool) -> None:
    """Also if the middleware that retries keeps the error as the result: the message that it sent is a sign."""
    completed: list[Completed] = []

    async def scenario(broker: InMemoryBroker) -> AsyncBatchHandle:
        runs: list[int] = []
        sealed = asyncio.Event()

        @broker.task(retry_on_error=True, max_retries=5)
        async def task() -> None:
            await sealed.wait()
            runs.append(1)
            if len(runs) < 3:
                raise RuntimeError("not yet")

        batch = await fan_out(task, [()])
        sealed.set()
        return batch

    retries = SimpleRetryMiddleware(no_result_on_retry=no_result_on_retry)
    assert in_memory(service_url, scenario, retries, on_completed=completed.append) == (1, 0, 0)
    # A failure in between would have been reported too.
    assert [completion.succeeded for completion in completed] == [True]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_task_that_sends_another_one_resolves_its_item(service_url: str, in_place: bool) -> None:
    """The broker may run the other one before `kiq` returns. A retry leaves the item to the next run."""

    async def scenario(broker: InMemoryBroker) -> AsyncBatchHandle:
        runs: list[int] = []

        @broker.task
        async def other() -> None: ...

        @broker.task(retry_on_error=True, max_retries=3)
        async def task(number: int) -> None:
            runs.append(number)
            await other.kiq()
            if number == 2 or runs.count(number) == number:
                raise RuntimeError("not yet")

        return await fan_out(task, [(0,), (1,), (2,)])

    assert in_memory(service_url, scenario, SimpleRetryMiddleware(), in_place=in_place) == (2, 1, 0)


@mutant(
    "a-task-without-a-result-fails",
    "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
    "isinstance(error, NoResultError) and not isinstance(error, Skipped)",
    "False",
)
def test_a_task_without_result_stays_pending(service_url: str) -> None:
    """Something else must send it again."""

    async def scenario(broker: InMemoryBroker) -> AsyncBatchHandle:
        @broker.task
        async def task() -> None:
            raise NoResultError

        return await fan_out(task, [()])

    assert in_memory(service_url, scenario) == (0, 0, 1)


@mutant(
    "a-skip-that-taskiq-takes-for-an-error-fails",
    "lastbit.integrations.taskiq:_resolution",
    "isinstance(error, _skipped.Skipped)",
    "False",
)
@pytest.mark.parametrize(("kind", "count"), [(taskiq_adapter.Skipped, 1), (Skipped, 2)], ids=["own", "of all adapters"])
def test_a_task_skips_its_item(service_url: str, kind: type[Skipped], count: int) -> None:
    """taskiq takes the skip of all adapters for an error, and retries it."""
    runs: list[int] = []

    async def scenario(broker: InMemoryBroker) -> AsyncBatchHandle:
        @broker.task(retry_on_error=True, max_retries=2)
        async def task() -> None:
            runs.append(1)
            raise kind("not in the catalog any more")

        batch = await fan_out(task, [()])
        assert (await batch.wait(30)).succeeded
        assert [dict(span.reasons) async for span in batch.skipped()] == [
            {f"{batch.id}:0:0": "not in the catalog any more"}
        ]
        return batch

    assert in_memory(service_url, scenario, SimpleRetryMiddleware()) == (0, 0, 0)
    assert len(runs) == count


@mutant(
    "a-task-that-the-worker-cancels-fails",
    "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
    "_is_cancelled()",
    "False",
)
def test_a_task_that_the_worker_cancels_is_not_resolved(service_url: str) -> None:
    """Its message is not acked, as the cancellation continues. A task that cancels itself has failed."""

    async def run() -> None:
        broker = InMemoryBroker()
        lastbit = LastbitMiddleware(service_url)
        broker.add_middlewares(lastbit)
        begun = asyncio.Event()

        @broker.task
        async def waits() -> None:
            begun.set()
            await asyncio.sleep(3600)

        @broker.task
        async def cancels_itself() -> None:
            raise asyncio.CancelledError

        batch = await fan_out(waits, [()], seal=False)
        await begun.wait()
        (running,) = broker._running_tasks
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await fan_out(cancels_itself, [()], batch=batch)
        await broker.wait_all()
        info = await batch.refresh()
        assert (info.pending, info.failed) == (1, 1)
        await lastbit.shutdown()

    asyncio.run(run())


def test_a_refused_token_is_an_error_outside_of_a_worker(tokens_url: str) -> None:
    """As in tests, where a pause would have no end. No more tasks run."""

    async def run() -> None:
        broker = InMemoryBroker()
        async with AsyncClient(tokens_url, token=TOKEN) as producer, AsyncClient(tokens_url) as client:
            lastbit = LastbitMiddleware(client=client)
            broker.add_middlewares(lastbit)
            batch = await producer.open(items=2)
            runs: list[int] = []

            @broker.task
            async def task(number: int) -> None:
                runs.append(number)

            for number, item in enumerate(batch.ids):
                await task.kicker().with_task_id(item).kiq(number)
                with pytest.raises(errors.Unauthorized):
                    await broker.wait_all()
                broker._running_tasks.clear()
            assert runs == [0]
            await lastbit.shutdown()

    asyncio.run(run())


def refusal(scenario: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(errors.InvalidArgument) as excinfo:
        asyncio.run(scenario)
    return str(excinfo.value)


def test_wrong_arguments_are_named(service_url: str) -> None:
    """A broker without the middleware, a label that acks too early, what is no tuple, two ways to name a service."""
    bare = InMemoryBroker()
    ready = InMemoryBroker()
    ready.add_middlewares(LastbitMiddleware(service_url))

    def task() -> None: ...

    assert "add_middlewares" in refusal(fan_out(bare.task(task), [()]))
    assert "ack_type" in refusal(fan_out(ready.task(task, ack_type="when_received"), [()]))
    assert "position 1: expected a tuple of arguments" in refusal(fan_out(ready.task(task), [(), "chair"]))
    with pytest.raises(errors.InvalidArgument, match="either these or client"):
        LastbitMiddleware("http://x", client=object())  # type: ignore[arg-type]


def test_an_argument_that_cannot_be_sent_ends_the_fan_out_at_once(service_url: str) -> None:
    """It is no refusal of the broker, which would be repeated."""

    async def run() -> None:
        broker = RedisStreamBroker("redis://127.0.0.1:9")
        lastbit = LastbitMiddleware(service_url)
        broker.add_middlewares(lastbit)
        with pytest.raises(taskiq.SendTaskError):
            await fan_out(broker.task(lambda number: None), [(object(),)])
        await lastbit.shutdown()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("broker", "command", "warning"),
    [
        (RedisStreamBroker("redis://127.0.0.1:9", unacknowledged_lock_timeout=1), "taskiq worker app:broker", ""),
        (RedisStreamBroker("redis://127.0.0.1:9"), "taskiq worker app:broker", "without unacknowledged_lock_timeout"),
        (
            RedisStreamBroker("redis://127.0.0.1:9", unacknowledged_lock_timeout=1, maxlen=9),
            "taskiq worker app:broker",
            "with maxlen=9, Redis drops the oldest messages",
        ),
        (ListQueueBroker("redis://127.0.0.1:9"), "taskiq worker app:broker", "ListQueueBroker has no acks"),
        (InMemoryBroker(), "taskiq worker app:broker --ack-type when_executed", "--ack-type when_executed acks"),
    ],
)
def test_a_worker_that_may_lose_messages_warns_when_it_starts(
    broker: Any,
    command: str,
    warning: str,
    service_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each warning names the setting."""

    async def start_and_stop() -> None:
        await lastbit.startup()
        await lastbit.shutdown()

    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(sys, "argv", command.split())
    lastbit = LastbitMiddleware(service_url)
    broker.add_middlewares(lastbit)
    broker.is_worker_process = True
    asyncio.run(start_and_stop())
    assert [record.getMessage() for record in caplog.records if warning in record.getMessage()] or not warning
    assert bool(caplog.records) == bool(warning)
