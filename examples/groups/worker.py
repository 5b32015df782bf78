"""One worker of the group: says what it was given, and what it gave back.

Its work is three offsets in each partition, acked and committed, so that the next owner can tell where it was left.
"""

from __future__ import annotations

import argparse
import signal
import time

from examples.speech import say
from lastbit import Client
from lastbit.streams import Assignment, ConsumerGroup

AT_ONCE = 3


def assigned(assignment: Assignment) -> None:
    found = assignment.floor
    at = time.monotonic()
    for offset in range(found + 1, found + 1 + AT_ONCE):
        assignment.window.track(offset)
        assignment.window.ack(offset)
    assignment.commit()
    say(assigned=assignment.partition, epoch=assignment.epoch, found=found, left=assignment.floor, at=at)


def released(assignment: Assignment) -> None:
    # All that was begun is done, so there is nothing to wait for.
    say(released=assignment.partition, epoch=assignment.epoch, lost=assignment.lost, at=time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--url", "--group", "--name"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    with Client(given.url) as client:
        group = ConsumerGroup(client, given.group, given.name)
        signal.signal(signal.SIGTERM, lambda number, frame: group.stop())
        say(joining=given.name, at=time.monotonic())
        group.run(assigned, released)


if __name__ == "__main__":
    main()
