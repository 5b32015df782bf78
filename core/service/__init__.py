"""Lastbit itself, as `api` and `jobs` call it: each verb as one transaction on one database, acks through the combiner.

Methods block; they are called from threads. `ack` only queues: its future is done after the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy.engine import Connection

from core import errors, explain, feed, metrics, tallies
from core.acks import commit, parents
from core.acks.call import Answer, Call, Outcome, Unit, check_width, request_fingerprint
from core.acks.combiner import Acks, Combiner, Commit
from core.acks.flush import Flushed
from core.acks.lanes import Deliver, Pending
from core.batches import batch as batches
from core.batches import group_counts, purge, ranges, repair, verify
from core.batches.batch import Batch
from core.batches.lifecycle import State
from core.bits.cache import Held
from core.consumer_groups import groups, leases
from core.processes import definitions, inbox, instances, outbox
from core.storage import schema
from core.storage.database import Database
from core.webhooks import subscriptions
from core.webhooks.subscriptions import Progress, Sender
from lastbit.streams.snapshot import Snapshot

log = structlog.get_logger(__name__)

LOCK_WAIT = 0.25
"""Seconds that a flush of merged calls waits for a lock; longer than others' transactions take."""

MaskPlaces = Sequence[tuple[str, int, bytes]]
"""(place in the request, batch, bits) of each mask, to be checked against its batch's group_size."""


def _tell(over: Sequence[Pending]) -> None:
    for each in over:
        if each.error is not None:
            each.to.set_exception(each.error)
        else:
            each.to.set_result(each.answer)


def _begins(batch: batches.Fixed | None, prefix: str) -> bool:
    return batch is not None and batch.key is not None and batch.key.startswith(prefix)


