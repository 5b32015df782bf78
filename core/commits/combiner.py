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
(`UnitOutcome.rest`).

*One locked row stalls all calls.* A merged flush waits for a lock only briefly. If that times out, the batches with
locked rows are set aside (see `aside`), and the rest of the flush is tried again immediately. The feed's head is no
batch's row: the whole flush waits for it, longer (see `lock_order`).

*The database refuses merged statements*, as some distributed ones do. Then each flush is committed batch by batch, and
that is told: a flush that failed although none of its parts did is counted and logged.

*One bad call fails its neighbours.* The error names batches with inconsistent counts: their calls fail, they are set
aside, and the rest is tried again. After any other failure the flush is tried again in halves (see `apart`), so only
the batch concerned fails. Malformed input is refused earlier.

*A child's end waits for its parent.* The call that ended a nested batch is answered when the parent's item is resolved
(`UnitOutcome.paid`). No thread and no other call waits for that.

*Memory grows without limit.* The queue is bounded; beyond the bound, callers must retry later (`errors.Overloaded`).

*Acks arrive faster than they can be committed.* Then the queue of the main lane is also bounded in time (see
`admission`): callers that can't be served soon must retry later, and the others are answered soon. A refused unit has
not been in a flush.

*A receiver that raises ends the thread that answers all calls.* It is logged, and the others get their answers (see
`pending`).

*Stop loses calls.* `stop` refuses new calls, flushes the waiting ones and answers them.

`Inline` is the same without threads: each call has its own transactions. The tests run on both. `InlineWhenIdle` is
`Inline` for a call that is alone, and `Combiner` for calls that arrive during another one.
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
from core.commits import apart
from core.commits.admission import Admission
from core.commits.aside import Aside
from core.commits.lanes import Backlog, MainLane, Waiting, too_many
from core.commits.operation import Answer, Mergeable, MergeableUnit, UnitOutcome
from core.commits.pending import HERE, Mailbox, Pending, Receiver, deliver
from core.errors import Fault

MAX_WAITING: Final = 50_000
"""Units that may wait before callers are refused."""
MAX_BYTES: Final = 256 * 2**20
"""Bytes of large units that may wait: about 60 calls of 4,096 masks each."""

log = structlog.get_logger(__name__)


TOO_MANY: Final = too_many("acks")


class Commit(Protocol):
    """Apply units in one transaction, commit it, and return an outcome for each unit. `lock_waits` is the maximum
    number of full lock waits; 0: only a brief one. Raises the exceptions of `database.Database.write`."""

    def __call__(self, units: Sequence[Any], /, *, lock_waits: int) -> Sequence[UnitOutcome]: ...


class GroupCommit(Protocol):
    """The interface of `Combiner` and `Inline`."""

    def submit(self, call: Mergeable[Answer], receiver: Receiver[Answer], mailbox: Mailbox = HERE) -> None:
        """Accept the call. When it is finished, its `Pending` is put into the mailbox, whose user calls `receiver`."""

    def is_full(self) -> bool:
        """Whether the next call will be refused due to overload. Callers check this before any work on the call."""

    def stop(self) -> None: ...


