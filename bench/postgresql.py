"""PostgreSQL next to MariaDB: single acks, many items a call, and each verb, with the same requests and one worker on
either server; and the space that a large batch takes. Both servers have their default settings and sync each commit.

A round runs each case on one server right after the other, as the machine's speed drifts. The second table shows where
the processor time of a round went: it is the same work on both, with its preparation, in the service and in the server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
from collections.abc import Callable

from bench import acks, bulk, measure, storage, verbs
from bench.measure import Scale
from core.service import Service
from core.storage import schema
from core.storage.database import Database
from tests.support.postgresql import PostgreSQL
from tests.support.servers import MariaDB, ServiceProcess


def _acks(order: str) -> Callable[[int, Scale], float]:
    return lambda port, scale: acks.one_round(port, scale, order).rate


def _bulk(way: Callable[[int, Scale], bulk.Bulk]) -> Callable[[int, Scale], float]:
    return lambda port, scale: bulk.one_round(port, scale, way).items


def _verb(verb: verbs.Verb) -> Callable[[int, Scale], float]:
    return lambda port, scale: verbs.drive(port, verb, verbs.calls_of_round(4000, scale), scale.connections).rate


CASES: dict[str, Callable[[int, Scale], float]] = {
    **{f"one id a call, {order}: calls": _acks(order) for order in ("in order", "at random")},
    **{f"{name}: items": _bulk(way) for name, way in bulk.WAYS.items()},
    **{f"{verb.title}: calls": _verb(verb) for name, verb in verbs.VERBS.items() if name != "ack"},
}


@dataclasses.dataclass
class _Side:
    """A server and the service that uses it: the rates of each case, and the seconds of processor time of both."""

    server: MariaDB | PostgreSQL
    service: ServiceProcess
    rates: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {name: [] for name in CASES})
    times: dict[str, list[tuple[float, float]]] = dataclasses.field(
        default_factory=lambda: {name: [] for name in CASES}
    )

    def run(self, name: str, scale: Scale) -> None:
        before = self._times()
        self.rates[name].append(CASES[name](self.service.port, scale))
        service, server = (after - start for after, start in zip(self._times(), before, strict=True))
        self.times[name].append((service, server))

    def _times(self) -> tuple[float, float]:
        assert self.service.process is not None
        assert self.server.process is not None
        return measure.processor_time(self.service.process.pid), measure.processor_time(self.server.process.pid)

    def seconds(self, name: str) -> tuple[float, float]:
        service, server = (statistics.median(column) for column in zip(*self.times[name], strict=True))
        return service, server


def _speed(scale: Scale) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables."""
    with (
        measure.mariadb() as first,
        measure.postgresql() as second,
        measure.lastbit_on(first) as on_mariadb,
        measure.lastbit_on(second) as on_postgresql,
    ):
        sides = _Side(first, on_mariadb), _Side(second, on_postgresql)
        few = dataclasses.replace(scale, requests=max(scale.requests // 100, 2 * scale.connections))
        for case in CASES.values():  # the services connect to their databases
            for side in sides:
                case(side.service.port, few)
        for _ in range(scale.rounds):
            for name in CASES:
                for side in sides:
                    side.run(name, scale)
    rates, times = [], []
    for name in CASES:
        medians = [f"{statistics.median(side.rates[name]):,.0f}" for side in sides]
        pairs = zip(*(side.rates[name] for side in sides), strict=True)
        rates.append([name, *medians, f"{statistics.median(other / base for base, other in pairs):.2f}"])
        (service, server), (other_service, other_server) = (side.seconds(name) for side in sides)
        seconds = [f"{value:.2f}" for value in (service, other_service, server, other_server)]
        times.append([name.rpartition(":")[0], *seconds, f"{other_server / server:.2f}" if server else ""])
    return rates, times


class _OnPostgreSQL:
    """The space on disk of tables with their indexes, after a plain VACUUM."""

    def __init__(self, server: PostgreSQL, url: str) -> None:
        self._connection = server.connect(url.rpartition("/")[2])

    def bytes(self, table: str) -> float:
        self._connection.execute(f"VACUUM {table}")
        [(size,)] = self._connection.execute("SELECT pg_total_relation_size(%s::regclass)", [table]).fetchall()
        return float(size)

    def rebuild(self, table: str) -> None:
        self._connection.execute(f"VACUUM FULL {table}")

    def close(self) -> None:
        self._connection.close()


class _OnMariaDB(storage.Store):
    def bytes(self, table: str) -> float:
        return self.bits_per_item(table) * self.items / 8


def _space(url: str, items: int, tables: _OnPostgreSQL | _OnMariaDB) -> dict[str, float]:
    """The space of the groups of a batch of which a random half is acked, and after all of it is."""
    with contextlib.closing(tables), Database(url) as database:
        service = Service(database)
        try:
            batch = storage.Batch(service, items)
            numbers = random.sample(range(items), items)
            batch.ack(numbers[: items // 2])
            space = {"a random half acked: bits per item": tables.bytes("item_groups") * 8 / items}
            batch.ack(numbers[items // 2 :])
            space["complete: bits per item"] = tables.bytes("item_groups") * 8 / items
            tables.rebuild("item_groups")
            space["complete, table rebuilt: bits per item"] = tables.bytes("item_groups") * 8 / items
            batch.check(items)
            return space
        finally:
            service.stop()


def _migrated(server: MariaDB | PostgreSQL) -> str:
    url = server.new_database()
    with Database(url) as database:
        schema.migrate(database)
    return url


def run(scale: Scale) -> None:
    rates, times = _speed(scale)
    measure.show(
        f"postgresql: a second, {scale.connections} connections for single calls, one worker (medians of "
        f"{scale.rounds} rounds)",
        ["", "MariaDB", "PostgreSQL", "ratio"],
        rates,
    )
    measure.show(
        "postgresql: seconds of processor time for a round",
        ["", "service, MariaDB", "service, PostgreSQL", "MariaDB", "PostgreSQL", "ratio of servers"],
        times,
    )
    with measure.mariadb() as first:
        url = _migrated(first)
        base = _space(url, scale.items, _OnMariaDB(first, scale.items, url))
    with measure.postgresql() as second:
        url = _migrated(second)
        other = _space(url, scale.items, _OnPostgreSQL(second, url))
    measure.show(
        f"postgresql: space on disk, after VACUUM, a batch of {scale.items:,} items",
        ["", "MariaDB", "PostgreSQL"],
        [[name, f"{base[name]:.2f}", f"{other[name]:.2f}"] for name in base],
    )


if __name__ == "__main__":
    measure.alone(run)
