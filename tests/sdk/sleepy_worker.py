"""A worker of a consumer group in a process of its own, which can be frozen. It says what happens as JSON, a line each;
each line that it reads has it try to ack and to commit what it held first, whatever it believes by then."""

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
        held = first[0]
        tries = {
            # What a process would send that knows nothing of leases.
            "raw": lambda: client.groups.commit(
                name, held.partition, worker=worker, epoch=held.epoch, snapshot=held.window.snapshot()
            ),
            "commit": held.commit,
            "ack": lambda: held.window.ack(held.floor + 1),
        }
        results = dict.fromkeys(tries, "done")
        for each, tried in tries.items():
            try:
                tried()
            except LastbitError as error:
                results[each] = type(error).__name__
        say(tried=results)

    group = ConsumerGroup(client, name, worker)

    def listen() -> None:
        with suppress(ValueError):
            for _ in sys.stdin:
                attempt()
        group.stop()

    threading.Thread(target=listen, daemon=True).start()
    group.run(assigned, released)


if __name__ == "__main__":
    main(*sys.argv[1:])
