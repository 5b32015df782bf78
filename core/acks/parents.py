"""Paying what ended batches owe the items that they are (see `nesting`): after their commit, level by level, and by a
sweep for what was left.

What could go wrong, and why it can't:

*A locked parent stalls everybody.* No flush of the combiner waits for a payment: a thread of its own pays (`Payer`),
and the call that ended a child is answered when that is done, or `PATIENCE` seconds after the last payment of its
chain. A payment waits for a lock only briefly, and names the parents that are locked. These are skipped until they are
found free, which takes one statement for all of them and waits for nothing, and the others are paid together.

*A locked parent stalls the sweep.* It is skipped for `Stuck.SECONDS`, and a sweep of the dispatcher ends after a while:
what is left is in the database, and the next one goes on with it.

*A payment is lost.* The debt is in the child's row until its parent was paid.
"""

from __future__ import annotations

import threading
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
from core.storage.database import Database
from core.storage.statements import chunks

LOCK_WAIT: Final = 0.05
"""Seconds that a payment waits for a lock."""
PATIENCE: Final = 3.0
"""Seconds for which a call waits for one level of payments, of the batch that it ended and of that one's parents."""
AGAIN: Final = 0.1
"""Seconds until it is looked again whether a locked parent is free, while a call waits for it."""

Flush = Callable[[Sequence[Unit]], Flushed]
"""Apply units in one transaction and commit it. Raises what `commit.commit` does."""

log = structlog.get_logger(__name__)


def payment(due: Due) -> Call:
    """The ack or failure of the parent's item."""
    how = "completed with failures" if due.state == State.COMPLETE else str(due.state)
    reason = None if due.verb is Verb.ACK else f"batch {due.child}, which this item is, {how}"
    return Call.of(due.verb, [due.item], reason=reason)


class Stuck:
    """Parents that can't be paid at the moment: they are locked, or inconsistent. Bounded in number."""

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
class Paid:
    """What came of some debts."""

    owing: list[tuple[int, int]] = field(default_factory=list)
    """(child, parent): the parent ended with the payment, and owes something itself."""
    locked: list[Due] = field(default_factory=list)
    """Their parents are locked."""
    broken: list[Due] = field(default_factory=list)
    """Their parents can't be paid for another reason."""


