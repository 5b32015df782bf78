"""One worker of the process, until it is told to stop, or killed."""

from __future__ import annotations

import argparse
import signal

from examples.orders.shipping import ship_order
from examples.speech import say
from lastbit import Client
from lastbit.processes import ProcessWorker


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--url", "--name", "--partitions", "--ttl"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    with Client(given.url) as client:
        worker = ProcessWorker(
            ship_order, client, given.name, partitions=int(given.partitions), ttl=float(given.ttl), every=0.2
        )
        signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
        say(working=given.name)
        worker.run()


if __name__ == "__main__":
    main()
