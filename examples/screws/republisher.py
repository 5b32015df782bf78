"""Reads the robots' reports and publishes each screw as a message, to the partition of its robot and kind.

It commits at intervals. `--die-after` makes it crash in the middle of a report. After a restart it publishes
uncommitted screws again, under new offsets but with the same source."""

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
    parser.add_argument("--die-after", type=int, help="crash after publishing this number of screws")
    arguments = parser.parse_args()
    reports = Topic(arguments.folder, "reports", arguments.reports)
    screws = Topic(arguments.folder, "screws", arguments.screws)
    screws.mend()
    positions = Committed(arguments.folder / "republisher", reports.partitions)
    starts = list(positions.starts)
    count = 0
    for number, (partition, report) in enumerate(reports.read_in_turns(positions.starts), 1):
        for child, kind in enumerate(report.value["screws"]):
            if count == arguments.die_after:
                os._exit(9)
            chain = SourceChain.decode(report.header).hop(reports.name, partition, report.offset, child)
            key = f"{report.value['robot']}/{kind}"
            screws.publish(partition_of(key, screws.partitions), key, chain.encode())
            count += 1
        starts[partition] = report.offset + 1
        if number % COMMIT_EVERY == 0:
            positions.commit(starts)
    positions.commit(starts)


if __name__ == "__main__":
    main()
