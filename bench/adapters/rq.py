"""RQ with its default worker, which forks for each job; one process."""

from __future__ import annotations

import os
from collections.abc import Sequence

import redis
from rq import Queue

from lastbit.batch import BatchHandle
from lastbit.integrations.rq import fan_out
from lastbit.integrations.rq._unacked import noted

WORKER = (
    *("rq.cli", "worker", "--quiet", "--url", os.environ["BENCH_BROKER"]),
    *("--worker-class", "lastbit.integrations.rq.LastbitWorker"),
)
FRACTION = 50
"""A job takes about a tenth of a second, as each has a process of its own: fewer of them suffice."""

queue = Queue(connection=redis.Redis.from_url(os.environ["BENCH_BROKER"]))


def nothing(number: int) -> None:
    pass


def send(numbers: Sequence[int]) -> None:
    queue.enqueue_many([Queue.prepare_data(nothing, (number,)) for number in numbers])


def track(numbers: Sequence[int]) -> BatchHandle:
    return fan_out(queue, nothing, ((number,) for number in numbers))


def left(store: redis.Redis) -> int:
    """The number of jobs that wait or are under way, or whose items are not acked yet."""
    waiting = int(store.llen(queue.key)) + int(store.llen(f"{queue.key}:intermediate"))
    return waiting + int(store.zcard("rq:wip:default")) + len(noted(store, queue.name))
