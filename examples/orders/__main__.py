"""`python -m examples.orders`: an order ships when its card is charged, its items are reserved, its batch is complete.

Real workers use a real service, with every permutation of the events that an order needs, duplicate events, and a
worker that is killed. At the end each order has one command in the feed. Exit status: 0 all checks passed, 1 a check
failed, 130 interrupted."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from rich.console import Console

from examples.course import prove
from examples.orders.proof import faults
from examples.orders.shipping import NEEDED
from examples.processes import Process, Processes, start_service
from lastbit import Client, Event

EACH = 6
"""Orders for each permutation of events."""
INCOMPLETE = 12
"""Orders that never get all their events."""
PARTITIONS = 8
TTL = 1.0
"""Seconds that a worker may be silent."""
WORKERS = ("ann", "bob", "cid")
LONGEST = 90
"""Seconds after which the example gives up."""


class Shop:
    """The source of the events: some are repeated with the same id, some with another one."""

    def __init__(self, client: Client, dice: random.Random) -> None:
        self._client = client
        self._dice = dice
        self.repeats = 0

    def happen(self, order: str, type: str) -> None:
        if type == "batch.completed":
            batch = self._client.open(key=order, items=3, sealed=True)
            for item in batch.ids:
                self._client.ack(item)
            self._client.ack(batch.ids[-1])  # a redelivery
            return
        event = {"id": f"{type}:{order}", "type": type, "data": {"order": order}}
        repeat = [event] if self._dice.random() < 0.5 else [{**event, "id": f"{type}:{order}:again"}]
        if self._dice.random() < 0.5:
            self._client.append([event, *repeat])
            self.repeats += 1
        else:
            self._client.append([event])


def _all_events(client: Client) -> list[Event]:
    page = client.events(limit=1000)
    events = list(page.events)
    while page.next < page.last:
        page = client.events(after=page.next, limit=1000)
        events += page.events
    return events


def _wait(client: Client, count: int) -> int:
    """Wait until `count` commands are issued. Returns how many were read."""
    after = commands = 0
    while commands < count:
        page = client.processes.commands(after=after, wait=5, limit=1000)
        commands, after = commands + len(page.commands), page.next
    return commands


def _run(console: Console, processes: Processes, folder: Path) -> list[str]:
    _, url = start_service(processes, folder / "lastbit.db", seconds=30)
    dice = random.Random(7)  # noqa: S311  # the same in every run
    ways = list(itertools.permutations(NEEDED))
    orders = {f"order-{way}-{number}": ways[way] for way in range(len(ways)) for number in range(EACH)}
    incomplete = {f"incomplete-{number}": ways[number % len(ways)][:2] for number in range(INCOMPLETE)}
    with Client(url) as client:
        running: dict[str, Process] = {}
        for name in WORKERS:
            arguments = ("--url", url, "--name", name, "--partitions", str(PARTITIONS), "--ttl", str(TTL))
            running[name] = processes.start(name, "examples.orders.worker", *arguments)
        console.print(f"{len(orders)} orders, {EACH} of each of the {len(ways)} ways in which three events can come;")
        console.print(f"{len(incomplete)} orders that lack one event; {len(WORKERS)} workers")
        shop = Shop(client, dice)
        all_orders = {**orders, **incomplete}
        for step in range(2):
            for order in dice.sample(list(all_orders), len(all_orders)):
                shop.happen(order, all_orders[order][step])
        last = dice.sample(list(orders), len(orders))
        for place, order in enumerate(last):
            if place == len(last) // 2:
                shipments = _wait(client, 1)
                running.pop(WORKERS[0]).kill()
                console.print(f"worker {WORKERS[0]} is killed (SIGKILL), {shipments} orders have shipped")
            shop.happen(order, orders[order][2])
        _wait(client, len(orders))
        for worker in running.values():
            worker.stop()
        events = _all_events(client)
        [summary] = client.processes.list()
        problems = faults(events, orders, incomplete)
        if (summary.finished, summary.running) != (len(orders), len(incomplete)):
            problems.append(f"{summary.finished} instances are finished, {summary.running} are running")
        console.print(f"{len(events)} events in the feed, {shop.repeats} events came twice")
        console.print(f"{summary.finished} orders shipped, one command each; {summary.running} wait for missing events")
    return problems


if __name__ == "__main__":
    sys.exit(prove("orders", LONGEST, _run))
