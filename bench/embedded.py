"""The duration of a call without a service, compared with the same call over HTTP: one thread, one call at a time, on
SQLite files in one folder.

Each call commits, so both sides have the same fsync, which the machine's disk decides; the table shows it too. The
service has a process of its own, so it has a processor of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import measure
from bench.measure import Scale
from lastbit import BatchHandle, Client
from lastbit.embedded import Lastbit
from tests.support.servers import running_service

Call = Callable[[], object]
Row = Callable[[Client, int], Iterator[Call]]
"""The calls of a round: the client and their number."""


def _acks(client: Client, calls: int) -> Iterator[Call]:
    for item in client.open(items=calls).ids:
        yield lambda item=item: client.ack(item)  # type: ignore[misc]


def _opens(client: Client, calls: int) -> Iterator[Call]:
    return itertools.repeat(lambda: client.open(items=10, sealed=True), calls)


def _extends(client: Client, calls: int) -> Iterator[Call]:
    batch: BatchHandle = client.open()
    return itertools.repeat(lambda: batch.extend(10), calls)


def _reads(client: Client, calls: int) -> Iterator[Call]:
    return itertools.repeat(client.open(items=10).refresh, calls)


ROWS: dict[str, Row] = {"ack": _acks, "open": _opens, "extend": _extends, "status": _reads}


def _median(calls: Iterator[Call]) -> float:
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _fsync(folder: Path, calls: int) -> float:
    """Median seconds of an fsync after a small write, without a database."""

    def write() -> None:
        file.write(b"x" * 4096)
        file.flush()
        os.fdatasync(file.fileno())

    with (folder / "fsync").open("wb") as file:
        return _median(itertools.repeat(write, calls))


@contextlib.contextmanager
def _sides(folder: Path) -> Iterator[tuple[Client, Client]]:
    """A client over HTTP, and one without a service, each on a file of its own."""
    with (
        running_service(f"sqlite:///{folder / 'service.db'}") as service,
        Client(service.url) as http,
        Lastbit(f"sqlite:///{folder / 'embedded.db'}") as lastbit,
    ):
        lastbit.migrate()
        yield http, lastbit.client()


def run(scale: Scale) -> None:
    calls = max(scale.requests // 40, 50)
    rounds: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="lastbit-bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        with _sides(folder) as sides:
            for row, client in itertools.product(ROWS.values(), sides):
                _median(row(client, 50))  # the first calls of a process are slower
            for number in range(scale.rounds):
                medians: tuple[dict[str, float], dict[str, float]] = ({}, {})
                for title, row in ROWS.items():
                    # The sides alternate in changing order, so that both run under the same conditions.
                    for side in (0, 1) if number % 2 else (1, 0):
                        medians[side][title] = _median(row(sides[side], calls))
                for side in (0, 1):
                    rounds[side].append(medians[side])
        fsync = _fsync(folder, calls)
    measure.show(
        f"embedded: one call at a time, SQLite (medians of {scale.rounds} rounds of {calls})",
        ["", "HTTP, ms", "in process, ms", "ratio"],
        measure.compared(*rounds),
        f"ratio: the time in process divided by that over HTTP; an fsync alone took {fsync * 1000:.2f} ms here, and "
        "each commit has one on both sides",
    )


if __name__ == "__main__":
    measure.alone(run)
