"""`python -m examples.screws [--reports N]`. Exit status: 0 the totals are correct, 1 they are not."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

from examples.course import temporary_folder
from examples.processes import Failed, Process, Processes, start_service
from examples.screws.logs import Topic
from lastbit import Client

ROBOTS = 12
KINDS = ("M4", "M5", "M6", "M8")
REPORTS, SCREWS = 2, 3
"""Partitions."""


def fasten(topic: Topic, reports: int, dice: random.Random) -> Counter[str]:
    """Publish reports of robots with up to five screws each. Returns the true totals by robot and kind."""
    truth: Counter[str] = Counter()
    for _ in range(reports):
        number = dice.randrange(ROBOTS)
        kinds = [dice.choice(KINDS) for _ in range(dice.randrange(6))]
        topic.publish(number % REPORTS, {"robot": f"robot-{number:02}", "screws": kinds})
        truth.update(f"robot-{number:02}/{kind}" for kind in kinds)
    return truth


def live_and_die(processes: Processes, folder: Path, url: str, total: int, dice: random.Random) -> tuple[int, int]:
    """Run republisher and counter at the same time, with crashes, until the republisher has published everything and
    the counter has read it. Returns how often each crashed."""
    deaths = {"republisher": 0, "counter": 0}
    places = ["--screws", str(SCREWS)]
    for life in range(100):
        dying = ["--die-after", str(dice.randrange(total // 8, total // 3))] if life < 4 else []
        republisher = processes.start(
            "republisher", "examples.screws.republisher", str(folder), *places, "--reports", str(REPORTS), *dying
        )
        counters = ["examples.screws.counter", str(folder), *places, "--url", url]
        counter = processes.start("counter", *counters, *dying)
        finished_publishing = _ended(republisher, deaths)
        _ended(counter, deaths)
        # Read the rest; this counter may crash too.
        if _ended(processes.start("counter", *counters, *dying), deaths) and finished_publishing:
            return deaths["republisher"], deaths["counter"]
    raise Failed("a hundred runs were not enough")


def _ended(process: Process, deaths: dict[str, int]) -> bool:
    """Whether the process finished, instead of crashing."""
    status = process.wait()
    if status not in (0, 9):
        raise Failed(f"{process.name} ended with exit status {status}:\n{process.last_words()}")
    deaths[process.name] += status == 9
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.screws", description="Count through crashes and replays.")
    parser.add_argument("--reports", type=int, default=1500, help="the number of robots' reports (1500)")
    parser.add_argument("--seed", type=int, help="seed of the random numbers; different in each run by default")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)  # noqa: S311  # not security-relevant
    with temporary_folder("screws") as name:
        folder = Path(name)
        truth = fasten(Topic(folder, "reports", REPORTS), arguments.reports, dice)
        print(f"{arguments.reports:,} reports of {ROBOTS} robots, {truth.total():,} screws of {len(truth)} kinds")
        with Processes(folder) as processes:
            _, url = start_service(processes, folder / "lastbit.db", seconds=60)
            deaths = live_and_die(processes, folder, url, truth.total(), dice)
            with Client(url) as client:
                totals = {total.key: total.value for total in client.tally("screws").totals()}
        screws = Topic(folder, "screws", SCREWS)
        publications = sum(1 for partition in range(SCREWS) for _ in screws.read(partition, 0))
        read_count = len((folder / "seen").read_text().splitlines())
    print(f"the republisher died {deaths[0]} times and published {publications:,} screws; ", end="")
    print(f"the counter died {deaths[1]} times")
    print(f"counting what was read:  {read_count:>7,}")
    print(f"the tally:               {sum(totals.values()):>7,}")
    print(f"the truth:               {truth.total():>7,}")
    wrong_keys = {key for key in {*totals, *truth} if totals.get(key, 0) != truth[key]}
    print("each total is correct" if not wrong_keys else f"wrong: {sorted(wrong_keys)}")
    return 1 if wrong_keys else 0


if __name__ == "__main__":
    sys.exit(main())
