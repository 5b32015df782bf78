"""The combiner: group commit for concurrent acks. One a process.

Calls that arrive while a transaction is under way wait, and are merged, by group, into the next one: one lock, one
write, one fsync for many callers, each answered after that commit. An idle service acks at once, and the size of a
flush grows by itself with the load. Callers that shared a flush come back at about the same time, while others wait
already; left alone, the two crowds take turns in flushes of half the size. So after a shared flush the lane waits until
as many have come as it has just answered, for two milliseconds at most.

What could go wrong, and why it can't:

*One hot batch starves the others.* Units wait in a queue for each batch, and a flush takes from the queues in turns.

*One large call stalls everybody.* A flush is bounded in groups and in what it costs: rows, bytes, ids (see `call`).
Larger calls are applied piece by piece, and other calls have their turn between two pieces (see `lanes`). What can't be
seen before the rows are locked, how many reasons a redrive removes, is bounded by the flush itself, which then leaves a
part of a unit to the next one (`Outcome.rest`).

*One stuck row stalls everybody.* A merged flush waits for a lock only briefly. If that is in vain, the batches whose
rows are locked are set aside (see `aside`), and the rest of the flush is tried again at once.

*One bad call fails its neighbours.* A batch whose counts are inconsistent is named by the error: its calls fail, it is
set aside, and the rest is tried again. After any other failure the flush is tried again in halves, so only the batch
concerned fails. Malformed input never gets here.

*A child's end waits for its parent.* The call that ended a nested batch is answered once the parent's item is resolved
(`Outcome.paid`). No thread and no other call waits for that.

*Memory grows without end.* The queue is bounded; beyond the bound callers must come back (`errors.Overloaded`).

*More comes than can be committed.* The main lane's queue is then bounded in time too (see `admission`): callers that
can't be served soon must come back, and those that are let in are answered soon. A unit that is refused has not been in
a flush.

*Stop loses calls.* `stop` takes no more, flushes what waits, and answers it.

`Inline` is the twin without threads: same interface, each call its own transactions. The suite runs on both.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

import structlog

from core import errors, metrics
from core.acks.admission import Admission
from core.acks.aside import Aside
from core.acks.call import Call, Outcome, Unit
from core.acks.lanes import Backlog, Deliver, Lane, Pending, Waiting
from core.errors import Fault

MAX_WAITING: Final = 50_000
"""Units that may wait before callers must come back."""
MAX_BYTES: Final = 256 * 2**20
"""Bytes that large units may take while they wait: some 60 calls of 4,096 masks each."""

TOO_MANY: Final = "more acks come at the moment than can be committed"

log = structlog.get_logger(__name__)


class Commit(Protocol):
    """Apply units in one transaction and commit it: an outcome for each unit. It may wait for locks as often as
    `lock_waits` says; 0: only briefly. Raises what `database.Database.write` does."""

    def __call__(self, units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]: ...


class Acks(Protocol):
    """What the combiner and its inline twin have in common."""

    def submit(self, call: Call, deliver: Deliver, to: Any = None) -> None:
        """Take the call; `deliver` is called with its `Pending`, and those of others, once it is over."""

    def is_full(self) -> bool:
        """Whether more acks come than can be committed, so that the next one will be refused: to be asked before
        anything is spent on it."""

    def stop(self) -> None: ...


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
        for first in units:
            unit: Unit | None = first
            while unit is not None and pending.error is None:
                try:
                    (outcome,) = self._commit([unit], lock_waits=4)
                except Exception as error:  # noqa: BLE001  # it is the caller's
                    pending.fail(error)
                    break
                if outcome.paid is not None:
                    outcome.paid.result()
                unit = outcome.rest
                pending.left += unit is not None
                pending.settle(outcome)
        deliver([pending])

    def is_full(self) -> bool:
        return False

    def stop(self) -> None:
        pass


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
        self._backlog = Backlog()
        self._admission = admission
        self._main = Lane(self._lock, self._backlog, self._flush, self._send_away, admission)
        self._aside = Aside(self._lock, self._backlog, self._flush_aside)
        self._stopping = False
        self._started = False

    def submit(self, call: Call, deliver: Deliver, to: Any = None) -> None:
        """Queue the call; it is over after the commit. Raises `errors.Overloaded` without queueing anything."""
        units = call.measured()
        pending = Pending(call.verb, len(units), deliver, to)
        if not units:
            deliver([pending])
            return
        size = sum([unit.size for unit in units])
        backlog = self._backlog
        with self._lock:
            if self._stopping:
                raise errors.Unavailable("the service is stopping")
            if self.is_full():
                raise errors.Overloaded(TOO_MANY)
            if backlog.units and backlog.units + len(units) > self._max_waiting:
                raise errors.Overloaded(f"{backlog.units:,} acks are waiting already")
            if backlog.bytes and backlog.bytes + size > self._max_bytes:
                raise errors.Overloaded(f"{backlog.bytes:,} bytes of acks are waiting already")
            if not self._started:
                self._started = True
                self._main.thread.start()
            backlog.units += len(units)
            backlog.bytes += size
            for unit in units:
                if self._aside.holds(unit.batch):
                    self._aside.put(unit, pending)
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
        set batches aside."""
        with self._lock:
            self._stopping = self._main.stopping = True
            self._main.wake.notify_all()
        if self._started:
            self._main.thread.join()
        self._aside.stop()

    def _send_away(self, surplus: list[Waiting]) -> None:
        self._fail(surplus, errors.Overloaded(TOO_MANY))

    def _fail(self, taken: list[Waiting], error: Exception) -> None:
        if not isinstance(error, errors.CoreError):
            log.error("flush_failed", units=len(taken), exc_info=error)
        with self._lock:
            self._backlog.leave(taken)
            over = [pending for _, pending in taken if pending.fail(error)]
        _deliver(over)

    def _flush(self, taken: list[Waiting]) -> None:
        """In the main lane's thread."""
        parts = [taken]
        while parts:
            part = parts.pop()
            error = self._attempt(part, lock_waits=0)
            if error is None:
                continue
            stuck = isinstance(error, errors.LockTimeout)
            if isinstance(error, errors.Unavailable) and not stuck:
                # An outage is no batch's fault.
                self._fail(part, error)
                continue
            (metrics.RETRIED[Fault.LOCK_WAIT] if stuck else metrics.RETRIED_APART).inc()
            batches = list(dict.fromkeys(unit.batch for unit, _ in part))
            culprits = frozenset(batches) if len(batches) == 1 else errors.batches_of(error).intersection(batches)
            if culprits:
                self._set_aside(culprits, [each for each in part if each[0].batch in culprits], error)
                rest = [each for each in part if each[0].batch not in culprits]
                parts += [rest] if rest else []
            else:
                half = set(batches[: len(batches) // 2])
                parts += [[each for each in part if (each[0].batch in half) is first] for first in (False, True)]

    def _set_aside(self, culprits: frozenset[int], part: list[Waiting], error: Exception) -> None:
        """Batches that have failed in the main lane. Those with locked rows are tried again, others fail at once."""
        stuck = isinstance(error, errors.LockTimeout)
        if stuck:
            for batch in culprits:
                log.warning("batch_stuck", batch=batch)
        else:
            log.warning("batch_set_aside", batches=sorted(culprits), error=str(error))
            self._fail(part, error)
        with self._lock:
            for batch in culprits:
                again = [each for each in part if each[0].batch == batch] if stuck else []
                self._aside.set_aside(batch, [*again, *self._main.give_up(batch)], broken=not stuck)

    def _flush_aside(self, batch: int, taken: list[Waiting]) -> None:
        """In one of the threads of `aside`."""
        error = self._attempt(taken, lock_waits=1, aside=True)
        with self._lock:
            if error is None:
                # Once the main lane ends, what waits must be flushed here.
                for unit, pending in self._aside.committed(batch, stay=self._stopping):
                    self._main.put(unit, pending)
                return
            if isinstance(error, errors.LockTimeout):
                if self._aside.locked(batch, taken):
                    metrics.RETRIED[Fault.LOCK_WAIT].inc()
                    return
            else:
                self._aside.failed(batch)
        self._fail(taken, error)

    def _attempt(self, taken: list[Waiting], *, lock_waits: int, aside: bool = False) -> Exception | None:
        """Commit the units and answer their calls. Returns the error for which nothing was committed."""
        live = [(unit, pending) for unit, pending in taken if pending.error is None]
        try:
            outcomes = self._commit([unit for unit, _ in live], lock_waits=lock_waits) if live else []
        except Exception as error:  # noqa: BLE001  # it is judged by the caller
            return error
        over = []
        unpaid: list[tuple[Pending, Outcome, Future[None]]] = []
        rests: list[Waiting] = []
        with self._lock:
            self._backlog.leave(taken)
            for (_, pending), outcome in zip(live, outcomes, strict=True):
                if outcome.rest is not None:
                    pending.left += 1
                    rests.append((outcome.rest, pending))
                    self._backlog.bytes += outcome.rest.size
                if outcome.paid is not None:
                    unpaid.append((pending, outcome, outcome.paid))
                elif pending.settle(outcome):
                    over.append(pending)
            if rests and aside:
                self._aside.put_back(rests[0][0].batch, rests)
            elif rests:
                self._main.put_back(rests)
        _deliver(over)
        for pending, outcome, paid in unpaid:
            paid.add_done_callback(functools.partial(self._paid, pending, outcome))
        return None

    def _paid(self, pending: Pending, outcome: Outcome, _: Future[None]) -> None:
        with self._lock:
            over = pending.settle(outcome)
        if over:
            _deliver([pending])
