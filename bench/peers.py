"""How does Lastbit compare with what people use instead? One id a call over HTTP beside the literal recipe, and 100 ids
a transaction beside a row per item, Carlyle's statements and Redis. The peers' own pages say how their users run them.

All write to a disk and sync it at each commit, but Redis where it says that it doesn't. MariaDB's buffer pool is made
large enough for the peers' tables. Their rows are there before the clock starts; how long that took stands beside.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bench import acks, load, measure
from bench.load import Load
from bench.measure import Scale
from bench.peer import redis_bits
from bench.peer.carlyle import Carlyle
from bench.peer.direct import Lastbit, Peer
from bench.peer.recipe import Recipe
from bench.peer.redis_bits import RedisBits
from bench.peer.rows import Rows
from lastbit.ids import DEFAULT_GROUP_SIZE, item_id
from tests.support.brokers import SYNCED, RedisServer, redis_server
from tests.support.servers import MariaDB

IDS = 100
"""Of a transaction."""
WRITERS = (1, 8)
OPTIONS = ("--innodb-buffer-pool-size=1G",)

LASTBIT = "Lastbit"
ROWS = "a row per item"
CARLYLE = "Carlyle, a commit for each group"
PEERS: dict[str, Callable[[MariaDB, int, int], Peer]] = {
    LASTBIT: Lastbit,
    ROWS: lambda server, items, _: Rows(server, items, indexed=True),
    "a row per item, no index of what is pending": lambda server, items, _: Rows(server, items, indexed=False),
    "Carlyle's statements in one transaction": lambda server, items, _: Carlyle(server, items, together=True),
    CARLYLE: lambda server, items, _: Carlyle(server, items, together=False),
}


def _recipe_round(recipe: Recipe, scale: Scale, items: int, numbers: Sequence[int]) -> Load:
    batch = recipe.open(items)
    requests = [load.encoded("/v1/acks", {"items": [item_id(batch, number)]}) for number in numbers]
    measured, _ = load.drive(recipe.port, requests, scale.connections)
    if recipe.acked(batch) != len(numbers):
        raise RuntimeError(f"{len(numbers)} items were acked, and the recipe's bits are {recipe.acked(batch)}")
    return measured


def _lastbit_round(port: int, scale: Scale, items: int, numbers: list[int]) -> Load:
    batch, requests = acks.fresh(port, items, numbers)
    measured, answers = load.drive(port, requests, scale.connections)
    acks.check(port, batch, answers, len(requests))
    return measured


def _redis_round(server: RedisServer, scale: Scale, key: str, numbers: Sequence[int]) -> Load:
    requests = [redis_bits.encoded(key, number) for number in numbers]
    measured, applied = redis_bits.drive(server.port, requests, scale.connections)
    acked = RedisBits(server, key).acked()
    if not acked == applied == len(numbers):
        raise RuntimeError(f"{len(numbers)} bits were set, {applied} newly, and BITCOUNT is {acked}")
    return measured


def single(scale: Scale, server: MariaDB, synced: RedisServer, unsynced: RedisServer) -> None:
    """The recipe is slow, so it gets a twentieth of the requests."""
    found: dict[str, list[Load]] = {}
    compared: dict[str, str] = {}
    few = max(scale.requests // 20, 100)

    def note(name: str, measured: Load, beside: str = "") -> None:
        found.setdefault(name, []).append(measured)
        compared[name] = beside

    with (
        measure.lastbit_on(server) as lastbit,
        measure.empty_endpoint() as empty,
        Recipe(server).served() as recipe,
    ):
        for turn in range(scale.rounds):
            bodies = [{"items": [item_id(1, number)]} for number in range(scale.requests)]
            requests = [load.encoded("/v1/acks", body) for body in bodies]
            note("empty endpoint", load.drive(empty, requests, scale.connections)[0])
            for order in ("in order", "at random"):
                numbers = acks.numbers_of(order, scale)
                ours = f"{LASTBIT}, {order}"
                note(ours, _lastbit_round(lastbit.port, scale, scale.items, numbers))
                note(f"recipe, {order}", _recipe_round(recipe, scale, scale.items, numbers[:few]), ours)
            one_group = _recipe_round(recipe, scale, DEFAULT_GROUP_SIZE, range(few))
            note("recipe, in order, a batch of one group", one_group, f"{LASTBIT}, in order")
            for name, redis in (("appendfsync always", synced), ("in memory alone", unsynced)):
                measured = _redis_round(redis, scale, f"single-{turn}", numbers)
                note(f"Redis, {name}, at random, no HTTP", measured, f"{LASTBIT}, at random")
    lines = []
    for line, (name, loads) in zip(acks.rows(found, "empty endpoint"), found.items(), strict=True):
        beside = compared[name]
        ratios = [ours.rate / its.rate for ours, its in zip(found[beside], loads, strict=True)] if beside else []
        lines.append([*line, f"{statistics.median(ratios):.2f}" if ratios else ""])
    measure.show(
        f"peers: one id a call, {scale.connections} connections, a batch of {scale.items:,} items (medians of "
        f"{scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "p99 ms", "of the empty endpoint", "Lastbit's, of it"],
        lines,
    )


@dataclass
class Contestant:
    """A peer, and the items that nobody has acked yet, in the order in which they will be."""

    peer: Peer
    seconds: float
    """That making its batch took."""
    numbers: Iterator[int]
    acked: int = 0
    rates: list[float] = field(default_factory=list)

    def turn(self, calls: int, writers: int) -> None:
        """A round: each writer has its connection and its part of the calls."""
        parts = [[next(self.numbers) for _ in range(IDS)] for _ in range(calls)]
        made = [self.peer.writer() for _ in range(writers)]
        ready = threading.Barrier(writers + 1)

        def work(place: int) -> None:
            ready.wait()
            for part in parts[place::writers]:
                made[place].ack(part)

        with ThreadPoolExecutor(writers) as threads:
            under_way = [threads.submit(work, place) for place in range(writers)]
            ready.wait()
            begun = time.perf_counter()
            for each in under_way:
                each.result()
            seconds = time.perf_counter() - begun
        for writer in made:
            writer.close()
        self.rates.append(calls * IDS / seconds)
        self.acked += calls * IDS
        if self.peer.acked() != self.acked:
            raise RuntimeError(f"{self.acked} items were acked, and {self.peer} says {self.peer.acked()}")


def _contestant(items: int, make: Callable[[], Peer]) -> Contestant:
    begun = time.perf_counter()
    peer = make()
    return Contestant(peer, time.perf_counter() - begun, iter(random.sample(range(items), items)))


def together(scale: Scale, writers: int, server: MariaDB, synced: RedisServer, unsynced: RedisServer) -> None:
    """Each peer has one batch for all rounds, since rows for each item take long to insert."""
    calls = max(scale.requests // 40, 4 * writers)
    found = {
        name: _contestant(scale.items, lambda make=make: make(server, scale.items, writers))
        for name, make in PEERS.items()
    }
    for name, redis in (("Redis, appendfsync always", synced), ("Redis, in memory alone", unsynced)):
        found[name] = _contestant(scale.items, lambda redis=redis: RedisBits(redis, f"together-{writers}"))
    with contextlib.ExitStack() as closed:
        for each in found.values():
            closed.callback(each.peer.close)
        for _ in range(scale.rounds):
            for name, each in found.items():
                # A hundred commits a call: a tenth of the calls is enough to wait for.
                each.turn(max(calls // 10, writers) if name == CARLYLE else calls, writers)
    lines = []
    for name, each in found.items():
        ratio = statistics.median(its / rows for its, rows in zip(each.rates, found[ROWS].rates, strict=True))
        lines.append([name, f"{statistics.median(each.rates):,.0f}", f"{ratio:.2f}", f"{each.seconds:.1f}"])
    measure.show(
        f"peers: {IDS} ids a transaction at random over {scale.items:,} items, {writers} "
        f"{'writer' if writers == 1 else 'writers in one process'}, no HTTP (medians of {scale.rounds} rounds)",
        ["", "ids/s", "of a row per item", "s to make the batch"],
        lines,
    )


def run(scale: Scale) -> None:
    with measure.mariadb(OPTIONS) as server, redis_server(*SYNCED) as synced, redis_server() as unsynced:
        single(scale, server, synced, unsynced)
        for writers in WRITERS:
            together(scale, writers, server, synced, unsynced)


if __name__ == "__main__":
    measure.alone(run)
