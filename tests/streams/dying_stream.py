"""A stream that dies: `python -m tests.streams.dying_stream FOLDER POINT` handles the log up to the `POINT`th point.

The points are: the reading of a record; the start of its handler; after the handler, before the ack; before a commit;
after the commit was stored, before it returns. There the process ends by `os._exit`, which runs no cleanup. With
`POINT` -1 it is killed from outside, or reaches the end.

FOLDER has the durable files: `handled`, a line for each record that was handled, and `stored`, the last committed
snapshot. The log is the numbers below `COUNT`, with gaps; a number's key is its remainder modulo `KEYS`. The first try
of some of them fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lastbit.streams import AckWindow, Backoff, Snapshot, run_ordered
from tests import mutants

COUNT = 300
KEYS = 7
LOG = [offset for offset in range(COUNT) if offset % 10 != 4]


class Points:
    """Counts points, and ends the process at one of them."""

    def __init__(self, point: int) -> None:
        self._left = point
        self._lock = threading.Lock()

    def passed(self, where: str) -> None:
        with self._lock:
            if not self._left:
                os.write(1, where.encode())
                os._exit(9)
            self._left -= 1


def read_snapshot(folder: Path) -> Snapshot:
    file = folder / "stored"
    return Snapshot.decode(file.read_bytes()) if file.exists() else Snapshot()


def main() -> None:
    mutants.from_environment()
    folder, points = Path(sys.argv[1]), Points(int(sys.argv[2]))
    snapshot_at_start = read_snapshot(folder)
    window = AckWindow.restore(snapshot_at_start, capacity=50)
    handled_file = os.open(folder / "handled", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def source() -> Iterator[tuple[int, int]]:
        for offset in LOG:
            if offset > snapshot_at_start.floor:
                points.passed("source")
                yield offset, offset

    failed_offsets: set[int] = set()

    def handle(offset: int) -> None:
        points.passed("before the handler")
        if offset % 13 == 0 and offset not in failed_offsets:
            failed_offsets.add(offset)
            raise OSError("the first try of this record")
        time.sleep(0.0003)  # the handler's work, during which a commit may come
        os.write(handled_file, f"{offset}\n".encode())
        points.passed("before the ack")

    def commit(floor: int) -> None:
        snapshot = window.snapshot()
        points.passed("before the commit")
        new = folder / f"stored-{os.getpid()}"
        new.write_bytes(snapshot)
        new.replace(folder / "stored")
        points.passed("after the commit")

    run_ordered(
        *(source(), handle),
        key=lambda offset: offset % KEYS,
        lanes=4,
        retry=Backoff(first=0.001),
        commit=commit,
        every=0.0005,
        window=window,
    )
    os.write(1, b"the end")


if __name__ == "__main__":
    main()
