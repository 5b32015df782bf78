"""Whether the number of items affects the cost of issuing them: open, extend and seal for a thousand items and for a
billion, as three calls and as one."""

from __future__ import annotations

import json

from bench import load, measure
from bench.measure import Scale

SMALL, LARGE = 10**3, 10**9


def _block(port: int, path: list[str], body: object, seconds: list[float]) -> list[dict[str, object]]:
    """Make the same call on each path over one connection; append its median seconds to `seconds`."""
    figures, answers = load.drive(port, [load.encoded(target, body) for target in path], 1)
    seconds.append(figures.p50)
    return [json.loads(answer) for answer in answers]


def _round(port: int, items: int, calls: int) -> dict[str, float]:
    """Median seconds by call; one kind of call at a time, as each needs the answers of the previous kind."""
    seconds: list[float] = []
    batches = [response["id"] for response in _block(port, ["/v1/batches"] * calls, {}, seconds)]
    _block(port, [f"/v1/batches/{batch}/items" for batch in batches], {"count": items}, seconds)
    _block(port, [f"/v1/batches/{batch}/seal" for batch in batches], None, seconds)
    at_once = _block(port, ["/v1/batches"] * calls, {"items": items, "sealed": True}, seconds)
    for batch in (*batches, *(response["id"] for response in at_once)):
        _check(port, batch, items)
    return {
        "open": seconds[0],
        "extend": seconds[1],
        "seal": seconds[2],
        "open + extend + seal": sum(seconds[:3]),
        "all of it in one call": seconds[3],
    }


def _check(port: int, batch: object, items: int) -> None:
    verification = measure.call(port, "GET", f"/v1/batches/{batch}/verify")
    state = measure.call(port, "GET", f"/v1/batches/{batch}")["state"]
    if not (verification["ok"] and verification["items"] == verification["pending"] == items and state == "sealed"):
        raise RuntimeError(f"{items} items were issued and sealed; the batch is {state} and has {verification}")


def run(scale: Scale) -> None:
    calls = max(scale.requests // 200, 10)
    results: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
    with measure.mariadb() as server, measure.lastbit_on(server) as service:
        _round(service.port, SMALL, calls)  # the first round of a process is always slower
        for number in range(scale.rounds):
            for items in (SMALL, LARGE) if number % 2 else (LARGE, SMALL):
                results[items].append(_round(service.port, items, calls))
    measure.show(
        f"extend: over HTTP on MariaDB, one connection (medians of {scale.rounds} rounds of {calls})",
        ["", "10^3 items, ms", "10^9 items, ms", "ratio"],
        measure.compared(results[SMALL], results[LARGE]),
    )


if __name__ == "__main__":
    measure.alone(run)
