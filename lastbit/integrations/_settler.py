"""Resolves the items of messages without holding the threads that handled them, and settles each message afterwards.

A message may be removed from its broker only after its item's resolution is committed. A worker thread that waited for
each response would do little else. So it passes the message to a settler and takes the next one. The settler gathers
resolutions in an acker, and its own threads remove the messages.

What could go wrong, and why it can't:

*A resolution fails*, because the service is down or refuses the token. The message must not stay unacked in a worker
that lives, as most brokers redeliver only the messages of dead workers. So the settler tries again until it succeeds.
Meanwhile the broker's limit of unacked messages stops the worker.

*An item is rejected*, as its batch was cancelled or deleted. No repetition would help: it is logged, and the message is
removed. So is the message of an item that a nested batch holds.

*The worker ends first.* `drain` waits for the responses. What is still open then is abandoned: `abandon` returns these
messages for the broker, which delivers them again. A response that arrives later finds nothing to remove.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from lastbit.acker import Acker
from lastbit.integrations._delayed import DelayedCalls
from lastbit.integrations._resolving import is_rejection, level_of

log = logging.getLogger("lastbit.integrations")

PAUSE: Final = 1.0
"""Seconds until a failed resolution is repeated, in addition to the client's own retries."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """How an item ended: acked, or failed with a reason."""

    item: str
    failed: bool = False
    reason: str | None = None


@dataclass(eq=False, slots=True)
class _Open:
    """A message whose item is being resolved."""

    resolution: Resolution
    remove: Callable[[], object]
    message: Any
    owner: object


class Settler:
    """Resolves items through `acker` and then calls `remove` for their messages, in one of `threads` threads. It
    belongs to the process that made it."""

    def __init__(self, acker: Acker, threads: int) -> None:
        self.process = os.getpid()
        self._acker = acker
        self._open: set[_Open] = set()
        self._lock = threading.Lock()
        self._closed_one = threading.Condition(self._lock)
        self._removals: SimpleQueue[_Open | None] = SimpleQueue()
        self._unresolved = DelayedCalls("lastbit-settler-again", PAUSE)
        """Resolutions that failed."""
        try:
            self._unresolved.start()
            for number in range(threads):
                # Daemons: with an unreachable broker, a removal may never return.
                threading.Thread(target=self._work, name=f"lastbit-settler-{number}", daemon=True).start()
        except RuntimeError:  # the process may have no more threads: end those that were started
            self._unresolved.close()
            for _ in range(threads):
                self._removals.put(None)
            raise

    def settle(self, resolution: Resolution, remove: Callable[[], object], message: Any, owner: object) -> None:
        """Resolve the item, and then call `remove`. Returns at once. `message` and `owner` are
        for `abandon`."""
        entry = _Open(resolution, remove, message, owner)
        with self._lock:
            self._open.add(entry)
        self._try(entry)

    def __len__(self) -> int:
        """The number of messages that are not settled yet."""
        return len(self._open)

    def drain(self, timeout: float) -> bool:
        """Wait until no message is open, for at most `timeout` seconds. Returns whether that is so."""
        with self._lock:
            return self._closed_one.wait_for(lambda: not self._open, timeout)

    def abandon(self, owner: object) -> list[Any]:
        """The open messages of an owner, which are not removed any more."""
        with self._lock:
            entries = [entry for entry in self._open if entry.owner is owner]
            self._open.difference_update(entries)
            self._closed_one.notify_all()
        return [entry.message for entry in entries]

    def _resolve(self, entry: _Open) -> None:
        item, reason = entry.resolution.item, entry.resolution.reason
        future = self._acker.fail(item, reason) if entry.resolution.failed else self._acker.ack(item)
        future.add_done_callback(lambda answer: self._answered(entry, answer))

    def _answered(self, entry: _Open, future: Future[Any]) -> None:
        """Called in the acker's thread, which must not wait for the broker."""
        error = future.exception()
        if error is not None and not is_rejection(error, entry.resolution.item):
            self._try_again(entry, error)
            return
        if error is not None:
            log.log(level_of(error), "%s; its message is removed", error)
        self._removals.put(entry)

    def _try_again(self, entry: _Open, error: BaseException) -> None:
        if self._unresolved.add(partial(self._try, entry)):
            log.warning("items are not resolved yet, and are sent again: %s", error)

    def _try(self, entry: _Open) -> None:
        with self._lock:
            if entry not in self._open:
                return
        try:
            self._resolve(entry)
        except Exception as failure:  # noqa: BLE001  # such as an acker's thread that could not be started
            self._try_again(entry, failure)

    def _work(self) -> None:
        while (entry := self._removals.get()) is not None:
            with self._lock:
                if entry not in self._open:
                    continue
            try:
                entry.remove()
            except Exception:  # such as an error of another add-on; the thread goes on
                log.exception("the message of item %s was not removed", entry.resolution.item)
            with self._lock:
                self._open.discard(entry)
                self._closed_one.notify_all()
