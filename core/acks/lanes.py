"""The combiner's queues, and its main lane: which of the waiting units the next flush takes.

Batches take turns, one unit at a time, and a flush is bounded in units, groups and cost. A unit that is larger than a
flush is taken in pieces. The rest of it goes to the end of its batch's queue, so other calls come between its pieces,
those of the same batch too. Its first piece may find no room beside what was taken before it; then it keeps its place
and begins the next flush.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import structlog

from core import metrics
from core.acks.admission import Admission
from core.acks.call import FLUSH_COST, UNIT_GROUPS, AckResult, Outcome, Unit
from core.batches.lifecycle import Verb

FLUSH_UNITS: Final = 4096
"""The most units of one flush; single acks of one group would otherwise be taken without end."""
FLUSH_SECONDS: Final = 0.05
"""How long a flush may be expected to take. Where the database is slow, less is taken."""
LEAST_COST: Final = 256
"""What a flush may cost, however slow the database is."""
GATHER: Final = 0.002
"""Seconds to wait, after a flush that several calls shared, for those callers to come back."""

log = structlog.get_logger(__name__)


class Pending:
    """One call under way. It is over when the last of its units is, or when the first one fails: then `answer` is
    whole, or `error` says why not. Units of one call may be in several lanes, so it is settled under the combiner's
    lock."""

    __slots__ = ("answer", "deliver", "error", "left", "to", "verb")

    def __init__(self, verb: Verb, units: int, deliver: Deliver, to: Any) -> None:
        self.verb = verb
        self.answer = AckResult()
        self.error: Exception | None = None
        self.left = units
        """Units, and pieces of units, that are not settled yet."""
        self.deliver = deliver
        self.to = to
        """Whom the answer is for, as its caller knows them."""

    def settle(self, outcome: Outcome) -> bool:
        """Whether the call is over with this."""
        if self.error is not None:
            return False
        self.answer.add(outcome)
        self.left -= 1
        return not self.left

    def fail(self, error: Exception) -> bool:
        """Whether the call is over with this, and was not before."""
        if self.error is not None:
            return False
        self.error = error
        return True


Deliver = Callable[[Sequence[Pending]], None]
"""Takes calls that are over, many at a time: a flush ends a thousand calls, and waking another thread for each would
cost more than the flush. Called from the combiner's threads; it must not block or raise."""

Waiting: TypeAlias = tuple[Unit, Pending]


class Backlog:
    """What all lanes have to do: units that wait or are in a flush, and the bytes of the large ones."""

    def __init__(self) -> None:
        self.units = 0
        self.bytes = 0

    def leave(self, taken: Sequence[Waiting]) -> None:
        self.units -= len(taken)
        if self.bytes:
            self.bytes -= sum([unit.size for unit, _ in taken])


class Load:
    """A flush that is being put together. `rests`: of the units that were taken in part, what is left."""

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

    def add(self, unit: Unit, pending: Pending) -> bool:
        """Take the unit, or a piece of it. False: it must wait for the next flush."""
        known = self._groups.setdefault(unit.batch, set())
        more = len(unit.groups() - known)
        if self._count + more > UNIT_GROUPS or self.cost + unit.cost > self._most_cost:
            if self.taken and (
                not unit.divisible or self._count > UNIT_GROUPS // 2 or self.cost > self._most_cost // 2
            ):
                return False
            if unit.divisible:
                rest, unit = unit, unit.take(UNIT_GROUPS - self._count, self._most_cost - self.cost)
                if rest.indexes or rest.masks:
                    pending.left += 1
                    self.rests.append((rest, pending))
                more = len(unit.groups() - known)
        known |= unit.groups()
        self._count += more
        self.cost += unit.cost
        self.taken.append((unit, pending))
        return True


