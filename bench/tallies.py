"""The cost of counting each message once: entries in calls of 1,000, over HTTP and durable, compared with a counter
that does not detect repeats: `UPDATE … SET value = value + d`, one statement for each entry and no guard, in
transactions of 1,000 by the driver itself, without HTTP and JSON. Also compared are the same thousand UPDATEs in one
packet, and the least possible work for a database: one INSERT … ON DUPLICATE KEY UPDATE of a thousand rows.

Both add to 2,000 keys; the tally has a row for each of them and each of 4 source partitions.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import pymysql
from pymysql.constants import CLIENT

from bench import load, measure
from bench.measure import Scale
from tests.support.servers import MariaDB

ENTRIES = 1000
KEYS = 2000
PARTITIONS = 4

Entries = list[tuple[str, int, int, int]]
"""Key, delta, partition, offset."""


class Messages:
    """Calls of new messages: each partition's offsets continue."""

    def __init__(self) -> None:
        self._offsets = [0] * PARTITIONS

    def calls(self, count: int) -> list[Entries]:
        return [[self._entry() for _ in range(ENTRIES)] for _ in range(count)]

    def _entry(self) -> tuple[str, int, int, int]:
        partition = random.randrange(PARTITIONS)
        self._offsets[partition] += 1
        return f"robot-{random.randrange(KEYS):05}", random.randrange(1, 9), partition, self._offsets[partition]


def _body(call: Entries) -> dict[str, Any]:
    return {
        "entries": [
            {"key": key, "delta": delta, "source": {"topic": "screws", "partition": partition, "offset": offset}}
            for key, delta, partition, offset in call
        ]
    }


def tally(port: int, name: str, calls: Sequence[Entries], *, replay: bool = False) -> float:
    """Entries a second."""
    requests = [load.encoded(f"/v1/tallies/{name}/apply", _body(call)) for call in calls]
    start = time.perf_counter()
    _, answers = load.drive(port, requests, 1)
    seconds = time.perf_counter() - start
    applied = load.total(answers, "applied")
    if applied != (0 if replay else len(calls) * ENTRIES):
        raise RuntimeError(f"{len(calls) * ENTRIES} entries were sent, but {applied} applied")
    return len(calls) * ENTRIES / seconds


def _one_by_one(cursor: Any, call: Entries) -> None:
    for key, delta, *_ in call:
        cursor.execute("UPDATE naive SET value = value + %s WHERE tally_key = %s", (delta, key))


def _in_one_packet(cursor: Any, call: Entries) -> None:
    texts = [f"UPDATE naive SET value = value + {delta} WHERE tally_key = '{key}'" for key, delta, *_ in call]
    cursor.execute(";".join(texts))
    while cursor.nextset():
        pass


def _upsert(cursor: Any, call: Entries) -> None:
    rows = ",".join(f"('{key}',{delta})" for key, delta, *_ in call)
    cursor.execute(f"INSERT INTO naive VALUES {rows} ON DUPLICATE KEY UPDATE value = value + VALUES(value)")


def _connected(server: MariaDB, database: str) -> Any:
    return pymysql.connect(
        host="127.0.0.1", port=server.port, user="root", database=database, client_flag=CLIENT.MULTI_STATEMENTS
    )


def naive(connection: Any, calls: Sequence[Entries], add: Callable[[Any, Entries], None]) -> float:
    """Entries a second."""
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute("SELECT SUM(value) FROM naive")
        before = int(cursor.fetchone()[0])
        start = time.perf_counter()
        for call in calls:
            connection.begin()
            add(cursor, call)
            connection.commit()
        seconds = time.perf_counter() - start
        cursor.execute("SELECT SUM(value) FROM naive")
        difference = int(cursor.fetchone()[0]) - before
    if difference != sum(delta for call in calls for _, delta, *_ in call):
        raise RuntimeError("the naive sum is wrong even without replays")
    return len(calls) * ENTRIES / seconds


_PEERS = {
    "UPDATE, one by one": _one_by_one,
    "UPDATE, a thousand in one packet": _in_one_packet,
    "one INSERT … ON DUPLICATE KEY UPDATE": _upsert,
}
_BASE = "UPDATE, one by one"


def run(scale: Scale) -> None:
    count = max(scale.requests // 1000, 2)
    results: dict[str, list[float]] = {}
    messages = Messages()
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        name = server.new_database().rpartition("/")[2]
        with contextlib.closing(_connected(server, name)) as connection:
            with connection.cursor() as cursor:
                cursor.execute("CREATE TABLE naive (tally_key VARBINARY(1020) PRIMARY KEY, value BIGINT NOT NULL)")
                rows = ",".join(f"('robot-{number:05}',0)" for number in range(KEYS))
                cursor.execute(f"INSERT INTO naive VALUES {rows}")
            # Each key of each partition has its row before the clock starts, on both sides.
            tally(service.port, "screws", messages.calls(max(count, 8 * scale.rounds)))
            for _ in range(scale.rounds):
                calls = messages.calls(count)
                results.setdefault("tally", []).append(tally(service.port, "screws", calls))
                results.setdefault("tally, only repeats", []).append(tally(service.port, "screws", calls, replay=True))
                for title, add in _PEERS.items():
                    results.setdefault(title, []).append(naive(connection, calls, add))
    measure.show(
        f"tallies: {count} calls of {ENTRIES:,} entries, {KEYS:,} keys, MariaDB (medians of {scale.rounds} rounds)",
        ["", "entries/s", f"of {_BASE}"],
        [
            [
                title,
                f"{statistics.median(rates):,.0f}",
                f"{statistics.median(rate / base for rate, base in zip(rates, results[_BASE], strict=True)):.2f}",
            ]
            for title, rates in results.items()
        ],
    )


if __name__ == "__main__":
    measure.alone(run)
