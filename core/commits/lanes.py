"""The combiner's queues, and its main lane, which selects the waiting units of the next flush.

Batches take turns, one unit at a time, and a flush is bounded in units, groups and cost. A unit that is larger than a
flush is applied in pieces. The rest of it goes to the end of its batch's queue, so other calls come between its pieces,
even those of the same batch. If its first piece doesn't fit into a flush that is partly full, the unit keeps its place
and begins the next flush.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeAlias

import structlog

from core import errors, metrics
from core.commits.admission import Admission
from core.commits.operation import MergeableUnit
from core.commits.pending import Pending
from core.commits.shedding import LEAST
from core.threads import QueueThread

UNIT_GROUPS: Final = 512
"""The maximum number of groups that one flush locks."""
FLUSH_COST: Final = 4096
"""The maximum cost of one flush, in units of about 10 µs. A flush of this cost takes about 50 ms, and delays all other
calls by as much."""
FLUSH_UNITS: Final = 4096
"""The maximum number of units in one flush."""
FLUSH_SECONDS: Final = 0.05
"""The expected maximum duration of a flush. If the database is slow, flushes get smaller."""
LEAST_COST: Final = 256
"""The minimum bound of a flush's cost, however slow the database is."""
PASSED_OVER: Final = 16
"""A flush takes no more units after the next units of this many batches didn't fit into it. Trying all batches would
take long, under the lock."""
GATHER: Final = 0.002
"""Seconds to wait, after a flush that several calls shared, for the next calls of these callers."""

log = structlog.get_logger(__name__)


Waiting: TypeAlias = tuple[MergeableUnit, Pending[Any]]


def too_many(what: str) -> str:
    """Why a call is refused; `what` is the plural of what the combiner commits."""
    return f"more {what} arrive than can be committed"


class Backlog:
    """The work of all lanes: the number of units that wait or are in a flush, and the bytes of the large ones. Both are
    bounded, but one call is always admitted."""

    def __init__(self, most_units: int, most_bytes: int, what: str) -> None:
        self.units = 0
        self.bytes = 0
        self._most_units = most_units
        self._most_bytes = most_bytes
        self._what = what

    def enter(self, units: int, size: int) -> None:
        """Add the units of a call, of `size` bytes. Raises `errors.Overloaded`."""
        if self.units and self.units + units > self._most_units:
            raise errors.Overloaded(f"{self.units:,} {self._what} are waiting already")
        if self.bytes and self.bytes + size > self._most_bytes:
            raise errors.Overloaded(f"{self.bytes:,} bytes of {self._what} are waiting already")
        self.units += units
        self.bytes += size

    def leave(self, units: Sequence[Waiting]) -> None:
        self.units -= len(units)
        if self.bytes:
            self.bytes -= sum([unit.size for unit, _ in units])


class Load:
    """A flush that is being assembled. `rests` are the remaining parts of units that were taken in part."""

    def __init__(self, units: int, cost: int) -> None:
        self.taken: list[Waiting] = []
        self.rests: list[Waiting] = []
        self._units = units
        self._groups: dict[int, set[int]] = {}
        self._count = 0
        self._most_cost = cost
        self.cost = 0

    @property
    def is_full(self) -> bool:
        return len(self.taken) >= self._units or self._count >= UNIT_GROUPS or self.cost >= self._most_cost

    def add(self, unit: MergeableUnit, pending: Pending[Any]) -> bool:
        """Add the unit, or a piece of it. False if it must wait for the next flush."""
        groups = self._groups.setdefault(unit.batch, set())
        new_groups = len(unit.groups() - groups)
        if self._count + new_groups > UNIT_GROUPS or self.cost + unit.cost > self._most_cost:
            if self.taken and (
                not unit.divisible or self._count > UNIT_GROUPS // 2 or self.cost > self._most_cost // 2
            ):
                return False
            if unit.divisible:
                rest, unit = unit, unit.take(UNIT_GROUPS - self._count, self._most_cost - self.cost)
                if not rest.is_empty():
                    pending.left += 1
                    self.rests.append((rest, pending))
                new_groups = len(unit.groups() - groups)
        groups.update(unit.groups())
        self._count += new_groups
        self.cost += unit.cost
        self.taken.append((unit, pending))
        return True


