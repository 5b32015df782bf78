"""Whether the size of a batch affects the cost of reading it: status, watermark, pending and one ack, for a batch of a
thousand items and one of a billion: untouched, with 500 items acked in order, and with 500 acked at random; and the
memory that the service needs for it.

At random, 500 acks are in one group of the thousand items and in as many groups of the billion, each with its own row.
There `pending` must read rows that the small batch does not have; it returns a page of 100 ranges in both cases.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from bench import load, measure
from bench.measure import Scale
from lastbit.ids import item_id

SMALL, LARGE = 10**3, 10**9
ACKED = 500
READS = {"status": "", "watermark": "/watermark", "pending": "/pending"}
UNTOUCHED, IN_ORDER, AT_RANDOM = "untouched", f"{ACKED} acked in order", f"{ACKED} acked at random"


@dataclass(frozen=True)
class Prepared:
    """A batch in the state under test, and the numbers to ack next, one item a call."""

    id: int
    acked: int
    following: list[int]


def _prepare(port: int, items: int, state: str, acks: int) -> Prepared:
    batch: int = measure.call(port, "POST", "/v1/batches", {"items": items})["id"]
    if state == UNTOUCHED:
        return Prepared(batch, 0, [])
    count = ACKED + acks
    numbers = list(range(count)) if state == IN_ORDER else random.sample(range(items), count)
    first = [item_id(batch, number) for number in numbers[:ACKED]]
    measure.call(port, "POST", "/v1/acks", {"items": first})
    return Prepared(batch, ACKED, numbers[ACKED:])


def _round(port: int, scale: Scale, small_first: bool) -> dict[int, dict[str, float]]:
    """Median seconds by size and question. The sizes alternate, so that both run under the same conditions."""
    calls = max(scale.requests // 200, 10)
    sizes = (SMALL, LARGE) if small_first else (LARGE, SMALL)
    seconds: dict[int, dict[str, float]] = {SMALL: {}, LARGE: {}}
    for state in (UNTOUCHED, IN_ORDER, AT_RANDOM):
        batches = {items: _prepare(port, items, state, calls) for items in sizes}
        for name, path in READS.items():
            for items in sizes:
                look = load.encoded(f"/v1/batches/{batches[items].id}{path}", None, "GET")
                seconds[items][f"{name}, {state}"] = load.drive(port, [look] * calls, 1)[0].p50
        for items in sizes:
            seconds[items][f"one ack, {state}"] = _acks(port, batches[items], items, calls)
    return seconds


def _acks(port: int, batch: Prepared, items: int, calls: int) -> float:
    """Median seconds of one ack. An untouched batch has only one first ack, so that case uses a new batch for each
    ack."""
    if batch.following:
        targets = [(batch.id, number) for number in batch.following]
    else:
        responses = load.drive(port, [load.encoded("/v1/batches", {"items": items})] * calls, 1)[1]
        targets = [(json.loads(response)["id"], random.randrange(items)) for response in responses]
    requests = [load.encoded("/v1/acks", {"items": [item_id(id, number)]}) for id, number in targets]
    figures, answers = load.drive(port, requests, 1)
    expected = {id: 1 for id, _ in targets}
    if batch.following:
        expected[batch.id] = batch.acked + len(targets)
    for id, acked in expected.items():
        verification = measure.call(port, "GET", f"/v1/batches/{id}/verify")
        if not (verification["ok"] and verification["acked"] == acked and verification["pending"] == items - acked):
            raise RuntimeError(f"{acked} of {items} items were acked, but the batch has {verification}")
    if load.total(answers, "applied") != len(targets):
        raise RuntimeError(f"{load.total(answers, 'applied')} of {len(targets)} acks were applied")
    return figures.p50


def run(scale: Scale) -> None:
    results: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        assert service.process is not None
        process = service.process.pid
        resident = {"after its start": measure.memory(process)}
        _round(service.port, scale, small_first=True)  # the first round of a process is always slower
        resident["after the warm-up round"] = measure.memory(process)
        for number in range(scale.rounds):
            for items, seconds in _round(service.port, scale, small_first=bool(number % 2)).items():
                results[items].append(seconds)
        resident[f"after {scale.rounds} more"] = measure.memory(process)
        resident["at its peak"] = measure.memory(process, "VmHWM")
    measure.show(
        f"status: over HTTP on MariaDB, one connection (medians of {scale.rounds} rounds)",
        ["", "10^3 items, ms", "10^9 items, ms", "ratio"],
        measure.compared(results[SMALL], results[LARGE]),
    )
    measure.show(
        "status: the service's resident memory (the bits of a billion items would be 119 MB)",
        ["", "MB"],
        [[name, f"{megabytes:.1f}"] for name, megabytes in resident.items()],
    )


if __name__ == "__main__":
    measure.alone(run)
