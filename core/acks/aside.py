"""Batches that are set aside: a row of theirs stays locked, or their counts and bits disagree.

Merged with others, such a batch would make flush after flush wait or fail. So its units wait here and are flushed by
themselves, in threads of their own, until one flush of it is committed or none was tried for `PROBATION` seconds.

*One stuck batch holds up another.* Each try waits for a lock once; then the other batches have their turn. A try is one
of `THREADS`, so that up to three stuck batches don't delay a fourth at all.

*A client that sends items of a broken batch again and again keeps a core busy.* A broken batch is tried once in
`PAUSE` seconds, and all calls that have come by then get the same answer.

*Memory.* At most `MOST` batches without waiting units are remembered.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from core.acks.call import FLUSH_COST, Unit
from core.acks.lanes import FLUSH_UNITS, Backlog, Load, Pending, Waiting

THREADS: Final = 4
TRIES: Final = 4
"""How often a unit waits for a lock until its caller must come back."""
PAUSE: Final = 0.25
"""Seconds between two tries of a batch that fails for another reason than a lock."""
PROBATION: Final = 60.0
"""Seconds after its last failed try for which a batch stays here though nothing came for it."""
MOST: Final = 1000


@dataclass(slots=True)
class _Batch:
    queue: deque[Waiting] = field(default_factory=deque)
    busy: bool = False
    """One of the threads has a flush of it under way."""
    tries: int = 0
    """How often its oldest units have waited for a lock in vain."""
    not_before: float = 0.0
    failed_at: float = 0.0


class Aside:
    """All state is under `lock`, which its callers hold. `flush` is called without it, from the threads here, with one
    batch and its units; it ends with `committed`, `locked` or `failed`."""

    def __init__(self, lock: threading.Lock, backlog: Backlog, flush: Callable[[int, list[Waiting]], None]) -> None:
        self._lock = lock
        self._wake = threading.Condition(lock)
        self._batches: OrderedDict[int, _Batch] = OrderedDict()
        """The one at the front was tried longest ago."""
        self._backlog = backlog
        self._flush = flush
        self._stopping = False
        self._threads: list[threading.Thread] = []

    def holds(self, batch: int) -> bool:
        """Whether units of the batch belong here."""
        found = self._batches.get(batch)
        if found is None:
            return False
        if found.busy or found.queue or time.monotonic() - found.failed_at < PROBATION:
            return True
        del self._batches[batch]
        return False

    def set_aside(self, batch: int, units: Iterable[Waiting], *, broken: bool) -> None:
        """The batch has just failed."""
        now = time.monotonic()
        made = self._batches[batch] = _Batch(deque(units), failed_at=now, not_before=now + PAUSE if broken else 0.0)
        if len(self._batches) > MOST:
            self._forget()
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name=f"combiner-aside-{number}", daemon=True)
                for number in range(THREADS)
            ]
            for thread in self._threads:
                thread.start()
        if made.queue:
            self._wake.notify()

    def put(self, unit: Unit, pending: Pending) -> None:
        batch = self._batches[unit.batch]
        batch.queue.append((unit, pending))
        if not batch.busy:
            self._wake.notify()

    def put_back(self, batch: int, rests: Sequence[Waiting]) -> None:
        """What is left of units of the batch that were taken in part."""
        self._backlog.units += len(rests)
        self._batches[batch].queue.extend(rests)

    def committed(self, batch: int, *, stay: bool = False) -> Sequence[Waiting]:
        """It is a batch like any other again. Returns what waits for it, which no longer waits here; nothing if its
        units are to `stay` here."""
        if not stay:
            return self._batches.pop(batch).queue
        self._batches[batch].tries = 0
        return ()

    def locked(self, batch: int, taken: list[Waiting]) -> bool:
        """A lock wait was in vain. Whether the units have another try."""
        found = self._batches[batch]
        found.failed_at = time.monotonic()
        found.tries += 1
        if found.tries >= TRIES:
            found.tries = 0
            return False
        found.queue.extendleft(reversed(taken))
        return True

    def failed(self, batch: int) -> None:
        found = self._batches[batch]
        found.failed_at = time.monotonic()
        found.not_before = found.failed_at + PAUSE

    def stop(self) -> None:
        """Flush what waits, and end the threads. Nothing comes any more."""
        with self._lock:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _forget(self) -> None:
        for batch, found in self._batches.items():
            if not found.busy and not found.queue:
                del self._batches[batch]
                return

    def _run(self) -> None:
        while True:
            with self._lock:
                batch = self._next()
                if batch is None:
                    return
                found = self._batches[batch]
                found.busy = True
                taken = self._take(batch, found)
            self._flush(batch, taken)
            with self._lock:
                found.busy = False
                self._wake.notify_all()

    def _next(self) -> int | None:
        """The batch whose turn it is; None: there will be none."""
        while True:
            now = time.monotonic()
            soonest: float | None = None
            for batch, found in self._batches.items():
                if found.busy or not found.queue:
                    continue
                if found.not_before <= now or self._stopping:
                    self._batches.move_to_end(batch)
                    return batch
                soonest = found.not_before if soonest is None else min(soonest, found.not_before)
            # A flush that is under way may put units back.
            if self._stopping and not any(found.busy for found in self._batches.values()):
                return None
            self._wake.wait(None if soonest is None else soonest - now)

    def _take(self, batch: int, found: _Batch) -> list[Waiting]:
        load = Load(FLUSH_UNITS, FLUSH_COST)
        while found.queue and not load.is_full and load.add(*found.queue[0]):
            found.queue.popleft()
        self.put_back(batch, load.rests)
        return load.taken
