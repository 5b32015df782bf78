"""Counts screws into a tally, and commits offsets after the service's response. `--die-after` makes it crash."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from examples.screws.logs import Committed, Topic
from lastbit import Client, SourceChain
from lastbit.streams import AckWindow

COMMIT_EVERY = 100
"""Screws."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--screws", type=int, required=True, help="partitions of the screws")
    parser.add_argument("--url", required=True)
    parser.add_argument("--die-after", type=int, help="crash after reading this number of screws")
    arguments = parser.parse_args()
    screws = Topic(arguments.folder, "screws", arguments.screws)
    positions = Committed(arguments.folder / "counter", screws.partitions)
    windows = [AckWindow() for _ in range(screws.partitions)]

    def commit() -> None:
        starts = zip(windows, positions.starts, strict=True)
        positions.commit([max(window.floor + 1, start) for window, start in starts])

    log = (arguments.folder / "seen").open("a")  # a counter without guards would count these
    with Client(arguments.url) as client, client.tally("screws").buffer(by="range", every=0.02, most=200) as buffer:
        for number, (partition, screw) in enumerate(screws.read_in_turns(positions.starts), 1):
            windows[partition].track(screw.offset)
            chain = SourceChain.decode(screw.header).hop(screws.name, partition, screw.offset)
            buffer.add({screw.value: 1}, chain, window=windows[partition])
            print(screw.value, file=log, flush=True)
            if number == arguments.die_after:
                os._exit(9)
            if number % COMMIT_EVERY == 0:
                commit()
        buffer.flush()
        commit()


if __name__ == "__main__":
    main()
