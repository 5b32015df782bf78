"""Reads what robots report, and publishes each screw by itself, to the partition of its robot and kind.

It commits now and then, dies in the middle of a report when it is told to, and publishes again what it had not
committed: under new offsets, but with the same source.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from examples.screws.logs import Committed, Topic
from lastbit import SourceChain
from lastbit.streams import partition_of

COMMIT_EVERY = 25
"""Reports."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reports", type=int, required=True, help="partitions of the reports")
    parser.add_argument("--screws", type=int, required=True, help="partitions of the screws")
    parser.add_argument("--die-after", type=int, help="screws that are published before it dies")
    given = parser.parse_args()
    reports = Topic(given.folder, "reports", given.reports)
    screws = Topic(given.folder, "screws", given.screws)
    screws.mend()
    committed = Committed(given.folder / "republisher", reports.partitions)
    done = list(committed.starts)
    published = 0
    for number, (partition, report) in enumerate(reports.read_in_turns(committed.starts), 1):
        for child, kind in enumerate(report.value["screws"]):
            if published == given.die_after:
                os._exit(9)
            chain = SourceChain.decode(report.header).hop(reports.name, partition, report.offset, child)
            key = f"{report.value['robot']}/{kind}"
            screws.publish(partition_of(key, screws.partitions), key, chain.encode())
            published += 1
        done[partition] = report.offset + 1
        if number % COMMIT_EVERY == 0:
            committed.commit(done)
    committed.commit(done)


if __name__ == "__main__":
    main()
