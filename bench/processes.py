"""The number of events a second that the workers of a process handle: one worker and four, each in a separate process,
on the same feed with two events for each instance, the second of which finishes it with a command. MariaDB, durable.

A lane has one call under way, with the events of different instances that are ready. Calls that arrive at the same time
share a transaction. The clock runs from appending the events, with all workers ready, to the last command, by the
database's time.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench import measure
from bench.measure import Scale
from lastbit import Client
from lastbit.models import Event
from lastbit.processes import Command, Finish, Process
from lastbit.processes import run as work
from tests.support.servers import ROOT

PARTITIONS = 16
SHAPES = ((1, 1), (4, 1), (1, 8), (4, 8))
"""The number of workers, and of lanes in each."""
_runs = itertools.count()


def process_of(name: str) -> Process:
    """A process whose instances need two events each."""

    def both(state: Any, event: Event) -> Any:
        return ("begun", []) if state is None else Finish([Command("done")])

    return Process(name, {f"{name}.happened": "key"}, both)


@contextlib.contextmanager
def _working(url: str, name: str, workers: int, lanes: int) -> Iterator[None]:
    """Run workers, each of which has its share of the partitions."""
    command = [sys.executable, "-m", "bench.processes", "worker", url, name]
    processes = [
        subprocess.Popen([*command, f"w{number}", str(lanes)], cwd=ROOT, stderr=subprocess.DEVNULL)
        for number in range(workers)
    ]
    try:
        with Client(url) as client:
            while not all(_settled(client, name, workers)):
                time.sleep(0.05)  # there is no event for settled assignments; the clock starts later
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _settled(client: Client, name: str, workers: int) -> list[bool]:
    group = client.groups.get(f"process.{name}")
    return [len(group.workers) == workers, *(worker.partitions == PARTITIONS // workers for worker in group.workers)]


def _rate(url: str, instances: int, workers: int, lanes: int) -> float:
    name = f"bench-{next(_runs)}"
    with Client(url) as client:
        client.processes.define(name, partitions=PARTITIONS, ttl=2)
        with _working(url, name, workers, lanes):
            events = [
                {"id": f"{name}:{turn}:{number}", "type": f"{name}.happened", "key": f"i{number}"}
                for turn in range(2)
                for number in range(instances)
            ]
            [first] = client.events(after=client.append(events[:1])[0].position - 1).events
            for start in range(1, len(events), 1000):
                client.append(events[start : start + 1000])
            after = count = 0
            while count < instances:
                page = client.processes.commands(after=after, process=name, wait=10, limit=1000)
                count, after = count + len(page.commands), page.next
                last = page.commands[-1].at if page.commands else first.at
        [summary] = [process for process in client.processes.list() if process.name == name]
        if (summary.finished, summary.running, count) != (instances, 0, instances):
            raise RuntimeError(f"{summary.finished} of {instances} instances are finished, with {count} commands")
    return len(events) / (last - first.at).total_seconds()


def run(scale: Scale) -> None:
    quick = scale == Scale.quick()
    instances, rounds = (60, 1) if quick else (2000, scale.rounds)
    shapes = (SHAPES[0], SHAPES[1]) if quick else SHAPES
    rates: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    with measure.mariadb() as server, measure.lastbit_on(server, workers=2) as service:
        for number in range(rounds):
            # In alternating order, as the machine's speed drifts.
            for shape in shapes if number % 2 else reversed(shapes):
                rates[shape].append(_rate(service.url, instances, *shape))
    rows = []
    for lanes in sorted({lanes for _, lanes in shapes}):
        single, four = rates[1, lanes], rates[4, lanes]
        ratio = statistics.median(fast / slow for slow, fast in zip(single, four, strict=True))
        rows.append(
            [str(lanes), f"{statistics.median(single):,.0f}", f"{statistics.median(four):,.0f}", f"{ratio:.2f}"]
        )
    measure.show("Process managers: events a second", ["lanes of a worker", "1 worker", "4 workers", "4 : 1"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        address, process, worker, several = sys.argv[2:]
        with Client(address) as connected:
            work(process_of(process), connected, worker, partitions=PARTITIONS, ttl=2, lanes=int(several))
    else:
        measure.alone(run)
