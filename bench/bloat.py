"""What a long load leaves in PostgreSQL's tables, with the server's own autovacuum: their size after each sixth of the
time, the part of the updates that stayed in their page (HOT), and how much smaller a rebuild makes each table.

    python -m bench.bloat [--minutes 60]

Each second, 50 batches live their whole lives (ten items, single acks), and 500 single acks go to random items of a
batch of a million, which the next one replaces when it is complete. Twelve times in a run, a janitor deletes what ended
before the last twelfth, as cron does every night with batches of a month.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench import lifecycle, load, measure
from bench.load import Flow
from tests.support.servers import ROOT

LIVES, ACKS = 50, 500
"""In each second."""
ITEMS = 1_000_000
"""Items of a large batch."""
CONNECTIONS = 8
PERIODS, PASSES = 6, 12
TABLES = "SELECT relname, n_live_tup, n_dead_tup, n_tup_upd, n_tup_hot_upd, autovacuum_count FROM pg_stat_user_tables"


@dataclass(frozen=True)
class Table:
    """The statistics of a table, which the server counts."""

    rows: int
    dead: int
    updates: int
    hot: int
    vacuums: int
    size: float
    """MB, with its indexes."""


def tables(connection: Any) -> dict[str, Table]:
    """The tables of the database, by name."""
    found = {}
    for name, *numbers in connection.execute(TABLES).fetchall():
        [(size,)] = connection.execute("SELECT pg_total_relation_size(%s::regclass)", [name]).fetchall()
        found[name] = Table(*map(int, numbers), size=size / 2**20)
    return found


def _random_acks(port: int) -> Iterator[Flow]:
    """Single acks without end, in one large batch after the other."""
    while True:
        batch = measure.call(port, "POST", "/v1/batches", {"items": ITEMS})["id"]
        for number in random.sample(range(ITEMS), ITEMS):
            yield _one(lifecycle.ack(batch, number))


def _one(request: bytes) -> Flow:
    yield request


def _janitor(url: str, keep: int) -> None:
    options = ["--keep", f"{keep}s", "--keep-events", f"{keep}s"]
    environment = {**os.environ, "LASTBIT_DATABASE_URL": url}
    command = [sys.executable, "-m", "lastbit_server", "janitor", *options]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def _load(port: int, url: str, seconds: int) -> Iterator[list[float]]:
    """Yields after each period, with the latencies of its requests. A machine that is too slow for the load gets less
    of it."""
    acks = _random_acks(port)
    latencies: list[float] = []
    completed: Counter[int] = Counter()
    passes = periods = 0
    start = time.monotonic()
    for second in itertools.count(1):
        flows = [*itertools.islice(acks, ACKS), *(lifecycle.life(completed) for _ in range(LIVES))]
        random.shuffle(flows)
        latencies += load.converse(port, flows, CONNECTIONS)[1]
        time.sleep(max(0.0, start + second - time.monotonic()))  # part of the measurement: a load of every second
        elapsed = time.monotonic() - start
        if elapsed * PASSES >= seconds * (passes + 1):
            passes += 1
            _janitor(url, max(1, seconds // PASSES))
        if elapsed * PERIODS >= seconds * (periods + 1):
            periods += 1
            yield latencies
            latencies = []
        if periods == PERIODS:
            return


def run(minutes: float) -> None:
    seconds = max(PASSES, round(60 * minutes))
    samples: list[dict[str, Table]] = []
    slow: list[float] = []
    requests = 0
    with measure.postgresql() as server, measure.lastbit_on(server) as service:
        connection = server.connect(service.database_url.rpartition("/")[2])
        for latencies in _load(service.port, service.database_url, seconds):
            requests += len(latencies)
            latencies.sort()
            slow.append(latencies[len(latencies) * 99 // 100] * 1e3)
            samples.append(tables(connection))
        connection.execute("VACUUM FULL")
        rebuilt = tables(connection)
    last = {name: table for name, table in samples[-1].items() if table.updates > 1000 or table.rows > 1000}
    measure.show(
        f"bloat: MB of each table with its indexes, PostgreSQL, {minutes:g} minutes, {requests:,} requests",
        ["", *(f"{number}/{PERIODS}" for number in range(1, PERIODS + 1)), "rebuilt"],
        [
            *([name, *(f"{s[name].size:.1f}" for s in samples), f"{rebuilt[name].size:.1f}"] for name in last),
            ["99 % of the requests, ms", *(f"{ms:.1f}" for ms in slow), ""],
        ],
    )
    measure.show(
        "bloat: the same tables at the end",
        ["", "rows", "dead rows", "updates", "HOT", "autovacuums"],
        [
            [
                name,
                f"{table.rows:,}",
                f"{table.dead:,}",
                f"{table.updates:,}",
                f"{table.hot / table.updates:.1%}" if table.updates else "\N{EN DASH}",
                str(table.vacuums),
            ]
            for name, table in last.items()
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.bloat", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    run(parser.parse_args().minutes)
