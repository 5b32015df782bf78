"""Results that other threads hand to the event loop, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import structlog

log = structlog.get_logger(__name__)


class Result(Protocol):
    """`to` is called with the result itself, in the event loop."""

    @property
    def to(self) -> Any: ...


class Wakeups:
    """Passes results to their receivers. One call into the loop serves all results of a delivery."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._finished: deque[Sequence[Result]] = deque()
        self.deliver = self._deliver
        """One bound method, so that senders can group results by it. It may be called in any thread."""

    def _deliver(self, results: Sequence[Result]) -> None:
        self._finished.append(results)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so are all connections
            self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        while self._finished:
            pass_on(self._finished.popleft())


def pass_on(results: Sequence[Result]) -> None:
    """Pass results to their receivers. One that raises has a bug: it is logged, and the others get theirs."""
    for result in results:
        try:
            result.to(result)
        except Exception:  # a bug of the receiver: its own result is lost, no others
            log.exception("receiver_failed", results=1)


def settle(future: asyncio.Future[Any], error: Exception | None, value: Any) -> None:
    """End the future, unless its request was cancelled."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
