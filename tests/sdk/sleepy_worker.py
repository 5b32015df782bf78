"""A consumer-group worker in a separate process that can be frozen. It prints one JSON line for each callback. For each
line of input it tries to ack and commit its first assignment, even if that assignment is lost. If an error ends the
worker, the last line has its name."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress

from lastbit import Client, LastbitError
from lastbit.streams import Assignment, ConsumerGroup


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(url: str, name: str, worker: str) -> None:
    first: list[Assignment] = []
    client = Client(url)

    def assigned(assignment: Assignment) -> None:
        for offset in range(3):
            assignment.window.track(assignment.floor + 1 + offset)
        first.append(assignment)
        say(assigned=assignment.partition, epoch=assignment.epoch)

    def released(assignment: Assignment) -> None:
        say(released=assignment.partition, epoch=assignment.epoch, lost=assignment.lost)

    def attempt() -> None:
        assignment = first[0]
        actions = {
            # The commit of a process that ignores leases.
            "raw": lambda: client.groups.commit(
                name, assignment.partition, worker=worker, epoch=assignment.epoch, snapshot=assignment.window.snapshot()
            ),
            "commit": assignment.commit,
            "ack": lambda: assignment.window.ack(assignment.floor + 1),
        }
        results = dict.fromkeys(actions, "done")
        for action, call in actions.items():
            try:
                call()
            except LastbitError as error:
                results[action] = type(error).__name__
        say(tried=results)

    group = ConsumerGroup(client, name, worker)

    def listen() -> None:
        with suppress(ValueError):
            for _ in sys.stdin:
                attempt()
        group.stop()

    threading.Thread(target=listen, daemon=True).start()
    try:
        group.run(assigned, released)
    except LastbitError as error:
        say(ended=type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
