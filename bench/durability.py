"""The cost of a binary log that is synced at each commit: the single acks of `acks`, in order and at random, on a
MariaDB with `log_bin` and `sync_binlog=1` compared with one without; both sync InnoDB's log at each commit."""

from __future__ import annotations

import contextlib

from bench import acks, load, measure
from bench.load import Load
from bench.measure import Scale
from tests.support.servers import MariaDB

BINLOG = ("--log-bin=binlog", "--sync-binlog=1")


def _round(port: int, scale: Scale, order: str) -> Load:
    batch, requests = acks.new_batch(port, scale.items, acks.numbers_of(order, scale))
    figures, answers = load.drive(port, requests, scale.connections)
    acks.check(port, batch, answers, len(requests))
    return figures


def _check(server: MariaDB, logs: bool) -> None:
    """Raise `RuntimeError` unless the server has the settings of its table row."""
    with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT @@log_bin, @@sync_binlog, @@innodb_flush_log_at_trx_commit")
        variables = cursor.fetchone()
    if variables != (int(logs), int(logs), 1):
        raise RuntimeError(f"log_bin, sync_binlog and innodb_flush_log_at_trx_commit are {variables}")


def run(scale: Scale) -> None:
    results: dict[str, dict[str, list[Load]]] = {}
    with (
        measure.mariadb() as plain,
        measure.mariadb(BINLOG) as binlog_server,
        measure.lastbit_on(plain) as plain_service,
        measure.lastbit_on(binlog_server) as with_binlog,
    ):
        _check(plain, logs=False)
        _check(binlog_server, logs=True)
        for _ in range(scale.rounds):
            for order in ("in order", "at random"):
                for name, service in (
                    (f"{order}, without", plain_service),
                    (f"{order}, with a binary log", with_binlog),
                ):
                    loads = results.setdefault(order, {}).setdefault(name, [])
                    loads.append(_round(service.port, scale, order))
    measure.show(
        f"durability: one id a call, {scale.connections} connections, MariaDB without and with log_bin and "
        f"sync_binlog=1 (medians of {scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "p99 ms", "of without"],
        [line for order, loads in results.items() for line in acks.rows(loads, f"{order}, without")],
    )


if __name__ == "__main__":
    measure.alone(run)
