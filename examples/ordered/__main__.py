"""`python -m examples.ordered`. Exit status: 0 all checks passed, 1 a check failed, 130 interrupted."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from examples.ordered.files import USERS, Files, invent
from examples.ordered.proof import Crash, Ledger
from examples.ordered.worker import EVERY, LANES, SLOW
from lastbit.streams import Snapshot

ROOT = Path(__file__).resolve().parent.parent.parent
KILLED_AT = ((0.2, 0.4), (0.5, 0.7))
"""Each worker is killed after a random share of the events between these two."""
PATIENCE = 60
"""Seconds to wait for the effects of one worker."""


@contextlib.contextmanager
def worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-m", "examples.ordered.worker", str(folder)], cwd=ROOT, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def kill_at_work(folder: Path, files: Files, effects: int) -> Crash | None:
    """Run a worker and kill it when `effects` effects and a position exist. Returns None if it finished earlier."""
    until = time.monotonic() + PATIENCE
    with worker(folder) as process:
        while len(files.effects()) < effects or files.position() is None:
            if process.poll() is not None or time.monotonic() > until:
                return None
            time.sleep(0.002)  # another process writes the files, without a signal
    return Crash(len(files.effects()), Snapshot.decode(files.position() or b""))


def run(folder: Path) -> Ledger:
    files = Files(folder)
    ledger = Ledger(invent())
    count = len(ledger.events)
    files.write_events(ledger.events)
    print(f"{count} events of {len(USERS)} users, mixed, each user's steps in order; those of user {SLOW} take longest")
    print(f"A worker handles them in {LANES} lanes and stores its position every {EVERY} s.")
    for low, high in KILLED_AT:
        crash = kill_at_work(folder, files, int(count * random.uniform(low, high)))  # noqa: S311
        if crash is not None:
            ledger.crashes.append(crash)
            last = crash.position
            done_above = last.high - last.floor - len(last.outstanding)
            outstanding = len(last.outstanding)
            print(
                f"killed (SIGKILL) after {crash.effects} effects. Its position: all up to event {last.floor} is done,"
            )
            print(f"  and {done_above} more up to event {last.high}, but not {outstanding} of them. Restarted.")
    with worker(folder) as process:
        status = process.wait(PATIENCE)
    ledger.effects = files.effects()
    position = files.position()
    if position is not None:
        ledger.end = Snapshot.decode(position)
    if status:
        ledger.errors.append(f"the last worker ended with exit status {status}")
    return ledger


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m examples.ordered", description="Ordered events, across crashes."
    ).parse_args()
    with tempfile.TemporaryDirectory(prefix="lastbit-ordered-") as folder:
        try:
            ledger = run(Path(folder))
        except KeyboardInterrupt:
            print("\ninterrupted; nothing is left behind", file=sys.stderr)
            return 130
    faults = ledger.faults()
    if faults:
        print("\nThe example failed:", *faults, sep=os.linesep + "  ")
        return 1
    print(f"""
Everything is handled.
  skipped    none of {len(ledger.events)} events
  order      no step of a user was handled before an earlier one
  replayed   {ledger.replayed} events, all outstanding in the last position of a killed worker;
             with an offset as the position it would have been {ledger.above_the_floors}""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
