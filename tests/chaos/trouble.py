"""Who makes trouble, and when: one thread for each of the troublemakers, with pauses of chance.

Between two troubles some work must have been done, or trouble would be all that there is on a slow machine.
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
"""Deliveries, or more, between two troubles."""
LONGEST = 90
"""Seconds to wait for them: maybe what is broken stays so until the next trouble."""


class Troublemaker:
    """Makes one of `troubles` after another, `every` so many seconds on average, between `begin` and `stop`. `work`:
    how much is done by now. In the log each has a line where it begins and where it is taken back, by the monotonic
    clock, as in the record."""

    def __init__(
        self, troubles: Mapping[str, Trouble], interval: float, dice: random.Random, work: Callable[[], int], log: Path
    ) -> None:
        self.made: Counter[str] = Counter()
        self.failure: BaseException | None = None
        """Why it gave up: then the run says nothing."""
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
        """Each of them was made."""
        return self.made.keys() == self._troubles.keys()

    def begin(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when what was made is taken back."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(min(self._dice.expovariate(1 / self._every), 3 * self._every)):
                self._see_work()
                # From a shuffled deck, so that a short run meets each of them too.
                if not self._deck:
                    self._deck = self._dice.sample(list(self._troubles), len(self._troubles))
                name = self._deck.pop()
                self._note(name)
                self._troubles[name](self._dice)
                self._note(f"{name}: over")
                self.made[name] += 1
        except BaseException as error:  # noqa: BLE001  # it is raised in the run's own thread
            self.failure = error

    def _note(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{time.monotonic():.3f} {text}\n")

    def _see_work(self) -> None:
        goal = self._work() + WORK
        until = time.monotonic() + LONGEST
        while self._work() < goal and time.monotonic() < until and not self._stop.wait(0.05):
            pass
