"""`python -m examples.groups`: forty partitions are shared by workers that join one by one; the last one is killed.

Real processes use a real service. Each step prints the moves of partitions between workers, and is compared with the
arithmetic of equal shares. Exit status: 0 all checks passed, 1 a check failed, 130 interrupted."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.course import prove
from examples.groups.ledger import Ledger, Step, most_moves_of_a_join
from examples.processes import Failed, Process, Processes, start_service
from lastbit import Client

PARTITIONS = 40
TTL = 1.5
"""Seconds that a worker may be silent."""
RELEASE = 2.0
"""Seconds that a worker has to drain a partition that it releases."""
LONGEST = 60
"""Seconds after which the example gives up."""
GROUP = "orders"
WORKERS = ("ann", "bob", "cid", "dan", "eve", "fay")


class Run:
    def __init__(self, console: Console, processes: Processes, url: str) -> None:
        self.ledger = Ledger(PARTITIONS)
        self.steps: list[Step] = []
        self._console = console
        self._processes = processes
        self._url = url
        self._running: dict[str, Process] = {}

    def join(self, name: str) -> None:
        before = list(self._running)
        arguments = ("--url", self._url, "--group", GROUP, "--name", name)
        self._running[name] = self._processes.start(name, "examples.groups.worker", *arguments)
        step = Step(f"{name} joins", most_moves_of_a_join(PARTITIONS, len(before)), TTL + RELEASE, {*before} or None)
        self._rest(step, None)

    def kill(self, name: str) -> None:
        step = Step(f"{name} is killed (SIGKILL)", self.ledger.held([name])[name], TTL + RELEASE, {name})
        self._running.pop(name).kill()
        self.ledger.dead.add(name)
        self._rest(step, time.monotonic())

    def _rest(self, step: Step, start: float | None) -> None:
        """Read reports until the shares are equal again. A join starts when the newcomer reports that it is joining."""
        names = list(self._running)
        while not self.ledger.at_rest(names):
            facts = self._hear()
            if start is None and "joining" in facts:
                start = facts["at"]
        assert start is not None
        step.seconds, step.held, step.moves = (
            time.monotonic() - start,
            self.ledger.held(names),
            self.ledger.take_moves(),
        )
        self.steps.append(step)
        for line in step.lines():
            self._console.print(line)

    def _hear(self) -> dict[str, Any]:
        report = self._processes.hear(LONGEST)
        if report is None or (report.facts is None and not report.process.was_killed):
            silent = (
                "the workers report nothing"
                if report is None
                else f"{report.process.name} ended:\n{report.process.last_words()}"
            )
            raise Failed(silent)
        facts = report.facts or {}
        if "assigned" in facts:
            self.ledger.assigned(report.process.name, facts)
        elif "released" in facts:
            self.ledger.released(facts)
        return facts


def _run(console: Console, processes: Processes, folder: Path) -> list[str]:
    _, url = start_service(processes, folder / "lastbit.db", seconds=30)
    with Client(url) as client:
        client.groups.create(GROUP, partitions=PARTITIONS, ttl=TTL, release=RELEASE)
        console.print(f"{PARTITIONS} partitions; a lease of {TTL:g} s, and {RELEASE:g} s to drain")
        run = Run(console, processes, url)
        for name in WORKERS:
            run.join(name)
        run.kill(WORKERS[-1])
        group = client.groups.get(GROUP)
    faults = [fault for step in run.steps for fault in step.faults()] + run.ledger.faults()
    owners = {position.partition: (position.owner, position.epoch) for position in group.positions}
    for partition, epoch in run.ledger.latest().items():
        if owners[partition] != (run.ledger.tenures[partition, epoch].worker, epoch):
            faults.append(f"in the service, the owner and epoch of partition {partition} are {owners[partition]}")
    return faults


if __name__ == "__main__":
    sys.exit(prove("groups", LONGEST, _run))
