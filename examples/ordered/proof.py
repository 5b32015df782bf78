"""Checks the files after each killed worker and at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.ordered.files import Event
from lastbit.streams import Snapshot


@dataclass(frozen=True)
class Crash:
    """The number of effects and the last position of a killed worker."""

    effects: int
    position: Snapshot


@dataclass
class Ledger:
    events: Sequence[Event]
    effects: Sequence[int] = ()
    """Offsets in the order of handling."""
    crashes: list[Crash] = field(default_factory=list)
    end: Snapshot = field(default_factory=Snapshot)
    errors: list[str] = field(default_factory=list)

    @property
    def replayed(self) -> int:
        """The number of repeated effects."""
        return len(self.effects) - len(set(self.effects))

    @property
    def above_the_floors(self) -> int:
        """The number of repeated effects if the positions were plain offsets."""
        return sum(
            sum(offset > crash.position.floor for offset in set(self.effects[: crash.effects]))
            for crash in self.crashes
        )

    def faults(self) -> list[str]:
        """A sentence for each failed check."""
        faults = [*self.errors]
        faults += [f"event {offset} was skipped" for offset in sorted(set(range(len(self.events))) - set(self.effects))]
        faults += self._order() + self._replays()
        if self.end != Snapshot(len(self.events) - 1, len(self.events) - 1):
            faults.append(f"the last position is {self.end}, not the end of the stream")
        if not self.crashes:
            faults.append("no worker was killed")
        return faults

    def _order(self) -> list[str]:
        """No event was handled before an earlier one of the same user."""
        next_steps: dict[int, int] = {}
        faults = []
        for offset in self.effects:
            event = self.events[offset]
            if event.step > next_steps.get(event.user, 0):
                expected_step = next_steps.get(event.user, 0)
                faults.append(f"user {event.user}: step {event.step} was handled before step {expected_step}")
            next_steps[event.user] = max(next_steps.get(event.user, 0), event.step + 1)
        return faults

    def _replays(self) -> list[str]:
        """After a crash, no event is handled that was done in the last position."""
        faults = []
        for crash in self.crashes:
            for offset in self.effects[crash.effects :]:
                if crash.position.done(offset):
                    faults.append(f"event {offset} was stored as done and was replayed")
        return faults
