"""Counts screws into a tally, and commits what the service has answered for. It dies when it is told to."""

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
    parser.add_argument("--die-after", type=int, help="screws that are read before it dies")
    given = parser.parse_args()
    screws = Topic(given.folder, "screws", given.screws)
    committed = Committed(given.folder / "counter", screws.partitions)
    windows = [AckWindow() for _ in range(screws.partitions)]

    def commit() -> None:
        starts = zip(windows, committed.starts, strict=True)
        committed.commit([max(window.floor + 1, start) for window, start in starts])

    seen = (given.folder / "seen").open("a")  # what a counter without guards would have counted
    with Client(given.url) as client, client.tally("screws").buffer(every=0.02, most=200) as buffer:
        for number, (partition, screw) in enumerate(screws.read_in_turns(committed.starts), 1):
            windows[partition].track(screw.offset)
            chain = SourceChain.decode(screw.header).hop(screws.name, partition, screw.offset)
            buffer.add({screw.value: 1}, chain, window=windows[partition])
            print(screw.value, file=seen, flush=True)
            if number == given.die_after:
                os._exit(9)
            if number % COMMIT_EVERY == 0:
                commit()
        buffer.flush()
        commit()


if __name__ == "__main__":
    main()
