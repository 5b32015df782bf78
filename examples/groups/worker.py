"""One worker of the group: reports the partitions that it gets and releases.

It acks and commits three offsets in each partition, so that the next owner's start can be checked.
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
    floor = assignment.floor
    now = time.monotonic()
    for offset in range(floor + 1, floor + 1 + AT_ONCE):
        assignment.window.track(offset)
        assignment.window.ack(offset)
    assignment.commit()
    say(assigned=assignment.partition, epoch=assignment.epoch, found=floor, left=assignment.floor, at=now)


def released(assignment: Assignment) -> None:
    # All its work is done, so there is nothing to wait for.
    say(released=assignment.partition, epoch=assignment.epoch, lost=assignment.lost, at=time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--url", "--group", "--name"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    with Client(arguments.url) as client:
        group = ConsumerGroup(client, arguments.group, arguments.name)
        signal.signal(signal.SIGTERM, lambda number, frame: group.stop())
        say(joining=arguments.name, at=time.monotonic())
        group.run(assigned, released)


if __name__ == "__main__":
    main()
