"""Measures event-loop iterations, and decides which calls to refuse when they are long.

Acks don't only wait in the combiner's queue (see `core.commits.admission`). Parsing large calls takes longer than
committing them. Then the queue stays short, and admission control refuses no call, but clients wait seconds until the
loop reads their sockets: an iteration serves all sockets that are ready, and data that arrives meanwhile waits for its
end. So this module measures iterations as admission control measures waits, and follows the same rule (see
`core.commits.shedding`). A burst is parsed completely, and so are the calls of any number of clients that each wait for
their response. Once iterations have been long for `after` seconds, or a single one for half of that, each iteration
parses some calls and refuses the rest unparsed, until no call had to be refused for a while. The fewer calls an
iteration parses, the earlier clients get their responses, as long as refusals leave time for parsing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import structlog

from core.commits.shedding import CROWD, LEAST, Shedding

SHARES: Final = (CROWD / 10, CROWD / 2)
"""The minimum and maximum seconds for parsing in an iteration, while iterations are long. Between them it is half of
the time that the previous iteration spent on other work, above all on refusals. So at least a third of the time goes
into calls that are accepted, unless refusals take more than a tenth of a second."""
FEWEST: Final = 8
"""Calls that such an iteration parses, however long it takes; `LEAST` if the previous one received no more than
that."""
LARGE: Final = CROWD / 1024
"""Seconds to parse a call that counts as large: libuv reads up to 1,024 sockets at once, and parsing that many smaller
calls takes less than `CROWD`."""
ALONE: Final = 1 / 2
"""The part of `after` that a single iteration may take. All calls that are read in it wait for its end, and then for
their commit."""

log = structlog.get_logger(__name__)


class ParseBudget:
    """The budget of one event loop. Only that loop's thread may call the methods. `call_soon` must call its argument
    after the current iteration, as the loop's method does."""

    def __init__(
        self,
        after: float,
        call_soon: Callable[[Callable[[], object]], Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`after`: seconds; 0: no call is ever refused."""
        self._after = after
        self._call_soon = call_soon
        self._clock = clock
        self._received = 0
        """The number of calls in this iteration."""
        self._received_before = 0
        """The number in the previous iteration."""
        self._parsed = 0
        """The number of parsed calls in this iteration."""
        self._share = SHARES[0]
        """Seconds for parsing in this iteration, if calls must be refused."""
        self._spent = 0.0
        """Seconds of this iteration that were spent on parsing."""
        self._start = 0.0
        self._shedding = Shedding(after)
        self._logged = False
        """Whether the refusals are logged. Iterations of many small calls may be long without refusals."""
        self._long = (0.0, 0)
        """Seconds and parsed calls of the long iteration that started the refusals."""

    def is_full(self) -> bool:
        """Whether the next call of this iteration must be refused. If at most `LEAST` calls arrive, none is refused,
        however long parsing takes: that many consumers, each waiting for its response, are no overload. If more arrive,
        the first `FEWEST` are never refused."""
        self._received += 1
        limit = FEWEST if self._shedding.is_on and self._received_before > LEAST else LEAST
        if self._parsed < limit or self._spent < self._share:
            return False
        if not self._shedding.is_on and not self._is_too_long():
            return False
        self._shedding.refused(self._clock())
        if not self._logged:
            self._logged = True
            log.warning("acks_shed", **_log_fields(*self._long))
        return True

    def has_large_calls(self) -> bool:
        """Whether to write finished responses during this event-loop iteration. A client sends its next request as soon
        as it gets a response, and while a thousand sockets are ready, libuv also reads those that became ready
        meanwhile. With small calls, which are parsed quickly, the iteration would not end."""
        return self._spent > self._parsed * LARGE

    def _is_too_long(self) -> bool:
        """Whether this iteration alone is so long that calls must be refused, starting in this iteration."""
        now = self._clock()
        seconds = now - self._start
        if not self._after or seconds <= max(CROWD, ALONE * self._after):
            return False
        self._shedding.begin(now)
        self._long = seconds, self._parsed
        return True

    def begin(self) -> float:
        """Call this before parsing a call. Returns the time, for `end`."""
        now = self._clock()
        if not self._parsed:
            self._start = now
            self._call_soon(self._end_iteration)
        self._parsed += 1
        return now

    def end(self, start: float) -> None:
        self._spent += self._clock() - start

    def _end_iteration(self) -> None:
        now = self._clock()
        seconds, calls = now - self._start, self._parsed
        self._share = min(max(SHARES[0], (seconds - self._spent) / 2), SHARES[1])
        self._received_before, self._received = self._received, 0
        self._parsed, self._spent = 0, 0.0
        if not self._shedding.measured(seconds > CROWD and calls > LEAST, self._start, now):
            return
        if self._shedding.is_on:
            self._long = seconds, calls
        elif self._logged:
            self._logged = False
            log.warning("acks_shed_no_more", **_log_fields(seconds, calls))


def _log_fields(seconds: float, calls: int) -> dict[str, float]:
    return {"turn": round(seconds, 3), "calls": calls}