class Service:
    """Everything that a client can ask. Close it with `stop`: it answers the acks under way first. `sender` is for
    webhooks: without one they can be neither made nor tested."""

    def __init__(
        self, database: Database, *, combiner: Callable[[Commit], Acks] = Combiner, sender: Sender | None = None
    ) -> None:
        self.database = database
        self._sender = sender
        self._acks = combiner(self._commit)
        self._payer = parents.Payer(database, self._flush)
        self._held = Held()
        database.on_doubt(self._held.clear)
        self._fixed: dict[int, batches.Fixed] = {}
        """Of batches seen in masks, or named by limited callers; ids never come back."""

    def open(
        self, opening: batches.Opening, idempotency_key: str | None = None, *, prefix: str | None = None
    ) -> batches.Opened:
        """With `prefix`, for a caller that is limited to it: to him, the keys of others' opens and parents are unknown.
        Raises `errors.IdempotencyKeyReused`; `InvalidRequest`, `BatchEnded` for an impossible parent."""
        parent = opening.parent
        if prefix is not None and parent is not None and not self._covered(parent.batch, prefix):
            raise errors.InvalidRequest("body.parent", f"there is no batch {parent.batch}")
        fingerprint = request_fingerprint("open", idempotency_key, opening.fingerprint())
        opened = self.database.write(
            lambda tx: batches.open_batch(tx, opening, idempotency_key, fingerprint, prefix),
            repeatable=idempotency_key is not None,
        )
        self._paid(opened.batch)
        return opened

    def extend(self, batch: int, count: int, idempotency_key: str | None = None) -> batches.Extended:
        """Raises `errors.BatchNotFound`, `BatchEnded`, `IdempotencyKeyReused`, `InvalidRequest`."""
        return self.database.write(
            lambda tx: batches.extend(tx, batch, count, idempotency_key), repeatable=idempotency_key is not None
        )

    def seal(self, batch: int, idempotency_key: str | None = None) -> batches.Sealed:
        """Raises `errors.BatchNotFound`, `BatchEnded`."""
        fingerprint = request_fingerprint("seal", idempotency_key, str(batch).encode())
        sealed = self.database.write(lambda tx: batches.seal(tx, batch, fingerprint), repeatable=True)
        self._paid(sealed.batch)
        return sealed

    def cancel(self, batch: int) -> Batch:
        """Raises `errors.BatchNotFound`, `BatchEnded`."""
        cancelled = self.database.write(lambda tx: batches.cancel(tx, batch), repeatable=True)
        self._paid(cancelled)
        return cancelled

    def delete(self, batch: int) -> None:
        """Raises `errors.BatchNotFound`."""
        if not self.database.write(lambda tx: purge.condemn(tx, batch)):
            self._payer.pay(batch).result()
            if not self.database.write(lambda tx: purge.condemn(tx, batch)):
                raise errors.Unavailable(f"batch {batch} is cancelled; its parent can't be told at the moment")
        purge.purge(self.database, batch)

    def submit(self, call: Call, deliver: Deliver, to: Any) -> None:
        """Acks or failures, as the call says; `deliver` is told when it is over, in another thread, together with other
        calls that ended in the same commit. Raises `errors.Overloaded`."""
        self._acks.submit(call, deliver, to)

    def is_full(self) -> bool:
        """Whether acks would be refused now, as more come than can be committed."""
        return self._acks.is_full()

    def ack(self, call: Call) -> Future[Answer]:
        """`submit` with a future. Raises `errors.Overloaded`; the future raises `errors.Unavailable`."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        self._acks.submit(call, _tell, future)
        return future

    def _commit(self, units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]:
        if lock_waits:
            flushed = commit.commit(self.database, units, self._held, lock_waits=lock_waits - 1)
        else:
            flushed = commit.commit(self.database, units, self._held, lock_waits=0, lock_wait=LOCK_WAIT)
        if flushed.owing:
            paid = {child: self._payer.pay(child) for child in flushed.owing}
            for outcome in flushed.outcomes:
                ended = outcome.completed
                if ended is not None and (ended.newly or ended.newly_succeeded):
                    outcome.paid = paid.get(ended.batch)
        return flushed.outcomes

    def _flush(self, units: Sequence[Unit]) -> Flushed:
        """A payment."""
        return commit.commit(self.database, units, self._held, lock_waits=0, lock_wait=parents.LOCK_WAIT)

    def _paid(self, batch: Batch) -> None:
        """Of a batch that may have ended: pay what it owes, as far as that is possible within `parents.PATIENCE`."""
        if batch.parent_due is not None:
            self._payer.pay(batch.id).result()

    def is_known(self, wanted: Iterable[int]) -> bool:
        """Whether all that never changes of these batches is at hand: then `check` asks no database."""
        return all(batch in self._fixed for batch in wanted)

    def check(self, call: Call, masks: MaskPlaces, prefix: str | None = None) -> None:
        """Raise `errors.InvalidRequest` for the first mask that is longer than its batch's group_size allows; with
        `prefix`, withhold the batches whose key doesn't begin so. To be done before a call is queued, so that of a
        malformed one nothing is applied."""
        fixed = self._look_up({batch for _, batch, _ in masks} if prefix is None else call.units)
        if prefix is not None:
            call.withheld = {batch for batch in call.units if not _begins(fixed.get(batch), prefix)}
        for place, batch, bits in masks:
            known = None if batch in call.withheld else fixed.get(batch)
            check_width(place, bits, None if known is None else known.group_size)

    def check_covered(self, batch: int, prefix: str) -> None:
        """Raises `errors.BatchNotFound` where the batch's key doesn't begin so. A key never changes, so what was found
        here stays true."""
        if not self._covered(batch, prefix):
            raise errors.BatchNotFound(batch)

    def _covered(self, batch: int, prefix: str) -> bool:
        return _begins(self._look_up([batch]).get(batch), prefix)

    def _look_up(self, wanted: Iterable[int]) -> Mapping[int, batches.Fixed]:
        """What never changes of those that exist."""
        found = {batch: self._fixed[batch] for batch in wanted if batch in self._fixed}
        unknown = set(wanted) - found.keys()
        if unknown:
            read = self.database.read(lambda tx: batches.fixed(tx, unknown))
            if len(self._fixed) > 50_000:
                self._fixed.clear()
            self._fixed |= read
            found |= read
        return found

    def get(self, batch: int) -> Batch:
        """Raises `errors.BatchNotFound`."""
        return self.database.read(lambda tx: batches.get(tx, batch))

    def page(
        self,
        *,
        state: State | None = None,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> batches.Page:
        return self.database.read(
            lambda tx: batches.page(tx, state=state, key=key, labels=labels, prefix=prefix, before=before, limit=limit)
        )

    def ranges(self, batch_id: int, kind: ranges.Kind, start: int, limit: int) -> tuple[Batch, ranges.Page]:
        """Raises `errors.BatchNotFound`."""

        def look(tx: Connection) -> tuple[Batch, ranges.Page]:
            batch = batches.get(tx, batch_id)
            return batch, ranges.page(tx, batch, kind, start, limit)

        return self.database.snapshot(look)

    def watermark(self, batch_id: int) -> tuple[Batch, int]:
        """The batch, and its smallest pending number (its items where there is none). Raises `errors.BatchNotFound`."""

        def look(tx: Connection) -> tuple[Batch, int]:
            batch = batches.get(tx, batch_id)
            return batch, ranges.watermark(tx, batch)

        return self.database.snapshot(look)

    def bits(self, batch_id: int, group: int) -> group_counts.Bits:
        """Raises `errors.BatchNotFound`, `GroupNotFound`."""
        return self.database.snapshot(lambda tx: group_counts.bits(tx, batches.get(tx, batch_id), group))

    def picture(self, batch_id: int, start: int, limit: int, per: int) -> tuple[Batch, group_counts.Picture]:
        """Raises `errors.BatchNotFound`."""

        def look(tx: Connection) -> tuple[Batch, group_counts.Picture]:
            found = batches.get(tx, batch_id)
            return found, group_counts.picture(tx, found, start, limit, per)

        return self.database.snapshot(look)

    def verify(self, batch: int) -> verify.Verification:
        """Raises `errors.BatchNotFound`."""
        return self.database.snapshot(lambda tx: verify.verify(tx, batch))

    def repair(self, batch: int, idempotency_key: str | None = None, *, dry_run: bool = False) -> repair.Repaired:
        """With `dry_run`, what a repair would do. Raises `errors.BatchNotFound`, `UpgradeNotFinished`."""
        if dry_run:
            return self.database.snapshot(lambda tx: repair.plan(tx, batch))
        fingerprint = request_fingerprint("repair", idempotency_key, str(batch).encode())
        done = planned = self.database.snapshot(lambda tx: repair.plan(tx, batch, fingerprint))
        if planned.faults:
            self.database.write(lambda tx: repair.prepare(tx, batch), repeatable=True)
            done = self.database.write(lambda tx: repair.repair(tx, batch, fingerprint), repeatable=True)
            log.warning("batch_repaired", batch=batch, faults=len(planned.faults), first=planned.faults[0])
            if not done.faults:  # the transaction was run twice, as nobody knew whether its COMMIT was done
                done = replace(done, before=planned.before, groups=planned.groups, faults=planned.faults)
        self._paid(done.after)
        after: int | None = -1
        while after is not None:
            owing, after = self.database.write(
                lambda tx, after=after: repair.owe_again(tx, batch, after),  # type: ignore[misc]
                repeatable=True,
            )
            self._payer.pay(*owing).result()
        return done

    def explain(self, batch: int) -> explain.Explanation:
        """Why the batch is not done. Raises `errors.BatchNotFound`."""
        return self.database.snapshot(lambda tx: explain.explain(tx, batch))

    def append(self, events: Sequence[feed.New], fence: groups.Fence | None = None) -> list[feed.Appended]:
        """Append events of a user's own; of each, where it stands. With a `fence`, only if it holds: raises
        `errors.StaleEpoch`, `errors.ConsumerGroupNotFound`."""

        def work(tx: Connection) -> list[feed.Appended]:
            if fence is not None:
                groups.fence(tx, fence.group, fence.partition, fence.worker, fence.epoch)
            return feed.append_once(tx, events)

        return self.database.write(work, repeatable=True)

    def events(
        self,
        after: int | None,
        limit: int,
        *,
        types: Collection[str] = (),
        batch: int | None = None,
        prefix: str | None = None,
        most: int | None = None,
    ) -> feed.Page:
        """Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for a position from the future."""
        return self.database.snapshot(
            lambda tx: feed.read(tx, after, limit, types=types, batch=batch, prefix=prefix, most=most)
        )

    def feed_head(self) -> int:
        """The position of the last event."""
        return self.database.read(feed.head)

    def apply_tally(
        self, tally: str, entries: Sequence[tallies.Entry], fence: groups.Fence | None = None
    ) -> tallies.Applied:
        """With a `fence`, only if it holds. Raises `errors.InvalidRequest`, `errors.OutOfOrder`, `errors.StaleEpoch`,
        `errors.ConsumerGroupNotFound`; then nothing was applied."""

        def work(tx: Connection) -> tallies.Applied:
            if fence is not None:
                groups.fence(tx, fence.group, fence.partition, fence.worker, fence.epoch)
            return tallies.apply(tx, tally, entries)

        return self.database.write(work, repeatable=True)

    def tally_value(self, tally: str, key: str) -> tallies.Value:
        """0, of no source, where nothing was ever added."""
        return self.database.read(lambda tx: tallies.get(tx, tally, key))

    def tally_page(self, tally: str, prefix: str, after: str | None, limit: int) -> list[tallies.Value]:
        """The totals of the keys above `after` that begin with `prefix`."""
        return self.database.read(lambda tx: tallies.page(tx, tally, prefix, after, limit))

    def delete_tally(self, tally: str) -> None:
        """With its guards: what comes again counts again."""
        while self.database.write(lambda tx: tallies.remove_chunk(tx, tally), repeatable=True):
            pass

    def create_webhook(self, url: str, types: Sequence[str] | None, label: str | None) -> subscriptions.Created:
        """Raises `errors.InvalidRequest` for a URL to which nothing may be sent."""
        subscriptions.fit(self._sending, url)
        secret = subscriptions.new_secret()
        return self.database.write(lambda tx: subscriptions.create(tx, url, types, label, secret))

    def list_webhooks(self, before: int | None, limit: int) -> tuple[list[subscriptions.Webhook], int | None]:
        """Newest first, and below which id the next page begins."""
        return self.database.read(lambda tx: subscriptions.page(tx, before, limit))

    def get_webhook(self, webhook: int) -> subscriptions.Webhook:
        """Raises `errors.WebhookNotFound`."""
        return self.database.read(lambda tx: subscriptions.get(tx, webhook))

    def delete_webhook(self, webhook: int) -> None:
        """Raises `errors.WebhookNotFound`."""
        subscriptions.delete(self.database, webhook)

    def list_deliveries(
        self, webhook: int, state: Progress | None, before: int | None, limit: int
    ) -> tuple[list[subscriptions.Delivery], int | None]:
        """Newest first, and below which position the next page begins. Raises `errors.WebhookNotFound`."""
        return self.database.snapshot(lambda tx: subscriptions.log(tx, webhook, state, before, limit))

    def batch_deliveries(self, batch: int) -> list[subscriptions.Delivery]:
        """Raises `errors.BatchNotFound`."""

        def look(tx: Connection) -> list[subscriptions.Delivery]:
            batches.get(tx, batch)
            return subscriptions.of_batch(tx, batch)

        return self.database.snapshot(look)

    def redeliver(self, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
        """How many are due again. Raises `errors.WebhookNotFound`, `WebhookDisabled`, `PositionTrimmed`,
        `InvalidRequest`."""
        return subscriptions.redeliver(self.database, webhook, position=position, event=event)

    def test_webhook(self, webhook: int) -> tuple[str, subscriptions.Answer]:
        """The id of the event that was sent, and what came back. Raises `errors.WebhookNotFound`."""
        return subscriptions.test(self.database, self._sending, webhook)

    def put_group(
        self, name: str, partitions: int, ttl: timedelta | None = None, release: timedelta | None = None
    ) -> tuple[groups.Group, bool]:
        """The group, and whether it is new. Raises `errors.PartitionsFixed`."""
        return self.database.write(lambda tx: groups.put(tx, name, partitions, ttl, release), repeatable=True)

    def list_groups(self, after: str | None, limit: int) -> list[groups.Summary]:
        """By name, those above `after`."""
        return self.database.snapshot(lambda tx: groups.page(tx, after, limit))

    def get_group(self, name: str) -> groups.Details:
        """Raises `errors.ConsumerGroupNotFound`."""
        return self.database.snapshot(lambda tx: groups.get(tx, name))

    def delete_group(self, name: str) -> None:
        """Raises `errors.ConsumerGroupNotFound`, `ConsumerGroupInUse`."""
        self.database.write(lambda tx: groups.delete(tx, name))

    def sync(self, group: str, caller: leases.Caller) -> leases.Synced:
        """Raises `errors.ConsumerGroupNotFound`, `SessionReplaced`, `InvalidRequest`."""
        return leases.synced(self.database, group, caller)

    def leave_group(self, group: str, worker: str, session: str | None = None) -> None:
        """Raises `errors.ConsumerGroupNotFound`."""
        self.database.write(lambda tx: leases.leave(tx, group, worker, session), repeatable=True)

    def commit_position(
        self, holds: groups.Fence, snapshot: Snapshot, *, token: str | None = None, head: int | None = None
    ) -> groups.Position:
        """Raises `errors.StaleEpoch`, `ConsumerGroupNotFound`."""
        return self.database.write(
            lambda tx: groups.commit(tx, holds, snapshot, token=token, head=head), repeatable=True
        )

    def define_process(
        self,
        name: str,
        *,
        partitions: int | None = None,
        ttl: timedelta | None = None,
        release: timedelta | None = None,
        after: int | None = None,
    ) -> tuple[definitions.Definition, bool]:
        """The process, and whether it is new. Raises `errors.PartitionsFixed`, `PositionTrimmed`, `InvalidRequest`,
        `ConsumerGroupInUse`."""
        definitions.sweep(self.database)  # one of that name may have been deleted half-way
        return self.database.write(
            lambda tx: definitions.define(tx, name, partitions, ttl, release, after), repeatable=True
        )

    def list_processes(self) -> list[instances.Summary]:
        return self.database.snapshot(instances.summaries)

    def delete_process(self, name: str) -> None:
        """Raises `errors.ProcessNotFound`, `ConsumerGroupInUse`."""
        definitions.delete(self.database, name)

    def handle(self, handling: instances.Handling) -> instances.Handled:
        """Raises `errors.ProcessNotFound`, `StaleEpoch`, `VersionConflict`, `InvalidRequest`."""
        handled = self.database.write(lambda tx: instances.handle(tx, handling), repeatable=True)
        metrics.PROCESS_EVENTS["repeated" if handled.repeated else handled.status].inc()
        if handled.status is inbox.Status.PARKED and not handled.repeated:
            log.warning(
                "event_parked",
                process=handling.process,
                instance=handling.instance,
                event_id=handling.event,
                error=handling.error,
            )
        return handled

    def list_instances(
        self, process: str, status: instances.Status | None, after: str | None, limit: int, *, parked: bool = False
    ) -> tuple[list[instances.Instance], bool]:
        """And whether there may be more. Raises `errors.ProcessNotFound`."""
        return self.database.snapshot(lambda tx: instances.page(tx, process, status, after, limit, parked=parked))

    def get_instance(self, process: str, instance: str) -> instances.Details:
        """Raises `errors.ProcessNotFound`, `InstanceNotFound`."""
        return self.database.snapshot(lambda tx: instances.get(tx, process, instance))

    def retry_parked(self, process: str, instance: str, event: str | None = None) -> int:
        """How many events are handled again. Raises `errors.ProcessNotFound`, `InstanceNotFound`."""
        return self.database.write(lambda tx: instances.retry(tx, process, instance, event))

    def commands(self, after: int, limit: int, *, types: Sequence[str] = (), process: str | None = None) -> outbox.Page:
        """Raises `errors.PositionTrimmed`, `errors.InvalidRequest` for a position from the future."""
        return self.database.snapshot(lambda tx: outbox.read(tx, after, limit, types=types, process=process))

    @property
    def _sending(self) -> Sender:
        if self._sender is None:
            raise errors.Misconfigured("webhooks can't be sent from here")
        return self._sender

    def on_append(self, react: Callable[[int], None]) -> None:
        """See `Database.on_append`."""
        self.database.on_append(react)

    def check_ready(self) -> None:
        """Raises `errors.Unavailable` (database away) or `Misconfigured` (its schema is older than this code)."""
        self.database.read(schema.check)

    def stop(self) -> None:
        """Answer the acks under way, take no more, close the connections."""
        self._acks.stop()
        self._payer.stop()
        self.database.dispose()
