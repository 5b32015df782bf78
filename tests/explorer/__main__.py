"""`python -m tests.explorer`: every pair with all interleavings, every triple with at most two preemptions; in each,
also every schedule in which the answer to one COMMIT is lost.

Pairs with the janitor have at most two preemptions as well, and two janitors one. The search can be interrupted: with
`--progress FILE` it resumes where it stopped, as long as the code is unchanged. It exits with 1 if it found anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import mutants
from tests.explorer import workers
from tests.explorer.arena import Arena
from tests.explorer.combinations import Combination, combinations, parse
from tests.explorer.operations import LONG
from tests.explorer.scene import SCENES, Scene
from tests.explorer.search import replay
from tests.explorer.sessions import explored
from tests.support.servers import ROOT

RACES = (
    "guarantees/test_races.py",
    "guarantees/test_growing.py::test_a_batch",
    "guarantees/test_growing.py::test_no_child",
    "guarantees/test_growing.py::test_an_item",
)
"""The tests that cover one race each; the explorer must find the mutants that they kill."""
IN_EVERY_ORDER = frozenset(
    {
        "a-replayed-open-never-gets-newly",
        "an-ack-does-not-touch-updated-at",
        "every-request-with-a-key-gets-newly",
        "expiry-is-not-judged-again-under-the-lock",
        "extend-does-not-keep-its-key",
        "extend-judges-the-state-before-the-key",
        "newly-is-not-kept-with-the-key",
        "open-does-not-look-for-its-key",
        "purge-removes-the-batch-row-first",
        "repeats-are-not-told",
        "the-janitor-forgets-what-is-half-deleted",
        "the-key-alone-names-a-request",
    }
)
"""But for these. Their outcomes are wrong in every order of the operations, or only after a crash, and so can't differ
from those of the orders. For example, a transaction that never judges expiry again also expires a batch acked just
before it; no repeat returns the completion; and rows outlive their batch only if a purge is killed between chunks."""
BOUNDS = {2: None, 3: 2}
"""The most preemptions of a schedule of two or three operations; with None, any number."""
MOST_OF_LONG = {1: 2, 2: 1}
"""The most preemptions of a schedule in which one of two operations, or both, are a sequence of many transactions: with
any number, such a pair has more schedules than can be run. The parts of the sequence are operations too, without this
limit."""
PASSES = ((2, 1), (2, None), (3, 1), (3, 2))
"""The order in which the first finding is looked for: operations, and preemptions. Most races need one."""
PLACES: dict[int, Sequence[Scene]] = {
    2: SCENES,
    3: (Scene("growing", "cold"), Scene("growing", "journaled-warm"), Scene("ending", "warm"), Scene("fresh", "cold")),
}
"""The scenes of pairs and of triples."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__.partition("\n")[0])
    parser.add_argument("--database", choices=workers.DATABASES, default="mariadb")
    commands = parser.add_subparsers(dest="command", required=True)
    all_command = commands.add_parser("all", help="every combination")
    all_command.add_argument("--of", type=int, choices=(2, 3), help="only of two, or only of three operations")
    all_command.add_argument("--preemptions", type=int, metavar="N", help="at most this many in a schedule")
    all_command.add_argument(
        "--share", default="0/1", metavar="K/N", help="only every N-th combination, starting with the K-th"
    )
    all_command.add_argument(
        "--only", nargs="*", default=[], metavar="OPERATION", help="combinations with all of these"
    )
    all_command.add_argument("--progress", type=Path, metavar="FILE", help="resume where it stopped")
    all_command.add_argument(
        "--first", action="store_true", help="stop at the first finding; few preemptions come first"
    )
    all_command.add_argument("--all-answered", action="store_true", help="lose no answer to a COMMIT")
    all_command.add_argument("--minutes", type=float, default=math.inf, help="stop after that time")
    all_command.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    mutants_command = commands.add_parser("mutants", help="break the code as the tests of races do; each must be found")
    mutants_command.add_argument("names", nargs="*", metavar="NAME", help="only these")
    mutants_command.add_argument("--minutes", type=float, default=math.inf, help="give each up after that time")
    mutants_command.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    replay_command = commands.add_parser("replay", help="run one schedule and print its steps")
    replay_command.add_argument("schedule", help="as a finding prints it: SCENE/VARIANT:OPERATION+OPERATION:STEPS")
    options = parser.parse_args(arguments)
    mutants.from_environment()
    if options.command == "replay":
        combination, steps = parse(options.schedule)
        with explored(), workers.DATABASES[options.database]() as database:
            arena = Arena(database, every_stop=True)
            finding = replay(arena, combination, steps)
            arena.close()
        print(finding)
        return 1 if finding.problems else 0
    if options.command == "mutants":
        return _find_mutants(options)
    return _explore(options)


