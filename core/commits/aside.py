"""Batches that are set aside: one of their rows stays locked, or their counts and bits disagree.

Merged with others, such a batch would make flush after flush wait or fail. So its units wait here and are flushed
alone, in separate threads, until a flush of the batch is committed, or none was tried for `PROBATION` seconds.

*One stuck batch blocks another.* Each try waits for a lock once, and then the other batches have their turn. There are
`THREADS` threads, so up to three stuck batches don't delay a fourth at all.

*A client that repeatedly sends items of a broken batch keeps a core busy.* A broken batch is tried once in `PAUSE`
seconds, and all calls that have arrived by then get the same response.

*Memory grows without limit.* At most `MOST` batches without waiting units are kept.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from core import errors, threads
from core.commits.lanes import FLUSH_COST, FLUSH_UNITS, Backlog, Load, Waiting
from core.commits.operation import MergeableUnit
from core.commits.pending import Pending

THREADS: Final = 4
TRIES: Final = 4
"""The number of lock waits of a unit before its call fails."""
PAUSE: Final = 0.25
"""Seconds between two tries of a batch that fails for a reason other than a lock."""
PROBATION: Final = 60.0
"""Seconds for which a batch without waiting units stays here after its last failed try."""
MOST: Final = 1000


@dataclass(slots=True)
class _Batch:
    queue: deque[Waiting] = field(default_factory=deque)
    busy: bool = False
    """One of the threads is flushing it."""
    tries: int = 0
    """The number of timed-out lock waits of its oldest units."""
    not_before: float = 0.0
    failed_at: float = 0.0


class Aside:
    """All state is protected by `lock`, which callers hold. `flush` is called without the lock, from the threads here,
    with one batch and its units, and calls `committed`, `locked` or `failed` at its end."""

    def __init__(self, lock: threading.Lock, backlog: Backlog, flush: Callable[[int, list[Waiting]], None]) -> None:
        self._lock = lock
        self._wake = threading.Condition(lock)
        self._batches: OrderedDict[int, _Batch] = OrderedDict()
        """The least recently tried batch is the first."""
        self._backlog = backlog
        self._flush = flush
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def holds(self, batch: int) -> bool:
        """Whether units of the batch belong here."""
        entry = self._batches.get(batch)
        if entry is None:
            return False
        if entry.busy or entry.queue or time.monotonic() - entry.failed_at < PROBATION:
            return True
        del self._batches[batch]
        return False

    def set_aside(self, batch: int, units: Iterable[Waiting], *, is_broken: bool) -> bool:
        """Add a batch that has just failed. Returns False, and adds nothing, if there is no thread to flush it."""
        if not self._has_threads():
            return False
        now = time.monotonic()
        entry = self._batches[batch] = _Batch(deque(units), failed_at=now, not_before=now + PAUSE if is_broken else 0.0)
        if len(self._batches) > MOST:
            self._forget()
        if entry.queue:
            self._wake.notify()
        return True

    def put(self, unit: MergeableUnit, pending: Pending[Any]) -> None:
        batch = self._batches[unit.batch]
        batch.queue.append((unit, pending))
        if not batch.busy:
            self._wake.notify()

    def put_back(self, batch: int, rests: Sequence[Waiting]) -> None:
        """Queue the rests of units of the batch that were applied in part."""
        self._backlog.units += len(rests)
        self._batches[batch].queue.extend(rests)

    def committed(self, batch: int, *, stay: bool = False) -> Sequence[Waiting]:
        """Stop setting the batch aside. Removes and returns its waiting units; with `stay`, keeps them instead."""
        if not stay:
            return self._batches.pop(batch).queue
        self._batches[batch].tries = 0
        return ()

    def locked(self, batch: int, units: list[Waiting]) -> bool:
        """A lock wait has timed out. Returns whether the units are tried again."""
        entry = self._batches[batch]
        entry.failed_at = time.monotonic()
        entry.tries += 1
        if entry.tries >= TRIES:
            entry.tries = 0
            return False
        entry.queue.extendleft(reversed(units))
        return True

    def failed(self, batch: int) -> None:
        entry = self._batches[batch]
        entry.failed_at = time.monotonic()
        entry.not_before = entry.failed_at + PAUSE

    def stop(self) -> None:
        """Flush the waiting units and end the threads. No units may be added any more."""
        with self._lock:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _has_threads(self) -> bool:
        """Start the threads that are missing, as far as the system allows; return whether there are any."""
        while len(self._threads) < THREADS:
            try:
                self._threads.append(threads.start(self._run, name=f"combiner-aside-{len(self._threads)}"))
            except errors.Unavailable:
                break
        return bool(self._threads)

    def _forget(self) -> None:
        for batch, entry in self._batches.items():
            if not entry.busy and not entry.queue:
                del self._batches[batch]
                return

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = self._next()
                if batch is None:
                    return
                entry = self._batches[batch]
                entry.busy = True
                units = self._take(batch, entry)
            self._flush(batch, units)
            with self._lock:
                entry.busy = False
                self._wake.notify_all()

    def _next(self) -> int | None:
        """Wait for the batch whose turn is next; None when the threads must end."""
        while True:
            now = time.monotonic()
            next_try: float | None = None
            for batch, entry in self._batches.items():
                if entry.busy or not entry.queue:
                    continue
                if entry.not_before <= now or self._stopping:
                    self._batches.move_to_end(batch)
                    return batch
                next_try = entry.not_before if next_try is None else min(next_try, entry.not_before)
            # A running flush may put units back.
            if self._stopping and not any(entry.busy for entry in self._batches.values()):
                return None
            self._wake.wait(None if next_try is None else next_try - now)

    def _take(self, batch: int, entry: _Batch) -> list[Waiting]:
        load = Load(FLUSH_UNITS, FLUSH_COST)
        while entry.queue and not load.is_full and load.add(*entry.queue[0]):
            entry.queue.popleft()
        self.put_back(batch, load.rests)
        return load.taken
