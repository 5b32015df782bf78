"""A comparison of Lastbit with other solutions: one id a call over HTTP compared with the literal recipe, and 100 ids a
transaction compared with a row for each item, Carlyle's statements and Redis. The peers' own modules describe how their
users run them.

All write to a disk and sync at each commit, except for Redis where the table says so. MariaDB's buffer pool is large
enough for the peers' tables. Their rows exist before the clock starts; the table shows how long that took.
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
"""Ids in a transaction."""
WRITERS = (1, 8)
OPTIONS = ("--innodb-buffer-pool-size=1G",)

LASTBIT = "Lastbit"
ROWS = "a row per item"
CARLYLE = "Carlyle, a commit for each group"
PEERS: dict[str, Callable[[MariaDB, int, int], Peer]] = {
    LASTBIT: Lastbit,
    ROWS: lambda server, items, _: Rows(server, items, index_pending=True),
    "a row per item, no index of what is pending": lambda server, items, _: Rows(server, items, index_pending=False),
    "Carlyle's statements in one transaction": lambda server, items, _: Carlyle(server, items, one_transaction=True),
    CARLYLE: lambda server, items, _: Carlyle(server, items, one_transaction=False),
}


def _recipe_round(recipe: Recipe, scale: Scale, items: int, numbers: Sequence[int]) -> Load:
    batch = recipe.open(items)
    requests = [load.encoded("/v1/acks", {"items": [item_id(batch, number)]}) for number in numbers]
    figures, _ = load.drive(recipe.port, requests, scale.connections)
    if recipe.acked(batch) != len(numbers):
        raise RuntimeError(f"{len(numbers)} items were acked, but the recipe's bits are {recipe.acked(batch)}")
    return figures


def _lastbit_round(port: int, scale: Scale, items: int, numbers: list[int]) -> Load:
    batch, requests = acks.new_batch(port, items, numbers)
    figures, answers = load.drive(port, requests, scale.connections)
    acks.check(port, batch, answers, len(requests))
    return figures


def _redis_round(server: RedisServer, scale: Scale, key: str, numbers: Sequence[int]) -> Load:
    requests = [redis_bits.encoded(key, number) for number in numbers]
    figures, applied = redis_bits.drive(server.port, requests, scale.connections)
    acked = RedisBits(server, key).acked()
    if not acked == applied == len(numbers):
        raise RuntimeError(f"{len(numbers)} bits were sent, {applied} newly set, but BITCOUNT is {acked}")
    return figures


def single(scale: Scale, server: MariaDB, durable_redis: RedisServer, memory_redis: RedisServer) -> None:
    """Single ids over HTTP. The recipe is slow, so it gets a twentieth of the requests."""
    loads_by_name: dict[str, list[Load]] = {}
    bases: dict[str, str] = {}
    fraction = max(scale.requests // 20, 100)

    def note(name: str, figures: Load, base: str = "") -> None:
        loads_by_name.setdefault(name, []).append(figures)
        bases[name] = base

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
                base_name = f"{LASTBIT}, {order}"
                note(base_name, _lastbit_round(lastbit.port, scale, scale.items, numbers))
                note(f"recipe, {order}", _recipe_round(recipe, scale, scale.items, numbers[:fraction]), base_name)
            one_group = _recipe_round(recipe, scale, DEFAULT_GROUP_SIZE, range(fraction))
            note("recipe, in order, a batch of one group", one_group, f"{LASTBIT}, in order")
            for name, redis in (("appendfsync always", durable_redis), ("in memory alone", memory_redis)):
                figures = _redis_round(redis, scale, f"single-{turn}", numbers)
                note(f"Redis, {name}, at random, no HTTP", figures, f"{LASTBIT}, at random")
    lines = []
    for line, (name, loads) in zip(acks.rows(loads_by_name, "empty endpoint"), loads_by_name.items(), strict=True):
        base = bases[name]
        ratios = (
            [
                base_name.rate / peer_figures.rate
                for base_name, peer_figures in zip(loads_by_name[base], loads, strict=True)
            ]
            if base
            else []
        )
        lines.append([*line, f"{statistics.median(ratios):.2f}" if ratios else ""])
    measure.show(
        f"peers: one id a call, {scale.connections} connections, a batch of {scale.items:,} items (medians of "
        f"{scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "p99 ms", "of the empty endpoint", "Lastbit's, of it"],
        lines,
    )


@dataclass
class Contestant:
    """A peer, and its unacked items in the order of their acks."""

    peer: Peer
    seconds: float
    """The seconds that creating its batch took."""
    numbers: Iterator[int]
    acked: int = 0
    rates: list[float] = field(default_factory=list)

    def run_round(self, calls: int, writers: int) -> None:
        """Run a round: each writer has its own connection and its part of the calls."""
        parts = [[next(self.numbers) for _ in range(IDS)] for _ in range(calls)]
        peer_writers = [self.peer.writer() for _ in range(writers)]
        ready = threading.Barrier(writers + 1)

        def work(place: int) -> None:
            ready.wait()
            for part in parts[place::writers]:
                peer_writers[place].ack(part)

        with ThreadPoolExecutor(writers) as threads:
            under_way = [threads.submit(work, place) for place in range(writers)]
            ready.wait()
            start = time.perf_counter()
            for future in under_way:
                future.result()
            seconds = time.perf_counter() - start
        for writer in peer_writers:
            writer.close()
        self.rates.append(calls * IDS / seconds)
        self.acked += calls * IDS
        if self.peer.acked() != self.acked:
            raise RuntimeError(f"{self.acked} items were acked, but {self.peer} has {self.peer.acked()}")


def _contestant(items: int, make: Callable[[], Peer]) -> Contestant:
    start = time.perf_counter()
    peer = make()
    return Contestant(peer, time.perf_counter() - start, iter(random.sample(range(items), items)))


def together(
    scale: Scale, writers: int, server: MariaDB, durable_redis: RedisServer, memory_redis: RedisServer
) -> None:
    """Each peer has one batch for all rounds, since inserting a row for each item takes long."""
    calls = max(scale.requests // 40, 4 * writers)
    contestants = {
        name: _contestant(scale.items, lambda make=make: make(server, scale.items, writers))
        for name, make in PEERS.items()
    }
    for name, redis in (("Redis, appendfsync always", durable_redis), ("Redis, in memory alone", memory_redis)):
        contestants[name] = _contestant(scale.items, lambda redis=redis: RedisBits(redis, f"together-{writers}"))
    with contextlib.ExitStack() as stack:
        for contestant in contestants.values():
            stack.callback(contestant.peer.close)
        for _ in range(scale.rounds):
            for name, contestant in contestants.items():
                # A hundred commits a call, so a tenth of the calls is enough.
                contestant.run_round(max(calls // 10, writers) if name == CARLYLE else calls, writers)
    lines = []
    for name, contestant in contestants.items():
        ratio = statistics.median(
            rate / rows for rate, rows in zip(contestant.rates, contestants[ROWS].rates, strict=True)
        )
        lines.append([name, f"{statistics.median(contestant.rates):,.0f}", f"{ratio:.2f}", f"{contestant.seconds:.1f}"])
    measure.show(
        f"peers: {IDS} ids a transaction at random over {scale.items:,} items, {writers} "
        f"{'writer' if writers == 1 else 'writers in one process'}, no HTTP (medians of {scale.rounds} rounds)",
        ["", "ids/s", "of a row per item", "s to make the batch"],
        lines,
    )


def run(scale: Scale) -> None:
    with measure.mariadb(OPTIONS) as server, redis_server(*SYNCED) as durable_redis, redis_server() as memory_redis:
        single(scale, server, durable_redis, memory_redis)
        for writers in WRITERS:
            together(scale, writers, server, durable_redis, memory_redis)


if __name__ == "__main__":
    measure.alone(run)
