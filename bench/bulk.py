"""The throughput of bulk acks: 1,000 ids a call in order, 100 ids a call at random over 2,000,000 items, and 512 masks
a call, either of full groups or of groups of which a random half is acked. All items are new, so every bit that is sent
is set.

A few connections, as a few consumers would have; requests are encoded before the clock starts.
"""

from __future__ import annotations

import base64
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bench import acks, load, measure
from bench.measure import Scale
from lastbit.ids import DEFAULT_GROUP_SIZE, item_id

GROUPS = 512
"""Masks a call: as many groups as the service locks in one transaction."""
HALVES = 64
"""Different masks of a random half: enough to prevent compression, few enough to make."""


@dataclass(frozen=True)
class Bulk:
    """The requests of a round before they are encoded: a body for each call, the number of items they name, and the
    number of items that the batch must have."""

    items: int
    issued: int
    bodies: list[dict[str, object]]
    connections: int


@dataclass(frozen=True)
class Figures:
    """The figures of a round: items and bytes (of requests with their heads) a second, calls a second, seconds of a
    call."""

    items: float
    sent: float
    calls: float
    p50: float


def _in_order(batch: int, scale: Scale) -> Bulk:
    calls = scale.requests // 20
    ids = [[item_id(batch, number) for number in range(n * 1000, n * 1000 + 1000)] for n in range(calls)]
    return Bulk(calls * 1000, max(calls * 1000, scale.items), [{"items": part} for part in ids], 8)


def _at_random(batch: int, scale: Scale) -> Bulk:
    calls = scale.requests // 20
    numbers = random.sample(range(scale.items), calls * 100)
    ids = [item_id(batch, number) for number in numbers]
    return Bulk(len(ids), scale.items, [{"items": ids[n : n + 100]} for n in range(0, len(ids), 100)], 8)


def _masks(batch: int, scale: Scale, masks: list[bytes]) -> Bulk:
    calls = max(scale.requests // 500, 2)
    texts = [base64.b64encode(mask).decode() for mask in masks]
    counts = [int.from_bytes(mask, "little").bit_count() for mask in masks]
    bodies: list[dict[str, object]] = [
        {
            "groups": [
                {"batch": batch, "group": group, "bits": texts[group % len(texts)]}
                for group in range(n * GROUPS, n * GROUPS + GROUPS)
            ]
        }
        for n in range(calls)
    ]
    items = sum(counts[group % len(counts)] for group in range(calls * GROUPS))
    return Bulk(items, calls * GROUPS * DEFAULT_GROUP_SIZE, bodies, 4)


def _full_masks(batch: int, scale: Scale) -> Bulk:
    return _masks(batch, scale, [b"\xff" * (DEFAULT_GROUP_SIZE // 8)])


def _half_masks(batch: int, scale: Scale) -> Bulk:
    return _masks(batch, scale, [os.urandom(DEFAULT_GROUP_SIZE // 8) for _ in range(HALVES)])


WAYS: dict[str, Callable[[int, Scale], Bulk]] = {
    "1,000 ids a call, in order": _in_order,
    "100 ids a call, at random": _at_random,
    f"{GROUPS} masks a call, full groups": _full_masks,
    f"{GROUPS} masks a call, a random half": _half_masks,
}


def one_round(port: int, scale: Scale, way: Callable[[int, Scale], Bulk]) -> Figures:
    batch = measure.call(port, "POST", "/v1/batches")["id"]
    bulk = way(batch, scale)
    measure.call(port, "POST", f"/v1/batches/{batch}/items", {"count": bulk.issued})
    requests = [load.encoded("/v1/acks", body) for body in bulk.bodies]
    figures, answers = load.drive(port, requests, bulk.connections)
    acks.check(port, batch, answers, bulk.items)
    seconds = len(requests) / figures.rate
    return Figures(bulk.items / seconds, sum(map(len, requests)) / seconds, figures.rate, figures.p50)


def run(scale: Scale) -> None:
    results: dict[str, list[Figures]] = {name: [] for name in WAYS}
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        for _ in range(scale.rounds):
            for name, way in WAYS.items():
                results[name].append(one_round(service.port, scale, way))
    lines = []
    for name, rounds in results.items():
        items, sent_bytes, calls, p50 = (
            statistics.median(getattr(figures, figure) for figures in rounds)
            for figure in ("items", "sent", "calls", "p50")
        )
        lines.append([name, f"{items:,.0f}", f"{sent_bytes / 1e6:.1f}", f"{calls:,.0f}", f"{p50 * 1e3:.1f}"])
    measure.show(
        f"bulk: many items a call, one worker, MariaDB (medians of {scale.rounds} rounds)",
        ["", "items/s", "MB/s sent", "calls/s", "p50 ms"],
        lines,
    )


if __name__ == "__main__":
    measure.alone(run)
