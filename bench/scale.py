"""Whether one ack costs more at scale: in a large batch compared with a small one, in ten thousand open batches
compared with one. Single ids over many connections, all new.

At random, the cost of an ack depends on the number of groups: with a thousand items all acks change one row, with a
billion each ack inserts a row.

The last table has calls that append to the feed, whose transactions take turns: opens, and acks that complete a batch
of one item. Each process of the service has as many connections. The figures are the processor time of the service and
the statements that a call needs; with four processes both should be at most 1.3 times those with one.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field

from bench import capacity, load, measure
from bench.load import Load
from bench.measure import Scale
from bench.wait import StatementCounter
from lastbit.ids import item_id
from tests.support.servers import MariaDB

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


def run(scale: Scale) -> None:
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
    with measure.mariadb() as server:
        by_processes = _by_processes(server, scale)
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
    measure.show(
        f"scale: by processes of the service, {scale.connections} connections each (medians of {scale.rounds} rounds)",
        ["", "service µs", "of one", "statements", "of one"],
        by_processes,
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
    measure.alone(run)
