"""Does the size of a batch cost anything when it is looked at? Status, watermark, pending and one ack, for a batch of a
thousand items and one of a billion: untouched, with 500 items acked in order, and with 500 acked at random; and what
memory the service takes for it.

At random, 500 acks lie in one group of the thousand and in as many groups of the billion, each with a row of its own.
So there `pending` has rows to read that the small batch does not have; what it answers is a page of 100 ranges in both.
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
LOOKS = {"status": "", "watermark": "/watermark", "pending": "/pending"}
UNTOUCHED, IN_ORDER, AT_RANDOM = "untouched", f"{ACKED} acked in order", f"{ACKED} acked at random"


@dataclass(frozen=True)
class Prepared:
    """A batch in the state that is asked about, and what shall be acked next, an item a call."""

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
    """Median seconds by size and question. The sizes take turns, so that both see the same machine."""
    calls = max(scale.requests // 200, 10)
    sizes = (SMALL, LARGE) if small_first else (LARGE, SMALL)
    seconds: dict[int, dict[str, float]] = {SMALL: {}, LARGE: {}}
    for state in (UNTOUCHED, IN_ORDER, AT_RANDOM):
        batches = {items: _prepare(port, items, state, calls) for items in sizes}
        for name, path in LOOKS.items():
            for items in sizes:
                look = load.encoded(f"/v1/batches/{batches[items].id}{path}", None, "GET")
                seconds[items][f"{name}, {state}"] = load.drive(port, [look] * calls, 1)[0].p50
        for items in sizes:
            seconds[items][f"one ack, {state}"] = _acks(port, batches[items], items, calls)
    return seconds


def _acks(port: int, batch: Prepared, items: int, calls: int) -> float:
    """Median seconds of one ack. An untouched batch has only one first ack, so there it is a batch for each."""
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
            raise RuntimeError(f"{acked} of {items} items were acked, and the batch says {verification}")
    if load.total(answers, "applied") != len(targets):
        raise RuntimeError(f"of {len(targets)} acks {load.total(answers, 'applied')} were applied")
    return figures.p50


def run(scale: Scale) -> None:
    results: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        assert service.process is not None
        process = service.process.pid
        resident = {"after its start": measure.memory(process)}
        _round(service.port, scale, small_first=True)  # the first of a process is always slower
        resident["after the round that warms up"] = measure.memory(process)
        for number in range(scale.rounds):
            for items, seconds in _round(service.port, scale, small_first=bool(number % 2)).items():
                results[items].append(seconds)
        resident[f"after {scale.rounds} more"] = measure.memory(process)
        resident["the most it ever was"] = measure.memory(process, "VmHWM")
    measure.show(
        f"status: over HTTP on MariaDB, one connection (medians of {scale.rounds} rounds)",
        ["", "10^3 items, ms", "10^9 items, ms", "ratio"],
        measure.beside(results[SMALL], results[LARGE]),
    )
    measure.show(
        "status: the service's resident memory (the bits of a billion items would be 119 MB)",
        ["", "MB"],
        [[name, f"{megabytes:.1f}"] for name, megabytes in resident.items()],
    )


if __name__ == "__main__":
    measure.alone(run)
