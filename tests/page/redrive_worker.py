"""`python -m tests.page.redrive_worker URL POSITION`: a producer that follows redrives, and a worker of
its items, which now succeeds. It runs until it is killed.
"""

from __future__ import annotations

import sys

from lastbit import Client


def main(url: str, after: int) -> None:
    with Client(url) as client, client.acker() as worker:
        for redrive in client.redrives(after=after):
            for item in client.batch(redrive.batch).redriven(redrive):
                worker.ack(item)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
