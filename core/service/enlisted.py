"""Verbs in transactions of callers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import structlog
from sqlalchemy.engine import Connection

from core import errors
from core.acks.call import AckResult, Call, Completed
from core.batches import batch as batches
from core.batches import writing
from core.batches.batch import Batch, Extended, Opened
from core.batches.lifecycle import State, completes
from core.bits.cache import Key
from core.enlisted import acks, mover, writes
from core.enlisted.transaction import Transaction
from core.service.acks import AckService
from core.service.mover import Mover
from core.storage import schema, statements
from core.storage.database import Database
from lastbit.ids import ItemId

REMEMBERED: Final = 100_000
"""Groups that are remembered as ready."""

log = structlog.get_logger(__name__)


class EnlistedService:
    def __init__(self, database: Database, acks: AckService) -> None:
        self._database = database
        self._acks = acks
        self._mover = Mover(database, acks)
        self._is_known = False
        """Every release that the schema supports knows the outboxes."""
        self._ready: set[Key] = set()
        """Groups for which `acks.prepare` has run."""
        database.on_doubt(self._ready.clear)

    def resolve(self, tx: Transaction, call: Call) -> acks.Resolved:
        """Apply the call in the caller's transaction. Of completions the result tells nothing (see `settled`). Raises
        `errors.InconsistentBatch`, `Misconfigured`, `UpgradeNotFinished`, and the driver's errors."""
        self._make_ready(tx, acks.groups_of(call))
        try:
            resolved = acks.resolve(tx, call)
        except errors.Contended:  # the database may be an older state of itself
            self._ready.clear()
            raise
        self._mover.expect(resolved.changed)
        return resolved

    def is_resolved(self, tx: Transaction, item: ItemId) -> bool:
        """Whether the item is acked; False may be outdated. Prepares an ack of it, which after an extend in the same
        transaction would have to wait for that transaction."""
        self._make_ready(tx, {item.batch: [item.group]})
        return acks.is_resolved(tx, item)

    def open(self, tx: Transaction, operation: writing.Open) -> Opened:
        """Open a batch in the caller's transaction: it exists if that is committed. Raises `errors.Contended`,
        `IdempotencyKeyReused`, `InvalidRequest`, `Misconfigured`, `UpgradeNotFinished`, and the driver's errors."""
        if operation.opening.parent is not None:
            raise errors.InvalidRequest(
                "body.parent", "expected none: the parent's row would stay locked until the end of your transaction"
            )
        self._check_releases()
        if operation.opening.has_policies:
            self._database.read(writing.check_policies)
        result: Opened = writes.apply(tx, operation)
        self._mover.expect([result.batch.id])
        return result

    def extend(self, tx: Transaction, operation: writing.Extend) -> Extended:
        """Issue more items in the caller's transaction, which holds up all others of this batch until its commit,
        unless it has opened the batch. Raises what `BatchService.extend` does, `errors.Contended`, `Misconfigured`,
        and the driver's errors."""
        self._make_ready(tx, {operation.batch: []})
        result: Extended = writes.apply(tx, operation)
        self._mover.expect([operation.batch])
        return result

    def seal(self, tx: Transaction, batch: int) -> None:
        """Seal the batch once the caller's transaction is committed. Raises `errors.BatchNotFound`, `BatchEnded`,
        `Misconfigured`, and the driver's errors."""
        self._check_releases()
        writes.seal(tx, batch)
        self._mover.expect([batch])

    def _check_releases(self) -> None:
        """Raise `errors.UpgradeNotFinished` while a release may be running that leaves the outboxes alone."""
        if not self._is_known and not self._database.read(schema.serves_only, acks.SINCE):
            raise errors.UpgradeNotFinished(acks.SINCE)
        self._is_known = True

    def _make_ready(self, tx: Transaction, groups: acks.Groups) -> None:
        """Prepare these groups, in a transaction of our own if possible. Without locks of rows, the caller's has that
        of the whole database; and nobody else sees a batch that it has opened."""
        groups = {batch: numbers for batch, numbers in groups.items() if not self._are_ready(batch, numbers)}
        if not groups:
            return
        ready_groups: Mapping[int, set[int]] = {}
        if self._database.dialect.locks_rows:
            ready_groups = self._database.write(acks.prepare, groups)
            if len(self._ready) > REMEMBERED:
                self._ready.clear()
            self._ready.update((batch, number) for batch, numbers in ready_groups.items() for number in numbers)
        if own_groups := {batch: numbers for batch, numbers in groups.items() if batch not in ready_groups}:
            acks.prepare(tx, own_groups)

    def _are_ready(self, batch: int, numbers: Sequence[int]) -> bool:
        return bool(numbers) and all((batch, number) in self._ready for number in numbers)

    def settled(self, call: Call, resolved: acks.Resolved) -> AckResult:
        """The answer to a call whose transaction is committed, with the batches that are complete now; with
        none if the database can't be asked, as the call has had its effect."""
        for batch in resolved.named:
            claim = mover.Claim(call.fingerprint(), batch in resolved.resolving)
            completed = self._settled(batch, claim, claims=batch in resolved.changed)
            if completed is not None:
                resolved.answer.completed[batch] = completed
        return resolved.answer

    def _settled(self, batch: int, claim: mover.Claim, *, claims: bool) -> Completed | None:
        """Move what waits for the batch if that may complete it, or leave it to the thread. The call `claims` something
        if it has changed something."""
        try:
            if not self._database.read(_may_be_complete, batch):
                return None
            moved = mover.Moved(has_more=True)
            while moved.has_more:
                moved = self._database.write(mover.move, [batch], {batch: claim} if claims else {})
                if moved.owing:
                    self._acks.pay(*moved.owing)
            return self._database.write(_told, batch, claim, claims)
        except errors.CoreError as error:  # the caller's transaction is committed
            log.warning("counts_wait", batches=[batch], error=str(error))
            self._mover.expect([batch])
            return None

    def move(self, batches: Collection[int]) -> None:
        """Move what waits for these batches, and pay what follows. Raises `errors.Unavailable`."""
        moved = mover.move_apart(self._database, batches)
        if moved.owing:
            self._acks.pay(*moved.owing)

    def start(self, *, debts: bool = False) -> None:
        """Move from now on what transactions of any process have left. With `debts`, also do what ended batches still
        have to do for their parents and children, as a dispatcher does."""
        self._mover.start_looking(debts=debts)

    def stop(self) -> None:
        self._mover.stop()


