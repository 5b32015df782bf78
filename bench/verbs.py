"""The number of calls of each verb that one worker answers: over 64 connections, compared with an empty FastAPI
endpoint and, if it has the verb, the usual recipe (rows in a table and a thread for each request) on the same MariaDB.

`python -m bench.verbs open status` measures only these. A round of a verb takes about two seconds on either side; a
short run before the rounds determines the number of calls. Each round follows a second of the empty endpoint, so that a
ratio compares neighbouring measurements.
"""

from __future__ import annotations

import base64
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import load, measure
from bench.load import Load
from bench.measure import Scale
from bench.peer import row_recipe
from lastbit.ids import item_id
from lastbit.streams.snapshot import Snapshot

ITEMS = 10
BATCHES = 64
PAGE = 50
ENTRIES = 1000
PARTITIONS = 256
SETUP_CONNECTIONS = 16
"""Connections for calls that prepare a round, which isn't measured."""
PER_SECOND = 10_000
"""`Scale.requests` of the fastest verb take two seconds."""
_names = (f"bench-{number}" for number in itertools.count())

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class Calls:
    """The requests of one round, and a function that raises `RuntimeError` if the answers are wrong."""

    requests: list[bytes]
    check: Callable[[Answers], None]


@dataclass(frozen=True)
class Verb:
    title: str
    prepare: Callable[[int, int], Calls]
    """Prepares a number of calls for the service at a port."""
    in_recipe: bool = False


def expect(correct: bool, answers: Answers) -> None:
    if not correct:
        raise RuntimeError(f"{len(answers)} unexpected answers, such as {answers[-1]}")


def open_batches(port: int, count: int, items: int = ITEMS, *, sealed: bool = False) -> list[int]:
    """Open batches and return their ids."""
    request = load.encoded("/v1/batches", {"items": items, "sealed": sealed})
    return [json.loads(answer)["id"] for answer in load.drive(port, [request] * count, SETUP_CONNECTIONS)[1]]


def acks(targets: Iterable[tuple[int, int]]) -> list[bytes]:
    return [load.encoded("/v1/acks", {"items": [item_id(batch, number)]}) for batch, number in targets]


