"""The thread that moves what transactions of callers have left: `core.enlisted.mover` has one pass of it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

import structlog

from core import errors
from core.acks import outbox, parents
from core.batches import descendants
from core.enlisted import mover
from core.service.acks import AckService
from core.storage.database import Database
from core.threads import QueueThread

FIRST_WAIT: Final = 0.1
"""Seconds until the thread looks for the first time for what a transaction has left."""
LONGEST_WAIT: Final = 1.0
"""Seconds between two of its looks for a transaction that was not committed yet; each takes twice as long as the one
before."""
EVERY: Final = 1.0
"""Seconds between two of its looks for what transactions of other processes have left."""
SWEEP: Final = 0.5
"""Seconds that each of the other sweeps of such a look may take."""

log = structlog.get_logger(__name__)


class Mover(QueueThread):
    """Moves what transactions of this process have left, soon after their commits, and with `start_looking` also what
    others have."""

    def __init__(self, database: Database, acks: AckService) -> None:
        super().__init__("mover")
        self._database = database
        self._acks = acks
        self._expected: dict[int, tuple[float, float]] = {}
        """By batch, when to look next, and how long after that again."""
        self._look_at: float | None = None
        """When to look for any batch."""
        self._pays = False
        """Whether it then also does what processes that died have left to the sweeps."""

    def expect(self, changed: Collection[int]) -> None:
        """A transaction that isn't committed yet leaves something for these batches."""
        if not changed:
            return
        with self.wake:
            if self.stopping:
                return
            due = time.monotonic() + FIRST_WAIT
            self._expected |= dict.fromkeys(changed, (due, FIRST_WAIT))
            if self._look_at is None:
                self._look_at = due + EVERY
            self._start()
            self.wake.notify()

    def start_looking(self, *, debts: bool) -> None:
        with self.wake:
            self._pays = debts
            self._look_at = time.monotonic()
            self._start()
            self.wake.notify()

    def _start(self) -> None:
        try:
            self.start()
        except errors.Unavailable as error:  # what is left stays in the outbox
            log.warning("counts_wait", error=str(error))

    def _serve(self) -> None:
        while True:
            with self.wake:
                if self.stopping:
                    return
                now = time.monotonic()
                times = [due for due, _ in self._expected.values()]
                times += [] if self._look_at is None else [self._look_at]
                if not times or min(times) > now:
                    self.wake.wait(min(times) - now if times else None)
                    continue
                due_batches = [batch for batch, (due, _) in self._expected.items() if due <= now]
                looks = self._look_at is not None and self._look_at <= now
            self._pass(due_batches, looks=looks)

    def _pass(self, due_batches: Collection[int], *, looks: bool) -> None:
        moved = mover.Moved()
        try:
            if looks:
                moved = mover.sweep(self._database)
            elif due_batches:
                # Not the rows of batches whose transactions aren't committed yet: one that has opened a batch holds it.
                moved = mover.move_apart(self._database, self._database.read(outbox.among, due_batches))
            if moved.owing:
                self._acks.pay(*moved.owing)
            if looks and self._pays:
                descendants.sweep(self._database, seconds=SWEEP)
                parents.sweep(self._database, seconds=SWEEP)
        except errors.CoreError as error:
            log.warning("counts_wait", error=str(error))
        except Exception:  # the thread must survive a bug: nobody else would move what this process has left
            log.exception("move_failed")
        now = time.monotonic()
        with self.wake:
            for batch in due_batches:
                due, wait = self._expected[batch]
                if due > now:
                    continue  # expected again in the meantime
                if batch in moved.batches or wait >= LONGEST_WAIT:
                    del self._expected[batch]
                else:
                    self._expected[batch] = now + 2 * wait, 2 * wait
            if looks:
                self._look_at = now + EVERY
