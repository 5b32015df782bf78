"""PostgreSQL next to MariaDB: single acks, many items a call, and each verb, with the same requests and one worker on
either server; and the space that a large batch takes. Both servers have their default settings and sync each commit.

A round runs each case on one server right after the other, as the machine's speed drifts.
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
from tests.support.servers import MariaDB


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


def _speed(scale: Scale) -> list[list[str]]:
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    with (
        measure.mariadb() as first,
        measure.postgresql() as second,
        measure.lastbit_on(first) as on_mariadb,
        measure.lastbit_on(second) as on_postgresql,
    ):
        few = dataclasses.replace(scale, requests=max(scale.requests // 100, 2 * scale.connections))
        for case in CASES.values():  # the services connect to their databases
            case(on_mariadb.port, few)
            case(on_postgresql.port, few)
        for _ in range(scale.rounds):
            for name, case in CASES.items():
                rates[name].append((case(on_mariadb.port, scale), case(on_postgresql.port, scale)))
    lines = []
    for name, pairs in rates.items():
        medians = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(other / base for base, other in pairs)
        lines.append([name, *(f"{rate:,.0f}" for rate in medians), f"{ratio:.2f}"])
    return lines


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
    measure.show(
        f"postgresql: a second, {scale.connections} connections for single calls, one worker (medians of "
        f"{scale.rounds} rounds)",
        ["", "MariaDB", "PostgreSQL", "ratio"],
        _speed(scale),
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
