"""Responses to failed calls. Clients that are refused under overload get their 503 after a short delay.

Without the delay, many refused clients would retry at once, in spite of `Retry-After`, and each retry would be read and
refused again. That takes time from commits, as the event loop and the combiner's thread share the GIL. It also delays
other clients: sockets are read in order, so with two thousand busy sockets each client waits for two thousand refusals.
libuv continues to read within one event-loop iteration while a thousand sockets are ready, up to 49,152 times, and
nothing else runs meanwhile. A client that waits for its refusal sends nothing. The delay costs it nothing, as it should
retry only after a second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from api import problems
from api.metrics import ACK_REQUESTS, REFUSED
from api.problems import Problem
from api.server.middleware import HEADER, request_id
from core import errors
from core.batches.lifecycle import Verb

log = structlog.get_logger(__name__)

SECONDS: Final = 0.2
"""With this delay, two thousand clients send at most ten thousand requests a second. One worker can read that many and
still commit."""
TOGETHER: Final = 0.01
"""Seconds within which refusals are sent together. A timer for each would cost more than the refusal."""


class Pause:
    """The delayed refusals of one event loop. Only that loop's thread may call the methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[float, Callable[[], object]]] = deque()
        """(loop time when it is due, callback) of each refusal, the next one first."""
        self._set = False
        """Whether the timer is set."""

    def before(self, refuse: Callable[[], object]) -> None:
        """Call `refuse` after the delay."""
        self._waiting.append((self._loop.time() + SECONDS, refuse))
        self._wait(SECONDS)

    def _wait(self, seconds: float) -> None:
        if not self._set:
            self._set = True
            self._loop.call_later(seconds, self._refuse_due)

    def _refuse_due(self) -> None:
        # A refused client may have sent its next request already; that calls `before` during this loop.
        due = self._loop.time()
        try:
            while self._waiting and self._waiting[0][0] <= due:
                self._waiting.popleft()[1]()
        finally:
            self._set = False
            if self._waiting:
                self._wait(max(self._waiting[0][0] - due, TOGETHER))


def refusal(verb: Verb, error: Exception, own_id: bytes | None) -> Problem:
    """The response to a failed call. Its request id is the client's `own_id` if that is valid. The failure is counted,
    and logged if the client did not cause it. Refusals under overload aren't logged here: there may be thousands a
    second, and the combiner logs their start once."""
    name = request_id(own_id)
    if isinstance(error, Problem):
        problem = error
    elif isinstance(error, errors.CoreError):
        problem = problems.from_core(error)
    else:
        problem = problems.internal()
    if problem.status == 500:
        trace = None if isinstance(error, errors.CoreError) else error
        log.error("ack_failed", request_id=name, verb=verb.value, error=str(error), exc_info=trace)
    elif isinstance(error, errors.Overloaded):
        REFUSED.labels("acks").inc()
    elif problem.status > 500:
        log.warning("ack_unavailable", request_id=name, verb=verb.value, error=problem.detail)
    ACK_REQUESTS.labels(verb.value, str(problem.status)).inc()
    problem.headers[HEADER] = name
    return problem
