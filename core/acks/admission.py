"""When more acks come than can be committed: how many may wait, so that those that are let in are answered soon.

A queue that only bounds its length lets everybody wait for as long as it takes to work it off, which helps nobody: what
is committed is committed late, and callers who gave up come again. So the bound is one of time. As long as waits are
short, or not long for long, anybody may wait (a burst is taken whole, and so is a thousand consumers who each wait for
an answer). Where they are longer than the `target`, flushes are kept short. Once they were longer than `CROWD` too, for
`after` seconds on end, the queue is cut to what can be committed within the target, and from then on kept so: after
each flush the bound is moved to where the wait should be. It is lifted when nobody had to be refused for a while.
(CoDel, of Nichols and Jacobson, is the model for telling a burst from a queue that stays.)

What a long wait is depends on the disk: large flushes are what makes acks cheap, so a slow one has to gather more. The
measure is a lone flush, of one unit, which shows what a transaction costs at the least. While waits are long one is
made each second. Without it, a bound in plain time would on a slow disk mean small flushes, hence fewer acks a second,
hence a smaller bound: a spiral that ends with nearly nothing being served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

AFTER: Final = 0.3
"""Seconds for which waits may be long before anybody is refused."""
LONES: Final = 6
"""Lone flushes that an ack may wait for: in so long a flush five sixths of the time are for units."""
SHORT: Final = 0.01
"""Seconds of waiting that are short in any case."""
CROWD: Final = 0.1
"""Seconds of waiting that begin no refusing: so long it takes to commit what a thousand consumers of one batch bring,
who each wait for their answers. There won't be more of them, and to send them away would help nobody."""
LONG: Final = 0.5
"""Seconds that are long in any case."""
LEAST: Final = 64
"""Units that may wait, whatever was measured. So many consumers who each wait for their answers are no overload,
however slowly they are served: there won't be more of them."""
CALM: Final = 1.0
"""Seconds for which nobody must have been refused before the bound is lifted."""
LOOK_EVERY: Final = 1.0
"""Seconds between two lone flushes."""


class Admission:
    """Of one queue, and under its lock, but for `refused` and reading `limit`. Times are of one monotonic clock."""

    def __init__(self, after: float = AFTER, changed: Callable[[bool], None] = lambda shedding: None) -> None:
        """`changed` is told when refusing begins and when it is over."""
        self._changed = changed
        self.limit: int | None = None
        """Units that may wait; None: it is calm."""
        self._after = after
        self._lone: deque[float] = deque(maxlen=5)
        self._looked = float("-inf")
        self._late = False
        """Waits are longer than they should be: flushes are kept short, and nobody is refused yet."""
        self._late_since: float | None = None
        self._refused_at = float("-inf")
        self._last = (1, SHORT)
        """Units of the last flush, and its seconds."""

    @property
    def target(self) -> float:
        """Seconds that a unit should wait at the most."""
        return min(LONG, max(SHORT, LONES * min(self._lone))) if self._lone else SHORT

    def refused(self, now: float) -> None:
        """Somebody was, as so many wait as may."""
        self._refused_at = now

    def taking(self, now: float, wait: float) -> None:
        """A flush is about to be taken whose oldest unit has waited so long: set the limit."""
        target = self.target
        if self.limit is not None:
            if now - self._refused_at > max(CALM, self._after):
                self.limit = self._late_since = None
                self._late = False
                self._changed(False)
            else:
                factor = min(1.25, max(0.5, target / wait)) if wait > 0 else 1.25
                self.limit = max(LEAST, round(self.limit * factor), self.limit + 1 if factor > 1 else 0)
        else:
            self._late = wait > target
            if wait <= max(target, CROWD):
                self._late_since = None
            elif self._late_since is None:
                self._late_since = now
            elif now - self._late_since >= self._after:
                self.limit = max(LEAST, self._within_target())
                self._changed(True)

    def most(self, now: float, most: int) -> int:
        """Units of the next flush, `most` if it is calm. While waits are long it takes no longer than the target (who
        comes during one of a second waits a second), or than `LEAST` take: were they smaller, less would be committed
        than comes at other times, and callers would be refused for as long as they come."""
        if not self._late:
            return most
        if now - self._looked >= LOOK_EVERY:
            return 1
        return min(most, max(LEAST, self._within_target()))

    def _within_target(self) -> int:
        """Units that are committed within the target, by what the last flush took."""
        units, seconds = self._last
        return max(1, round(units * self.target / seconds))

    def flushed(self, now: float, units: int, seconds: float) -> None:
        """A flush is over, and took so long."""
        if units == 1:
            self._lone.append(seconds)
            self._looked = now
        else:
            self._last = units, max(seconds, 1e-6)