class Lane:
    """A queue for each batch, and one thread that flushes from them in turns. All state is under `lock`."""

    def __init__(
        self,
        lock: threading.Lock,
        backlog: Backlog,
        flush: Callable[[list[Waiting]], None],
        send_away: Callable[[list[Waiting]], None],
        admission: Admission | None = None,
    ) -> None:
        self.queues: OrderedDict[int, deque[Waiting]] = OrderedDict()
        self.wake = threading.Condition(lock)
        self.stopping = False
        self.waiting = 0
        """Units in the queues."""
        self._left = 0
        """Units that are not in the queues any more."""
        self._came: deque[tuple[int, float]] = deque()
        """(units before it, time) of the first unit that came after each flush, as long as it, or one that came after
        it and before the next flush, waits. A look at the clock for each unit would cost too much."""
        self._noted = False
        """Whether a unit has come since the last flush."""
        self.wake_at: int | None = None
        """The thread sleeps until so many wait; None: it is at work."""
        self._most_cost = FLUSH_COST
        self._backlog = backlog
        self._flush = flush
        self._send_away = send_away
        self.admission = admission
        self.thread = threading.Thread(target=self._run, name="combiner", daemon=True)

    def put(self, unit: Unit, pending: Pending) -> None:
        queue = self.queues.get(unit.batch)
        if queue is None:
            queue = self.queues[unit.batch] = deque()
        queue.append((unit, pending))
        if not self._noted:
            self._noted = True
            self._came.append((self._left + self.waiting, time.monotonic()))
        self.waiting += 1
        if self.wake_at is not None and self.waiting >= self.wake_at:
            self.wake.notify()

    def take(self, most: int) -> Load:
        """The next flush: one unit of each waiting batch in turn, until it is full or has `most` units."""
        load = Load(most, self._most_cost)
        passed_over: list[tuple[int, deque[Waiting]]] = []
        while self.queues and not load.is_full:
            batch, queue = self.queues.popitem(last=False)
            # With one batch left there is nobody to take turns with.
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
        self._leave(len(load.taken))
        self.put_back(load.rests)
        return load

    def put_back(self, rests: Sequence[Waiting]) -> None:
        """What is left of units that were taken in part waits from now on."""
        self._backlog.units += len(rests)
        for unit, pending in rests:
            self.put(unit, pending)

    def give_up(self, batch: int) -> Sequence[Waiting]:
        """Take out all that waits for a batch."""
        behind = self.queues.pop(batch, ())
        self._leave(len(behind))
        return behind

    def shorten(self, keep: int) -> list[Waiting]:
        """Take out the oldest until `keep` units wait, of each batch its share."""
        surplus, waiting = self.waiting - keep, self.waiting
        out: list[Waiting] = []
        due = 0
        for batch, queue in list(self.queues.items()):
            share, due = divmod(due + len(queue) * surplus, waiting)
            out += [queue.popleft() for _ in range(share)]
            if not queue:
                del self.queues[batch]
        self._leave(len(out))
        return out

    def oldest(self) -> float | None:
        """When the unit came that has waited for longest, to within one flush."""
        return self._came[0][1] if self._came else None

    def _leave(self, units: int) -> None:
        self.waiting -= units
        self._left += units
        self._noted = False
        while len(self._came) > 1 and self._came[1][0] <= self._left:
            self._came.popleft()
        if not self.waiting:
            self._came.clear()

    def _run(self) -> None:
        shared = 0
        while True:
            with self.wake:
                if shared > 1:
                    self._sleep(self.waiting + shared, GATHER)
                self._sleep(1, None)
                begun = time.monotonic()
                oldest = self.oldest()
                load, surplus = self._admitted(begun, 0.0 if oldest is None else begun - oldest)
            if surplus:
                self._send_away(surplus)
            taken = load.taken
            if not taken:
                return
            metrics.FLUSH_UNITS.observe(len(taken))
            if oldest is not None:
                metrics.FLUSH_WAIT.observe(begun - oldest)
            self._flush(taken)
            self._flushed(load, time.monotonic(), begun)
            shared = len(taken)

    def _flushed(self, load: Load, over: float, begun: float) -> None:
        """A flush took so long: the bounds of the next ones follow from that."""
        seconds = over - begun
        if load.cost >= LEAST_COST:
            wanted = round(load.cost * FLUSH_SECONDS / max(seconds, 1e-6))
            # No more than twice as much or half as much at a time: one long flush may have been an accident.
            wanted = min(2 * self._most_cost, max(self._most_cost // 2, wanted))
            self._most_cost = min(FLUSH_COST, max(LEAST_COST, wanted))
        if self.admission is not None and not load.rests:
            # A piece of a large unit says nothing about what a unit takes.
            self.admission.flushed(over, len(load.taken), seconds)

    def _admitted(self, now: float, wait: float) -> tuple[Load, list[Waiting]]:
        """The next flush, and those that must be sent away. Under the lock."""
        admission = self.admission
        if admission is None or self.stopping:
            return self.take(FLUSH_UNITS), []
        before = admission.limit
        admission.taking(now, wait)
        limit = admission.limit
        surplus: list[Waiting] = []
        if before is None and limit is not None:
            log.warning("acks_shed", waiting=self.waiting, limit=limit)
            surplus = self.shorten(limit) if self.waiting > limit else []
        elif before is not None and limit is None:
            log.warning("acks_shed_no_more", waiting=self.waiting)
        return self.take(admission.most(now, FLUSH_UNITS)), surplus

    def _sleep(self, until: int, seconds: float | None) -> None:
        """Until so many units wait, the time is over or the lane stops."""
        self.wake_at = until
        self.wake.wait_for(lambda: self.waiting >= until or self.stopping, seconds)
        self.wake_at = None
