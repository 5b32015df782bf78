"""What one database carries: a model of the resources that a call needs, fitted to measurements, and checked against
runs that it has not seen.

The resources of a call are the processor time of the service, that of the database, and the bytes of the database's
redo log. They add up, so the resources of a mixture of calls are the sum of its parts. Calls that arrive together share
a transaction; its fixed cost is divided among them. So a call in a load of n connections needs

    per call + per transaction / n

of each resource. The two parameters are fitted to loads of few and of many connections. The model is checked with
another number of connections, and with whole lives of batches. The last table has the loads at which the first resource
is used up, for servers that this benchmark doesn't have: only as good as the assumption that more processors do
proportionally more.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench import lifecycle, load, measure, verbs
from bench.measure import Scale
from bench.verbs import Answers, Calls, Verb
from tests.support.servers import MariaDB, ServiceProcess

FITTED = (8, 64)
"""The numbers of connections to which the model is fitted."""
UNSEEN = 24
LIFE = {"open": 1, "ack-small": lifecycle.ITEMS - 1, "ack-last": 1}
"""The calls of a batch's life. Its announcement by the feed is not in the model: the only follower reads many at
once."""
SERVERS = ((4, 4), (8, 8), (16, 16))
"""Processors of the database, and workers of the service with a processor each."""


def _small_acks(port: int, calls: int, items: int, acks: int) -> Calls:
    """Acks of batches with `items` items each, `acks` of each batch, the batches in turn."""
    batches = verbs.open_batches(port, -(-calls // acks), items, sealed=True)
    targets = [(batch, number) for number in range(acks) for batch in batches][:calls]

    def check(answers: Answers) -> None:
        verbs.expect(sum(answer["applied"] for answer in answers) == calls, answers)
        completed = sum(len(answer["completed"]) for answer in answers)
        verbs.expect(completed == (calls if acks == items else 0), answers)

    return Calls(verbs.acks(targets), check)


KINDS: dict[str, Verb] = {
    **{name: verbs.VERBS[name] for name in ("open", "extend-many", "seal", "status", "watermark", "page", "append")},
    **{name: verbs.VERBS[name] for name in ("tally", "position", "ack")},
    "ack-small": Verb("an ack of a small batch", lambda port, calls: _small_acks(port, calls, lifecycle.ITEMS, 9)),
    "ack-last": Verb("the last ack of a batch", lambda port, calls: _small_acks(port, calls, 1, 1)),
}


@dataclass(frozen=True)
class Resources:
    """Seconds of processor time of the service and the database, and bytes of redo log."""

    service: float = 0.0
    database: float = 0.0
    log: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(self.service + other.service, self.database + other.database, self.log + other.log)

    def __sub__(self, other: Resources) -> Resources:
        return self + other * -1

    def __mul__(self, factor: float) -> Resources:
        return Resources(self.service * factor, self.database * factor, self.log * factor)


@dataclass(frozen=True)
class Cost:
    """The resources of a verb: of each call, and of each transaction."""

    call: Resources
    transaction: Resources

    def at(self, connections: float) -> Resources:
        """The resources of a call in a load of this many connections."""
        return self.call + self.transaction * (1 / connections)

    @classmethod
    def fit(cls, small_load: Resources, large_load: Resources) -> Cost:
        """The costs for which a call needs `small_load` and `large_load` in loads of FITTED connections."""
        first, second = FITTED
        transaction = (small_load - large_load) * (1 / (1 / first - 1 / second))
        return cls(large_load - transaction * (1 / second), transaction)


class Meter:
    """Measures the resources that a service and its database use."""

    def __init__(self, server: MariaDB, service: ServiceProcess) -> None:
        assert server.process is not None
        assert service.process is not None
        self._database, self._service = server.process.pid, service.process.pid
        self._connection = server.connect()

    def close(self) -> None:
        self._connection.close()

    def look(self) -> Resources:
        with self._connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_os_log_written'")
            log_bytes = int(cursor.fetchone()[1])
        return Resources(measure.processor_time(self._service), measure.processor_time(self._database), log_bytes)


def _median(rounds: list[Resources]) -> Resources:
    return Resources(*(statistics.median(getattr(resources, name) for resources in rounds) for name in vars(rounds[0])))


def life(costs: Mapping[str, Cost], connections: int) -> Resources:
    """The resources of a batch's life in a load of this many connections, which are spread over its calls."""
    total = sum(LIFE.values())
    resources = Resources()
    for name, count in LIFE.items():
        resources += costs[name].at(connections * count / total) * count
    return resources


