"""The cost of knowing when all tasks of a Celery group have ended. The same no-op tasks run untracked, as items of a
batch with `lastbit.integrations.celery`, and as a chord, which is Celery's own way.

The clock runs from before the tasks are published (with Lastbit: before the batch is opened) until the end is known:
untracked, when the broker has no message left, neither waiting nor under way; with Lastbit, when the batch is also
complete; with a chord, when the result of its body is there. The check takes the same few Redis calls with Lastbit and
without. Broker and result backend are one Redis in memory, as in most deployments. Workers have run such tasks before
the clock starts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import redis
from celery import chord, group
from celery.exceptions import TimeoutError as NotFinished

from bench import measure
from bench.measure import Scale
from bench.peer import tasks
from tests.support.brokers import RedisServer, redis_server
from tests.support.servers import ROOT, ServiceProcess

PREFORK = "prefork, 2 processes"
POOLS = {PREFORK: ("prefork", 2), "16 threads": ("threads", 16)}
"""Celery's default pool, with the default of one process for each of two cores; and one for tasks that mostly wait."""
WARM = 50
"""Tasks that a worker runs before the clock starts."""
POLL = 0.01
"""Seconds between two checks whether everything is done."""
PATIENCE = 300
QUICK_PATIENCE = 20
"""Seconds after which a chord is abandoned."""
CHORDED = 5
"""The chord measured in each round has a fifth of the tasks."""


@dataclass(frozen=True)
class Place:
    broker: RedisServer
    service: ServiceProcess

    @contextlib.contextmanager
    def worker(self, pool: str, concurrency: int) -> Iterator[None]:
        """Run a worker on an empty broker."""
        with redis.Redis(port=self.broker.port) as client:
            client.flushall()
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "bench.peer.tasks",
            "worker",
            "--without-mingle",
            "--loglevel",
            "ERROR",
        ]
        environment = {
            "CELERY_BROKER_URL": self.broker.url(0),
            "CELERY_RESULT_BACKEND": self.broker.url(1),
            "LASTBIT_URL": self.service.url,
            "PYTHONWARNINGS": "ignore::UserWarning",  # run by root, as in a container
        }
        process = subprocess.Popen(
            [*command, "--pool", pool, "--concurrency", str(concurrency)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,  # a banner
            start_new_session=True,
        )
        try:
            yield
        finally:
            # Collected results unsubscribe; without their Redis, each would try to for a while.
            gc.collect()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:  # an abandoned chord has left too much to do
                os.killpg(process.pid, 9)
                process.wait(20)

    def wait_until_empty(self, seconds: float) -> None:
        """Wait until the broker has no message, neither waiting nor under way."""
        deadline = time.monotonic() + seconds
        with redis.Redis(port=self.broker.port) as client:
            while client.llen("celery") or client.hlen("unacked"):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{client.llen('celery')} tasks wait, {client.hlen('unacked')} are under way")
                time.sleep(POLL)  # Redis has no notification for an empty list


Work = Callable[[Place, int, float], float | None]
"""Run this many tasks and return the seconds it took, or None if they did not end within the last argument's
seconds."""


def untracked(place: Place, count: int, patience: float) -> float:
    start = time.perf_counter()
    group(tasks.nothing.s() for _ in range(count)).apply_async()
    place.wait_until_empty(patience)
    return time.perf_counter() - start


def with_lastbit(place: Place, count: int, patience: float) -> float:
    start = time.perf_counter()
    batch = tasks.lastbit.fan_out(tasks.nothing.s() for _ in range(count))
    place.wait_until_empty(patience)
    complete = batch.refresh().complete
    seconds = time.perf_counter() - start
    verification = batch.verify()
    # A message is removed after its commit, so nothing is left to wait for.
    if not (complete and verification.ok and verification.counted.acked == verification.items == count):
        raise RuntimeError(f"{count} tasks have ended, but the batch has {verification}")
    return seconds


def with_chord(place: Place, count: int, patience: float) -> float | None:
    start = time.perf_counter()
    result = chord(tasks.chorded.s() for _ in range(count))(tasks.count.s())
    try:
        counted = result.get(timeout=max(patience - (time.perf_counter() - start), 0), interval=POLL)
    except NotFinished:
        result.forget()  # otherwise it would be kept, with all its tasks, and look for its Redis when Python ends
        return None
    seconds = time.perf_counter() - start
    if counted != count:
        raise RuntimeError(f"the chord counted {counted} of {count} tasks")
    return seconds


WAYS: dict[str, Work] = {"untracked": untracked, "tracked by Lastbit": with_lastbit}


def run(scale: Scale) -> None:
    count = scale.requests // 2
    fraction = count // CHORDED
    patience = PATIENCE if count >= 10_000 else QUICK_PATIENCE
    times: dict[str, list[float]] = {}

    with measure.mariadb() as server, measure.lastbit_on(server) as service, redis_server() as broker:
        tasks.app.conf.update(broker_url=broker.url(0), result_backend=broker.url(1))
        os.environ["LASTBIT_URL"] = service.url
        place = Place(broker, service)

        def note(pool: str, count: int, ways: Mapping[str, Work]) -> None:
            for way, work in ways.items():
                name = f"{count:,} tasks, {pool}: {way}"
                work(place, WARM, patience)
                seconds = work(place, count, patience)
                if seconds is None:
                    raise RuntimeError(f"{name}: not finished in {patience} s")
                times.setdefault(name, []).append(seconds)

        for _ in range(scale.rounds):
            for pool in POOLS:
                with place.worker(*POOLS[pool]):
                    note(pool, count, WAYS)
                    if pool == PREFORK:
                        note(pool, fraction, {**WAYS, "a chord": with_chord})
        with place.worker(*POOLS[PREFORK]):
            large = with_chord(place, count, patience)
    lines = []
    for name, seconds in times.items():
        base_times = times[f"{name.rpartition(':')[0]}: untracked"]
        ratio = statistics.median(time_of_way / plain for time_of_way, plain in zip(seconds, base_times, strict=True))
        lines.append([name, f"{statistics.median(seconds):.2f}", f"{ratio:.2f}"])
    name = f"{count:,} tasks, {PREFORK}: a chord, once"
    if large is None:
        lines.append([name, f"did not finish in {patience}", ""])
    else:
        plain = statistics.median(times[f"{count:,} tasks, {PREFORK}: untracked"])
        lines.append([name, f"{large:.2f}", f"{large / plain:.2f}"])
    measure.show(
        f"celery: no-op tasks on Redis, from publishing to the end, MariaDB (medians of {scale.rounds} rounds)",
        ["", "s", "of untracked"],
        lines,
    )


if __name__ == "__main__":
    measure.alone(run)
