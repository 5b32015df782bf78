"""Disturbs the system: one thread for each troublemaker, with random pauses.

Some work must be done between two disturbances; otherwise a slow machine would do no work at all.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.chaos.worlds import Trouble

WORK = 50
"""The least number of deliveries between two disturbances."""
LONGEST = 90
"""Seconds to wait for them: the damage may last until the next disturbance."""


class Troublemaker:
    """Causes one of `troubles` after another between `begin` and `stop`, `interval` seconds apart on average. `work`
    returns the number of deliveries done. The log has a line for the start and the end of each disturbance, with the
    record's monotonic clock."""

    def __init__(
        self, troubles: Mapping[str, Trouble], interval: float, dice: random.Random, work: Callable[[], int], log: Path
    ) -> None:
        self.made: Counter[str] = Counter()
        self.failure: BaseException | None = None
        """The error that stopped it; it makes the run void."""
        self._troubles = troubles
        self._every = interval
        self._work = work
        self._log = log
        self._dice = dice
        self._deck: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def played(self) -> bool:
        """Whether each disturbance has happened at least once."""
        return self.made.keys() == self._troubles.keys()

    def begin(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the current disturbance is over."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(min(self._dice.expovariate(1 / self._every), 3 * self._every)):
                self._see_work()
                # From a shuffled deck, so that even a short run has each disturbance.
                if not self._deck:
                    self._deck = self._dice.sample(list(self._troubles), len(self._troubles))
                name = self._deck.pop()
                self._note(name)
                self._troubles[name](self._dice)
                self._note(f"{name}: over")
                self.made[name] += 1
        except BaseException as error:  # noqa: BLE001  # raised again in the run's own thread
            self.failure = error

    def _note(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{time.monotonic():.3f} {text}\n")

    def _see_work(self) -> None:
        goal = self._work() + WORK
        until = time.monotonic() + LONGEST
        while self._work() < goal and time.monotonic() < until and not self._stop.wait(0.05):
            pass
