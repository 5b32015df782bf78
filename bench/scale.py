"""Whether one ack costs more at scale: in a large batch compared with a small one, in ten thousand open batches
compared with one. Single ids over many connections, all new.

At random, the cost of an ack depends on the number of groups: with a thousand items all acks change one row, with a
billion each ack inserts a row.

The last table has calls that append to the feed, whose transactions take turns: opens, and acks that complete a batch
of one item. Each process of the service has as many connections. The figures are the processor time of the service and
the statements that a call needs; with four processes both should be at most 1.3 times those with one.

`affinity` has acks of one batch, in order, through nginx to one process and to four: to each in turn, and to the one
that deploy/nginx/lastbit.conf chooses by the batch. By the batch, an ack should cost at most 1.15 times one of a single
process in processor time of the services, redo log and lock waits.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import capacity, load, measure
from bench.load import Load
from bench.measure import Scale
from bench.wait import StatementCounter
from core.storage import schema
from core.storage.database import Database
from lastbit.ids import item_id
from tests.support import nginx
from tests.support.servers import MariaDB, ServiceProcess, free_port, running_service

PARTS = ("batches", "processes", "affinity")
PROCESSES = (1, 2, 4)
APPENDING = ("ack-last", "open")
"""Kinds of `capacity`."""
SIZES = (10**3, 10**5, 10**7, 10**9)
PART = 1000
"""Acks that one batch gets in a round by size: as many as the smallest has items."""
SETUP_CONNECTIONS = 4
"""Connections that open and verify batches, which isn't measured; with more, the service's threads are slower."""


def _open(port: int, batches: int, items: int) -> list[int]:
    request = load.encoded("/v1/batches", {"items": items})
    return [json.loads(answer)["id"] for answer in load.drive(port, [request] * batches, SETUP_CONNECTIONS)[1]]


def _acks(port: int, scale: Scale, targets: list[tuple[int, int]]) -> Load:
    """Ack each (batch, number)."""
    requests = [load.encoded("/v1/acks", {"items": [item_id(batch, number)]}) for batch, number in targets]
    figures, answers = load.drive(port, requests, scale.connections)
    if load.total(answers, "applied") != len(targets):
        raise RuntimeError(f"{load.total(answers, 'applied')} of {len(targets)} acks were applied")
    return figures


def _check(port: int, acked: Counter[int]) -> None:
    """Raise `RuntimeError` unless each batch's bits match the number of its acked items."""
    requests = [load.encoded(f"/v1/batches/{batch}/verify", None, "GET") for batch in acked]
    answers = [json.loads(answer) for answer in load.drive(port, requests, SETUP_CONNECTIONS)[1]]
    # Answers arrive in no particular order and don't name their batch, so they are compared as a whole.
    actual = Counter(answer["counted"]["acked"] for answer in answers if answer["ok"])
    if actual != Counter(acked.values()):
        raise RuntimeError(f"batches by their acked items: expected {Counter(acked.values())}, found {actual}")


