"""Results that other threads hand to the event loop, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from core.commits.pending import Mailbox, Pending


class Wakeups(Mailbox):
    """The mailbox of an event loop, which calls the receivers. One call into the loop, which wakes it, serves all
    results that were put together."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        note: Callable[[Sequence[Pending[Any]]], None] = lambda finished: None,
    ) -> None:
        """`note` is called in the loop too, once for all results that were put together."""
        self._loop = loop
        self._note = note
        self._finished: deque[Sequence[Pending[Any]]] = deque()

    def put(self, finished: Sequence[Pending[Any]]) -> None:
        self._finished.append(finished)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so are all connections
            self._loop.call_soon_threadsafe(self.empty)

    @property
    def is_empty(self) -> bool:
        return not self._finished

    def empty(self) -> None:
        """Call the receivers of all results. Only the loop's thread may call this."""
        while self._finished:
            finished = self._finished.popleft()
            super().put(finished)
            self._note(finished)
