"""Which records may be handled next: a queue for each key, of which any free worker takes the next records.

It knows neither threads, nor an event loop, nor the time. `ready(key)` tells the runner that a worker should `take`
from that key, and `call_later(seconds, function)` asks it to call a function once that time has passed. What could go
wrong, and why it can't:

* Two workers handle one key at once, or a later record before an earlier one. Between `take` and `finished`, or until
  the retry of a record that failed, its key isn't ready: nothing else of it is taken.
* A key is forgotten. A key with records is in exactly one state: it is ready; a worker has it; it waits for a retry; or
  it waits for more records of its batch. Each state ends with a call to `ready`, or with an empty queue.
* A stuck or failing key holds others. Keys share nothing but the workers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

R = TypeVar("R")


class Entry(NamedTuple, Generic[R]):
    """A record that was tracked and isn't done."""

    position: int
    offset: Any
    record: R
    tries: int = 0
    """How often its handler has failed."""


UNWANTED: Final = object()
"""In place of a key: the record is not to be handled."""

UNORDERED: Final = object()
"""The key of all records without order. Any number of workers take its records at once."""


class Schedule(Generic[R]):
    """`batch`: the most records that one `take` returns. `linger`: seconds for which fewer wait for others of their
    key."""

    def __init__(
        self,
        ready: Callable[[Hashable], object],
        call_later: Callable[[float, Callable[[], None]], object],
        batch: int = 1,
        linger: float = 0.0,
    ) -> None:
        self._ready = ready
        self._call_later = call_later
        self._batch = batch
        self._linger = linger if batch > 1 else 0.0
        self._queues: dict[Hashable, deque[Entry[R]]] = {}
        self._lingering: dict[Hashable, object] = {}
        """Keys that wait for more records, each with a mark of this wait."""
        self._left = 0
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """The number of records that were added and aren't done."""
        return self._left

    def add(self, entry: Entry[R], key: Hashable) -> None:
        """A record has come. Raises `TypeError` if the key can't be hashed."""
        with self._lock:
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = deque((entry,))
                self._left += 1
                self._release(key, queue)
                return
            queue.append(entry)
            self._left += 1
            if len(queue) >= self._batch and self._lingering.pop(key, None):
                self._ready(key)

    def take(self, key: Hashable) -> list[Entry[R]]:
        """The next records of a key that was ready; they must be given to `finished` or `retry`."""
        with self._lock:
            queue = self._queues[key]
            entries = [queue.popleft() for _ in range(min(self._batch, len(queue)))]
            if key is UNORDERED:
                self._go_on(key, queue)
            return entries

    def finished(self, key: Hashable, count: int) -> bool:
        """`count` records of the key are done, and no other one that was taken waits for a retry. Returns whether none
        is left of any key."""
        with self._lock:
            self._left -= count
            if key is not UNORDERED:
                self._go_on(key, self._queues[key])
            return not self._left

    def retry(self, key: Hashable, entries: Sequence[tuple[Entry[R], float]], finished: int = 0) -> None:
        """Of the records that were taken, these wait for so many seconds, and `finished` others are done. The key waits
        for the longest of these times, so that its order is kept."""
        with self._lock:
            self._left -= finished
        if key is UNORDERED:
            for entry, seconds in entries:
                self._call_later(seconds, partial(self._again, key, [entry]))
        else:
            seconds = max(seconds for _, seconds in entries)
            self._call_later(seconds, partial(self._again, key, [entry for entry, _ in entries]))

    def flush(self) -> None:
        """No more records will come, so none waits for others."""
        with self._lock:
            self._linger = 0.0
            for key in self._lingering:
                self._ready(key)
            self._lingering.clear()

    def _again(self, key: Hashable, entries: list[Entry[R]]) -> None:
        with self._lock:
            queue = self._queues.setdefault(key, deque())
            # Records without order may be ready already, as no retry holds them.
            is_ready = key is UNORDERED and bool(queue) and self._lingering.pop(key, None) is None
            queue.extendleft(reversed(entries))
            if not is_ready:
                self._ready(key)

    def _go_on(self, key: Hashable, queue: deque[Entry[R]]) -> None:
        if queue:
            self._release(key, queue)
        else:
            del self._queues[key]

    def _release(self, key: Hashable, queue: deque[Entry[R]]) -> None:
        """The key has records, and no worker has it."""
        if not self._linger or len(queue) >= self._batch:
            self._ready(key)
        else:
            mark = self._lingering[key] = object()
            self._call_later(self._linger, partial(self._waited, key, mark))

    def _waited(self, key: Hashable, mark: object) -> None:
        with self._lock:
            if self._lingering.get(key) is mark:
                del self._lingering[key]
                self._ready(key)
