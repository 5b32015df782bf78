"""The requests that wait for a thread of the pool, in which all routes but the fast ones run."""

from __future__ import annotations

import asyncio

import anyio.to_thread

from api.metrics import REFUSED
from api.problems import Problem


class Threads:
    """The thread pool of one event loop."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._admitted = 0
        """Requests admitted in this event-loop iteration. They request a thread in the next one."""

    def admit(self) -> None:
        """Admit a request that may need a thread, in the task that will request it. Raises `Problem` if too many wait
        for one. The request is counted until the next event-loop iteration: many may arrive in one iteration, and the
        thread pool's statistics don't include them yet."""
        pool = anyio.to_thread.current_default_thread_limiter().statistics()
        free = pool.total_tokens - pool.borrowed_tokens
        if pool.tasks_waiting + self._admitted - free >= self._most_waiting:
            REFUSED.labels("requests").inc()
            raise Problem("unavailable", "too many requests are waiting", headers={"Retry-After": "1"})
        self._admitted += 1
        asyncio.get_running_loop().call_soon(self._forget_admitted)

    def _forget_admitted(self) -> None:
        self._admitted -= 1