def _find_mutants(options: argparse.Namespace) -> int:
    """Explore the code with each mutant that a race test kills, until the explorer finds it."""
    races = [
        mutant
        for mutant in mutants.every()
        if mutant.test.startswith(RACES)
        and mutant.name not in IN_EVERY_ORDER
        and (not options.names or mutant.name in options.names)
    ]
    misses = 0
    for mutant in races:
        start = time.monotonic()
        process = subprocess.run(
            [
                *(sys.executable, "-m", "tests.explorer", f"--database={options.database}", "all", "--first"),
                *(f"--processes={options.processes}", f"--minutes={options.minutes}"),
            ],
            env={**os.environ, mutants.VARIABLE: mutant.name},
            capture_output=True,
            text=True,
            check=False,
        )
        schedule = next((line for line in process.stdout.splitlines() if "/" in line and "+" in line), "")
        misses += not schedule
        seconds = time.monotonic() - start
        print(f"{'FOUND ' if schedule else 'MISSED'} {mutant.name}, {seconds:.0f} s\n       {schedule}", flush=True)
        if process.returncode and not schedule:
            print(process.stderr, flush=True)
    print(f"{len(races) - misses} of {len(races)} mutants were found")
    return 1 if misses else 0


def _explore(options: argparse.Namespace) -> int:
    start = time.monotonic()
    passes = [
        (size, bound if options.preemptions is None else options.preemptions)
        for size, bound in (PASSES if options.first else BOUNDS.items())
        if options.of in (None, size)
    ]
    progress = _Progress(options.progress)
    place, step = map(int, options.share.split("/"))
    with explored(), workers.DATABASES[options.database]() as database:
        arena = Arena(database)
        found = {size: _combinations(arena, size, options.only) for size in dict(passes)}
        arena.close()
    tasks = [
        (combination, _bound(combination, bound), not options.all_answered)
        for size, bound in dict.fromkeys(passes)
        for combination in found[size]
    ][place::step]
    remaining = [task for task in tasks if workers.name(task) not in progress.results]
    print(f"{len(tasks):,} combinations, {len(tasks) - len(remaining):,} of them done before", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.processes, workers.begin, (options.database,)) as pool:
        results = pool.imap_unordered(workers.search, remaining)
        for count in range(1, len(remaining) + 1):
            try:
                rest = min(start + options.minutes * 60 - time.monotonic(), threading.TIMEOUT_MAX)
                name, result = results.next(max(0, rest))
            except multiprocessing.TimeoutError:
                print(f"{len(remaining) - count + 1:,} combinations are left", flush=True)
                break
            progress.add(name, result)
            for finding in result["findings"]:
                print(finding, flush=True)
            if options.first and result["findings"]:
                break
            if count % 100 == 0:
                minutes = (time.monotonic() - start) / 60
                print(f"{count:,} of {len(remaining):,}: {progress.counts()}, {minutes:.1f} min", flush=True)
    findings = sum(len(result["findings"]) for result in progress.results.values())
    minutes = (time.monotonic() - start) / 60
    print(f"{len(tasks):,} combinations, {progress.counts()}, {minutes:.1f} min: {findings} findings")
    return 1 if findings else 0


def _bound(combination: Combination, preemptions: int | None) -> int | None:
    long = sum(operation in LONG for operation in combination.operations)
    return MOST_OF_LONG.get(long) if preemptions is None else preemptions


def _combinations(arena: Arena, size: int, required_names: Sequence[str]) -> list[Combination]:
    """The combinations with all of these operations, the most promising ones first."""
    excluded_names = LONG if size > 2 else ()
    every = combinations(arena, size, PLACES[size], in_one=size > 2, excluded_names=excluded_names)
    selection = [combination for combination in every if set(required_names) <= set(combination.operations)]
    return sorted(selection, key=arena.footprints.promise, reverse=True)


class _Progress:
    """The combinations that were searched with this version of the code, one a line."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.results: dict[str, dict[str, Any]] = {}
        self._code = hashlib.sha256()
        for source in sorted([*ROOT.glob("core/**/*.py"), *ROOT.glob("tests/explorer/*.py")]):
            self._code.update(source.read_bytes())
        if path is None:
            return
        lines = path.read_text().splitlines() if path.exists() else []
        if lines and lines[0] == self._code.hexdigest():
            self.results = dict(json.loads(line) for line in lines[1:])
        else:
            path.write_text(self._code.hexdigest() + "\n")

    def counts(self) -> str:
        schedules, executed = (
            sum(result[name] for result in self.results.values()) for name in ("schedules", "executed")
        )
        return f"{schedules:,} schedules ({executed:,} executions)"

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.results[name] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, result]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
