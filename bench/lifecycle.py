"""The number of complete batch lives that one worker serves a second: open with 10 items, ten single acks, complete,
and announced by the feed. Each of 64 connections runs one life after the other; one more connection follows the feed.

For comparison: the usual recipe, which has no feed, and an empty FastAPI endpoint that gets eleven calls for each life.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from typing import Any

from bench import load, measure, verbs
from bench.load import Flow
from bench.measure import Scale
from bench.peer import row_recipe
from lastbit.ids import item_id

ITEMS = verbs.ITEMS
OPENING = load.encoded("/v1/batches", {"items": ITEMS, "sealed": True})


def ack(batch: int, number: int) -> bytes:
    return load.encoded("/v1/acks", {"items": [item_id(batch, number)]})


def life(completed: Counter[int]) -> Flow:
    """Counts its batch when the last ack has completed it."""
    batch = json.loads((yield OPENING))["id"]
    for number in range(ITEMS):
        completions = json.loads((yield ack(batch, number)))["completed"]
        completed.update(completion["batch"] for completion in completions if completion["newly"])
        if bool(completions) != (number == ITEMS - 1):
            raise RuntimeError(f"after {number + 1} of {ITEMS} acks, completed is {completions}")


def _follow(after: int, lives: int, announced: Counter[int]) -> Flow:
    """Read the feed until it has announced this many batches."""
    while announced.total() < lives:
        path = f"/v1/events?after={after}&type=batch.completed&limit=1000&wait=10"
        page: dict[str, Any] = json.loads((yield load.encoded(path, None, "GET")))
        announced.update(event["batch"] for event in page["events"])
        after = page["next"]


def _empty_life() -> Flow:
    for number in range(1 + ITEMS):
        yield ack(1, number)


def lastbit(port: int, lives: int, connections: int) -> float:
    """Batches per second, until the last one is in the feed."""
    completed, announced = Counter[int](), Counter[int]()
    after = measure.call(port, "GET", "/v1/events?limit=1")["last"]
    flows = itertools.chain([_follow(after, lives, announced)], (life(completed) for _ in range(lives)))
    seconds, _ = load.converse(port, flows, connections + 1)
    if not (completed == announced and len(completed) == completed.total() == lives):
        raise RuntimeError(f"{len(completed)} of {lives} batches were completed, {len(announced)} announced")
    return lives / seconds


def recipe(port: int, lives: int, connections: int) -> float:
    """Batches per second, until the last one is complete."""
    completed = Counter[int]()
    seconds, _ = load.converse(port, (life(completed) for _ in range(lives)), connections)
    if not len(completed) == completed.total() == lives:
        raise RuntimeError(f"{len(completed)} of {lives} batches were completed")
    return lives / seconds


def empty(port: int, lives: int, connections: int) -> float:
    return lives / load.converse(port, (_empty_life() for _ in range(lives)), connections)[0]


def run(scale: Scale) -> None:
    rates: dict[str, list[float]] = {}
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        row_recipe.served(server) as recipe_port,
        measure.empty_endpoint() as empty_port,
    ):
        sides = {
            "empty endpoint, eleven calls": (empty, empty_port),
            "recipe, without a feed": (recipe, recipe_port),
            "Lastbit": (lastbit, service.port),
        }
        first = max(scale.requests // 200, scale.connections)
        counts = {
            name: verbs.calls_of_round(live(port, first, scale.connections), scale)
            for name, (live, port) in sides.items()
        }
        for _ in range(scale.rounds):
            for name, (live, port) in sides.items():
                rates.setdefault(name, []).append(live(port, counts[name], scale.connections))
    lastbit_rates = rates["Lastbit"]
    measure.show(
        f"lifecycle: {scale.connections} connections, one worker, MariaDB (medians of {scale.rounds} rounds)",
        ["", "batches/s", "Lastbit's ratio to it"],
        [
            [
                name,
                f"{statistics.median(side_rates):,.0f}",
                f"{statistics.median(rate / other for rate, other in zip(lastbit_rates, side_rates, strict=True)):.2f}",
            ]
            for name, side_rates in rates.items()
        ],
        "ratio: Lastbit's batches/s divided by this line's",
    )


if __name__ == "__main__":
    measure.alone(run)
