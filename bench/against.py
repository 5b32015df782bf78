"""`python -m bench.against COMMIT [--rounds N] [--only verb]`: acks, bulk acks, verbs and overload, beside an earlier
commit.

Both services run on one server, each with its own database and with the packages of this environment. Their rounds
alternate, and the order within a pair changes, so that a drift of the machine's speed doesn't favour either. Beside
the rates, whose rounds differ by a tenth and more on a machine with other work, it prints the processor time that the
service needs for an item or call.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench import acks, bulk, lifecycle, load, measure, overload, verbs
from bench.measure import Scale
from tests.support.servers import ROOT, MariaDB, ServiceProcess

FLOOD = 10.0
"""Seconds of a flood."""
TICK = 0.01
"""Seconds in which the system counts processor time."""


class Work(NamedTuple):
    """What a service did in a round: items or calls, and their number in a second."""

    amount: float
    rate: float


Round = Callable[[int, Scale], Work]
"""Returns what the service on this port did."""


def _acks(order: str) -> Round:
    def run(port: int, scale: Scale) -> Work:
        batch, requests = acks.new_batch(port, scale.items, acks.numbers_of(order, scale))
        figures, answers = load.drive(port, requests, scale.connections)
        acks.check(port, batch, answers, len(requests))
        return Work(len(requests), figures.rate)

    return run


def _lives(port: int, scale: Scale) -> Work:
    lives = max(scale.requests // 20, scale.connections)
    return Work(lives, lifecycle.lastbit(port, lives, scale.connections))


def _bulk(way: str) -> Round:
    # The same items in each round.
    return lambda port, scale: Work(1, bulk.one_round(port, scale, bulk.WAYS[way]).items)


def _verb(verb: verbs.Verb) -> Round:
    def run(port: int, scale: Scale) -> Work:
        calls = max(scale.requests // 5, 2 * scale.connections)
        return Work(calls, verbs.drive(port, verb, calls, scale.connections).rate)

    return run


def _overload(kind: overload.Kind) -> Round:
    """Admitted requests a second while many more are offered."""

    def run(port: int, scale: Scale) -> Work:
        items = 10**9 if kind.in_order else scale.items
        batch, _ = acks.new_batch(port, items, [])
        size = measure.call(port, "GET", f"/v1/batches/{batch}")["group_size"]
        seconds = FLOOD if scale.items >= Scale.full().items else 1.0
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            phase = pool.apply(overload.flood, (port, (kind, batch, size, items, 0), seconds))
        return Work(len(phase.took), len(phase.took) / seconds)

    return run


ROUNDS: dict[str, Round] = {
    **{f"one id a call, {order}": _acks(order) for order in ("in order", "at random")},
    "whole lives": _lives,
    **{way: _bulk(way) for way in bulk.WAYS},
    **{f"verb: {verb.title}": _verb(verb) for verb in verbs.VERBS.values()},
    **{f"overload: {kind.name}": _overload(kind) for kind in overload.KINDS},
}


@contextlib.contextmanager
def code_of(commit: str) -> Iterator[Path]:
    """A folder with the files of this commit."""
    with tempfile.TemporaryDirectory(prefix="lastbit-earlier-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


@contextlib.contextmanager
def _service(server: MariaDB, root: Path) -> Iterator[ServiceProcess]:
    url = server.new_database()
    migrate = [sys.executable, "-m", "api", "migrate", "--database-url", url]
    subprocess.run(migrate, cwd=root, check=True, capture_output=True)
    service = ServiceProcess(url, root=root, environment={"LASTBIT_LOG_LEVEL": "error"}).start()
    try:
        yield service
    finally:
        service.remove()


class _Measured(NamedTuple):
    rate: float
    processor: float
    """Seconds for an item or call."""


def _measured(service: ServiceProcess, round_: Round, scale: Scale) -> _Measured:
    assert service.process is not None
    before = measure.processor_time(service.process.pid)
    work = round_(service.port, scale)
    used = max(measure.processor_time(service.process.pid) - before, TICK)
    return _Measured(work.rate, used / work.amount)


def run(commit: str, scale: Scale, beginning: str = "") -> None:
    """Compare the cases whose names begin so."""
    rounds: dict[str, list[tuple[_Measured, _Measured]]] = {name: [] for name in ROUNDS if name.startswith(beginning)}
    with (
        code_of(commit) as earlier,
        measure.mariadb() as server,
        _service(server, earlier) as old,
        _service(server, ROOT) as new,
    ):
        for number, name in itertools.product(range(scale.rounds), rounds):
            services = [old, new][:: -1 if number % 2 else 1]
            results = {service: _measured(service, ROUNDS[name], scale) for service in services}
            rounds[name].append((results[old], results[new]))
    measure.show(
        f"this code against {commit}: items or admitted calls a second, one worker, MariaDB ({scale.rounds} rounds)",
        ["", commit, "now", "ratio", "of the rounds", "CPU"],
        [[name, *_row(pairs)] for name, pairs in rounds.items()],
    )


def _row(pairs: list[tuple[_Measured, _Measured]]) -> list[str]:
    ratios = sorted(new.rate / old.rate for old, new in pairs)
    rates = (statistics.median(pair[place].rate for pair in pairs) for place in (0, 1))
    processor = statistics.median(new.processor / old.processor for old, new in pairs)
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return [*(f"{rate:,.0f}" for rate in rates), f"{statistics.median(ratios):.2f}", spread, f"{processor:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.against", description=__doc__.partition("\n\n")[2])
    parser.add_argument("commit")
    parser.add_argument("--quick", action="store_true", help="a small run, to check that everything works")
    parser.add_argument("--rounds", type=int, help="instead of five, or two with --quick")
    parser.add_argument("--only", metavar="NAME", default="", help="only cases whose names begin with NAME")
    options = parser.parse_args()
    if not any(name.startswith(options.only) for name in ROUNDS):
        parser.error(f"no case begins with {options.only!r}: the cases are {', '.join(ROUNDS)}")
    scale = Scale.quick() if options.quick else Scale.full()
    run(options.commit, dataclasses.replace(scale, rounds=options.rounds or scale.rounds), options.only)


if __name__ == "__main__":
    main()