class Inline:
    """Applies each call immediately, in the caller's thread."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit

    def submit(self, call: Mergeable[Answer], receiver: Receiver[Answer], mailbox: Mailbox = HERE) -> None:
        units = call.chunks()
        pending = Pending(call, call.new_answer(), len(units), receiver, mailbox)
        for chunk in units:
            unit: MergeableUnit | None = chunk
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
        mailbox.put([pending])

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
        self._lock = threading.Lock()
        self._backlog = Backlog(max_waiting, max_bytes, what)
        self._admission = admission
        self._main = MainLane(self._lock, self._backlog, self._flush, self._send_away, admission, what)
        self._has_told = False
        self._aside = Aside(self._lock, self._backlog, self._flush_aside)

    def submit(self, call: Mergeable[Answer], receiver: Receiver[Answer], mailbox: Mailbox = HERE) -> None:
        """Queue the call, which is finished after the commit. Raises `errors.Overloaded` or `errors.Unavailable`
        without queueing anything."""
        units = call.measured()
        pending = Pending(call, call.new_answer(), len(units), receiver, mailbox)
        if not units:
            mailbox.put([pending])
            return
        size = sum([unit.size for unit in units])
        with self._lock:
            if self._main.stopping:
                raise errors.Unavailable("the service is stopping")
            if self.is_full():
                raise errors.Overloaded(too_many(self._what))
            self._main.start()
            self._backlog.enter(len(units), size)
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

    @property
    def is_idle(self) -> bool:
        """Whether no call waits, and none is being committed."""
        return self._backlog.units == 0

    def stop(self) -> None:
        """Refuse new calls, flush and answer the waiting ones, and end the threads. The main lane ends first, as it may
        still set batches aside."""
        self._main.stop()
        self._aside.stop()

    def _send_away(self, surplus: list[Waiting]) -> None:
        self._fail(surplus, errors.Overloaded(too_many(self._what)))

    def _fail(self, units: Sequence[Waiting], error: Exception) -> None:
        if not isinstance(error, errors.CoreError):
            log.error("flush_failed", units=len(units), exc_info=error)
        with self._lock:
            self._backlog.leave(units)
            finished = [pending for _, pending in units if pending.fail(error)]
        deliver(finished)

    def _flush(self, units: list[Waiting]) -> None:
        """Runs in the thread of the main lane."""
        unexplained: list[Exception] = []

        def attempt(merged_units: Sequence[Waiting]) -> Exception | None:
            error = self._attempt(merged_units, lock_waits=0)
            if isinstance(error, errors.LockTimeout):
                metrics.RETRIED[Fault.LOCK_WAIT].inc()
            elif error is not None and not errors.is_outage(error):
                unexplained.append(error)
            return error

        is_faulty = False
        for failed_units, error in apart.attempt(attempt, units, _batch_of):
            if errors.is_outage(error):
                self._fail(failed_units, error)
            else:
                is_faulty |= not isinstance(error, errors.LockTimeout)
                self._set_aside(failed_units, error)
        if not unexplained:
            return
        if is_faulty or isinstance(unexplained[0], errors.CoreError):
            metrics.RETRIED_APART.inc(len(unexplained))
        else:
            self._tell_of_refusal(unexplained)

    def _tell_of_refusal(self, refusals: Sequence[Exception]) -> None:
        """Each batch of a flush was committed by itself, but the database refused to do several at once."""
        metrics.MERGING_REFUSED.inc(len(refusals))
        if not self._has_told:
            self._has_told = True
            log.error("merging_refused", what=self._what, error=str(refusals[0]))

    def _set_aside(self, failed_units: Sequence[Waiting], error: Exception) -> None:
        """Set aside batches that have failed in the main lane. Units with locked rows are tried again, others fail."""
        is_locked = isinstance(error, errors.LockTimeout)
        retries: dict[int, list[Waiting]] = {unit.batch: [] for unit, _ in failed_units}
        if is_locked:
            for waiting in failed_units:
                retries[_batch_of(waiting)].append(waiting)
            for batch in retries:
                log.warning("batch_stuck", batch=batch)
        else:
            log.warning("batch_set_aside", batches=sorted(retries), error=str(error))
            self._fail(failed_units, error)
        refused: list[Waiting] = []
        with self._lock:
            for batch, units in retries.items():
                units += self._main.give_up(batch)
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
                for unit, pending in self._aside.committed(batch, stay=self._main.stopping):
                    self._main.put(unit, pending)
                return
            if isinstance(error, errors.LockTimeout):
                if self._aside.locked(batch, units):
                    metrics.RETRIED[Fault.LOCK_WAIT].inc()
                    return
            else:
                self._aside.failed(batch)
        self._fail(units, error)

    def _attempt(self, units: Sequence[Waiting], *, lock_waits: int, is_aside: bool = False) -> Exception | None:
        """Commit the units and answer their calls. Returns the error if nothing was committed."""
        live = [(unit, pending) for unit, pending in units if pending.error is None]
        try:
            outcomes = self._commit([unit for unit, _ in live], lock_waits=lock_waits) if live else []
        except Exception as error:  # noqa: BLE001  # the caller handles it
            return error
        finished = []
        payments: list[tuple[Pending[Any], UnitOutcome, Future[None]]] = []
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
        deliver(finished)
        for pending, outcome, payment in payments:
            payment.add_done_callback(functools.partial(self._paid, pending, outcome))
        return None

    def _paid(self, pending: Pending[Any], outcome: UnitOutcome, _: Future[None]) -> None:
        with self._lock:
            is_over = pending.settle(outcome)
        if is_over:
            deliver([pending])


class InlineWhenIdle:
    """Applies a call in the thread of its caller, which waits for it, if no other call is in progress. Calls that
    arrive meanwhile are merged. A call for another mailbox than `HERE` is never applied in its caller's thread, which
    may be that of an event loop."""

    def __init__(self, commit: Commit) -> None:
        self._inline = Inline(commit)
        self._combiner = Combiner(commit)
        self._turn = threading.Lock()
        """Held by the thread that applies its call itself."""

    def submit(self, call: Mergeable[Answer], receiver: Receiver[Answer], mailbox: Mailbox = HERE) -> None:
        if mailbox is not HERE or not self._combiner.is_idle or not self._turn.acquire(blocking=False):
            self._combiner.submit(call, receiver, mailbox)
            return
        try:
            self._inline.submit(call, receiver)
        finally:
            self._turn.release()

    def is_full(self) -> bool:
        return self._combiner.is_full()

    def stop(self) -> None:
        """As `Combiner.stop`. Nobody may be in `submit`."""
        self._combiner.stop()


def _batch_of(waiting: Waiting) -> int:
    unit, _ = waiting
    return unit.batch
