"""Acks, failures and redrives: queued, merged into shared transactions, and answered after the commit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Final

from core.acks import commit, parents
from core.acks.call import AckResult, Call, Outcome, Unit, check_width
from core.acks.flush import Flushed
from core.batches.batch import Batch
from core.bits.cache import BitfieldCache
from core.commits.combiner import Commit, GroupCommit
from core.commits.pending import HERE, Mailbox, Receiver, settle
from core.service.batch_facts import BatchFacts
from core.storage.database import Database

LOCK_WAIT: Final = 0.25
"""Seconds that a flush of merged calls waits for a lock. Transactions of other verbs usually take less."""

MaskPlaces = Sequence[tuple[str, int, bytes]]
"""(place in the request, batch, bits) of each mask."""


class AckService:
    def __init__(self, database: Database, facts: BatchFacts, combiner: Callable[[Commit], GroupCommit]) -> None:
        self._database = database
        self._facts = facts
        self._combiner = combiner(self._commit)
        self._payer = parents.Payer(database, self._flush_payment)
        self._bitfields = BitfieldCache()
        database.on_doubt(self._bitfields.clear)

    def ack(self, call: Call) -> Future[AckResult]:
        """Queue the call. Raises `errors.Overloaded`; the future raises `errors.Unavailable`."""
        future: Future[AckResult] = Future()
        future.set_running_or_notify_cancel()
        self._combiner.submit(call, functools.partial(settle, future))
        return future

    def submit(self, call: Call, receiver: Receiver[AckResult], mailbox: Mailbox = HERE) -> None:
        """Queue the call. When it is finished, it is put into the mailbox, with all calls that ended in the same
        commit. Raises `errors.Overloaded`."""
        self._combiner.submit(call, receiver, mailbox)

    def is_full(self) -> bool:
        """Whether `submit` would raise `errors.Overloaded` now."""
        return self._combiner.is_full()

    def check(self, call: Call, masks: MaskPlaces, prefix: str | None = None) -> None:
        """Raise `errors.InvalidRequest` for the first mask that is longer than its batch's group size allows. With
        `prefix`, withhold the batches whose key doesn't begin with it.

        A call must be checked before it is queued, so that nothing of a malformed one is applied.
        """
        if prefix is not None:
            call.withheld = self._facts.outside(call.units, prefix)
        facts = self._facts.get({batch for _, batch, _ in masks if batch not in call.withheld})
        for place, batch, bits in masks:
            fact = facts.get(batch)
            check_width(place, bits, None if fact is None else fact.group_size)

    def checks_without_database(self, batches: Iterable[int]) -> bool:
        """Whether `check` of a call for these batches reads nothing from the database."""
        return self._facts.are_cached(batches)

    def pay_parent(self, batch: Batch) -> None:
        """If the batch has ended and owes its parent's item an ack or a failure, pay it. Waits for at most
        `parents.PATIENCE`; after that, the sweep pays."""
        if batch.parent_due is not None:
            self.pay(batch.id)

    def pay(self, *batches: int) -> None:
        """As `pay_parent`, for batches that owe."""
        self._payer.pay(*batches).result()

    def payment(self, batch: int) -> Future[None]:
        """Start to pay what the batch owes. The future is done when that is paid, or left to the sweep."""
        return self._payer.pay(batch)

    def stop(self) -> None:
        """Answer the calls in progress, and accept no more."""
        self._combiner.stop()
        self._payer.stop()

    def _commit(self, units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]:
        if lock_waits:
            result = commit.commit(self._database, units, self._bitfields, lock_waits=lock_waits - 1)
        else:
            result = commit.commit(self._database, units, self._bitfields, lock_waits=0, lock_wait=LOCK_WAIT)
        if result.owing:
            payments = {child: self._payer.pay(child) for child in result.owing}
            for unit, outcome in zip(units, result.outcomes, strict=True):
                completion = outcome.completed
                if completion is None:  # the batch was cancelled by its failures
                    ends = outcome.applied > 0
                else:
                    ends = completion.newly or completion.newly_succeeded
                if ends:
                    outcome.paid = payments.get(unit.batch)
        return result.outcomes

    def _flush_payment(self, units: Sequence[Unit]) -> Flushed:
        return commit.commit(self._database, units, self._bitfields, lock_waits=0, lock_wait=parents.LOCK_WAIT)
