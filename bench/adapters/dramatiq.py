"""Dramatiq on Redis, with the settings of its command: a process for each core, with 8 threads."""

from __future__ import annotations

import os
from collections.abc import Sequence

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from lastbit.batch import BatchHandle
from lastbit.integrations.dramatiq import LastbitMiddleware, fan_out

WORKER = ("dramatiq", "bench.adapters.dramatiq")

broker = RedisBroker(url=os.environ["BENCH_BROKER"])
broker.add_middleware(LastbitMiddleware())
dramatiq.set_broker(broker)


@dramatiq.actor
def nothing(number: int) -> None:
    pass


def send(numbers: Sequence[int]) -> None:
    for number in numbers:
        nothing.send(number)


def track(numbers: Sequence[int]) -> BatchHandle:
    return fan_out(nothing.message(number) for number in numbers)


def left(store: redis.Redis) -> int:
    """The number of messages that wait or are under way."""
    return int(store.hlen("dramatiq:default.msgs"))
