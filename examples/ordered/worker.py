"""The worker: handles what its position says is left. It is killed at any moment, and started again, as often as you
like."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from examples.ordered.files import USERS, Event, Files
from lastbit.streams import AckWindow, run_ordered

SLOW = USERS[-1]
LANES = 8
EVERY = 0.1
"""Seconds between two commits."""


def main() -> None:
    files = Files(Path(sys.argv[1]))
    position = files.position()
    window = AckWindow() if position is None else AckWindow.restore(position)

    def handle(event: Event) -> None:
        """Here a real one would write to a database or send a mail, for which this waits. One user's take longer."""
        time.sleep(random.uniform(0.005, 0.015) * (4 if event.user == SLOW else 1))  # noqa: S311
        files.write_effect(event.offset)

    def commit(floor: int) -> None:
        files.write_position(window.snapshot())

    left = files.events(after=window.floor)
    run_ordered(left, handle, key=lambda event: event.user, lanes=LANES, commit=commit, every=EVERY, window=window)


if __name__ == "__main__":
    main()
