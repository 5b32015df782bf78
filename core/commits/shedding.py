"""When to refuse callers: the states of a load control.

What it measures, waits or iterations of the event loop, may be long for a short time, as in a burst. Refusals begin
once all measurements of `after` seconds were long, and end when no caller was refused for a while. (CoDel, by Nichols
and Jacobson, is the model for distinguishing a burst from a standing queue.)
"""

from __future__ import annotations

from typing import Final

AFTER: Final = 0.3
"""Seconds for which measurements may be long before callers are refused."""
CROWD: Final = 0.1
"""Seconds of waiting below which callers are never refused. It takes this long to commit the acks of a thousand
consumers of one batch that each wait for a response. Their number doesn't grow, so to refuse them would not help."""
LEAST: Final = 64
"""Callers that are never refused. This many consumers that each wait for a response are no overload, however slowly
they are served: their number doesn't grow."""
CALM: Final = 1.0
"""Seconds without a refusal after which refusals end."""


class Shedding:
    """Whether callers are to be refused. Times are from one monotonic clock."""

    def __init__(self, after: float = AFTER) -> None:
        """`after`: seconds; 0: no caller is ever to be refused."""
        self.is_on = False
        self._after = after
        self._long_since: float | None = None
        self._refused_at = float("-inf")

    def measured(self, is_long: bool, began: float, ended: float) -> bool:
        """Note a measurement, and the time that it covers. Returns whether refusals begin or end with it."""
        if self.is_on:
            self.is_on = ended - self._refused_at <= max(CALM, self._after)
            return not self.is_on
        if not is_long or not self._after:
            self._long_since = None
        elif self._long_since is None:
            self._long_since = began
        elif ended - self._long_since >= self._after:
            self.begin(ended)
        return self.is_on

    def begin(self, now: float) -> None:
        """Begin refusals at once."""
        self.is_on = True
        self._long_since = None
        self._refused_at = now

    def refused(self, now: float) -> None:
        """Note that a caller was refused."""
        self._refused_at = now
