"""The gain of a stream with lanes, and the cost of an event. No service is needed: this measures `lastbit.streams`
only.

Handlers that wait for 5 ms, as one that makes a call, run in eight lanes and in one, with threads and with tasks; each
event has its own key. Handlers that do nothing are compared with a plain loop over the same records, without tracking
or commits: the difference is the cost of the window, the lane and the commits for each event.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

from bench import measure
from bench.measure import Scale
from lastbit.streams import AckWindow, Backoff, run_ordered, run_ordered_async

LANES = 8
WAIT = 0.005
"""Seconds that a handler takes."""
EVERY = 0.1
"""Seconds between two commits, which store nothing."""


class Stream:
    """Records 0 .. count-1, whose number is their offset and their key; counts handled records and checks the end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._handled = 0
        self._committed = -1

    def handle(self, record: int) -> None:
        self._handled += 1

    def commit(self, floor: int) -> None:
        self._committed = floor

    def timed(self, run: Callable[[Stream], None], *, commits: bool = True) -> float:
        """Seconds for each event."""
        start = time.perf_counter()
        run(self)
        seconds = time.perf_counter() - start
        if self._handled != self._count or (commits and self._committed != self._count - 1):
            raise RuntimeError(f"{self._handled} of {self._count} were handled, {self._committed} was committed")
        return seconds / self._count

    def records(self) -> list[tuple[int, int]]:
        return [(number, number) for number in range(self._count)]


def same(record: int) -> int:
    return record


def loop(stream: Stream) -> None:
    for _, record in stream.records():
        stream.handle(record)


def window_alone(stream: Stream) -> None:
    """The loop with tracking and acking of each record."""
    window = AckWindow()
    for offset, record in stream.records():
        window.track(offset)
        stream.handle(record)
        window.ack(offset)
    stream.commit(window.floor)


def threads(lanes: int, wait: float, retry: Backoff | None = None) -> Callable[[Stream], None]:
    def run(stream: Stream) -> None:
        def handle(record: int) -> None:
            if wait:
                time.sleep(wait)  # part of the measurement: a handler that waits, as for a call
            stream.handle(record)

        run_ordered(stream.records(), handle, key=same, lanes=lanes, retry=retry, commit=stream.commit, every=EVERY)

    return run


def tasks(lanes: int, wait: float) -> Callable[[Stream], None]:
    def run(stream: Stream) -> None:
        async def handle(record: int) -> None:
            if wait:
                await asyncio.sleep(wait)  # part of the measurement, as above
            stream.handle(record)

        asyncio.run(
            run_ordered_async(stream.records(), handle, key=same, lanes=lanes, commit=stream.commit, every=EVERY)
        )

    return run


def run(scale: Scale) -> None:
    waiting = (scale.requests // 320 + 10) * LANES
    cheap = scale.requests * 5
    of_lanes: dict[str, list[tuple[float, float]]] = {"threads": [], "tasks": []}
    ways = {
        "a plain loop": loop,
        "the same with a window": window_alone,
        "run_ordered, 1 lane": threads(1, 0),
        f"run_ordered, {LANES} lanes": threads(LANES, 0),
        f"run_ordered, {LANES} lanes, with retries": threads(LANES, 0, Backoff()),
        "run_ordered_async, 1 lane": tasks(1, 0),
        f"run_ordered_async, {LANES} lanes": tasks(LANES, 0),
    }
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(scale.rounds):
        for name, way in (("threads", threads), ("tasks", tasks)):
            single, parallel = (Stream(waiting).timed(way(lanes, WAIT)) for lanes in (1, LANES))
            of_lanes[name].append((1 / single, 1 / parallel))
        for name, run in ways.items():
            costs[name].append(Stream(cheap).timed(run, commits=run is not loop))
    measure.show(
        f"ordered: handlers of {WAIT * 1e3:.0f} ms, {waiting:,} events (medians of {scale.rounds} rounds)",
        ["lanes are", "1 lane, events/s", f"{LANES} lanes, events/s", "ratio"],
        [
            [
                name,
                *(f"{statistics.median(run[place] for run in rounds):,.0f}" for place in (0, 1)),
                f"{statistics.median(parallel / single for single, parallel in rounds):.2f}",
            ]
            for name, rounds in of_lanes.items()
        ],
    )
    measure.show(
        f"ordered: handlers that do nothing, {cheap:,} events (medians of {scale.rounds} rounds)",
        ["", "µs an event", "more than the loop"],
        [
            [name, f"{statistics.median(times) * 1e6:.2f}", f"{statistics.median(differences) * 1e6:.2f}"]
            for name, times in costs.items()
            for differences in [[seconds - bare for seconds, bare in zip(times, costs["a plain loop"], strict=True)]]
        ],
    )


if __name__ == "__main__":
    measure.alone(run)
