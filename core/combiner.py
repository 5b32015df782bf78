"""The combiner: group commit for concurrent acks. One a process.

Calls that arrive while a transaction is under way wait, and are merged, by group, into the next one: one lock, one
write, one fsync for many callers, each answered after that commit. An idle service acks at once, and the size of a
flush grows by itself with the load. Callers that shared a flush come back at about the same time, while others wait
already; left alone, the two crowds take turns in flushes of half the size. So after a shared flush the lane waits until
as many have come as it has just answered, for two milliseconds at the most.

What could go wrong, and why it can't:

*One hot batch starves the others.* Units wait in a queue per batch, and a flush takes from the queues in turns.

*One stuck row stalls everybody.* A merged flush waits for a lock once. If that is in vain, its batches are tried one by
one; those that still can't be locked move to a second lane, with a thread and patience of its own, and so does what
arrives for them until they are through.

*One bad call fails its neighbours.* Any failure of a merged flush is repeated batch by batch, so only the batch
concerned fails. Bad input never gets here.

*Memory grows without end.* The queue is bounded; beyond the bound callers are told to come back (`errors.Overloaded`).

*More comes than can be committed.* The main lane's queue is then bounded in time too (see `admission`): callers are
told at once to come back, and those that are let in are answered soon. A unit that is refused has not been in a flush.

*Stop loses calls.* `stop` takes no more, flushes what waits, and answers it.

`Inline` is the twin without threads: same interface, each call its own transactions. The suite runs on both.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import structlog

from core import errors, metrics
from core.admission import Admission
from core.calls import UNIT_GROUPS, Answer, Call, Outcome, Unit, Verb
from core.faults import Fault

FLUSH_UNITS: Final = 4096
"""The most units of one flush; single acks of one group would otherwise be taken without end."""
MAX_WAITING: Final = 50_000
"""Units that may wait before callers are told to come back."""
MAX_BYTES: Final = 256 * 2**20
"""Bytes that large units may take while they wait: some 60 calls of 4,096 masks each."""

GATHER: Final = 0.002
"""Seconds to wait, after a flush that several calls shared, for those callers to come back."""

TOO_MANY: Final = "more acks come at the moment than can be committed"

log = structlog.get_logger(__name__)


class Commit(Protocol):
    """Apply units in one transaction and commit it: an outcome for each unit. Raises what `db.Database.write` does."""

    def __call__(self, units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]: ...


class Acks(Protocol):
    """What the combiner and its inline twin have in common."""

    def submit(self, call: Call, deliver: Deliver, to: Any = None) -> None:
        """Take the call; `deliver` is called with its `Pending`, and those of others, once it is over."""

    def is_full(self) -> bool:
        """Whether more acks come than can be committed, so that the next one will be refused: to be asked before
        anything is spent on it."""

    def stop(self) -> None: ...


class Pending:
    """One call under way. It is over when the last of its units is, or when the first one fails: then `answer` is
    whole, or `error` says why not. Units of one call may be in both lanes: it is settled under the combiner's lock."""

    __slots__ = ("answer", "deliver", "error", "left", "to", "verb")

    def __init__(self, verb: Verb, units: int, deliver: Deliver, to: Any) -> None:
        self.verb = verb
        self.answer = Answer()
        self.error: Exception | None = None
        self.left = units
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


def _deliver(over: Sequence[Pending]) -> None:
    by_receiver: dict[Deliver, list[Pending]] = {}
    for pending in over:
        by_receiver.setdefault(pending.deliver, []).append(pending)
    for deliver, part in by_receiver.items():
        deliver(part)


