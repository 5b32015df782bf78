"""A stream that dies: `python -m tests.streams.dying_stream FOLDER POINT` handles the log until the `POINT`th point.

The points are: the reading of a record; before its handler did anything; after that, before its ack; before a commit;
after it was stored, before that is known. There the process ends by `os._exit`, which runs nothing. With `POINT` -1 it
is killed from outside, or gets to the end.

FOLDER has what survives: `handled`, a line for each record that was handled, and `stored`, the snapshot that was
committed last. The log is the numbers below `COUNT`, with gaps; the key of one is its remainder by `KEYS`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lastbit.streams import AckWindow, Snapshot, run_ordered
from tests.guarantees import mutants

COUNT = 300
KEYS = 7
LOG = [offset for offset in range(COUNT) if offset % 10 != 4]


class Points:
    """Ends the process at one of them."""

    def __init__(self, point: int) -> None:
        self._left = point
        self._lock = threading.Lock()

    def passed(self, where: str) -> None:
        with self._lock:
            if not self._left:
                os.write(1, where.encode())
                os._exit(9)
            self._left -= 1


def stored(folder: Path) -> Snapshot:
    file = folder / "stored"
    return Snapshot.decode(file.read_bytes()) if file.exists() else Snapshot()


def main() -> None:
    mutants.from_environment()
    folder, points = Path(sys.argv[1]), Points(int(sys.argv[2]))
    begun = stored(folder)
    window = AckWindow.restore(begun, capacity=50)
    handled = os.open(folder / "handled", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def source() -> Iterator[tuple[int, int]]:
        for offset in LOG:
            if offset > begun.floor:
                points.passed("source")
                yield offset, offset

    def handle(offset: int) -> None:
        points.passed("before the handler")
        time.sleep(0.0003)  # its work, in the middle of which a commit may come
        os.write(handled, f"{offset}\n".encode())
        points.passed("before the ack")

    def commit(floor: int) -> None:
        snapshot = window.snapshot()
        points.passed("before the commit")
        new = folder / f"stored-{os.getpid()}"
        new.write_bytes(snapshot)
        new.replace(folder / "stored")
        points.passed("after the commit")

    run_ordered(source(), handle, key=lambda offset: offset % KEYS, lanes=4, commit=commit, every=0.0005, window=window)
    os.write(1, b"the end")


if __name__ == "__main__":
    main()