def _sizes(port: int, scale: Scale, order: str) -> dict[str, Load]:
    """One round: for each size, the acks of a batch or two, one after the other."""
    loads = {}
    for items in SIZES:
        targets = []
        for batch in _open(port, max(scale.requests // 10_000, 1), items):
            part = min(PART, scale.requests)
            numbers = list(range(part)) if order == "in order" else random.sample(range(items), part)
            targets += [(batch, number) for number in numbers]
        loads[f"10^{len(str(items)) - 1} items, {order}"] = _acks(port, scale, targets)
        _check(port, Counter(batch for batch, _ in targets))
    return loads


@dataclass
class Open:
    """Batches that are open at the same time, each acked in order. They stay open for all rounds, since opening ten
    thousand takes longer than a round. So mostly the first round inserts their groups' rows."""

    batches: list[int]
    acked: Counter[int] = field(default_factory=Counter)

    def following(self, acks: int) -> list[tuple[int, int]]:
        targets = []
        for batch in random.choices(self.batches, k=acks):
            targets.append((batch, self.acked[batch]))
            self.acked[batch] += 1
        return targets


def _spread(scale: Scale) -> tuple[int, ...]:
    return (1, 100, 1_000, 10_000) if scale.requests >= 10_000 else (1, 20, 200)


@dataclass(frozen=True)
class Needs:
    """The seconds of the service's processors, and the statements, that a call needs."""

    seconds: float
    statements: float


def _needs(port: int, process: int, statements: StatementCounter, kind: str, calls: int, connections: int) -> Needs:
    prepared = capacity.KINDS[kind].prepare(port, calls)
    seconds, count = measure.processor_time(process), statements.so_far()[0]
    _, answers = load.drive(port, prepared.requests, connections)
    needs = Needs((measure.processor_time(process) - seconds) / calls, (statements.so_far()[0] - count) / calls)
    prepared.check([json.loads(answer) for answer in answers])
    return needs


def _by_processes(server: MariaDB, scale: Scale) -> list[list[str]]:
    """One row for each kind of call and number of processes, with the medians of the rounds."""
    rounds: dict[tuple[str, int], list[Needs]] = {}
    statements = StatementCounter(server)
    for workers in PROCESSES:
        with measure.lastbit_on(server, workers=workers) as service:
            assert service.process is not None
            for _ in range(scale.rounds):
                for kind in APPENDING:
                    load_of_kind = kind, scale.requests // 2, workers * scale.connections
                    needs = _needs(service.port, service.process.pid, statements, *load_of_kind)
                    rounds.setdefault((kind, workers), []).append(needs)
    medians = {
        key: Needs(*(statistics.median(getattr(needs, figure) for needs in part) for figure in vars(part[0])))
        for key, part in rounds.items()
    }
    rows = []
    for kind in APPENDING:
        base = medians[kind, PROCESSES[0]]
        for workers in PROCESSES:
            needs = medians[kind, workers]
            rows.append(
                [
                    f"{capacity.KINDS[kind].title}, {workers} process{'es' if workers > 1 else ''}",
                    *(f"{needs.seconds * 1e6:,.0f}", f"{needs.seconds / base.seconds:.2f}"),
                    *(f"{needs.statements:.2f}", f"{needs.statements / base.statements:.2f}"),
                ]
            )
    return rows


@dataclass(frozen=True)
class Costs:
    """Of one ack: seconds of the services' processors, bytes of the redo log, lock waits."""

    service: float
    redo: float
    waits: float


FRONTS = {
    "1 process": (1, "hash $lastbit_batch consistent;"),
    "4 processes, in turn": (4, ""),
    "4 processes, by batch": (4, "hash $lastbit_batch consistent;"),
}
"""The number of processes, and how nginx chooses one."""


@contextlib.contextmanager
def _front(services: Sequence[ServiceProcess], choice: str) -> Iterator[int]:
    """The port of nginx with the example's choice of a server, or another, without TLS."""
    port = free_port()
    replacements = {
        "server 127.0.0.1:8000;": "".join(f"server 127.0.0.1:{service.port};" for service in services),
        "hash $lastbit_batch consistent;": choice,
    }
    head = nginx.example("lastbit.conf", replacements).partition("\nserver {")[0]
    location = 'proxy_pass http://lastbit; proxy_http_version 1.1; proxy_set_header Connection "";'
    server = f"server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; location / {{ {location} }} }}"
    with tempfile.TemporaryDirectory() as folder, nginx.running_nginx(Path(folder), head + server, port, logs=False):
        yield port


def _counters(server: MariaDB) -> tuple[int, int]:
    """Bytes of the redo log, and lock waits, so far."""
    with contextlib.closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS WHERE Variable_name IN ('Innodb_os_log_written', 'Innodb_row_lock_waits')")
        counters = dict(cursor.fetchall())
    return int(counters["Innodb_os_log_written"]), int(counters["Innodb_row_lock_waits"])


def _costs(server: MariaDB, services: Sequence[ServiceProcess], port: int, scale: Scale) -> Costs:
    """Of acks of a new batch, after enough of them to make its first group's row and all connections."""

    def processors() -> float:
        return sum(measure.processor_time(service.process.pid) for service in services if service.process is not None)

    [batch] = _open(services[0].port, 1, 2 * scale.requests)
    headers = {"Lastbit-Batch": str(batch)}
    requests = [
        load.encoded("/v1/acks", {"items": [item_id(batch, number)]}, headers=headers)
        for number in range(2 * scale.requests)
    ]
    load.drive(port, requests[: scale.requests], scale.connections)
    seconds, (redo, waits) = processors(), _counters(server)
    _, answers = load.drive(port, requests[scale.requests :], scale.connections)
    seconds, (redo_after, waits_after) = processors() - seconds, _counters(server)
    if load.total(answers, "applied") != scale.requests:
        raise RuntimeError(f"{load.total(answers, 'applied')} of {scale.requests} acks were applied")
    return Costs(seconds / scale.requests, (redo_after - redo) / scale.requests, (waits_after - waits) / scale.requests)


def _by_affinity(scale: Scale) -> list[list[str]]:
    """One row for each of `FRONTS`, with the medians of the rounds, which take turns."""
    rounds: dict[str, list[Costs]] = {name: [] for name in FRONTS}
    with measure.mariadb() as server, contextlib.ExitStack() as stack:
        url = server.new_database()
        with Database(url) as database:
            schema.migrate(database)
        services = [stack.enter_context(running_service(url)) for _ in range(4)]
        ports = {
            name: stack.enter_context(_front(services[:count], choice)) for name, (count, choice) in FRONTS.items()
        }
        for _ in range(scale.rounds):
            for name, port in ports.items():
                rounds[name].append(_costs(server, services, port, scale))
    medians = {
        name: Costs(*(statistics.median(getattr(costs, figure) for costs in part) for figure in vars(part[0])))
        for name, part in rounds.items()
    }
    base = next(iter(medians.values()))
    return [
        [
            name,
            *(f"{costs.service * 1e6:,.0f}", f"{costs.service / base.service:.2f}"),
            *(f"{costs.redo:,.0f}", f"{costs.redo / base.redo:.2f}"),
            f"{costs.waits:.3f}",
        ]
        for name, costs in medians.items()
    ]


def run(scale: Scale, parts: Sequence[str] = PARTS) -> None:
    if "batches" in parts:
        _run_batches(scale)
    if "processes" in parts:
        with measure.mariadb() as server:
            by_processes = _by_processes(server, scale)
        measure.show(
            f"scale: by processes of the service, {scale.connections} connections each (medians of {scale.rounds} "
            "rounds)",
            ["", "service µs", "of one", "statements", "of one"],
            by_processes,
        )
    if "affinity" in parts:
        measure.show(
            f"scale: one id a call, all of one batch, {scale.connections} connections through nginx (medians of "
            f"{scale.rounds} rounds)",
            ["", "service µs", "of one", "redo bytes", "of one", "lock waits"],
            _by_affinity(scale),
        )


def _run_batches(scale: Scale) -> None:
    by_size: dict[str, dict[str, list[Load]]] = {"in order": {}, "at random": {}}
    by_spread: dict[int, list[Load]] = {}
    acks = scale.requests // 2
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        port = service.port
        for _ in range(scale.rounds):
            for order, loads_by_name in by_size.items():
                for name, figures in _sizes(port, scale, order).items():
                    loads_by_name.setdefault(name, []).append(figures)
        open_batches = {n: Open(_open(port, n, acks * scale.rounds)) for n in _spread(scale)}
        for _ in range(scale.rounds):
            for count, batches in open_batches.items():
                by_spread.setdefault(count, []).append(_acks(port, scale, batches.following(acks)))
        for batches in open_batches.values():
            _check(port, batches.acked)
    measure.show(
        f"scale: one id a call, {scale.connections} connections, MariaDB, by size (medians of {scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "of 10^3 items"],
        [line for loads_by_name in by_size.values() for line in _lines(loads_by_name)],
    )
    measure.show(
        f"scale: the same by open batches, {acks:,} acks at random over them (medians of {scale.rounds} rounds)",
        ["batches", "calls/s", "p50 ms", "of one batch"],
        _lines({f"{count:,} open": loads for count, loads in by_spread.items()}),
    )


def _lines(loads_by_name: dict[str, list[Load]]) -> list[list[str]]:
    """One row for each name, with the median of the rounds' own ratios to the first."""
    base = next(iter(loads_by_name.values()))
    lines = []
    for name, loads in loads_by_name.items():
        rate, p50 = (statistics.median(getattr(figures, figure) for figures in loads) for figure in ("rate", "p50"))
        ratio = statistics.median(figures.rate / other.rate for figures, other in zip(loads, base, strict=True))
        lines.append([name, f"{rate:,.0f}", f"{p50 * 1e3:.1f}", f"{ratio:.2f}"])
    return lines


if __name__ == "__main__":
    measure.alone(run, PARTS)
