"""Overload: how many units may wait if acks arrive faster than they can be committed.

If only the length of the queue is bounded, every caller waits as long as it takes to empty a full queue. That helps
nobody: acks are committed late, and callers that gave up send them again. So the bound is one of time. While waits are
short, or long only for a short time, no caller is refused (neither a burst nor a thousand consumers that each wait for
a response). If waits are longer than the `target`, flushes are kept short. If they also exceed `CROWD` for a while (see
`shedding`), the queue is cut to the units that can be committed within the target. From then on the bound is adjusted
after each flush to keep the wait at the target, until refusals end.

The target depends on the disk: large flushes make acks cheap, so a slow disk needs larger ones. The measure is a lone
flush, of one unit, which shows the minimum cost of a transaction. While waits are long, there is a lone flush each
second. A bound in absolute time would mean small flushes on a slow disk, therefore fewer acks a second, and therefore a
smaller bound: a spiral that ends with almost no acks being served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from core.commits.shedding import AFTER, CROWD, LEAST, Shedding

LONES: Final = 6
"""The target in lone flushes: in a flush of this length, five sixths of the time are spent on units."""
SHORT: Final = 0.01
"""The minimum of the target, in seconds."""
LONG: Final = 0.5
"""The maximum of the target, in seconds."""
LOOK_EVERY: Final = 1.0
"""Seconds between two lone flushes."""


class Admission:
    """The admission to one queue, used under its lock, except for `refused` and reading `limit`. Times are from one
    monotonic clock."""

    def __init__(self, after: float = AFTER, on_change: Callable[[bool], None] = lambda shedding: None) -> None:
        """`on_change` is called with True when refusals begin, and with False when they end."""
        self._on_change = on_change
        self.limit: int | None = None
        """The number of units that may wait; None: no bound."""
        self._shedding = Shedding(after)
        self._lone: deque[float] = deque(maxlen=5)
        self._looked = float("-inf")
        self._late = False
        """Waits are longer than the target, so flushes are kept short."""
        self._last = (1, SHORT)
        """Units and seconds of the last flush."""

    @property
    def target(self) -> float:
        """The maximum number of seconds that a unit should wait."""
        return min(LONG, max(SHORT, LONES * min(self._lone))) if self._lone else SHORT

    def refused(self, now: float) -> None:
        """A caller was refused, as the queue has reached its limit."""
        self._shedding.refused(now)

    def taking(self, now: float, wait: float) -> None:
        """Set the limit before a flush whose oldest unit has waited for `wait` seconds."""
        target = self.target
        has_changed = self._shedding.measured(wait > max(target, CROWD), now, now)
        self._late = self._shedding.is_on or wait > target
        if not self._shedding.is_on:
            self.limit = None
        elif self.limit is None:
            self.limit = max(LEAST, self._within_target())
        else:
            factor = min(1.25, max(0.5, target / wait)) if wait > 0 else 1.25
            self.limit = max(LEAST, round(self.limit * factor), self.limit + 1 if factor > 1 else 0)
        if has_changed:
            self._on_change(self._shedding.is_on)

    def flush_limit(self, now: float, limit: int) -> int:
        """The number of units of the next flush: at most `limit`, and fewer while waits are long. Then a flush takes no
        longer than the target, as callers that arrive during a flush of a second wait a second. But it has at least
        `LEAST` units: smaller flushes would commit less than arrives at normal times, so refusals would never end."""
        if not self._late:
            return limit
        if now - self._looked >= LOOK_EVERY:
            return 1
        return min(limit, max(LEAST, self._within_target()))

    def _within_target(self) -> int:
        """The number of units that are committed within the target, estimated from the last flush."""
        units, seconds = self._last
        return max(1, round(units * self.target / seconds))

    def flushed(self, now: float, units: int, seconds: float) -> None:
        """Record a finished flush."""
        if units == 1:
            self._lone.append(seconds)
            self._looked = now
        else:
            self._last = units, max(seconds, 1e-6)
