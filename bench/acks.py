"""The cost of one durable ack over HTTP, compared with an empty FastAPI endpoint. Single ids over 64 connections, in
order and at random, all new; one worker, and two on one batch."""

from __future__ import annotations

import asyncio
import random
import statistics

from bench import load, measure
from bench.load import Load
from bench.measure import Scale


async def _call(port: int, method: str, path: str, body: object = None) -> dict[str, object]:
    async with measure.connected(port) as connection:
        response: dict[str, object] = await connection.call(method, path, body)
        return response


def new_batch(port: int, items: int, numbers: list[int]) -> tuple[int, list[bytes]]:
    """Open a batch and encode an ack for each number."""
    response = asyncio.run(_call(port, "POST", "/v1/batches", {"items": items}))
    batch, size = response["id"], response["group_size"]
    assert isinstance(batch, int)
    assert isinstance(size, int)
    return batch, [load.encoded("/v1/acks", {"items": [f"{batch}:{n // size}:{n % size}"]}) for n in numbers]


def check(port: int, batch: int, answers: list[bytes], count: int) -> None:
    """Raise `RuntimeError` unless the bits match the answers."""
    verification = asyncio.run(_call(port, "GET", f"/v1/batches/{batch}/verify"))
    applied = load.total(answers, "applied")
    if not (verification["ok"] and verification["acked"] == applied == count):
        raise RuntimeError(f"{count} items were acked, {applied} applied, but the batch has {verification}")


def numbers_of(order: str, scale: Scale) -> list[int]:
    if order == "in order":
        return list(range(scale.requests))
    return random.sample(range(scale.items), scale.requests)


def one_round(port: int, scale: Scale, order: str) -> Load:
    batch, requests = new_batch(port, scale.items, numbers_of(order, scale))
    figures, answers = load.drive(port, requests, scale.connections)
    check(port, batch, answers, len(requests))
    return figures


def _empty_round(port: int, scale: Scale) -> Load:
    requests = [load.encoded("/v1/acks", {"items": [f"1:{n // 8192}:{n % 8192}"]}) for n in range(scale.requests)]
    return load.drive(port, requests, scale.connections)[0]


def run(scale: Scale) -> None:
    loads: dict[str, list[Load]] = {}
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as single,
        measure.lastbit_on(server, workers=2) as double,
        measure.empty_endpoint() as empty,
    ):
        for _ in range(scale.rounds):
            loads.setdefault("empty endpoint", []).append(_empty_round(empty, scale))
            for order in ("in order", "at random"):
                loads.setdefault(f"lastbit, {order}", []).append(one_round(single.port, scale, order))
                loads.setdefault(f"two workers, {order}", []).append(one_round(double.port, scale, order))
    measure.show(
        f"acks: one id a call, {scale.connections} connections, MariaDB (medians of {scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "p99 ms", "of the empty endpoint"],
        rows(loads, "empty endpoint"),
    )


def rows(loads_by_name: dict[str, list[Load]], peer: str) -> list[list[str]]:
    """One row for each name; the ratio is the median of the rounds' own ratios, as the machine's speed drifts."""
    lines = []
    for name, loads in loads_by_name.items():
        rate = statistics.median(figures.rate for figures in loads)
        p50, p99 = (statistics.median(getattr(figures, q) for figures in loads) * 1e3 for q in ("p50", "p99"))
        ratio = statistics.median(
            figures.rate / other.rate for figures, other in zip(loads, loads_by_name[peer], strict=True)
        )
        lines.append([name, f"{rate:,.0f}", f"{p50:.1f}", f"{p99:.1f}", f"{ratio:.2f}"])
    return lines


if __name__ == "__main__":
    run(Scale.full())
