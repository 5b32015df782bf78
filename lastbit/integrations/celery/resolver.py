"""Resolves items in a worker's main process, through one acker, and continues with each message after the commit. Other
adapters use `lastbit.integrations._settler`; here a message may have several items, and Celery has a thread for the
broker.

What could go wrong: the service is away for longer than the client retries, or refuses the token. Then the resolutions
are held, and sent again from time to time. Their messages stay in the broker, as not acknowledged, so a worker that has
reached its prefetch limit takes no more tasks. If the worker ends first, the messages are redelivered.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from lastbit.acker import Acker, ItemResult
from lastbit.client import Client
from lastbit.integrations._delayed import DelayedCalls
from lastbit.integrations._resolving import is_rejection, level_of
from lastbit.integrations._settler import Resolution
from lastbit.models import Completed

log = logging.getLogger("lastbit.celery")

PAUSE: Final = 5.0
"""Seconds until resolutions that failed are sent again. The client has retried for longer than that before."""
LINGER: Final = 0.1
"""Seconds that acks are gathered, if that cannot leave the worker without work."""
LARGE_PREFETCH: Final = 200
"""Messages. An acker gathers at most a hundred items, so a worker with this prefetch has as many other tasks to run."""


class Resolver:
    """Made in each process that imports the app. Only workers start its threads, after they have forked their first
    children."""

    def __init__(self, client: Callable[[], Client], on_completed: Callable[[Completed], object] | None) -> None:
        self._client = client
        self._on_completed = on_completed
        self._acker: Acker | None = None
        self._linger = 0.0
        self._lock = threading.Lock()
        self._is_done = threading.Condition(self._lock)
        self._open = 0
        self._held = DelayedCalls("lastbit-again", PAUSE)

    def start(self, prefetch: int) -> None:
        """Called before the first message. `prefetch`: the number of messages that the worker takes at a time; 0 if it
        is not limited."""
        # With fewer messages, those that wait for their ack would soon be all that the broker gives to this worker.
        self._linger = LINGER if prefetch == 0 or prefetch >= LARGE_PREFETCH else 0.0
        self._held.start()

    def resolve(self, resolutions: Sequence[Resolution], then: Callable[[], None]) -> None:
        """Resolve the items, and call `then` after the commit of the last one: at once if there are none, otherwise in
        another thread."""
        if not resolutions:
            then()
            return
        if len(resolutions) > 1:
            then = _Countdown(len(resolutions), then)
        with self._lock:
            self._open += len(resolutions)
        for resolution in resolutions:
            self._send(resolution, then)

    def flush(self, seconds: float) -> bool:
        """Wait until all items are resolved, for this long; returns whether they are."""
        with self._lock:
            return self._is_done.wait_for(lambda: not self._open, seconds)

    def _send(self, resolution: Resolution, then: Callable[[], None]) -> None:
        try:
            acker = self._running_acker()
            if resolution.failed:
                future = acker.fail(resolution.item, resolution.reason)
            else:
                future = acker.ack(resolution.item)
        except Exception as error:  # noqa: BLE001  # such as an acker's thread that could not be started
            self._hold(resolution, then, error)
            return
        future.add_done_callback(partial(self._continue, resolution, then))

    def _continue(self, resolution: Resolution, then: Callable[[], None], future: Future[ItemResult]) -> None:
        error = future.exception()
        if error is not None and not is_rejection(error, resolution.item):
            self._hold(resolution, then, error)
            return
        if error is not None:
            # It would be rejected again after each redelivery.
            log.log(level_of(error), "the task's message is removed although %s", error)
        try:
            then()
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._is_done.notify_all()

    def _hold(self, resolution: Resolution, then: Callable[[], None], error: BaseException) -> None:
        if self._held.add(partial(self._send, resolution, then)):
            log.error("items are not resolved, and their messages stay in the broker, until this ends: %s", error)

    def _running_acker(self) -> Acker:
        with self._lock:
            if self._acker is None:
                # The broker limits the messages that are open. An acker that blocks would stop the worker's event loop.
                self._acker = self._client().acker(self._on_completed, max_pending=sys.maxsize, linger=self._linger)
            return self._acker


class _Countdown:
    """Calls `then` at the last of `count` calls."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count = count
        self._then = then
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = not self._count
        if is_last:
            self._then()