def _may_be_complete(tx: Connection, batch: int) -> bool:
    """Whether the batch is complete, or is once what waits for it is moved."""
    waiting = "FROM count_outbox WHERE batch_id = batches.id"
    [rows] = statements.finish(
        tx,
        "SELECT state, items, acked + failed + COALESCE(skipped, 0), "  # noqa: S608
        f"(SELECT COALESCE(SUM(acked + failed + skipped), 0) {waiting}), (SELECT COALESCE(MAX(seals), 0) {waiting}) "
        f"FROM batches WHERE id = {batch}",
    )
    if not rows:
        return False
    state, items, resolved, left, seals = rows[0]
    state = State(statements.as_text(state) or "")
    if state is State.COMPLETE:
        return True
    sealed = State.SEALED if seals and state is State.OPEN else state
    return completes(sealed, items, resolved + int(left))


def _told(tx: Connection, batch_id: int, claim: mover.Claim, claims: bool) -> Completed | None:
    """What the answer tells of the batch. If no call has completed it by name, the one that `claims` it has, unless it
    only redrove items: the batch may have been complete for long."""
    try:
        before, _ = batches.lock(tx, batch_id)
    except errors.BatchNotFound:
        return None
    if not before.complete:
        return None
    batch = _claimed(before, claim) if claims else before
    batches.save(tx, before, batch)
    newly, newly_succeeded = batch.completed_by == claim.fingerprint, batch.succeeded_by == claim.fingerprint
    return Completed(batch.id, batch.key, newly, batch.succeeded, newly_succeeded)


def _claimed(batch: Batch, claim: mover.Claim) -> Batch:
    succeeded_by = (batch.succeeded_by or claim.fingerprint) if batch.succeeded else None
    return replace(batch, completed_by=batch.completed_by or claim.completer, succeeded_by=succeeded_by)
