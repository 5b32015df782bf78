"""taskiq on Redis Streams, with the settings of its command."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import redis
from taskiq_redis import RedisStreamBroker

from lastbit import Client
from lastbit.batch import BatchHandle
from lastbit.integrations.taskiq import LastbitMiddleware, fan_out

WORKER = ("taskiq", "worker", "bench.adapters.taskiq:broker", "--log-level", "ERROR")

broker = RedisStreamBroker(os.environ["BENCH_BROKER"], consumer_id="0", unacknowledged_lock_timeout=60)
broker.add_middlewares(LastbitMiddleware())


@broker.task
async def nothing(number: int) -> None:
    pass


def send(numbers: Sequence[int]) -> None:
    async def sending() -> None:
        await broker.startup()
        for number in numbers:
            await nothing.kiq(number)
        await broker.shutdown()

    asyncio.run(sending())


def track(numbers: Sequence[int]) -> BatchHandle:
    async def tracking() -> int:
        await broker.startup()
        batch = await fan_out(nothing, ((number,) for number in numbers))
        await broker.shutdown()
        return batch.id

    return Client().batch(asyncio.run(tracking()))


def left(store: redis.Redis) -> int:
    """The number of messages that wait or are under way."""
    (group,) = store.xinfo_groups("taskiq")
    return int(group["pending"]) + int(group["lag"] or 0)
