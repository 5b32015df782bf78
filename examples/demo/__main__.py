"""`python -m examples.demo [--stay]`. Exit status: 0 all checks passed, 1 a check failed, 130 interrupted."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from examples.course import Interrupted, interrupted, listen_for_the_end, temporary_folder
from examples.demo import proof
from examples.demo.run import Demo
from examples.demo.show import Show, show
from examples.processes import Failed, Processes
from lastbit import LastbitError

LONGEST = 180
"""Seconds after which the demo gives up."""

NEXT = """
Try next
  make serve                          the service, at http://127.0.0.1:8000; its API pages are at /docs
  .venv/bin/lastbit open --key mine --items 3 --sealed
  .venv/bin/lastbit ack 1:0:0 1:0:2   then: lastbit status 1 · pending 1 · watch 1 · verify 1
  README.md                           an introduction, in Python
  examples/demo/                      the source of this demo"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="A real fan-out to its exact end.")
    parser.add_argument("--stay", action="store_true", help="keep the service up afterwards, until Ctrl-C")
    arguments = parser.parse_args()
    listen_for_the_end(LONGEST)
    try:
        with show() as screen, temporary_folder("demo") as folder, Processes(Path(folder)) as processes:
            return _run(screen, processes, Path(folder), arguments.stay)
    except Interrupted:
        return interrupted("demo")


def _run(screen: Show, processes: Processes, folder: Path, stay: bool) -> int:
    demo = Demo(screen, processes, folder)
    failure = None
    try:
        demo.run()
    except (Failed, LastbitError, OSError) as error:
        failure = str(error)
    signal.alarm(0)
    faults = demo.ledger.faults() if failure is None else [failure, *demo.ledger.errors]
    screen.end()
    if faults:
        screen.plain("\nThe demo failed:")
        for fault in faults:
            screen.plain(f"  {fault}")
        return 1
    assert demo.ledger.batch is not None
    screen.plain(f"\nBatch {demo.ledger.batch.id} is complete, exactly.\n")
    for line in proof.closing_lines(demo.ledger, screen.seconds):
        screen.plain(line)
    screen.plain(NEXT)
    if stay:
        screen.plain(
            f"\nThe service stays at {demo.url} until Ctrl-C: LASTBIT_URL={demo.url} .venv/bin/lastbit status 1"
        )
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
