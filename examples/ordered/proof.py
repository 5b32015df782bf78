"""What must add up, of what is on disk when a worker was killed, and in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.ordered.files import Event
from lastbit.streams import Snapshot


@dataclass(frozen=True)
class Crash:
    """What a worker left: how many effects, and its last position."""

    effects: int
    position: Snapshot


@dataclass
class Ledger:
    events: Sequence[Event]
    effects: Sequence[int] = ()
    """Offsets, in the order in which they were handled."""
    crashes: list[Crash] = field(default_factory=list)
    end: Snapshot = field(default_factory=Snapshot)
    errors: list[str] = field(default_factory=list)

    @property
    def replayed(self) -> int:
        """How often something was handled again."""
        return len(self.effects) - len(set(self.effects))

    @property
    def above_the_floors(self) -> int:
        """How often it would have been, had the positions been offsets alone."""
        return sum(
            sum(offset > crash.position.floor for offset in set(self.effects[: crash.effects]))
            for crash in self.crashes
        )

    def faults(self) -> list[str]:
        """Each thing that does not add up, as a sentence."""
        found = [*self.errors]
        found += [f"event {each} was skipped" for each in sorted(set(range(len(self.events))) - set(self.effects))]
        found += self._order() + self._replays()
        if self.end != Snapshot(len(self.events) - 1, len(self.events) - 1):
            found.append(f"the last position is {self.end}, not the end of the stream")
        if not self.crashes:
            found.append("nobody was killed at work")
        return found

    def _order(self) -> list[str]:
        """No event before an earlier one of its user was handled."""
        done: dict[int, int] = {}
        found = []
        for offset in self.effects:
            event = self.events[offset]
            if event.step > done.get(event.user, 0):
                found.append(f"user {event.user}: step {event.step} was handled before step {done.get(event.user, 0)}")
            done[event.user] = max(done.get(event.user, 0), event.step + 1)
        return found

    def _replays(self) -> list[str]:
        """After a crash, nothing is handled that the position knew to be done."""
        found = []
        for crash in self.crashes:
            for offset in self.effects[crash.effects :]:
                if crash.position.done(offset):
                    found.append(f"event {offset} was done, was written down as done, and was replayed")
        return found
