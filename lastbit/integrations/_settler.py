"""Removes messages after their items were resolved, in threads of its own: for the adapters of task queues, whose
brokers may block.

*The worker ends first.* `drain` waits for the service. What is still open then is abandoned: `abandon` returns these
messages for the broker, which delivers them again. A response that arrives later finds nothing to remove.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from lastbit.client import Client
from lastbit.integrations._resolver import Resolver, Verb
from lastbit.models import Completed

log = logging.getLogger("lastbit.integrations")


@dataclass(frozen=True, slots=True)
class Resolution:
    """How an item ends: it is acked, or failed or skipped for a reason."""

    item: str
    verb: Verb = "ack"
    reason: str | None = None


@dataclass(eq=False, slots=True)
class _Open:
    """A message of which `unresolved` items are being resolved."""

    unresolved: int
    remove: Callable[[], object]
    message: Any
    owner: object


@dataclass(eq=False, slots=True)
class _ItemOfMessage:
    item: str
    message: _Open


class Settler:
    """Resolves items and then calls `remove` for their messages, in one of `threads` threads. It belongs to the process
    that starts it. `end`, `on_completed`, `linger`, `skip_ended`: as for `Resolver`."""

    def __init__(
        self,
        client: Client,
        end: Callable[[BaseException], object],
        on_completed: Callable[[Completed], object] | None = None,
        *,
        threads: int,
        linger: float,
        skip_ended: bool = True,
    ) -> None:
        self._end = end
        self._resolver: Resolver[_ItemOfMessage] = Resolver(
            client, self._resolved, self._refused, on_completed, linger=linger, skip_ended=skip_ended
        )
        self.skips = self._resolver.skips
        self.note_skipped = self._resolver.note_skipped
        self.learn = self._resolver.learn
        self.leave = self._resolver.leave
        self.ended = self._resolver.ended
        self._open: set[_Open] = set()
        self._lock = threading.Lock()
        self._closed_one = threading.Condition(self._lock)
        self._removals: SimpleQueue[_Open | None] = SimpleQueue()
        self._threads = threads
        self._is_started = False

    def start(self) -> None:
        """Start the threads, unless they run. Raises `RuntimeError` if the process may have no more; those that were
        started end."""
        if self._is_started:
            return
        try:
            self._resolver.start()
            for number in range(self._threads):
                # Daemons: with an unreachable broker, a removal may never return.
                threading.Thread(target=self._work, name=f"lastbit-settler-{number}", daemon=True).start()
        except RuntimeError:
            self._resolver.stop_repeating()
            for _ in range(self._threads):
                self._removals.put(None)
            raise
        self._resolver.follow()
        self._is_started = True

    @property
    def refusal(self) -> BaseException | None:
        """The error with which the service refuses acks for good."""
        return self._resolver.refusal

    def settle(
        self,
        resolutions: Sequence[Resolution],
        remove: Callable[[], object],
        message: Any = None,
        owner: object = None,
    ) -> None:
        """Resolve the items, and then call `remove`: at once if there are none. Returns without waiting for the
        service. `message` and `owner` are for `abandon`."""
        if not resolutions:
            remove()
            return
        entry = _Open(len(resolutions), remove, message, owner)
        with self._lock:
            self._open.add(entry)
        for resolution in resolutions:
            item = _ItemOfMessage(resolution.item, entry)
            if resolution.verb == "fail":
                self._resolver.fail(item, resolution.reason)
            elif resolution.verb == "skip":
                self._resolver.skip(item, resolution.reason)
            else:
                self._resolver.ack(item)

    def __len__(self) -> int:
        """The number of messages that are not settled yet."""
        return len(self._open)

    def drain(self, timeout: float) -> bool:
        """Wait until no message is open, for at most `timeout` seconds, and not if the service refuses acks for good.
        Returns whether none is open."""
        with self._lock:
            self._closed_one.wait_for(lambda: not self._open or self.refusal is not None, timeout)
            return not self._open

    def abandon(self, owner: object = None) -> list[Any]:
        """The open messages of an owner, which are not removed any more. If no other message is open, nothing is sent
        again."""
        with self._lock:
            entries = [entry for entry in self._open if entry.owner is owner]
            self._open.difference_update(entries)
            self._closed_one.notify_all()
            is_last = not self._open
        if is_last:
            self._resolver.stop_repeating()
        return [entry.message for entry in entries]

    def _resolved(self, items: Sequence[_ItemOfMessage], are_failed: bool) -> None:
        with self._lock:
            for item in items:
                item.message.unresolved -= 1
                if not item.message.unresolved:
                    self._removals.put(item.message)

    def _refused(self, error: BaseException) -> None:
        with self._lock:
            self._closed_one.notify_all()
        self._end(error)

    def _work(self) -> None:
        while (entry := self._removals.get()) is not None:
            with self._lock:
                if entry not in self._open:
                    continue
            try:
                entry.remove()
            except Exception:  # such as an error of another add-on; the thread goes on
                log.exception("a message was not removed, although its items are resolved")
            with self._lock:
                self._open.discard(entry)
                self._closed_one.notify_all()
