"""Paying the debts of ended batches to their parents' items (see `nesting`): after the commit that ended the batch,
level by level. A sweep pays the debts that remain.

What could go wrong, and why it can't:

*A locked parent stalls all calls.* No flush of the combiner waits for a payment: a separate thread pays (`Payer`). The
call that ended a child gets its response when its payments are done, or when `PATIENCE` seconds pass without another
payment for it. If a lock isn't granted soon, the payment fails with the ids of the locked parents. These are skipped
until they are free; one statement checks all of them without waiting. The other parents are paid together.

*A locked parent stalls the sweep.* The sweep skips it for `Stuck.SECONDS`. A sweep of the dispatcher also ends after
some time: the remaining debts are in the database, and the next sweep continues with them.

*A payment is lost.* The debt stays in the child's row until its parent is paid.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import structlog

from core import errors
from core.acks import commit
from core.acks.call import Call, Unit
from core.acks.flush import Flushed
from core.batches import nesting
from core.batches.lifecycle import State, Verb
from core.batches.nesting import Due
from core.bits.cache import BitfieldCache
from core.commits import apart
from core.storage.database import Database
from core.storage.statements import chunks
from core.threads import QueueThread

LOCK_WAIT: Final = 0.05
"""Seconds that a payment waits for a lock."""
PATIENCE: Final = 3.0
"""Seconds that a call waits for each level of payments: for the batch that it ended, for its parent, and so on."""
AGAIN: Final = 0.1
"""Seconds between two checks of whether a locked parent is free, while a call waits for it."""

Flush = Callable[[Sequence[Unit]], Flushed]
"""Apply units in one transaction and commit it. Raises what `commit.commit` does."""

log = structlog.get_logger(__name__)


def payment(due: Due) -> Call:
    """The ack or failure of the parent's item."""
    ending = "completed with failures" if due.state == State.COMPLETE else str(due.state)
    reason = None if due.verb is Verb.ACK else f"batch {due.child}, which stands for this item, {ending}"
    call = Call.of(due.verb, [due.item], reason=reason)
    call.pays = True
    return call


class Stuck:
    """Parents that can't be paid now, because they are locked or inconsistent. Holds at most `MOST`."""

    SECONDS: Final = 10.0
    MOST: Final = 500

    def __init__(self) -> None:
        self._until: OrderedDict[int, float] = OrderedDict()

    def add(self, parents: Collection[int]) -> None:
        until = time.monotonic() + self.SECONDS
        for parent in parents:
            self._until[parent] = until
            self._until.move_to_end(parent)
        while len(self._until) > self.MOST:
            self._until.popitem(last=False)

    def parents(self) -> list[int]:
        now = time.monotonic()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return list(self._until)


@dataclass(slots=True)
class PaymentResult:
    """The result of paying some debts."""

    owing: list[tuple[int, int]] = field(default_factory=list)
    """(child, parent): the payment ended the parent, which now has a debt itself."""
    locked: list[Due] = field(default_factory=list)
    """Debts to locked parents."""
    broken: list[Due] = field(default_factory=list)
    """Debts to parents that can't be paid for another reason."""


def pay(database: Database, flush: Flush, dues: Sequence[Due]) -> PaymentResult:
    """Pay these debts, but not debts that result from the payments. Raises `errors.Unavailable` if the database is
    unreachable."""
    result = PaymentResult()

    def flush_merged(merged: Sequence[Due]) -> Exception | None:
        try:
            flush_result = flush([unit for due in merged for unit in payment(due).chunks()])
        except Exception as error:  # noqa: BLE001  # even a bug must not delay the response for acks that are committed
            return error
        _strike_out(database, merged)
        ended_parents = set(flush_result.owing)
        result.owing += [(due.child, due.item.batch) for due in merged if due.item.batch in ended_parents]
        return None

    for page in chunks(list(dues), nesting.PAGE):
        for failed_dues, error in apart.attempt(flush_merged, page, lambda due: due.item.batch):
            if errors.is_outage(error):
                raise error
            if isinstance(error, errors.LockTimeout):
                result.locked += failed_dues
            else:
                result.broken += failed_dues
                parents = sorted({due.item.batch for due in failed_dues})
                log.warning("parents_left_to_the_sweep", parents=parents, error=str(error))
    return result


def _strike_out(database: Database, dues: Sequence[Due]) -> None:
    """Remove paid debts. If a child's row stays locked, its debt is left to the sweep, so that no call waits for it."""
    try:
        database.write(nesting.strike_out, dues, lock_waits=0, lock_wait=LOCK_WAIT)
    except errors.LockTimeout:
        database.write(lambda tx: nesting.strike_out(tx, dues, skip_locked=True))