def pay(database: Database, flush: Flush, dues: Sequence[Due]) -> Paid:
    """Pay these debts, one level. Raises `errors.Unavailable` where the database can't be reached."""
    paid = Paid()
    parts = [list(part) for part in chunks(list(dues), nesting.PAGE)]
    while parts:
        part = parts.pop()
        try:
            flushed = flush([unit for due in part for unit in payment(due).chunks()])
        except Exception as error:  # even a bug of ours must not keep the answer of what is committed
            if isinstance(error, errors.Unavailable) and not isinstance(error, errors.LockTimeout):
                raise
            locked = isinstance(error, errors.LockTimeout)
            stuck = errors.batches_of(error).intersection([due.item.batch for due in part])
            if not stuck and len(part) == 1:
                stuck = frozenset([part[0].item.batch])
            if not stuck:
                parts += [part[: len(part) // 2], part[len(part) // 2 :]]
                continue
            (paid.locked if locked else paid.broken).extend(due for due in part if due.item.batch in stuck)
            if not locked:
                log.warning("parents_left_to_the_sweep", parents=sorted(stuck), error=str(error))
            rest = [due for due in part if due.item.batch not in stuck]
            parts += [rest] if rest else []
            continue
        _strike_out(database, part)
        ended = set(flushed.owing)
        paid.owing += [(due.child, due.item.batch) for due in part if due.item.batch in ended]
    return paid


def _strike_out(database: Database, paid: Sequence[Due]) -> None:
    """Debts that were paid. A child's row that stays locked keeps nobody waiting: its debt is left to the sweep."""
    try:
        database.write(nesting.strike_out, paid, repeatable=True, lock_waits=0, lock_wait=LOCK_WAIT)
    except errors.LockTimeout:
        database.write(lambda tx: nesting.strike_out(tx, paid, skip_locked=True), repeatable=True)


def sweep(
    database: Database, flush: Flush | None = None, *, stuck: Stuck | None = None, seconds: float | None = None
) -> int:
    """Pay all that is due, but for what is due to `stuck` parents, for about so many seconds at most. Returns how many
    debts were paid. Raises `errors.Unavailable`."""
    if flush is None:
        held = BitfieldCache()

        def flush(units: Sequence[Unit]) -> Flushed:
            return commit.commit(database, units, held, lock_waits=0, lock_wait=LOCK_WAIT)

    stuck = stuck or Stuck()
    until = None if seconds is None else time.monotonic() + seconds
    swept = after = 0
    level: list[int] = []
    while until is None or time.monotonic() < until:
        # What its own payments made due comes first, level by level.
        page, level = level[: nesting.PAGE], level[nesting.PAGE :]
        dues = database.read(
            lambda tx, page=page, after=after: (  # type: ignore[misc]
                nesting.debts(tx, page or None, 0 if page else after, stuck.parents())
            )
        )
        if not page:
            if not dues:
                break
            after = dues[-1].child
        paid = pay(database, flush, dues)
        unpaid = [*paid.locked, *paid.broken]
        stuck.add({due.item.batch for due in unpaid})
        level += dict.fromkeys(parent for _, parent in paid.owing)
        swept += len(dues) - len(unpaid)
    return swept


@dataclass(slots=True, eq=False)
class _Bill:
    """What is to be paid for one call: the children that owe something now, of one level after the other."""

    owing: set[int]
    until: float
    paid: Future[None] = field(default_factory=Future)


class Payer:
    """Pays in a thread of its own, which begins with the first payment. `stop` it after those who use it."""

    def __init__(self, database: Database, flush: Flush) -> None:
        self._database = database
        self._flush = flush
        self._wake = threading.Condition()
        self._bills: list[_Bill] = []
        self._new: list[_Bill] = []
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._locked: dict[int, Due] = {}
        """By child, the debts whose parents were found locked."""
        self._look_at = 0.0
        """When to look again whether these are free."""

    def pay(self, *children: int) -> Future[None]:
        """Pay what the children owe, then what their parents owe if that ended them, and so on. The future is done when
        that is over, and never fails: what can't be paid by then is left to the sweep."""
        bill = _Bill(set(children), time.monotonic() + PATIENCE)
        with self._wake:
            if self._stopping or not children:
                bill.paid.set_result(None)
                return bill.paid
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="payments", daemon=True)
                self._thread.start()
            self._new.append(bill)
            self._wake.notify()
        return bill.paid

    def stop(self) -> None:
        """Pay what can be paid now, and leave the rest to the sweep."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._new and not self._stopping:
                    # All bills that are left wait for locked parents.
                    self._wake.wait(max(0.0, self._look_at - time.monotonic()) if self._bills else None)
                self._bills += self._new
                self._new.clear()
                if not self._bills and self._stopping:
                    return
            try:
                self._pay_level()
            except errors.CoreError as error:
                log.warning("payments_wait", error=str(error))
                self._settle(self._bills)
            except Exception:  # even a bug of ours must not keep the answer of what is committed
                log.exception("payments_failed")
                self._settle(self._bills)

    def _pay_level(self) -> None:
        """One level of all bills, together."""
        now = time.monotonic()
        if self._locked and now >= self._look_at:
            self._look_for_free_ones()
            self._look_at = time.monotonic() + AGAIN
        children = sorted({child for bill in self._bills for child in bill.owing} - self._locked.keys())
        dues = [due for part in chunks(children, nesting.PAGE) for due in self._database.read(nesting.debts, part)]
        # New children of parents that are known to be locked need not be tried.
        known = {due.item.batch for due in self._locked.values()}
        paid = pay(self._database, self._flush, [due for due in dues if due.item.batch not in known])
        locked = [*paid.locked, *(due for due in dues if due.item.batch in known)]
        if locked and not self._locked:
            self._look_at = time.monotonic() + AGAIN
        self._locked |= {due.child: due for due in locked}
        above: dict[int, list[int]] = {}
        for child, parent in paid.owing:
            above.setdefault(child, []).append(parent)
        over = []
        for bill in self._bills:
            tried = bill.owing - self._locked.keys()
            bill.owing -= tried
            if tried:
                bill.until = time.monotonic() + PATIENCE
            bill.owing.update(parent for child in tried for parent in above.get(child, ()))
            waits = bill.owing <= self._locked.keys()
            if not bill.owing or time.monotonic() >= bill.until or (self._stopping and waits):
                over.append(bill)
        self._settle(over)

    def _look_for_free_ones(self) -> None:
        units = [unit for due in self._locked.values() for unit in payment(due).chunks()]
        locked = self._database.read(commit.locked, units)
        self._locked = {child: due for child, due in self._locked.items() if due.item.batch in locked}

    def _settle(self, over: list[_Bill]) -> None:
        gone = set(map(id, over))
        self._bills = [bill for bill in self._bills if id(bill) not in gone]
        wanted = {child for bill in self._bills for child in bill.owing}
        left = {child for bill in over for child in bill.owing}
        if left:
            log.warning("parents_left_to_the_sweep", children=sorted(left)[:10])
        self._locked = {child: due for child, due in self._locked.items() if child in wanted}
        for bill in over:
            bill.paid.set_result(None)