class Arrivals:
    """The age of the oldest waiting unit, accurate to one flush. To read the clock for each unit would cost too much,
    so a time is noted for the first unit that arrives after each flush."""

    def __init__(self) -> None:
        self._left = 0
        """The number of units that have left."""
        self._times: deque[tuple[int, float]] = deque()
        """(number of earlier units, arrival time) of the noted units that may still wait. The first one, or a unit that
        came after it and before the next one, is the oldest."""
        self.is_due = True
        """Whether the next unit that arrives is to be noted."""

    def note(self, waiting: int) -> None:
        """A unit arrives, and `waiting` others wait."""
        self.is_due = False
        self._times.append((self._left + waiting, time.monotonic()))

    def leave(self, count: int, waiting: int) -> None:
        """`count` units leave, and `waiting` remain."""
        self._left += count
        self.is_due = True
        while len(self._times) > 1 and self._times[1][0] <= self._left:
            self._times.popleft()
        if not waiting:
            self._times.clear()

    @property
    def oldest(self) -> float | None:
        """The arrival time of the oldest waiting unit; None if none waits."""
        return self._times[0][1] if self._times else None


class MainLane(QueueThread):
    """A queue for each batch, and one thread that flushes them in turn. All state is protected by `lock`."""

    def __init__(
        self,
        lock: threading.Lock,
        backlog: Backlog,
        flush: Callable[[list[Waiting]], None],
        send_away: Callable[[list[Waiting]], None],
        admission: Admission | None = None,
        what: str = "acks",
    ) -> None:
        super().__init__(f"combiner-{what}", lock)
        self._what = what
        self.queues: OrderedDict[int, deque[Waiting]] = OrderedDict()
        self.waiting = 0
        """Units in the queues."""
        self.waiting_calls = 0
        """The calls of these units."""
        self._arrivals = Arrivals()
        self.wake_at: int | None = None
        """The number of waiting units at which the thread wakes up; None: it is not asleep."""
        self._most_cost = FLUSH_COST
        self._backlog = backlog
        self._flush = flush
        self._send_away = send_away
        self.admission = admission

    def put(self, unit: MergeableUnit, pending: Pending[Any]) -> None:
        queue = self.queues.get(unit.batch)
        if queue is None:
            queue = self.queues[unit.batch] = deque()
        queue.append((unit, pending))
        if self._arrivals.is_due:
            self._arrivals.note(self.waiting)
        self.waiting += 1
        self.waiting_calls += not pending.queued
        pending.queued += 1
        if self.wake_at is not None and self.waiting >= self.wake_at:
            self.wake.notify()

    def take(self, limit: int) -> Load:
        """Take the next flush: one unit of each waiting batch in turn, until it is full or has `limit` units."""
        load = Load(limit, self._most_cost)
        passed_over: list[tuple[int, deque[Waiting]]] = []
        while self.queues and not load.is_full and len(passed_over) < PASSED_OVER:
            batch, queue = self.queues.popitem(last=False)
            # The last batch doesn't take turns.
            turn = len(queue) if not self.queues else 1
            while turn and not load.is_full and load.add(*queue[0]):
                queue.popleft()
                turn -= 1
            if turn:
                passed_over.append((batch, queue))
            elif queue:
                self.queues[batch] = queue
        for batch, queue in reversed(passed_over):
            self.queues[batch] = queue
            self.queues.move_to_end(batch, last=False)
        self._leave(load.taken)
        self.put_back(load.rests)
        return load

    def put_back(self, rests: Sequence[Waiting]) -> None:
        """Queue the rests of units that were taken in part."""
        self._backlog.units += len(rests)
        for unit, pending in rests:
            self.put(unit, pending)

    def give_up(self, batch: int) -> Collection[Waiting]:
        """Remove and return all waiting units of a batch."""
        queue = self.queues.pop(batch, ())
        self._leave(queue)
        return queue

    def shorten(self, keep: int) -> list[Waiting]:
        """Remove and return the oldest units, from each batch in proportion, until `keep` units wait."""
        surplus, waiting = self.waiting - keep, self.waiting
        excess: list[Waiting] = []
        due = 0
        for batch, queue in list(self.queues.items()):
            share, due = divmod(due + len(queue) * surplus, waiting)
            excess += [queue.popleft() for _ in range(share)]
            if not queue:
                del self.queues[batch]
        self._leave(excess)
        return excess

    def _leave(self, units: Collection[Waiting]) -> None:
        for _, pending in units:
            pending.queued -= 1
            self.waiting_calls -= not pending.queued
        self.waiting -= len(units)
        self._arrivals.leave(len(units), self.waiting)

    def _serve(self) -> None:
        last_units = 0
        while True:
            with self.wake:
                if last_units > 1:
                    self._sleep(self.waiting + last_units, GATHER)
                self._sleep(1, None)
                start = time.monotonic()
                oldest = self._arrivals.oldest
                load, surplus = self._admitted(start, 0.0 if oldest is None else start - oldest)
            if surplus:
                self._send_away(surplus)
            units = load.taken
            if not units:
                return
            metrics.FLUSH_UNITS.observe(len(units))
            if oldest is not None:
                metrics.FLUSH_WAIT.observe(start - oldest)
            self._flush(units)
            self._flushed(load, time.monotonic(), start)
            last_units = len(units)

    def _flushed(self, load: Load, end: float, start: float) -> None:
        """Adjust the bounds of the next flushes to the duration of this one."""
        seconds = end - start
        if load.cost >= LEAST_COST:
            cost = round(load.cost * FLUSH_SECONDS / max(seconds, 1e-6))
            # Change by a factor of two at most: a single long flush may be an exception.
            cost = min(2 * self._most_cost, max(self._most_cost // 2, cost))
            self._most_cost = min(FLUSH_COST, max(LEAST_COST, cost))
        if self.admission is not None and not load.rests:
            # A piece of a large unit doesn't show how long a unit takes.
            self.admission.flushed(end, len(load.taken), seconds)

    def _admitted(self, now: float, wait: float) -> tuple[Load, list[Waiting]]:
        """The next flush, and the units to refuse. Called under the lock."""
        admission = self.admission
        if admission is None or self.stopping:
            return self.take(FLUSH_UNITS), []
        before = admission.limit
        # So few calls would not be refused, however long they wait: they may be large ones, or have units of many
        # batches.
        admission.taking(now, wait if self.waiting_calls > LEAST else 0.0)
        limit = admission.limit
        surplus: list[Waiting] = []
        if before is None and limit is not None:
            self._warn_of_refusals(limit)
            surplus = self.shorten(limit) if self.waiting > limit else []
        elif before is not None and limit is None:
            self._warn_of_refusals(None)
        return self.take(admission.flush_limit(now, FLUSH_UNITS)), surplus

    def _sleep(self, until: int, seconds: float | None) -> None:
        """Sleep until `until` units wait, the time is over or the lane stops."""
        self.wake_at = until
        self.wake.wait_for(lambda: self.waiting >= until or self.stopping, seconds)
        self.wake_at = None

    def _warn_of_refusals(self, limit: int | None) -> None:
        """Log that refusals begin or, without a limit, that they end."""
        if self._what == "acks" and limit is not None:
            log.warning("acks_shed", waiting=self.waiting, limit=limit)
        elif self._what == "acks":
            log.warning("acks_shed_no_more", waiting=self.waiting)
        elif limit is not None:
            log.warning("writes_shed", waiting=self.waiting, limit=limit)
        else:
            log.warning("writes_shed_no_more", waiting=self.waiting)
