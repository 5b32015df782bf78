"""`python -m tests.explorer`: every pair with all interleavings, every triple with at most two preemptions.

It can be interrupted: with `--progress FILE` it goes on where it ended, as long as the code is the same. It exits with
1 if anything was found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.explorer import workers
from tests.explorer.operations import LONG
from tests.explorer.scene import SCENES, VARIANTS, Scene
from tests.explorer.search import Arena, combinations, parse, replay
from tests.explorer.sessions import explored
from tests.guarantees import mutants
from tests.support.servers import ROOT

RACES = ("test_races.py", "test_growing.py::test_a_batch", "test_growing.py::test_no_child")
"""The tests that find one race each; the explorer must find them all."""
BOUND = 2
"""Preemptions of a schedule of three operations."""
PLACES = {
    2: [Scene(name, variant) for name in SCENES for variant in VARIANTS],
    3: [Scene("growing", "cold"), Scene("growing", "journaled-warm"), Scene("ending", "warm")],
}
"""The scenes of pairs and of triples."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__.partition("\n")[0])
    parser.add_argument("--database", choices=workers.DATABASES, default="mariadb")
    commands = parser.add_subparsers(dest="command", required=True)
    every = commands.add_parser("all", help="every combination")
    every.add_argument("--of", type=int, choices=(2, 3), help="only of two, or only of three operations")
    every.add_argument("--share", default="0/1", metavar="K/N", help="only each N-th combination, from the K-th on")
    every.add_argument("--only", nargs="*", default=[], metavar="OPERATION", help="combinations with all of these")
    every.add_argument("--progress", type=Path, metavar="FILE", help="go on where it ended")
    every.add_argument("--first", action="store_true", help="end with the first finding")
    every.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    broken = commands.add_parser("mutants", help="break the code as the tests of races do; each must be found")
    broken.add_argument("names", nargs="*", metavar="NAME", help="only these")
    broken.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    one = commands.add_parser("replay", help="run one schedule and print its steps")
    one.add_argument("schedule", help="as a finding prints it: SCENE/VARIANT:OPERATION+OPERATION:STEPS")
    given = parser.parse_args(arguments)
    mutants.from_environment()
    if given.command == "replay":
        combination, steps = parse(given.schedule)
        with explored(), workers.DATABASES[given.database]() as database:
            arena = Arena(database, every_stop=True)
            found = replay(arena, combination, steps)
            arena.close()
        print(found)
        return 1 if found.what else 0
    if given.command == "mutants":
        return _find_mutants(given.names, given.processes)
    return _explore(given)


def _find_mutants(names: Sequence[str], processes: int) -> int:
    """Explore the code with each mutant in place that a test of races kills, until it is found."""
    races = [each for each in mutants.MUTANTS if each.test.startswith(RACES) and (not names or each.name in names)]
    missed = 0
    for mutant in races:
        started = time.monotonic()
        for many in (2, 3):
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "tests.explorer", "all", "--first", f"--of={many}"),
                    f"--processes={processes}",
                ],
                env={**os.environ, mutants.VARIABLE: mutant.name},
                capture_output=True,
                text=True,
                check=False,
            )
            schedule = next((line for line in done.stdout.splitlines() if "/" in line and "+" in line), "")
            if done.returncode:
                break
        missed += not schedule
        seconds = time.monotonic() - started
        print(f"{'FOUND ' if schedule else 'MISSED'} {mutant.name}, {seconds:.0f} s\n       {schedule}", flush=True)
        if done.returncode and not schedule:
            print(done.stderr, flush=True)
    print(f"{len(races) - missed} of {len(races)} mutants were found")
    return 1 if missed else 0


def _explore(given: argparse.Namespace) -> int:
    started = time.monotonic()
    done = _Progress(given.progress)
    place, step = map(int, given.share.split("/"))
    with explored(), workers.DATABASES[given.database]() as database:
        arena = Arena(database)
        wanted = [
            (each, None if many == 2 else BOUND)
            for many in ([given.of] if given.of else [2, 3])
            for each in combinations(arena, many, PLACES[many], in_one=many > 2, without=LONG if many > 2 else ())
            if set(given.only) <= set(each.operations)
        ][place::step]
        arena.close()
    left = [each for each in wanted if str(each[0]) not in done.results]
    print(f"{len(wanted):,} combinations, {len(wanted) - len(left):,} of them done before", flush=True)
    schedules = sum(result["schedules"] for result in done.results.values())
    with multiprocessing.get_context("spawn").Pool(given.processes, workers.begin, (given.database,)) as pool:
        for count, (name, result) in enumerate(pool.imap_unordered(workers.search, left), 1):
            done.add(name, result)
            schedules += result["schedules"]
            for finding in result["findings"]:
                print(finding, flush=True)
            if given.first and result["findings"]:
                break
            if count % 100 == 0:
                minutes = (time.monotonic() - started) / 60
                print(f"{count:,} of {len(left):,}: {schedules:,} schedules, {minutes:.1f} min", flush=True)
    findings = sum(len(result["findings"]) for result in done.results.values())
    minutes = (time.monotonic() - started) / 60
    print(f"{len(wanted):,} combinations, {schedules:,} schedules, {minutes:.1f} min: {findings} findings")
    return 1 if findings else 0


class _Progress:
    """What has been searched, a line each, for this very code."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.results: dict[str, dict[str, object]] = {}
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

    def add(self, name: str, result: dict[str, object]) -> None:
        self.results[name] = result
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([name, result]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
