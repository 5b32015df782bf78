"""The combiner: group commit for concurrent calls.

A process of the service has one for acks, and one for the verbs of `core.writes`.

A *unit* is a call's part for one batch, a *flush* is one transaction, and a *lane* is a queue with its thread.

Calls that arrive during a transaction wait, and are merged by group into the next one: one lock, one write and one
fsync for many callers, which are answered after that commit. An idle service acks immediately, and the size of a flush
grows with the load. Callers that shared a flush send their next calls at about the same time, while other calls are
already waiting. Then two halves of the callers would alternate in flushes of half the size. So after a shared flush the
lane waits for as many new units as it has just answered, for at most two milliseconds.

What could go wrong, and why it can't:

*One hot batch starves the others.* Each batch has its own queue, and a flush takes units from the queues in turn.

*One large call stalls all others.* A flush is bounded in groups and in cost: rows, bytes and ids. Larger calls are
applied piece by piece, and other calls have their turn between two pieces (see `lanes`). The number of reasons that a
redrive removes is known only under the locks; the flush itself bounds it, and leaves a part of the unit to the next one
(`Outcome.rest`).

*One locked row stalls all calls.* A merged flush waits for a lock only briefly. If that times out, the batches with
locked rows are set aside (see `aside`), and the rest of the flush is tried again immediately. The feed's head is no
batch's row: the whole flush waits for it, longer (see `lock_order`).

*One bad call fails its neighbours.* The error names batches with inconsistent counts: their calls fail, they are set
aside, and the rest is tried again. After any other failure the flush is tried again in halves, so only the batch
concerned fails. Malformed input is refused earlier.

*A child's end waits for its parent.* The call that ended a nested batch is answered when the parent's item is resolved
(`Outcome.paid`). No thread and no other call waits for that.

*Memory grows without limit.* The queue is bounded; beyond the bound, callers must retry later (`errors.Overloaded`).

*Acks arrive faster than they can be committed.* Then the queue of the main lane is also bounded in time (see
`admission`): callers that can't be served soon must retry later, and the others are answered soon. A refused unit has
not been in a flush.

*A receiver that raises ends the thread that answers all calls.* It is logged, and the others get their answers.

*Stop loses calls.* `stop` refuses new calls, flushes the waiting ones and answers them.

`Inline` is the same without threads: each call has its own transactions. The tests run on both.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, Protocol

import structlog

from core import errors, metrics, threads
from core.commits.admission import Admission
from core.commits.aside import Aside
from core.commits.lanes import Backlog, Deliver, Lane, Pending, Waiting
from core.commits.operation import Call, Outcome, Unit
from core.errors import Fault

MAX_WAITING: Final = 50_000
"""Units that may wait before callers are refused."""
MAX_BYTES: Final = 256 * 2**20
"""Bytes of large units that may wait: about 60 calls of 4,096 masks each."""

log = structlog.get_logger(__name__)


def too_many(what: str) -> str:
    """Why a call is refused; `what` is the plural of what the combiner commits."""
    return f"more {what} arrive than can be committed"


TOO_MANY: Final = too_many("acks")


class Commit(Protocol):
    """Apply units in one transaction, commit it, and return an outcome for each unit. `lock_waits` is the maximum
    number of full lock waits; 0: only a brief one. Raises the exceptions of `database.Database.write`."""

    def __call__(self, units: Sequence[Any], /, *, lock_waits: int) -> Sequence[Outcome]: ...


class GroupCommit(Protocol):
    """The interface of `Combiner` and `Inline`."""

    def submit(self, call: Call, deliver: Deliver, receiver: Any = None) -> None:
        """Accept the call. When it is finished, `deliver` is called with its `Pending`, and possibly others."""

    def is_full(self) -> bool:
        """Whether the next call will be refused due to overload. Callers check this before any work on the call."""

    def stop(self) -> None: ...


def _deliver(finished: Sequence[Pending]) -> None:
    threads.deliver((pending.deliver, pending) for pending in finished)


class Inline:
    """Applies each call immediately, in the caller's thread."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit

    def submit(self, call: Call, deliver: Deliver, receiver: Any = None) -> None:
        units = call.chunks()
        pending = Pending(call, len(units), deliver, receiver)
        for first in units:
            unit: Unit | None = first
            while unit is not None and pending.error is None:
                try:
                    (outcome,) = self._commit([unit], lock_waits=4)
                except Exception as error:  # noqa: BLE001  # it is passed to the caller
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
    """See the module's docstring. `commit` is called from the combiner's own threads. Without `admission`, waits are
    not bounded in time. `what` names what is committed, in the plural, in messages and logs."""

    def __init__(
        self,
        commit: Commit,
        *,
        max_waiting: int = MAX_WAITING,
        max_bytes: int = MAX_BYTES,
        admission: Admission | None = None,
        what: str = "acks",
    ) -> None:
        self._commit = commit
        self._what = what
        self._max_waiting = max_waiting
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._backlog = Backlog()
        self._admission = admission
        self._main = Lane(self._lock, self._backlog, self._flush, self._send_away, admission, what)
        self._aside = Aside(self._lock, self._backlog, self._flush_aside)
        self._stopping = False

    def submit(self, call: Call, deliver: Deliver, receiver: Any = None) -> None:
        """Queue the call, which is finished after the commit. Raises `errors.Overloaded` or `errors.Unavailable`
        without queueing anything."""
        units = call.measured()
        pending = Pending(call, len(units), deliver, receiver)
        if not units:
            deliver([pending])
            return
        size = sum([unit.size for unit in units])
        backlog = self._backlog
        with self._lock:
            if self._stopping:
                raise errors.Unavailable("the service is stopping")
            if self.is_full():
                raise errors.Overloaded(too_many(self._what))
            if backlog.units and backlog.units + len(units) > self._max_waiting:
                raise errors.Overloaded(f"{backlog.units:,} {self._what} are waiting already")
            if backlog.bytes and backlog.bytes + size > self._max_bytes:
                raise errors.Overloaded(f"{backlog.bytes:,} bytes of {self._what} are waiting already")
            self._main.start()
            backlog.units += len(units)
            backlog.bytes += size
            for unit in units:
                if self._aside.holds(unit.batch):
                    self._aside.put(unit, pending)
                else:
                    self._main.put(unit, pending)

    def start(self) -> None:
        """Start the thread, which otherwise starts with the first call. Raises `errors.Unavailable`."""
        with self._lock:
            self._main.start()

    def is_full(self) -> bool:
        admission = self._admission
        if admission is None or admission.limit is None or self._main.waiting < admission.limit:
            return False
        admission.refused(time.monotonic())
        return True

    def stop(self) -> None:
        """Refuse new calls, flush and answer the waiting ones, and end the threads. The main lane ends first, as it may
        still set batches aside."""
        with self._lock:
            self._stopping = self._main.stopping = True
            self._main.wake.notify_all()
        if self._main.thread is not None:
            self._main.thread.join()
        self._aside.stop()

    def _send_away(self, surplus: list[Waiting]) -> None:
        self._fail(surplus, errors.Overloaded(too_many(self._what)))

    def _fail(self, units: list[Waiting], error: Exception) -> None:
        if not isinstance(error, errors.CoreError):
            log.error("flush_failed", units=len(units), exc_info=error)
        with self._lock:
            self._backlog.leave(units)
            finished = [pending for _, pending in units if pending.fail(error)]
        _deliver(finished)

    def _flush(self, units: list[Waiting]) -> None:
        """Runs in the thread of the main lane."""
        parts = [units]
        while parts:
            part = parts.pop()
            error = self._attempt(part, lock_waits=0)
            if error is None:
                continue
            is_locked = isinstance(error, errors.LockTimeout)
            if isinstance(error, errors.Unavailable) and not isinstance(error, errors.LockTimeout | errors.Contended):
                # No batch causes an outage.
                self._fail(part, error)
                continue
            (metrics.RETRIED[Fault.LOCK_WAIT] if is_locked else metrics.RETRIED_APART).inc()
            batches = list(dict.fromkeys(unit.batch for unit, _ in part))
            culprits = frozenset(batches) if len(batches) == 1 else errors.batches_of(error).intersection(batches)
            if culprits:
                self._set_aside(culprits, [waiting for waiting in part if waiting[0].batch in culprits], error)
                rest = [waiting for waiting in part if waiting[0].batch not in culprits]
                parts += [rest] if rest else []
            else:
                half = set(batches[: len(batches) // 2])
                parts += [
                    [waiting for waiting in part if (waiting[0].batch in half) is first] for first in (False, True)
                ]

    def _set_aside(self, culprits: frozenset[int], part: list[Waiting], error: Exception) -> None:
        """Set aside batches that have failed in the main lane. Units with locked rows are tried again, others fail."""
        is_locked = isinstance(error, errors.LockTimeout)
        if is_locked:
            for batch in culprits:
                log.warning("batch_stuck", batch=batch)
        else:
            log.warning("batch_set_aside", batches=sorted(culprits), error=str(error))
            self._fail(part, error)
        refused: list[Waiting] = []
        with self._lock:
            for batch in culprits:
                retries = [waiting for waiting in part if waiting[0].batch == batch] if is_locked else []
                units = [*retries, *self._main.give_up(batch)]
                if not self._aside.set_aside(batch, units, is_broken=not is_locked):
                    refused += units
        if refused:
            self._fail(refused, errors.Unavailable("the system allows no more threads"))

    def _flush_aside(self, batch: int, units: list[Waiting]) -> None:
        """Runs in a thread of the lane for batches set aside."""
        error = self._attempt(units, lock_waits=1, is_aside=True)
        with self._lock:
            if error is None:
                # After the main lane has ended, waiting units must be flushed here.
                for unit, pending in self._aside.committed(batch, stay=self._stopping):
                    self._main.put(unit, pending)
                return
            if isinstance(error, errors.LockTimeout):
                if self._aside.locked(batch, units):
                    metrics.RETRIED[Fault.LOCK_WAIT].inc()
                    return
            else:
                self._aside.failed(batch)
        self._fail(units, error)

    def _attempt(self, units: list[Waiting], *, lock_waits: int, is_aside: bool = False) -> Exception | None:
        """Commit the units and answer their calls. Returns the error if nothing was committed."""
        live = [(unit, pending) for unit, pending in units if pending.error is None]
        try:
            outcomes = self._commit([unit for unit, _ in live], lock_waits=lock_waits) if live else []
        except Exception as error:  # noqa: BLE001  # the caller handles it
            return error
        finished = []
        payments: list[tuple[Pending, Outcome, Future[None]]] = []
        rests: list[Waiting] = []
        with self._lock:
            self._backlog.leave(units)
            for (_, pending), outcome in zip(live, outcomes, strict=True):
                if outcome.rest is not None:
                    pending.left += 1
                    rests.append((outcome.rest, pending))
                    self._backlog.bytes += outcome.rest.size
                if outcome.paid is not None:
                    payments.append((pending, outcome, outcome.paid))
                elif pending.settle(outcome):
                    finished.append(pending)
            if rests and is_aside:
                self._aside.put_back(rests[0][0].batch, rests)
            elif rests:
                self._main.put_back(rests)
        _deliver(finished)
        for pending, outcome, payment in payments:
            payment.add_done_callback(functools.partial(self._paid, pending, outcome))
        return None

    def _paid(self, pending: Pending, outcome: Outcome, _: Future[None]) -> None:
        with self._lock:
            is_over = pending.settle(outcome)
        if is_over:
            _deliver([pending])