def _acked_batches(port: int) -> list[int]:
    """Batches whose first items are acked."""
    batches = open_batches(port, BATCHES, sealed=True)
    load.drive(port, acks((batch, number) for batch in batches for number in range(ITEMS // 2)), SETUP_CONNECTIONS)
    return batches


def _open(_: int, calls: int) -> Calls:
    def check(answers: Answers) -> None:
        states = {(answer["items"], answer["pending"], answer["state"]) for answer in answers}
        expect(states == {(ITEMS, ITEMS, "sealed")} and len({answer["id"] for answer in answers}) == calls, answers)

    return Calls([load.encoded("/v1/batches", {"items": ITEMS, "sealed": True})] * calls, check)


def _extend(port: int, calls: int, count: int) -> Calls:
    batches = open_batches(port, count, 0)

    def check(answers: Answers) -> None:
        ranges = {(answer["batch"], answer["start"]) for answer in answers if answer["count"] == ITEMS}
        totals = Counter(batch for batch, _ in ranges)
        expected = {(batch, number * ITEMS) for batch, total in totals.items() for number in range(total)}
        expect(len(ranges) == calls and ranges == expected, answers)

    targets = itertools.islice(itertools.cycle(batches), calls)
    return Calls([load.encoded(f"/v1/batches/{batch}/items", {"count": ITEMS}) for batch in targets], check)


def _seal(batches: Sequence[int]) -> Calls:
    def check(answers: Answers) -> None:
        states = {answer["state"] for answer in answers}
        expect(states == {"sealed"} and Counter(answer["id"] for answer in answers) == Counter(batches), answers)

    return Calls([load.encoded(f"/v1/batches/{batch}/seal", None) for batch in batches], check)


def _reads(port: int, calls: int, path: str, expected: dict[str, int]) -> Calls:
    def check(answers: Answers) -> None:
        expect(all(expected.items() <= answer.items() for answer in answers), answers)

    targets = itertools.islice(itertools.cycle(_acked_batches(port)), calls)
    return Calls([load.encoded(f"/v1/batches/{batch}{path}", None, "GET") for batch in targets], check)


def _page(port: int, calls: int) -> Calls:
    """Pages that all start at different events."""
    after = measure.call(port, "GET", "/v1/events?limit=1")["last"]
    open_batches(port, 2 * PAGE, sealed=True)

    def check(answers: Answers) -> None:
        expect({len(answer["events"]) for answer in answers} == {PAGE}, answers)

    paths = [f"/v1/events?after={after + number % PAGE}&limit={PAGE}" for number in range(calls)]
    return Calls([load.encoded(path, None, "GET") for path in paths], check)


def _append(_: int, calls: int) -> Calls:
    name = next(_names)

    def check(answers: Answers) -> None:
        positions = {event["position"] for answer in answers for event in answer["events"] if not event["repeated"]}
        expect(len(positions) == calls == max(positions) - min(positions) + 1, answers)

    events = ({"id": f"{name}:{number}", "type": "robot.moved", "key": name} for number in range(calls))
    return Calls([load.encoded("/v1/events", {"events": [{**event, "data": {"x": 1}}]}) for event in events], check)


def _tally(port: int, calls: int) -> Calls:
    """Add to keys that have rows; a key is repeated after a thousand calls, in the order of its messages."""
    path = f"/v1/tallies/{next(_names)}/apply"

    def entry(number: int) -> dict[str, Any]:
        offset, key = divmod(number, ENTRIES)
        return {"key": f"robot-{key}", "delta": 1, "source": {"topic": "moves", "partition": 0, "offset": offset}}

    measure.call(port, "POST", path, {"entries": [entry(number) for number in range(ENTRIES)]})

    def check(answers: Answers) -> None:
        expect(all(answer == {"applied": 1, "repeated": 0} for answer in answers), answers)

    numbers = range(ENTRIES, ENTRIES + calls)
    return Calls([load.encoded(path, {"entries": [entry(number)]}) for number in numbers], check)


def _position(port: int, calls: int) -> Calls:
    """Each call commits the next offset of one of the partitions, which all belong to one worker."""
    path = f"/v1/consumer-groups/{next(_names)}"
    measure.call(port, "PUT", path, {"partitions": PARTITIONS, "ttl": 3600})
    leases = measure.call(port, "POST", f"{path}/sync", {"worker": "w", "session": "s"})["assigned"]
    epochs = {lease["partition"]: lease["epoch"] for lease in leases}

    def request(number: int) -> bytes:
        offset, partition = divmod(number, PARTITIONS)
        snapshot = base64.b64encode(Snapshot(floor=offset, high=offset).encode()).decode()
        body = {"worker": "w", "epoch": epochs[partition], "snapshot": snapshot}
        return load.encoded(f"{path}/partitions/{partition}/position", body, "PUT")

    def check(answers: Answers) -> None:
        floors = [position["floor"] for position in measure.call(port, "GET", path)["positions"]]
        expect(sum(floor + 1 for floor in floors if floor is not None) == calls, answers)

    return Calls([request(number) for number in range(calls)], check)


def _ack(port: int, calls: int) -> Calls:
    [batch] = open_batches(port, 1, calls + 1, sealed=True)

    def check(answers: Answers) -> None:
        pending = measure.call(port, "GET", f"/v1/batches/{batch}")["pending"]
        expect(pending == 1 and sum(answer["applied"] for answer in answers) == calls, answers)

    return Calls(acks((batch, number) for number in range(calls)), check)


VERBS = {
    "open": Verb("open, 10 items, sealed", _open, in_recipe=True),
    "extend-one": Verb("extend by 10, one batch", lambda port, calls: _extend(port, calls, 1), in_recipe=True),
    "extend-many": Verb("extend by 10, 64 batches", lambda port, calls: _extend(port, calls, BATCHES), in_recipe=True),
    "seal": Verb("seal a fresh batch", lambda port, calls: _seal(open_batches(port, calls)), in_recipe=True),
    "seal-again": Verb(
        "seal one batch again", lambda port, calls: _seal(open_batches(port, 1, sealed=True) * calls), in_recipe=True
    ),
    "status": Verb("status", lambda port, calls: _reads(port, calls, "", {"pending": ITEMS // 2}), in_recipe=True),
    "watermark": Verb(
        "watermark", lambda port, calls: _reads(port, calls, "/watermark", {"watermark": ITEMS // 2}), in_recipe=True
    ),
    "page": Verb("a page of 50 events", _page),
    "append": Verb("append one event", _append),
    "tally": Verb("one tally entry", _tally),
    "position": Verb("one position", _position),
    "ack": Verb("one ack", _ack, in_recipe=True),
}


def drive(port: int, verb: Verb, calls: int, connections: int) -> Load:
    """Prepare calls, time them, and check their answers."""
    prepared = verb.prepare(port, calls)
    figures, answers = load.drive(port, prepared.requests, connections)
    prepared.check([json.loads(answer) for answer in answers])
    return figures


def empty(port: int, calls: int, connections: int) -> Load:
    return load.drive(port, acks((1, number) for number in range(calls)), connections)[0]


def calls_of_round(rate: float, scale: Scale) -> int:
    """The calls of a round: two seconds' worth at this rate, but at least some for each connection."""
    return max(int(min(rate / PER_SECOND, 1) * scale.requests), 2 * scale.connections)


def run(scale: Scale, names: Sequence[str] = tuple(VERBS)) -> None:
    verbs = [VERBS[name] for name in names]
    empty_rates: list[float] = []
    loads: dict[tuple[Verb, int], list[Load]] = {}
    ratios: dict[Verb, list[float]] = {}
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        row_recipe.served(server) as recipe,
        measure.empty_endpoint() as empty_port,
    ):
        first = max(scale.requests // 100, 2 * scale.connections)
        empty(empty_port, first, scale.connections)
        counts = {
            (verb, port): calls_of_round(drive(port, verb, first, scale.connections).rate, scale)
            for verb in verbs
            for port in ((service.port, recipe) if verb.in_recipe else (service.port,))
        }
        for _ in range(scale.rounds):
            for verb in verbs:
                empty_rates.append(empty(empty_port, calls_of_round(PER_SECOND / 2, scale), scale.connections).rate)
                for port in (service.port, recipe):
                    if (verb, port) in counts:
                        figures = drive(port, verb, counts[verb, port], scale.connections)
                        loads.setdefault((verb, port), []).append(figures)
                ratios.setdefault(verb, []).append(loads[verb, service.port][-1].rate / empty_rates[-1])
    rows = [["empty endpoint", f"{statistics.median(empty_rates):,.0f}", "", "1.00", "", ""]]
    for verb in verbs:
        lastbit_loads, recipe_loads = loads[verb, service.port], loads.get((verb, recipe), [])
        rate, p50 = (statistics.median(getattr(figures, name) for figures in lastbit_loads) for name in ("rate", "p50"))
        row = [verb.title, f"{rate:,.0f}", f"{p50 * 1e3:.1f}", f"{statistics.median(ratios[verb]):.2f}", "", ""]
        if recipe_loads:
            row[4] = f"{statistics.median(figures.rate for figures in recipe_loads):,.0f}"
            rates = [figures.rate / other.rate for figures, other in zip(lastbit_loads, recipe_loads, strict=True)]
            row[5] = f"{statistics.median(rates):.2f}"
        rows.append(row)
    measure.show(
        f"verbs: {scale.connections} connections, one worker, MariaDB (medians of {scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "of the\nempty", "recipe,\ncalls/s", "of the\nrecipe"],
        rows,
        "of the empty, of the recipe: Lastbit's calls/s divided by theirs,\nso 1.00 is as fast and 2.00 twice as fast",
    )


if __name__ == "__main__":
    measure.alone(run, VERBS)