def sweep(
    database: Database, flush: Flush | None = None, *, stuck_parents: Stuck | None = None, seconds: float | None = None
) -> int:
    """Pay all debts except those to `stuck_parents`, for about `seconds` at most. Returns the number of paid debts.
    Raises `errors.Unavailable`."""
    if flush is None:
        cache = BitfieldCache()

        def flush(units: Sequence[Unit]) -> Flushed:
            return commit.commit(database, units, cache, lock_waits=0, lock_wait=LOCK_WAIT)

    stuck_parents = stuck_parents or Stuck()
    until = None if seconds is None else time.monotonic() + seconds
    count = after = 0
    level: list[int] = []
    while until is None or time.monotonic() < until:
        # Debts that arose from payments of this sweep come first, level by level.
        page, level = level[: nesting.PAGE], level[nesting.PAGE :]
        dues = database.read(
            lambda tx, page=page, after=after: (  # type: ignore[misc]
                nesting.debts(tx, page or None, 0 if page else after, stuck_parents.parents())
            )
        )
        if not page:
            if not dues:
                break
            after = dues[-1].child
        result = pay(database, flush, dues)
        remaining = [*result.locked, *result.broken]
        stuck_parents.add({due.item.batch for due in remaining})
        level += dict.fromkeys(parent for _, parent in result.owing)
        count += len(dues) - len(remaining)
    return count


@dataclass(slots=True, eq=False)
class _Bill:
    """The debts to pay for one call: the children of the current level that owe something."""

    owing: set[int]
    until: float
    paid: Future[None] = field(default_factory=Future)


class Payer(QueueThread):
    """Pays in a separate thread. Call `stop` only after its users have stopped: it pays the debts that can be paid now,
    and leaves the rest to the sweep."""

    def __init__(self, database: Database, flush: Flush) -> None:
        super().__init__("payments")
        self._database = database
        self._flush = flush
        self._bills: list[_Bill] = []
        self._new: list[_Bill] = []
        self._locked: dict[int, Due] = {}
        """The debts to locked parents, by child."""
        self._check_at = 0.0
        """The time of the next check of whether these parents are free."""

    def pay(self, *children: int) -> Future[None]:
        """Pay the debts of the children, then those of parents that end as a result, and so on. The future is done when
        no more debts can be paid. It never fails: the remaining debts are left to the sweep."""
        bill = _Bill(set(children), time.monotonic() + PATIENCE)
        with self.wake:
            if self.stopping or not children:
                bill.paid.set_result(None)
                return bill.paid
            try:
                self.start()
            except errors.Unavailable as error:  # the child's end is committed
                log.warning("parents_left_to_the_sweep", children=sorted(children)[:10], error=str(error))
                bill.paid.set_result(None)
                return bill.paid
            self._new.append(bill)
            self.wake.notify()
        return bill.paid

    def _serve(self) -> None:
        while True:
            with self.wake:
                if not self._new and not self.stopping:
                    # All remaining bills wait for locked parents.
                    self.wake.wait(max(0.0, self._check_at - time.monotonic()) if self._bills else None)
                self._bills += self._new
                self._new.clear()
                if not self._bills and self.stopping:
                    return
            try:
                self._pay_level()
            except errors.CoreError as error:
                log.warning("payments_wait", error=str(error))
                self._settle(self._bills)
            except Exception:  # even a bug here must not delay the response for acks that are committed
                log.exception("payments_failed")
                self._settle(self._bills)

    def _pay_level(self) -> None:
        """Pay one level of all bills together."""
        now = time.monotonic()
        if self._locked and now >= self._check_at:
            self._forget_free_parents()
            self._check_at = time.monotonic() + AGAIN
        children = sorted({child for bill in self._bills for child in bill.owing} - self._locked.keys())
        dues = [due for part in chunks(children, nesting.PAGE) for due in self._database.read(nesting.debts, part)]
        # Debts of new children to parents that are known to be locked need no attempt.
        locked_parents = {due.item.batch for due in self._locked.values()}
        result = pay(self._database, self._flush, [due for due in dues if due.item.batch not in locked_parents])
        locked_dues = [*result.locked, *(due for due in dues if due.item.batch in locked_parents)]
        if locked_dues and not self._locked:
            self._check_at = time.monotonic() + AGAIN
        self._locked |= {due.child: due for due in locked_dues}
        parents: dict[int, list[int]] = {}
        for child, parent in result.owing:
            parents.setdefault(child, []).append(parent)
        finished = []
        for bill in self._bills:
            tried_children = bill.owing - self._locked.keys()
            bill.owing -= tried_children
            if tried_children:
                bill.until = time.monotonic() + PATIENCE
            bill.owing.update(parent for child in tried_children for parent in parents.get(child, ()))
            waits = bill.owing <= self._locked.keys()
            if not bill.owing or time.monotonic() >= bill.until or (self.stopping and waits):
                finished.append(bill)
        self._settle(finished)

    def _forget_free_parents(self) -> None:
        units = [unit for due in self._locked.values() for unit in payment(due).chunks()]
        locked_parents = self._database.read(commit.locked, units)
        self._locked = {child: due for child, due in self._locked.items() if due.item.batch in locked_parents}

    def _settle(self, finished: list[_Bill]) -> None:
        finished_ids = set(map(id, finished))
        self._bills = [bill for bill in self._bills if id(bill) not in finished_ids]
        waiting_children = {child for bill in self._bills for child in bill.owing}
        unpaid_children = {child for bill in finished for child in bill.owing}
        if unpaid_children:
            log.warning("parents_left_to_the_sweep", children=sorted(unpaid_children)[:10])
        self._locked = {child: due for child, due in self._locked.items() if child in waiting_children}
        for bill in finished:
            bill.paid.set_result(None)
