"""The tasks that the tests' workers run. Their effects are in the broker's Redis: `runs` counts the runs of each task,
and a list of the name `begun:WORD` receives an element when the task for it has begun."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Annotated, Any

import redis
from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends, TaskiqMiddleware
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from lastbit.integrations import _endings, current_batch, current_item
from lastbit.integrations.taskiq import LastbitMiddleware
from tests import mutants

mutants.from_environment()
URL = os.environ["TESTS_REDIS"]
store = redis.Redis.from_url(URL)


class KillsItself(TaskiqMiddleware):
    """Ends its process by SIGKILL when the result of `killed_at_ack` is stored for the first time: the item is resolved
    then, and the message is still in the queue."""

    def post_save(self, message: Any, result: Any) -> None:
        if message.task_name.endswith(":killed_at_ack") and store.incr("acks") == 1:
            os.kill(os.getpid(), signal.SIGKILL)


# A dead worker's messages are back after two seconds.
broker = RedisStreamBroker(
    URL, consumer_id="0", idle_timeout=2000, xread_block=100, unacknowledged_lock_timeout=1.0
).with_result_backend(RedisAsyncResultBackend(URL))
_endings.TTL = 1.0  # type: ignore[misc]
_endings.LOOK = 0.1  # type: ignore[misc]
middleware = LastbitMiddleware(app_name=os.environ.get("TESTS_APP", "taskiq"))
broker.add_middlewares(SimpleRetryMiddleware(), KillsItself(), middleware)

Current = Annotated[Context, TaskiqDepends()]


def run(context: Context) -> int:
    """Count this run of the task, and return how many there were. It knows its item."""
    if context.message.task_id.startswith("batch:"):
        assert context.message.task_id.startswith(f"batch:{current_batch()}:")
    elif ":" in context.message.task_id:
        assert current_item() == context.message.task_id
    return int(store.hincrby("runs", context.message.task_id, 1))


@broker.task
async def succeeds(number: int, context: Current) -> int:
    run(context)
    return number


@broker.task
def succeeds_in_a_thread(number: int) -> int:
    assert current_item()
    return number


@broker.task(retry_on_error=True, max_retries=5)
async def succeeds_at_the_third_run(context: Current) -> None:
    if run(context) < 3:
        raise RuntimeError("not yet")


@broker.task(retry_on_error=True, max_retries=2)
async def exhausts_its_retries(context: Current) -> None:
    run(context)
    raise ValueError("no such picture")


@broker.task
async def fails(context: Current) -> None:
    run(context)
    raise KeyError("picture")


@broker.task
async def fails_at_first_if_wrong(word: str, context: Current) -> None:
    if run(context) == 1 and word == "wrong":
        raise ValueError(word)


@broker.task(timeout=0.05)
async def exceeds_its_time() -> None:
    await asyncio.sleep(60)


@broker.task
async def is_rejected(context: Current) -> None:
    context.reject()


@broker.task
async def is_requeued(context: Current) -> None:
    if run(context) == 1:
        await context.requeue()


@broker.task
async def killed_at_ack(context: Current) -> None:
    run(context)


@broker.task
async def waits_in_its_first_run(word: str, context: Current) -> None:
    if run(context) == 1:
        store.rpush(f"begun:{word}", 1)
        await asyncio.sleep(3600)