class Inline:
    """Each call at once, in the caller's thread."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit

    def submit(self, call: Call, deliver: Deliver, to: Any = None) -> None:
        units = call.chunks()
        pending = Pending(call.verb, len(units), deliver, to)
        for unit in units:
            try:
                pending.settle(self._commit([unit], lock_waits=4)[0])
            except Exception as error:  # noqa: BLE001  # it is the caller's
                pending.fail(error)
        deliver([pending])

    def is_full(self) -> bool:
        return False

    def stop(self) -> None:
        pass


_Waiting: TypeAlias = tuple[Unit, Pending]


class _Lane:
    """A queue per batch, and one thread that flushes from them in turns. All state is under `lock`."""

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        flush: Callable[[list[_Waiting]], None],
        admission: Admission | None = None,
        send_away: Callable[[list[_Waiting]], None] | None = None,
    ) -> None:
        self.queues: OrderedDict[int, deque[_Waiting]] = OrderedDict()
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
        self._flush = flush
        self.admission = admission
        self._send_away = send_away
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

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

    def take(self, most: int) -> list[_Waiting]:
        """The next flush: one unit of each waiting batch in turn, until its groups are full or it has `most` units."""
        taken: list[_Waiting] = []
        groups: dict[int, set[int]] = {}
        count = 0
        while self.queues and len(taken) < most:
            batch, queue = self.queues.popitem(last=False)
            known = groups.setdefault(batch, set())
            # With one batch left there is nobody to take turns with.
            turn = len(queue) if not self.queues else 1
            while turn and len(taken) < most:
                more = len(queue[0][0].groups() - known)
                if taken and count + more > UNIT_GROUPS:
                    self.queues[batch] = queue
                    self.queues.move_to_end(batch, last=False)
                    self._leave(len(taken))
                    return taken
                unit, pending = queue.popleft()
                known |= unit.groups()
                count += more
                taken.append((unit, pending))
                turn -= 1
            if queue:
                self.queues[batch] = queue
        self._leave(len(taken))
        return taken

    def give_up(self, batch: int) -> Sequence[_Waiting]:
        """Take out all that waits for a batch."""
        behind = self.queues.pop(batch, ())
        self._leave(len(behind))
        return behind

    def shorten(self, keep: int) -> list[_Waiting]:
        """Take out the oldest until `keep` units wait, of each batch its share."""
        surplus, waiting = self.waiting - keep, self.waiting
        out: list[_Waiting] = []
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
                taken, surplus = self._admitted(begun, 0.0 if oldest is None else begun - oldest)
            if surplus and self._send_away is not None:
                self._send_away(surplus)
            if not taken:
                return
            metrics.FLUSH_UNITS.observe(len(taken))
            if oldest is not None:
                metrics.FLUSH_WAIT.observe(begun - oldest)
            self._flush(taken)
            shared = len(taken)
            if self.admission is not None:
                over = time.monotonic()
                self.admission.flushed(over, shared, over - begun)

    def _admitted(self, now: float, wait: float) -> tuple[list[_Waiting], list[_Waiting]]:
        """The next flush, and those that are to be sent away. Under the lock."""
        admission = self.admission
        if admission is None or self.stopping:
            return self.take(FLUSH_UNITS), []
        before = admission.limit
        admission.taking(now, wait)
        limit = admission.limit
        surplus: list[_Waiting] = []
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


class Combiner:
    """See the module. `commit` is called from the combiner's own threads. Without `admission` acks may wait for any
    time."""

    def __init__(
        self,
        commit: Commit,
        *,
        max_waiting: int = MAX_WAITING,
        max_bytes: int = MAX_BYTES,
        admission: Admission | None = None,
    ) -> None:
        self._commit = commit
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting = 0
        self._bytes = 0
        """Of the large units among them."""
        self._stuck: dict[int, int] = {}
        """Batches of the second lane → their units there."""
        self._admission = admission
        self._main = _Lane("combiner", self._lock, self._flush, admission, self._send_away)
        self._patient = _Lane("combiner-patient", self._lock, self._flush_patiently)
        self._stopping = False
        self._started = False

    def submit(self, call: Call, deliver: Deliver, to: Any = None) -> None:
        """Queue the call; it is over after the commit. Raises `errors.Overloaded` without queueing anything."""
        units = call.chunks()
        pending = Pending(call.verb, len(units), deliver, to)
        if not units:
            deliver([pending])
            return
        size = sum([unit.size for unit in units])
        with self._lock:
            if self._stopping:
                raise errors.Unavailable("the service is stopping")
            if self.is_full():
                raise errors.Overloaded(TOO_MANY)
            if self._waiting and self._waiting + len(units) > self._max_waiting:
                raise errors.Overloaded(f"{self._waiting:,} acks are waiting already")
            if self._bytes and self._bytes + size > self._max_bytes:
                raise errors.Overloaded(f"{self._bytes:,} bytes of acks are waiting already")
            if not self._started:
                self._started = True
                self._main.thread.start()
                self._patient.thread.start()
            self._waiting += len(units)
            self._bytes += size
            for unit in units:
                if unit.batch in self._stuck:
                    self._stuck[unit.batch] += 1
                    self._patient.put(unit, pending)
                else:
                    self._main.put(unit, pending)

    def is_full(self) -> bool:
        admission = self._admission
        if admission is None or admission.limit is None or self._main.waiting < admission.limit:
            return False
        admission.refused(time.monotonic())
        return True

    def stop(self) -> None:
        """Take no more calls, flush and answer those that wait, end the threads. The main lane ends first: it may still
        hand batches to the patient one."""
        with self._lock:
            self._stopping = True
        for lane in (self._main, self._patient):
            with self._lock:
                lane.stopping = True
                lane.wake.notify_all()
            if self._started:
                lane.thread.join()

    def _leave(self, taken: list[_Waiting]) -> None:
        """They are answered. Under the lock."""
        self._waiting -= len(taken)
        if self._bytes:
            self._bytes -= sum([unit.size for unit, _ in taken])

    def _send_away(self, surplus: list[_Waiting]) -> None:
        error = errors.Overloaded(TOO_MANY)
        with self._lock:
            self._leave(surplus)
            over = [pending for _, pending in surplus if pending.fail(error)]
        _deliver(over)

    def _flush(self, taken: list[_Waiting]) -> None:
        if self._attempt(taken, lock_waits=0):
            return
        by_batch: dict[int, list[_Waiting]] = {}
        for unit, pending in taken:
            by_batch.setdefault(unit.batch, []).append((unit, pending))
        for batch, part in by_batch.items():
            # The only batch of its flush has had its lock wait already.
            if len(by_batch) == 1 or not self._attempt(part, lock_waits=0):
                log.warning("batch_stuck", batch=batch, units=len(part))
                with self._lock:
                    behind = self._main.give_up(batch)
                    self._stuck[batch] = self._stuck.get(batch, 0) + len(part) + len(behind)
                    for unit, pending in (*part, *behind):
                        self._patient.put(unit, pending)

    def _flush_patiently(self, taken: list[_Waiting]) -> None:
        by_batch: dict[int, list[_Waiting]] = {}
        for unit, pending in taken:
            by_batch.setdefault(unit.batch, []).append((unit, pending))
        for batch, part in by_batch.items():
            self._attempt(part, lock_waits=3, last=True)
            with self._lock:
                self._stuck[batch] -= len(part)
                if not self._stuck[batch]:
                    del self._stuck[batch]

    def _attempt(self, taken: list[_Waiting], *, lock_waits: int, last: bool = False) -> bool:
        """Commit and answer; False where it should be tried again in smaller parts."""
        live = [(unit, pending) for unit, pending in taken if pending.error is None]
        one_batch = len({unit.batch for unit, _ in live}) <= 1
        try:
            outcomes = self._commit([unit for unit, _ in live], lock_waits=lock_waits) if live else []
        except Exception as error:
            stuck = isinstance(error, errors.LockTimeout)
            outage = isinstance(error, errors.Unavailable) and not stuck
            # An outage is nobody's fault in particular: all are told at once. A stuck row or a broken batch is sought.
            if not last and not outage and (stuck or not one_batch):
                (metrics.RETRIED[Fault.LOCK_WAIT] if stuck else metrics.RETRIED_APART).inc()
                return False
            if not isinstance(error, errors.CoreError):
                log.exception("flush_failed", units=len(live))
            with self._lock:
                self._leave(taken)
                over = [pending for _, pending in taken if pending.fail(error)]
            _deliver(over)
            return True
        with self._lock:
            self._leave(taken)
            over = [pending for (_, pending), outcome in zip(live, outcomes, strict=True) if pending.settle(outcome)]
        _deliver(over)
        return True
