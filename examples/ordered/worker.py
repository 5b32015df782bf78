"""The worker: handles the events that its position does not mark as done. It can be killed at any time and
restarted."""

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
        """Wait for the time that a real handler would take to write to a database. One user's events take longer."""
        time.sleep(random.uniform(0.005, 0.015) * (4 if event.user == SLOW else 1))  # noqa: S311
        files.write_effect(event.offset)

    def commit(floor: int) -> None:
        files.write_position(window.snapshot())

    remaining_events = files.events(after=window.floor)
    run_ordered(
        remaining_events, handle, key=lambda event: event.user, lanes=LANES, commit=commit, every=EVERY, window=window
    )


if __name__ == "__main__":
    main()
