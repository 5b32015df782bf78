"""Whether the number of batches affects the cost of finding them: lists, searches, counts, and failures by reason, in a
service with 100,000 batches of which one has a million failures, and in one with a hundred batches.

A third of the batches is open, a third succeeded and a third failed. Calls come one after the other, while nothing
else happens; the goal is that each takes less than 100 ms.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlencode

from bench import load, measure
from bench.measure import Scale
from lastbit.ids import item_id

GOAL = 0.1
"""Seconds."""
REASONS = ("card declined", "address unknown", "out of stock")
CALL = 1000
"""Items of a call."""
FEW = 100
"""Batches of the small service, and a hundredth of the failures."""


@dataclass(frozen=True)
class Prepared:
    port: int
    failing: int
    """The batch whose items all failed."""
    parent: int
    middle: str
    """When half of the batches had been opened."""


def _fail(port: int, items: list[str], reason: str, count: int) -> None:
    """With `count` items a call."""
    bodies = [{"items": items[start : start + count], "reason": reason} for start in range(0, len(items), count)]
    load.drive(port, [load.encoded("/v1/failures", body) for body in bodies], 2)


def _prepare(port: int, batches: int, failures: int, connections: int) -> Prepared:
    parent = measure.call(port, "POST", "/v1/batches", {"key": "parent", "items": batches})
    opens = []
    for number in range(batches):
        labels = {"team": f"team-{number % 10}", "run": f"{number // 100}"}
        body: dict[str, object] = {"key": f"order-{number:06}", "labels": labels, "items": 1}
        if number % 50 == 0:
            body["parent"] = item_id(parent["id"], number)
        opens.append(load.encoded("/v1/batches", body))
    half = len(opens) // 2
    answers = load.drive(port, opens[:half], connections)[1]
    middle = json.loads(answers[-1])["created_at"]
    answers += load.drive(port, opens[half:], connections)[1]
    ids = sorted(json.loads(answer)["id"] for answer in answers)
    ended_ids = [id for id in ids if id % 3]
    load.drive(port, [load.encoded(f"/v1/batches/{id}/seal", None) for id in ended_ids], connections)
    items = [item_id(id, 0) for id in ended_ids if id % 3 == 1]
    acks = [load.encoded("/v1/acks", {"items": items[start : start + 100]}) for start in range(0, len(items), 100)]
    load.drive(port, acks, 2)  # each call ends a hundred batches
    _fail(port, [item_id(id, 0) for id in ended_ids if id % 3 == 2], REASONS[0], 100)
    failing = measure.call(port, "POST", "/v1/batches", {"key": "failing", "items": failures})["id"]
    for place, reason in enumerate(REASONS):
        _fail(port, [item_id(failing, number) for number in range(place, failures, len(REASONS))], reason, CALL)
    return Prepared(port, failing, parent["id"], middle)


def _questions(service: Prepared) -> dict[str, str]:
    searches: dict[str, dict[str, object]] = {
        "newest": {},
        "one key": {"key": "order-000042"},
        "a prefix of all keys": {"key_prefix": "order-"},
        "a prefix of ten keys": {"key_prefix": "order-00004"},
        "label, in a tenth": {"label": "team:team-3"},
        "label, in a hundred": {"label": "run:0"},
        "state": {"state": "open"},
        "outcome": {"outcome": "failed"},
        "opened before": {"opened_before": service.middle},
        "parent": {"parent": service.parent},
        "prefix, outcome, time": {"key_prefix": "order-", "outcome": "failed", "opened_before": service.middle},
    }
    questions = {f"list: {name}": f"/v1/batches?{urlencode(given)}" for name, given in searches.items()}
    counted = ("newest", "a prefix of all keys", "a prefix of ten keys", "outcome", "opened before", "parent")
    for name in (*counted, "label, in a tenth"):
        title = "all" if name == "newest" else name
        questions[f"counts: {title}"] = f"/v1/batches/counts?{urlencode(searches[name])}"
    questions["failures by reason"] = f"/v1/batches/{service.failing}/failed/reasons"
    questions["failed items"] = f"/v1/batches/{service.failing}/failed"
    return questions


def run(scale: Scale) -> None:
    full = scale.items >= Scale.full().items
    batches, failures, calls = (100_000, 10**6, 20) if full else (1_000, 6_000, 3)
    with (
        measure.mariadb(["--innodb-flush-log-at-trx-commit=0"]) as server,  # only reads are measured
        measure.lastbit_on(server) as small,
        measure.lastbit_on(server) as large,
    ):
        start = time.monotonic()
        services = (
            _prepare(small.port, FEW, failures // 100, scale.connections),
            _prepare(large.port, batches, failures, scale.connections),
        )
        prepared = time.monotonic() - start
        rounds: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for _ in range(scale.rounds):
            for service, found in zip(services, rounds, strict=True):
                found.append(
                    {
                        name: load.drive(service.port, [load.encoded(path, None, "GET")] * calls, 1)[0].p99
                        for name, path in _questions(service).items()
                    }
                )
    rows = measure.compared(*rounds)
    slow = [name for name in rounds[1][0] if statistics.median(found[name] for found in rounds[1]) > GOAL]
    measure.show(
        f"search: slowest of {calls} calls, {batches:,} batches and a batch with {failures:,} failures, MariaDB "
        f"(medians of {scale.rounds} rounds; prepared in {prepared:.0f} s)",
        ["", f"{FEW} batches, ms", f"{batches:,} batches, ms", "ratio"],
        rows,
        f"over {GOAL * 1e3:.0f} ms: {', '.join(slow) or 'none'}",
    )


if __name__ == "__main__":
    measure.alone(run)
