"""`python -m tests.chaos [--minutes N] [--seed S] [--database D] [--lose N]`: the exit status is 1 if a promise was
broken."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.chaos.actors import NESTING
from tests.chaos.run import ACTORS, Run
from tests.chaos.worlds import OneOceanBase, OnePostgreSQL, OneServer, ThreeNodes, World

WORLDS: Final[Mapping[str, Callable[[], World]]] = {
    "mariadb": OneServer,
    "postgresql": OnePostgreSQL,
    "oceanbase": OneOceanBase,
    "galera": ThreeNodes,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="Disturb a running system, then check its promises."
    )
    parser.add_argument(
        "--minutes", type=float, default=20, help="duration of the disturbances; finishing takes another minute (20)"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="selects batches and disturbances")
    parser.add_argument(
        "--database",
        choices=WORLDS,
        default="mariadb",
        help="the server, or galera: a cluster with one node always down or joining (mariadb)",
    )
    parser.add_argument(
        "--lose",
        type=int,
        metavar="N",
        help="lose the answer to one of N COMMITs all the time; nothing else happens to database and service",
    )
    parser.add_argument("--no-spark", action="store_true", help="send masks as executors do, but without a JVM")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the record and the logs in this folder")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="lastbit-chaos-"))
    if options.lose is not None and (options.lose < 1 or options.database == "galera"):
        parser.error("--lose needs a positive number, and one server")
    actors = ACTORS if options.no_spark else (*ACTORS, "consumer-spark")
    if options.lose:
        actors = (*actors, NESTING)
    # Makes the processes that this one started end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    world = WORLDS[options.database]()
    if not world.available:
        parser.error("the database is not installed")
    try:
        world.start()
        seconds = options.minutes * 60
        run = Run(world, folder, seconds=seconds, seed=options.seed, actors=actors, lose=options.lose, say=_say)
        report = run.go()
    finally:
        logs = folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        for number, log in enumerate(world.logs()):
            shutil.copyfile(log, logs / f"database-{number}.log")
        world.close()
    _say(str(report))
    if report.violations:
        _say(f"record and logs: {folder}; again: with --seed {options.seed}")
        return 1
    if options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
