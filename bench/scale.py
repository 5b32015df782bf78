"""Does the size of a batch cost anything? Open + extend + seal, status, pending, watermark and one ack, for a batch of
a thousand items and one of a billion."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

from bench import measure
from bench.measure import Connection, Scale

SMALL, LARGE = 10**3, 10**9


async def _extend(connection: Connection, items: int) -> int:
    batch: int = (await connection.call("POST", "/v1/batches", {}))["id"]
    await connection.call("POST", f"/v1/batches/{batch}/items", {"count": items})
    await connection.call("POST", f"/v1/batches/{batch}/seal")
    return batch


async def _compare(port: int, scale: Scale) -> dict[str, dict[int, float]]:
    """Median seconds by question and size; the sizes take turns, so that both see the same machine."""
    times: dict[str, dict[int, list[float]]] = {}
    async with measure.connected(port) as connection:
        batches: dict[int, list[int]] = {SMALL: [], LARGE: []}

        def questions(items: int) -> dict[str, Callable[[], Awaitable[object]]]:
            batch = batches[items][-1] if batches[items] else 0
            number = len(batches[items])
            return {
                "status": lambda: connection.call("GET", f"/v1/batches/{batch}"),
                "pending": lambda: connection.call("GET", f"/v1/batches/{batch}/pending"),
                "watermark": lambda: connection.call("GET", f"/v1/batches/{batch}/watermark"),
                "one ack": lambda: connection.call("POST", "/v1/acks", {"items": [f"{batch}:0:{number}"]}),
            }

        for _ in range(max(scale.requests // 100, 20)):
            for items in (SMALL, LARGE):
                begun = time.perf_counter()
                batches[items].append(await _extend(connection, items))
                times.setdefault("open + extend + seal", {}).setdefault(items, []).append(time.perf_counter() - begun)
            for name in questions(SMALL):
                for items in (SMALL, LARGE):
                    begun = time.perf_counter()
                    await questions(items)[name]()
                    times.setdefault(name, {}).setdefault(items, []).append(time.perf_counter() - begun)
    return {name: {n: statistics.median(t) for n, t in by_size.items()} for name, by_size in times.items()}


def run(scale: Scale) -> None:
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        times = asyncio.run(_compare(service.port, scale))
    measure.show(
        "scale: the cost of size, over HTTP on MariaDB (medians)",
        ["", "10^3 items, ms", "10^9 items, ms", "ratio"],
        [
            [name, f"{t[SMALL] * 1e3:.2f}", f"{t[LARGE] * 1e3:.2f}", f"{t[LARGE] / t[SMALL]:.2f}"]
            for name, t in times.items()
        ],
    )


if __name__ == "__main__":
    run(Scale.full())
