"""What does one durable ack cost over HTTP, against an empty FastAPI endpoint? Single ids, in order and at random, all
fresh."""

from __future__ import annotations

import asyncio
import random
import statistics

from bench import measure
from bench.measure import Load, Scale


async def _round(port: int, scale: Scale, order: str) -> Load:
    async with measure.connected(port) as connection:
        opened = await connection.call("POST", "/v1/batches", {"items": scale.items})
        batch, size = opened["id"], opened["group_size"]
        numbers = range(scale.requests) if order == "in order" else random.sample(range(scale.items), scale.requests)
        bodies = ({"items": [f"{batch}:{n // size}:{n % size}"]} for n in numbers)
        measured, answers = await measure.load(port, "/v1/acks", bodies, scale.connections)
        found = await connection.call("GET", f"/v1/batches/{batch}/verify")
        applied = sum(answer["applied"] for answer in answers)
        if not (found["ok"] and found["acked"] == applied == scale.requests):
            raise RuntimeError(f"{scale.requests} acks were sent, {applied} applied, and the batch says {found}")
    return measured


async def _empty_round(port: int, scale: Scale) -> Load:
    bodies = ({"items": [f"1:{n // 8192}:{n % 8192}"]} for n in range(scale.requests))
    return (await measure.load(port, "/v1/acks", bodies, scale.connections))[0]


def run(scale: Scale) -> None:
    found: dict[str, list[Load]] = {}
    with measure.mariadb() as server, measure.lastbit_on(server) as service, measure.empty_endpoint() as empty:
        for _ in range(scale.rounds):
            found.setdefault("empty endpoint", []).append(asyncio.run(_empty_round(empty, scale)))
            for order in ("in order", "at random"):
                found.setdefault(f"lastbit, {order}", []).append(asyncio.run(_round(service.port, scale, order)))
    peer = statistics.median(each.rate for each in found["empty endpoint"])
    rows = []
    for name, loads in found.items():
        rate = statistics.median(each.rate for each in loads)
        p50, p99 = (statistics.median(getattr(each, q) for each in loads) * 1e3 for q in ("p50", "p99"))
        rows.append([name, f"{rate:,.0f}", f"{p50:.1f}", f"{p99:.1f}", f"{rate / peer:.2f}"])
    measure.show(
        f"acks: one id a call, {scale.connections} connections, one worker, MariaDB (medians of {scale.rounds} rounds)",
        ["", "calls/s", "p50 ms", "p99 ms", "of the empty endpoint"],
        rows,
    )


if __name__ == "__main__":
    run(Scale.full())
