"""The files: the stream of events, the effects of handling them, and the position."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

USERS = (1, 2, 3)
STEPS = (
    *(
        "signed up",
        "confirmed the address",
        "added a card",
        "ordered",
        "changed the order",
        "paid",
        "was sent the parcel",
    ),
    *("received it", "asked a question", "was answered", "returned a part", "was refunded", "wrote a review", "left"),
)
ROUNDS = 4
"""The number of times that each user does all steps."""


@dataclass(frozen=True)
class Event:
    offset: int
    user: int
    step: int
    what: str


def invent() -> list[Event]:
    """All users' steps, shuffled between users but in order for each."""
    next_steps = {user: iter(range(ROUNDS * len(STEPS))) for user in USERS}
    users = [user for user in USERS for _ in range(ROUNDS * len(STEPS))]
    random.shuffle(users)
    steps = ((user, next(next_steps[user])) for user in users)
    return [Event(offset, user, step, STEPS[step % len(STEPS)]) for offset, (user, step) in enumerate(steps)]


class Files:
    def __init__(self, folder: Path) -> None:
        self._stream = folder / "events.jsonl"
        self._effects = folder / "effects.jsonl"
        self._position = folder / "position"

    def write_events(self, events: Sequence[Event]) -> None:
        self._stream.write_text("".join(json.dumps(asdict(event)) + "\n" for event in events))

    def events(self, after: int = -1) -> Iterator[tuple[int, Event]]:
        """Yields (offset, event)."""
        with self._stream.open() as lines:
            for line in itertools.islice(lines, after + 1, None):
                event = Event(**json.loads(line))
                yield event.offset, event

    def write_effect(self, offset: int) -> None:
        """Record that an event was handled, in one write, so that the record is complete or missing."""
        file = os.open(self._effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{offset}\n".encode())
        finally:
            os.close(file)

    def effects(self) -> list[int]:
        """The offsets in the order of handling."""
        return [int(line) for line in self._effects.read_text().split()] if self._effects.exists() else []

    def write_position(self, snapshot: bytes) -> None:
        """Replace the position in one step: after a crash the old or the new one exists."""
        draft = self._position.with_suffix(".new")
        with draft.open("wb") as file:
            file.write(snapshot)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._position)

    def position(self) -> bytes | None:
        return self._position.read_bytes() if self._position.exists() else None
