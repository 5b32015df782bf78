"""The combiner: group commit for concurrent acks. One a process.

Calls that arrive while a transaction is under way wait, and are merged, by group, into the next one: one lock, one
write, one fsync for many callers, each answered after that commit. There is no timer: an idle service acks at once, and
the batch size grows by itself with the load.

What could go wrong, and why it can't:

*One hot batch starves the others.* Units wait in a queue per batch, and a flush takes from the queues in turns.

*One stuck row stalls everybody.* A merged flush waits for a lock once. If that is in vain, its batches are tried one by
one; those that still can't be locked move to a second lane, with a thread and patience of its own, and so does what
arrives for them until they are through.

*One bad call fails its neighbours.* Any failure of a merged flush is repeated batch by batch, so only the batch
concerned fails. Bad input never gets here.

*Memory grows without end.* The queue is bounded; beyond the bound callers are told to come back (`errors.Overloaded`).

*Stop loses calls.* `stop` takes no more, flushes what waits, and answers it.

`Inline` is the twin without threads: same interface, each call its own transactions. The suite runs on both.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

import structlog

from core import errors
from core.calls import UNIT_GROUPS, Answer, Call, Outcome, Unit

FLUSH_UNITS: Final = 4096
"""The most units of one flush; single acks of one group would otherwise be taken without end."""
MAX_WAITING: Final = 50_000
"""Units that may wait before callers are told to come back."""

log = structlog.get_logger(__name__)


class Commit(Protocol):
    """Apply units in one transaction and commit it: an outcome for each unit. Raises what `db.Database.write` does."""

    def __call__(self, units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]: ...


class Acks(Protocol):
    """What the combiner and its inline twin have in common."""

    def submit(self, call: Call) -> Future[Answer]: ...
    def stop(self) -> None: ...


class _Pending:
    """One call under way: its future is done when the last of its units is, or when the first one fails. Units of one
    call may be in both lanes, so its count has a lock."""

    __slots__ = ("_lock", "answer", "future", "left")

    def __init__(self, units: int) -> None:
        self.answer = Answer()
        self.future: Future[Answer] = Future()
        self.future.set_running_or_notify_cancel()
        self.left = units
        self._lock = threading.Lock()
        if not units:
            self.future.set_result(self.answer)

    def settle(self, outcome: Outcome) -> None:
        with self._lock:
            self.answer.add(outcome)
            self.left -= 1
            last = self.left == 0
        if last:
            self.future.set_result(self.answer)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            first, self.left = self.left > 0, -1
        if first:
            self.future.set_exception(error)


class Inline:
    """Each call at once, in the caller's thread."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit

    def submit(self, call: Call) -> Future[Answer]:
        units = [chunk for unit in call.units.values() for chunk in unit.chunks()]
        pending = _Pending(len(units))
        for unit in units:
            try:
                pending.settle(self._commit([unit], lock_waits=4)[0])
            except Exception as error:  # noqa: BLE001  # it is the future's
                pending.fail(error)
        return pending.future

    def stop(self) -> None:
        pass


class _Lane:
    """A queue per batch, and one thread that flushes from them in turns. All state is under `lock`."""

    def __init__(self, name: str, lock: threading.Lock, flush: Callable[[list[tuple[Unit, _Pending]]], None]) -> None:
        self.queues: OrderedDict[int, deque[tuple[Unit, _Pending]]] = OrderedDict()
        self.wake = threading.Condition(lock)
        self.stopping = False
        self._flush = flush
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def put(self, unit: Unit, pending: _Pending) -> None:
        self.queues.setdefault(unit.batch, deque()).append((unit, pending))
        self.wake.notify()

    def take(self) -> list[tuple[Unit, _Pending]]:
        """The next flush: one unit of each waiting batch in turn, until the groups or units of a flush are full."""
        taken: list[tuple[Unit, _Pending]] = []
        groups: set[tuple[int, int]] = set()
        while self.queues and len(taken) < FLUSH_UNITS:
            batch, queue = self.queues.popitem(last=False)
            unit, pending = queue[0]
            wanted = {(batch, group) for group in unit.groups()}
            if taken and len(groups | wanted) > UNIT_GROUPS:
                self.queues[batch] = queue
                self.queues.move_to_end(batch, last=False)
                break
            queue.popleft()
            groups |= wanted
            taken.append((unit, pending))
            if queue:
                self.queues[batch] = queue
        return taken

    def _run(self) -> None:
        while True:
            with self.wake:
                while not self.queues and not self.stopping:
                    self.wake.wait()
                taken = self.take()
            if not taken:
                return
            self._flush(taken)


