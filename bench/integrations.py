"""What it costs that Lastbit tracks the tasks of a queue, through the queue's adapter. The same no-op tasks run twice
on the same workers: sent as usual, and by `fan_out`. Each adapter has a module in `bench.adapters`.

The clock runs from before the first task is sent until the broker has no message left, neither waiting nor under way;
a tracked batch is complete then. Broker and workers have their default settings, Redis keeps everything in memory, and
the service stores on MariaDB.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import redis

from bench import measure
from bench.measure import Scale
from tests.support.brokers import RedisServer, redis_server
from tests.support.servers import ROOT

ADAPTERS = ("dramatiq", "taskiq", "rq")
WARM = 50
"""Tasks that the workers run before the clock starts."""
POLL = 0.01
"""Seconds between two checks whether everything is done."""
PATIENCE = 300.0


@contextlib.contextmanager
def workers(adapter: ModuleType) -> Iterator[None]:
    """The worker command of an adapter."""
    process = subprocess.Popen(
        [sys.executable, "-m", *adapter.WORKER],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(20)


def seconds_until_empty(adapter: ModuleType, store: redis.Redis, send: Callable[[], object]) -> float:
    start = time.perf_counter()
    send()
    while left := adapter.left(store):
        if time.perf_counter() - start > PATIENCE:
            raise TimeoutError(f"{left} tasks have not ended")
        time.sleep(POLL)  # no broker notifies about an empty queue
    return time.perf_counter() - start


def compare(adapter: ModuleType, store: redis.Redis, count: int) -> tuple[float, float]:
    """Seconds for `count` tasks, untracked and tracked."""
    batches = []
    numbers = range(count)
    untracked = seconds_until_empty(adapter, store, lambda: adapter.send(numbers))
    tracked = seconds_until_empty(adapter, store, lambda: batches.append(adapter.track(numbers)))
    verification = batches[0].verify()
    # A message is removed after its commit, so nothing is left to wait for.
    if not (batches[0].refresh().succeeded and verification.ok and verification.counted.acked == count):
        raise RuntimeError(f"{count} tasks have ended, but the batch has {verification}")
    return untracked, tracked


def measured(name: str, broker: RedisServer, scale: Scale) -> list[str]:
    adapter = importlib.import_module(f"bench.adapters.{name}")
    count = scale.requests // 2 // getattr(adapter, "FRACTION", 1)
    with redis.Redis(port=broker.port) as store:
        store.flushall()
        with workers(adapter):
            compare(adapter, store, WARM)
            rounds = [compare(adapter, store, count) for _ in range(scale.rounds)]
    untracked, tracked = zip(*rounds, strict=True)
    ratio = statistics.median(with_items / plain for plain, with_items in rounds)
    return [
        f"{count:,} tasks, {name}",
        *(f"{statistics.median(rates):.2f}" for rates in (untracked, tracked)),
        f"{ratio:.2f}",
    ]


def run(scale: Scale) -> None:
    with measure.mariadb() as server, measure.lastbit_on(server) as service, redis_server() as broker:
        # For the workers, and for the modules that this process imports.
        os.environ |= {"LASTBIT_URL": service.url, "BENCH_BROKER": broker.url()}
        lines = [measured(name, broker, scale) for name in ADAPTERS]
    measure.show(
        f"integrations: no-op tasks on Redis, from sending to the end, MariaDB (medians of {scale.rounds} rounds)",
        ["", "untracked, s", "tracked, s", "ratio"],
        lines,
    )


if __name__ == "__main__":
    measure.alone(run)
