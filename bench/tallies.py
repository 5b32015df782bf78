"""The cost of counting each message once: entries in calls of 1,000, over HTTP and durable, compared with a counter
that does not detect repeats: `UPDATE … SET value = value + d`, one statement for each entry and no guard, in
transactions of 1,000 by the driver itself, without HTTP and JSON. Also compared are the same thousand UPDATEs in one
packet, and the least possible work for a database: one INSERT … ON DUPLICATE KEY UPDATE of a thousand rows.

Both add to 2,000 keys; the tally has a row for each of them and each of 4 source partitions.

Then ranges: calls of 1,000 messages over 100 keys, compared with one INSERT … ON DUPLICATE KEY UPDATE of the same 100
sums without a guard, and with entries for the same messages. In the end, eight callers have a partition each, on two
processes of the service; the server counts how often a statement waits for the lock of a row.
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


RANGE_KEYS = 100
CALLERS = 8


def _sums() -> dict[str, int]:
    """What 1,000 messages add up to."""
    return {f"robot-{number:05}": random.randrange(10, 80) for number in range(RANGE_KEYS)}


def _range_requests(name: str, sums: Sequence[dict[str, int]], start: int, partition: int = 0) -> list[bytes]:
    """A call for each of these sums, from the position `start` on."""
    requests = []
    for number, totals in enumerate(sums, start):
        after = str(number * ENTRIES) if number else None
        span = {"topic": "screws", "partition": partition, "after": after, "upto": str((number + 1) * ENTRIES)}
        requests.append(load.encoded(f"/v1/tallies/{name}/ranges", {"ranges": [{**span, "totals": totals}]}))
    return requests


def _applied(answers: Sequence[bytes]) -> None:
    if not all(answer == b'{"results":[{"status":"applied"}]}' for answer in answers):
        raise RuntimeError("a range was not applied")


def _entry_requests(name: str, count: int, start: int) -> list[bytes]:
    """Calls of 1,000 messages of one partition, over the keys of ranges."""
    return [
        load.encoded(
            f"/v1/tallies/{name}/apply",
            _body([(f"robot-{random.randrange(RANGE_KEYS):05}", 3, 0, call * ENTRIES + n) for n in range(ENTRIES)]),
        )
        for call in range(start, start + count)
    ]


def _timed_upserts(connection: Any, sums: Sequence[dict[str, int]]) -> float:
    """Messages a second."""
    with contextlib.closing(connection.cursor()) as cursor:
        start = time.perf_counter()
        for totals in sums:
            connection.begin()
            _upsert(cursor, [(key, total, 0, 0) for key, total in totals.items()])
            connection.commit()
        return len(sums) * ENTRIES / (time.perf_counter() - start)


def ranges(scale: Scale) -> None:
    """Messages a second: by ranges, by an upsert without a guard, and by entries."""
    count = max(scale.requests // 100, 4)
    rates: dict[str, list[float]] = {}
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        name = server.new_database().rpartition("/")[2]
        with contextlib.closing(_connected(server, name)) as connection:
            with connection.cursor() as cursor:
                cursor.execute("CREATE TABLE naive (tally_key VARBINARY(1020) PRIMARY KEY, value BIGINT NOT NULL)")
            for round_ in range(-1, scale.rounds):  # the first round warms up
                sums = [_sums() for _ in range(count)]
                if round_ < 0:
                    sums[0] = dict.fromkeys(sums[0], 2**30)  # a total that doubles is read, which is rare for old ones
                requests = _range_requests("ranges", sums, (round_ + 1) * count)
                entry_requests = _entry_requests("entries", count // 4, (round_ + 1) * (count // 4))
                result, answers = load.drive(service.port, requests, 1)
                _applied(answers)
                figures = {
                    "ranges": result.rate * ENTRIES,
                    _UPSERT: _timed_upserts(connection, sums),
                    "entries": load.drive(service.port, entry_requests, 1)[0].rate * ENTRIES,
                }
                for title, rate in figures.items():
                    if round_ >= 0:
                        rates.setdefault(title, []).append(rate)
    measure.show(
        f"tallies by ranges: {count} calls of {ENTRIES:,} messages, {RANGE_KEYS} keys, MariaDB (medians of "
        f"{scale.rounds} rounds)",
        ["", "messages/s", "ranges are"],
        [
            [
                title,
                f"{statistics.median(values):,.0f}",
                f"{statistics.median(a / b for a, b in zip(rates['ranges'], values, strict=True)):.2f} of it",
            ]
            for title, values in rates.items()
        ],
    )


_UPSERT = "one INSERT … ON DUPLICATE KEY UPDATE of the sums"


def _lock_waits(connection: Any) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_waits'")
        return int(cursor.fetchone()[1])


def partitions(scale: Scale) -> None:
    """Eight callers with a partition each."""
    count = max(scale.requests // 100, 4)
    with measure.mariadb() as server, measure.lastbit_on(server, workers=2) as service:
        name = server.new_database().rpartition("/")[2]
        with contextlib.closing(_connected(server, name)) as connection:
            calls = [_range_requests("apart", [_sums() for _ in range(count)], 0, part) for part in range(CALLERS)]
            before = _lock_waits(connection)
            start = time.perf_counter()
            load.converse(service.port, [_conversation(requests) for requests in calls], CALLERS)
            seconds = time.perf_counter() - start
            waits = _lock_waits(connection) - before
    rate = CALLERS * count * ENTRIES / seconds
    print(f"{CALLERS} partitions on {CALLERS} callers: {rate:,.0f} messages/s, {waits} lock waits")


def _conversation(requests: Sequence[bytes]) -> load.Flow:
    """The calls of one caller, one after the other."""
    for request in requests:
        _applied([(yield request)])


def run(scale: Scale) -> None:
    entries(scale)
    ranges(scale)
    partitions(scale)


def entries(scale: Scale) -> None:
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