def _measure(meter: Meter, port: int, name: str, calls: int, connections: int) -> Resources:
    """The resources of a call of the verb."""
    load_of_verb = KINDS[name].prepare(port, calls)
    before = meter.look()
    _, answers = load.drive(port, load_of_verb.requests, connections)
    resources = (meter.look() - before) * (1 / calls)
    load_of_verb.check([json.loads(answer) for answer in answers])
    return resources


def _row(name: str, *columns: Resources) -> list[str]:
    """Microseconds and bytes; each resource of all columns beside each other."""
    cells = [
        *(f"{column.service * 1e6:,.0f}" for column in columns),
        *(f"{column.database * 1e6:,.0f}" for column in columns),
        *(f"{column.log:,.0f}" for column in columns),
    ]
    return [name, *cells]


def _most(resources: Resources, processors: int, workers: int) -> tuple[float, str]:
    """How often a second this can be done, and which processors are used up then.

    In a short run, a need can be less than the clock of processor time shows; it is not the one that is used up.
    """
    needs = (("workers", workers, resources.service), ("database", processors, resources.database))
    return min(((available / need, name) for name, available, need in needs if need > 0), default=(math.nan, "unknown"))


def run(scale: Scale) -> None:
    samples: dict[tuple[str, int], list[Resources]] = {}
    lives: list[Resources] = []
    calls = max(scale.requests // 4, 200)
    count = max(scale.requests // 40, scale.connections)
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        contextlib.closing(Meter(server, service)) as meter,
    ):
        for _ in range(scale.rounds):
            for name in KINDS:
                for connections in (*FITTED, UNSEEN):
                    resources = _measure(meter, service.port, name, calls, connections)
                    samples.setdefault((name, connections), []).append(resources)
            before = meter.look()
            lifecycle.lastbit(service.port, count, scale.connections)
            lives.append((meter.look() - before) * (1 / count))
    medians = {key: _median(rounds) for key, rounds in samples.items()}
    costs = {name: Cost.fit(*(medians[name, connections] for connections in FITTED)) for name in KINDS}
    measure.show(
        f"capacity: resources of a call and of a transaction (medians of {scale.rounds} rounds)",
        [
            "",
            *(
                f"{resource},\n{source}"
                for resource in ("service \u00b5s", "database \u00b5s", "log bytes")
                for source in ("call", "tx")
            ),
        ],
        [_row(name, costs[name].call, costs[name].transaction) for name in KINDS],
    )
    predictions = {f"{name}, {UNSEEN} connections": (costs[name].at(UNSEEN), medians[name, UNSEEN]) for name in KINDS}
    predictions[f"a life, {scale.connections} connections"] = life(costs, scale.connections), _median(lives)
    measure.show(
        "capacity: the model and runs that it has not seen",
        [
            "",
            *(
                f"{resource},\n{source}"
                for resource in ("service \u00b5s", "database \u00b5s", "log bytes")
                for source in ("model", "run")
            ),
        ],
        [_row(name, *pair) for name, pair in predictions.items()],
    )
    kinds = {name: costs[name].at(scale.connections) for name in KINDS} | {"a life": _median(lives)}
    lines = []
    for name, resources in kinds.items():
        line = [name]
        for processors, workers in SERVERS:
            rate, limiting_part = _most(resources, processors, workers)
            line.append(f"{rate:,.0f} ({limiting_part}, {rate * resources.log / 1e6:,.0f} MB/s)")
        lines.append(line)
    measure.show(
        f"capacity: the model's limits, {scale.connections} connections for each worker",
        ["a second", *(f"{processors} database processors,\n{workers} workers" for processors, workers in SERVERS)],
        lines,
        "in brackets: what is used up, and the redo log that is written",
    )


if __name__ == "__main__":
    measure.alone(run)