class Combiner:
    """See the module. `commit` is called from the combiner's own threads."""

    def __init__(self, commit: Commit, *, max_waiting: int = MAX_WAITING) -> None:
        self._commit = commit
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._waiting = 0
        self._stuck: dict[int, int] = {}
        """Batches of the second lane → their units there."""
        self._main = _Lane("combiner", self._lock, self._flush)
        self._patient = _Lane("combiner-patient", self._lock, self._flush_patiently)
        self._stopping = False
        self._started = False

    def submit(self, call: Call) -> Future[Answer]:
        """Queue the call; the future is done after the commit. Raises `errors.Overloaded` without queueing anything."""
        units = [chunk for unit in call.units.values() for chunk in unit.chunks()]
        pending = _Pending(len(units))
        with self._lock:
            if self._stopping:
                raise errors.Unavailable("the service is stopping")
            if self._waiting and self._waiting + len(units) > self._max_waiting:
                raise errors.Overloaded(f"{self._waiting:,} acks are waiting already")
            if not self._started:
                self._started = True
                self._main.thread.start()
                self._patient.thread.start()
            self._waiting += len(units)
            for unit in units:
                if unit.batch in self._stuck:
                    self._stuck[unit.batch] += 1
                    self._patient.put(unit, pending)
                else:
                    self._main.put(unit, pending)
        return pending.future

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

    def _flush(self, taken: list[tuple[Unit, _Pending]]) -> None:
        if self._attempt(taken, lock_waits=0):
            return
        by_batch: dict[int, list[tuple[Unit, _Pending]]] = {}
        for unit, pending in taken:
            by_batch.setdefault(unit.batch, []).append((unit, pending))
        for batch, part in by_batch.items():
            # The only batch of its flush has had its lock wait already.
            if len(by_batch) == 1 or not self._attempt(part, lock_waits=0):
                log.warning("batch_stuck", batch=batch, units=len(part))
                with self._lock:
                    behind = self._main.queues.pop(batch, ())
                    self._stuck[batch] = self._stuck.get(batch, 0) + len(part) + len(behind)
                    for unit, pending in (*part, *behind):
                        self._patient.put(unit, pending)

    def _flush_patiently(self, taken: list[tuple[Unit, _Pending]]) -> None:
        by_batch: dict[int, list[tuple[Unit, _Pending]]] = {}
        for unit, pending in taken:
            by_batch.setdefault(unit.batch, []).append((unit, pending))
        for batch, part in by_batch.items():
            self._attempt(part, lock_waits=3, last=True)
            with self._lock:
                self._stuck[batch] -= len(part)
                if not self._stuck[batch]:
                    del self._stuck[batch]

    def _attempt(self, taken: list[tuple[Unit, _Pending]], *, lock_waits: int, last: bool = False) -> bool:
        """Commit and answer; False where it should be tried again in smaller parts."""
        live = [(unit, pending) for unit, pending in taken if not pending.future.done()]
        one_batch = len({unit.batch for unit, _ in live}) <= 1
        try:
            outcomes = self._commit([unit for unit, _ in live], lock_waits=lock_waits) if live else []
        except Exception as error:
            stuck = isinstance(error, errors.LockTimeout)
            outage = isinstance(error, errors.Unavailable) and not stuck
            # An outage is nobody's fault in particular: all are told at once. A stuck row or a broken batch is sought.
            if not last and not outage and (stuck or not one_batch):
                return False
            if not isinstance(error, errors.CoreError):
                log.exception("flush_failed", units=len(live))
            with self._lock:
                self._waiting -= len(taken)
            for _, pending in taken:
                pending.fail(error)
            return True
        with self._lock:
            self._waiting -= len(taken)
        for (_, pending), outcome in zip(live, outcomes, strict=True):
            pending.settle(outcome)
        return True
