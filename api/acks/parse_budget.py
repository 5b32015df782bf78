"""How long the event loop's turns take, and whom to send away when they are long.

Acks don't only wait in their queue (see `core.acks.admission`). Where calls are large, to parse them takes longer than
to commit them: the queue stays short, while callers wait in their sockets until the loop comes to them, for seconds,
and nobody is told to come back. A turn is what the loop does for all who have sent something; who sends while it lasts
waits for its end. So turns are the measure here as waits are there, and the rule is the same: a burst is taken whole,
and so is a crowd in which each waits for an answer. Once turns have been long for `after` seconds on end, or one alone
for half of that, each parses some calls and sends away the rest as they are, until nobody had to be sent away for a
while. The fewer it parses the sooner all are answered, as long as sending away leaves time for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from core.acks.admission import CALM, CROWD, LEAST

SHARES: Final = (CROWD / 10, CROWD / 2)
"""Seconds of a turn for parsing, while turns are long, at the least and at the most: half of what the one before took
for the rest, for sending away above all. So a third of the time at least goes into those who are let in, unless to send
away takes more than a tenth of a second."""
FEWEST: Final = 8
"""Calls that are parsed in such a turn, however long it takes; `LEAST` where the one before heard no more than that."""
LARGE: Final = CROWD / 1024
"""Seconds to parse a call that is large: no more of them are parsed within `CROWD` than libuv hears at once."""
ALONE: Final = 1 / 2
"""Of `after`: so long one turn alone may be. All who are heard in it wait for its end, and for their commit then."""

log = structlog.get_logger(__name__)


class Turns:
    """Of one event loop, whose thread alone calls this. `soon` is to call its argument when the turn is over, as
    `call_soon` does: callbacks wait until all who have sent something were heard."""

    def __init__(
        self,
        after: float,
        call_soon: Callable[[Callable[[], object]], Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`after`: seconds; 0: nobody is ever sent away."""
        self._after = after
        self._soon = call_soon
        self._clock = clock
        self._heard = 0
        """Calls of this turn."""
        self._heard_before = 0
        """Of the one before."""
        self._calls = 0
        """Of this turn, those that are parsed."""
        self._share = SHARES[0]
        """Seconds for parsing in this turn, if it has to be cut."""
        self._spent = 0.0
        """Seconds of this turn that went into parsing."""
        self._began = 0.0
        self._long_since: float | None = None
        self._behind = False
        self._refused_at = 0.0
        self._said = False
        """That somebody is sent away. Turns of many small calls may be long too, and nobody is."""
        self._long = (0.0, 0)
        """Seconds and calls of the turn after which the next ones were cut."""

    def is_full(self) -> bool:
        """Whether the next call of this turn has to be sent away. Where no more than `LEAST` keep coming, none is,
        however long it takes to parse them: so many consumers who each wait for their answers are no overload. Of more,
        `FEWEST` never are."""
        self._heard += 1
        limit = FEWEST if self._behind and self._heard_before > LEAST else LEAST
        if self._calls < limit or self._spent < self._share:
            return False
        if not self._behind and not self._is_too_long():
            return False
        self._refused_at = self._clock()
        if not self._said:
            self._said = True
            self._say("acks_shed", *self._long)
        return True

    def is_of_large_calls(self) -> bool:
        """Whether finished answers should be written during this event-loop iteration. An answered client sends its
        next request at once, and while a thousand sockets are ready libuv also reads those that became ready
        meanwhile. With small calls, which are parsed quickly, the iteration would not end."""
        return self._spent > self._calls * LARGE

    def _is_too_long(self) -> bool:
        """Whether this turn alone is so long that the next ones would be cut. Then it is itself, as the last who is
        heard in it waits for all of it."""
        seconds = self._clock() - self._began
        if not self._after or seconds <= max(CROWD, ALONE * self._after):
            return False
        self._behind = True
        self._long = seconds, self._calls
        return True

    def begin(self) -> float:
        """A call is about to be parsed: the time, for `end`."""
        now = self._clock()
        if not self._calls:
            self._began = now
            self._soon(self._over)
        self._calls += 1
        return now

    def end(self, start: float) -> None:
        self._spent += self._clock() - start

    def _say(self, event: str, seconds: float, calls: int) -> None:
        log.warning(event, turn=round(seconds, 3), calls=calls)

    def _over(self) -> None:
        now = self._clock()
        seconds, calls = now - self._began, self._calls
        self._share = min(max(SHARES[0], (seconds - self._spent) / 2), SHARES[1])
        self._heard_before, self._heard = self._heard, 0
        self._calls, self._spent = 0, 0.0
        if self._behind:
            if now - self._refused_at > max(CALM, self._after):
                self._behind = False
                self._long_since = None
                if self._said:
                    self._said = False
                    self._say("acks_shed_no_more", seconds, calls)
        elif seconds <= CROWD or calls <= LEAST or not self._after:
            self._long_since = None
        elif self._long_since is None:
            self._long_since = self._began
        elif now - self._long_since >= self._after:
            self._behind = True
            self._long = seconds, calls
            self._refused_at = now
