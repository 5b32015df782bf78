"""Batches: opened, extended, sealed, cancelled, deleted, looked at and repaired."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import structlog
from sqlalchemy.engine import Connection

from core import errors, explain
from core.acks.call import request_fingerprint
from core.batches import batch as batches
from core.batches import (
    descendants,
    failure_search,
    failures,
    group_counts,
    history,
    purge,
    ranges,
    redrive,
    reopen,
    repair,
    search,
    tree,
    update,
    verify,
    writing,
)
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, State
from core.batches.update import KEEP, Keep
from core.service.acks import AckService
from core.service.batch_facts import BatchFacts
from core.service.reads import ReadService
from core.service.webhooks import WebhookService
from core.service.writes import WriteService
from core.storage.database import Database
from core.traces import TraceContext
from core.webhooks import subscriptions
from lastbit.ids import ItemId

log = structlog.get_logger(__name__)


def opening_of(
    opening: batches.Opening,
    idempotency_key: str | None = None,
    *,
    prefix: str | None = None,
    trace: TraceContext | None = None,
) -> writing.Open:
    """The operation of `BatchService.open`. `trace`: the context of the request."""
    content = b"" if idempotency_key is None else opening.fingerprint()
    fingerprint = request_fingerprint("open", idempotency_key, content)
    return writing.Open(
        opening=opening,
        idempotency_key=idempotency_key,
        fingerprint=fingerprint,
        prefix=prefix,
        secret=None if opening.callback is None else subscriptions.new_secret(),
        trace=trace,
    )


def seal_of(batch: int, idempotency_key: str | None = None) -> writing.Seal:
    """The operation of `BatchService.seal`."""
    fingerprint = request_fingerprint("seal", idempotency_key, str(batch).encode())
    return writing.Seal(batch=batch, fingerprint=fingerprint)


class BatchService:
    """Methods that take a batch's id raise `errors.BatchNotFound`."""

    def __init__(
        self,
        database: Database,
        facts: BatchFacts,
        acks: AckService,
        writes: WriteService,
        reads: ReadService,
        webhooks: WebhookService,
    ) -> None:
        self._database = database
        self._reads = reads
        self._facts = facts
        self._acks = acks
        self._writes = writes
        self._webhooks = webhooks

    def open(
        self,
        opening: batches.Opening,
        idempotency_key: str | None = None,
        *,
        prefix: str | None = None,
        trace: TraceContext | None = None,
    ) -> batches.Opened:
        """`prefix` limits the caller: for it, the keys of others' opens, and others' parents, don't exist. Raises
        `errors.IdempotencyKeyReused`; `InvalidRequest`, `BatchEnded` for an impossible parent; `InvalidRequest` for a
        callback to which nothing may be sent."""
        if prefix is not None and opening.parent is not None:
            self.check_parent(opening.parent, prefix)
        operation = opening_of(opening, idempotency_key, prefix=prefix, trace=trace)
        self.check_callback(opening)
        opened: batches.Opened = self._writes.run(operation)
        return opened

    def check_callback(self, opening: batches.Opening) -> None:
        """Raise `errors.InvalidRequest` if nothing may be sent to the URL of its callback. Needs no thread."""
        if opening.callback is not None:
            self._webhooks.check(opening.callback.url, "body.callback.url")

    def extend(
        self,
        batch: int,
        count: int,
        idempotency_key: str | None = None,
        digest: str | None = None,
        by: ItemId | None = None,
    ) -> batches.Extended:
        """Raises `errors.BatchEnded`, `BatchFull`, `ItemResolved`, `IdempotencyKeyReused`, `InvalidRequest`."""
        extended: batches.Extended = self._writes.run(
            writing.Extend(batch=batch, count=count, idempotency_key=idempotency_key, digest=digest, by=by)
        )
        return extended

    def seal(self, batch: int, idempotency_key: str | None = None) -> batches.Sealed:
        """Raises `errors.BatchEnded`."""
        sealed: batches.Sealed = self._writes.run(seal_of(batch, idempotency_key))
        return sealed

    def update(self, batch: int, patch: update.Patch, idempotency_key: str | None = None) -> update.Updated:
        """Change the tolerance, deadline and labels of a live batch. Raises `errors.BatchEnded`, `InvalidRequest`,
        `IdempotencyKeyReused`, `UpgradeNotFinished`."""
        updated = update.update(self._database, batch, patch, idempotency_key)
        self._settle(updated.batch)
        return updated

    def cancel(
        self, batch: int, idempotency_key: str | None = None, *, reason: str | None = None, children: bool = False
    ) -> Batch:
        """With `children`, live descendants end before this returns, if they do within `descendants.PATIENCE`. A repeat
        keeps the first reason. Raises `errors.BatchEnded`."""
        fingerprint = request_fingerprint("cancel", idempotency_key, str(batch).encode())
        cancelled = self._database.write(
            lambda tx: batches.cancel(tx, batch, fingerprint, reason=reason, children=children)
        )
        self._settle(cancelled)
        return cancelled

    def reopen(
        self,
        batch: int,
        idempotency_key: str | None = None,
        *,
        deadline: datetime | Keep | None = KEEP,
        reason: str | None = None,
    ) -> reopen.Reopened:
        """Bring back a batch that was cancelled or has expired. Raises `errors.BatchComplete`, `BatchLive`,
        `InvalidRequest`, `IdempotencyKeyReused`, `UpgradeNotFinished`."""
        result = reopen.reopen(self._database, batch, deadline=deadline, reason=reason, idempotency_key=idempotency_key)
        self._settle(result.batch)
        return result

    def _settle(self, batch: Batch) -> None:
        """Do what follows from the batch's end, or its return, in its parent and its children; what takes too long is
        left to the sweeps."""
        self._acks.pay_parent(batch)
        if batch.children_due is not None:
            self._acks.pay(*descendants.settle(self._database, [batch.id], seconds=descendants.PATIENCE).owing)

    def delete(self, batch: int, state: State | None = None) -> None:
        """Cancel the batch, notify its parent, and remove it; with `state`, only if it is in this state. Raises
        `errors.StateConflict`."""
        if not self._database.write(purge.condemn, batch, state):
            self._settle(self.get(batch))
            if state in LIVE:
                state = State.CANCELLED
            if not self._database.write(purge.condemn, batch, state):
                raise errors.Unavailable(
                    f"batch {batch} is cancelled, but its parent can't be updated, or its children, at the moment"
                )
        purge.purge(self._database, batch)

    def check_parent(self, parent: ItemId, prefix: str) -> None:
        """Raise `errors.InvalidRequest` unless the key of the parent item's batch begins with `prefix`."""
        if self._facts.outside([parent.batch], prefix):
            raise errors.InvalidRequest("body.parent", f"there is no batch {parent.batch}")

    def check_covered(self, batch: int, prefix: str) -> None:
        """Raise `errors.BatchNotFound` unless the batch's key begins with `prefix`. A key never changes, so the result
        stays true."""
        if self._facts.outside([batch], prefix):
            raise errors.BatchNotFound(batch)

    def get(self, batch: int) -> Batch:
        return self._reads.batches.get(batch)

    def page(
        self, chosen: search.Filter, *, before: int | None = None, limit: int = 100, with_history: bool = False
    ) -> search.BatchPage:
        """The newest batches with an id below `before` that the filter selects; `with_history`, also how each got on.
        Raises `errors.InvalidRequest` for a filter that contradicts itself."""
        chosen.check()

        def read(tx: Connection) -> search.BatchPage:
            page = search.page(tx, chosen, before=before, limit=limit)
            return replace(page, histories=history.of_batches(tx, page.batches)) if with_history else page

        return (self._database.snapshot if with_history else self._database.read)(read)

    def counts(self, chosen: search.Filter) -> search.Counts:
        """How many batches the filter selects, by state. Raises `errors.InvalidRequest` like `page`."""
        chosen.check()
        return self._database.read(search.counts, chosen)

    def find_failures(
        self,
        conditions: search.Filter,
        text: str | None = None,
        *,
        place: failure_search.Place | None = None,
        limit: int = 100,
    ) -> failure_search.FailurePage:
        """The failures, from the place on, of the batches that the filter selects; with `text`, those whose reason
        contains it. Raises `errors.InvalidRequest` like `page`."""
        conditions.check()
        return self._database.read(lambda tx: failure_search.page(tx, conditions, text, place=place, limit=limit))

    def ranges(self, batch_id: int, kind: ranges.Kind, start: int, limit: int) -> tuple[Batch, ranges.RangePage]:
        def read(tx: Connection) -> tuple[Batch, ranges.RangePage]:
            batch = batches.get(tx, batch_id)
            return batch, ranges.page(tx, batch, kind, start, limit)

        return self._database.snapshot(read)

    def failures(self, batch_id: int, start: int, limit: int) -> tuple[Batch, failures.Reasons]:
        """The batch, and the reasons of its failures from the place `start` on."""

        def read(tx: Connection) -> tuple[Batch, failures.Reasons]:
            batch = batches.get(tx, batch_id)
            return batch, failures.by_reason(tx, batch, start, limit)

        return self._database.snapshot(read)

    def redrive(self, batch: int, wish: redrive.Wish, idempotency_key: str | None = None) -> redrive.Redriven:
        """Ask the producer to send failed items again. Raises `errors.BatchEnded`, `NothingFailed`, `InvalidRequest`,
        `IdempotencyKeyReused`."""
        return redrive.redrive(self._database, batch, wish, idempotency_key)

    def watermark(self, batch: int) -> tuple[Batch, int]:
        """The batch, and its smallest pending number. Without pending items, that is the number of its items."""
        return self._reads.watermarks.get(batch)

    def bits(self, batch_id: int, group: int) -> group_counts.Bits:
        """Raises `errors.GroupNotFound`."""
        return self._database.snapshot(lambda tx: group_counts.bits(tx, batches.get(tx, batch_id), group))

    def picture(
        self, batch_id: int, start: int, limit: int, groups_per_tile: int
    ) -> tuple[Batch, group_counts.Picture]:
        """The batch, and the counts of `limit` cells of `groups_per_tile` groups, starting at group `start`."""

        def read(tx: Connection) -> tuple[Batch, group_counts.Picture]:
            batch = batches.get(tx, batch_id)
            return batch, group_counts.picture(tx, batch, start, limit, groups_per_tile)

        return self._database.snapshot(read)

    def history(self, batch_id: int) -> tuple[Batch, list[history.Point]]:
        """The batch, and how it got on."""

        def read(tx: Connection) -> tuple[Batch, list[history.Point]]:
            batch = batches.get(tx, batch_id)
            return batch, history.of_batches(tx, [batch])[batch_id]

        return self._database.snapshot(read)

    def progress(self, batch: int) -> tree.Progress:
        """The sums of the batch and all of its descendants."""
        return self._database.snapshot(tree.progress, batch)

    def verify(self, batch: int) -> verify.Verification:
        return self._database.snapshot(verify.verify, batch)

    def explain(self, batch: int) -> explain.Explanation:
        """Why the batch is not complete."""
        return self._database.snapshot(explain.explain, batch)

    def repair(self, batch: int, idempotency_key: str | None = None, *, dry_run: bool = False) -> repair.Repaired:
        """Make the batch's counts agree with its bits. With `dry_run`, return what a repair would do. Raises
        `errors.UpgradeNotFinished`."""
        if dry_run:
            return self._database.snapshot(repair.plan, batch)
        fingerprint = request_fingerprint("repair", idempotency_key, str(batch).encode())
        result = plan = self._database.snapshot(repair.plan, batch, fingerprint)
        if plan.faults:
            self._database.write(repair.prepare, batch)
            result = self._database.write(repair.repair, batch, fingerprint)
            log.warning("batch_repaired", batch=batch, faults=len(plan.faults), first=plan.faults[0])
        self._settle(self.get(batch))
        return result
