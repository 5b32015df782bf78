"""One worker of the process. It runs until SIGTERM or SIGKILL."""

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
    arguments = parser.parse_args()
    with Client(arguments.url) as client:
        worker = ProcessWorker(
            ship_order,
            client,
            arguments.name,
            partitions=int(arguments.partitions),
            ttl=float(arguments.ttl),
            every=0.2,
        )
        signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
        say(working=arguments.name)
        worker.run()


if __name__ == "__main__":
    main()
