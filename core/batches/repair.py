"""Repairs a batch whose counts or state disagree with its bits (see `verify`): both are restored from the bits.

Bits that were lost can't be restored. Their items are pending again, and their redelivery resolves them. The state of
an item is decided by the first rule that applies:

1. It is acked if the journal names it.
2. It is skipped if its bit in `skipped` is set, or if a reason of a skip is stored for it.
3. It is failed if its bit in `failed` is set, or if a reason is stored for it: a redrive removes the reason in the same
   transaction, so a reason without the bit means that the bit was lost. If the item was acked after that, this is the
   only case in which the repair is wrong. The error is visible: the item is listed as failed, and one more ack corrects
   it. A failed item that was restored as acked would never be found.
4. It is acked if its bit in `resolved` is set.
5. It is pending otherwise. Bits and reasons of items that were never issued are removed.

What could go wrong, and why it can't:

*An ack slips in between the recount and the write.* Every transaction that changes a bit of the batch locks the batch
row before it commits, and a repair holds that lock from its first read on. So what it reads is committed, and nothing
else of the batch is committed before the repair is.

*A bitfield in another process's memory is mistaken for the repaired one.* `cache` identifies a bitfield by its counts,
and relies on them determining the bits. That is no longer true once a repair lowers a count: a process may have cached
ten resolved items, of which the repair keeps seven; if another process then acks three other items, the counts are the
same, but the bits are not. So a repaired batch stays journaled from then on. No process uses the counts of `cache` for
a journaled batch: every ack transaction reads `batches.journal_next`, and if it isn't 0, begins again as for a
journaled batch. The cached state of a journaled batch is identified by `journal_next` and the entries since. A repair
advances `journal_next` without an entry, so all processes miss an entry and read everything again
(`journal.catch_up`). `journal_next` never goes back to 0, unless the batch is marked as one without a journal, of which
no process caches bits.

*A caller's transaction flips bits without the lock of the batch's row* (see `core.enlisted`). It holds the lock of its
group until its commit. So the repair of such a batch locks all groups before the batch. Then the bits have all that
waits in the outbox of counts, and the repair takes it out.

*A transaction that has locked groups waits for the batch row, and the repair waits for the groups.* That would be a
deadlock with each flush of a busy batch, and the database might roll back the repair each time. So a separate
transaction makes the batch journaled first. After its commit, every process detects this in its next flush at the
latest.

*An earlier release uses the database.* It would append the event of a second completion under the id of the first,
which is refused. And a release without the journal would cache bitfields by rules that a repair breaks. So a repair
requires that the schema supports no such release (`schema.finish`).

*The second completion is mistaken for the first.* Each repair increments the batch's generation (the column `repairs`),
which is part of the ids of all later events of the batch: `batch:7:completed:1`. See decision 18.

*The item that a child batch resolved is pending again.* No queue redelivers it. So the batch asks its ended children
again (see `descendants`). Nothing is revoked in the other direction: if a batch that was
wrongly complete has resolved its parent's item, that item stays resolved.

Cost: one read of all groups under the lock of the batch row, and one write of those that are wrong. Acks, extends and
the seal of this batch wait in the meantime; other batches don't.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import verify
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, Duty, State
from core.batches.verify import StoredGroup
from core.bits import bitfield, group_rows
from core.storage import faults, schema, statements, tables
from core.storage.statements import LIST, chunks

SINCE: Final = "0009"
"""The revision of the schema that introduced generations."""

_batches = tables.batches.c
_waiting = tables.count_outbox


@dataclass(frozen=True, slots=True)
class Repaired:
    """The batch before and after the repair or its plan. `groups` is the number of wrong group rows."""

    before: Batch
    after: Batch
    groups: int
    faults: list[str]
    newly: bool = False
    """This call completed the batch."""
    newly_succeeded: bool = False


@dataclass(slots=True)
class _Recounted:
    acked: int = 0
    failed: int = 0
    skipped: int = 0
    full_prefix: int = 0
    groups: int = 0

    @property
    def resolved(self) -> int:
        return self.acked + self.failed + self.skipped


def plan(tx: Connection, batch_id: int, fingerprint: bytes = b"") -> Repaired:
    """The result that a repair would have now. `tx` must be a snapshot. Raises `errors.BatchNotFound`."""
    batch = batches.get(tx, batch_id)
    counts, faults = _recount(tx, batch, write=False)
    if not faults:
        return _fine(batch, fingerprint)
    after, _ = _settled(batch, counts, batch.updated_at, b"")
    return Repaired(batch, after, counts.groups, faults)


def prepare(tx: Connection, batch_id: int) -> None:
    """Make the batch journaled, in a transaction before that of `repair`. Raises `errors.BatchNotFound`,
    `errors.UpgradeNotFinished`."""
    batch, _ = batches.lock(tx, batch_id)
    check_generations(tx)
    if not batch.journal_next and not batch.no_journal:
        batches.save(tx, batch, replace(batch, journal_next=1))


def check_generations(tx: Connection) -> None:
    """Raise `errors.UpgradeNotFinished` while an earlier release, which knows no generations, may be running."""
    if not schema.serves_only(tx, SINCE):
        raise errors.UpgradeNotFinished(SINCE)


def repair(tx: Connection, batch_id: int, fingerprint: bytes) -> Repaired:
    """Repair a batch after `prepare`. `fingerprint` identifies the request. Raises `errors.BatchNotFound`."""
    locked_groups = _lock_groups(tx, batch_id)
    batch, now = batches.lock(tx, batch_id)
    if batch.no_journal and (locked_groups is None or set(tx.scalars(_group_numbers(batch_id))) - locked_groups):
        raise faults.BeginAgain
    counts, problems = _recount(tx, batch, write=True)
    tx.execute(sa.delete(tables.ack_journal).where(tables.ack_journal.c.batch_id == batch_id))
    # Needed even without faults, as groups of the journal were written without an entry.
    journaled = batch if batch.no_journal else replace(batch, journal_next=batch.journal_next + 1)
    if batch.no_journal:
        # All groups are locked: the bits have what waits, and nothing is left by others until the commit.
        tx.execute(sa.update(_waiting).where(_waiting.c.batch_id == batch_id).values(acked=0, failed=0, skipped=0))
    if not problems:  # another request has repaired it in the meantime
        batches.save(tx, batch, journaled)
        return _fine(batch, fingerprint)
    after, names = _settled(journaled, counts, now, fingerprint)
    if after.state in LIVE:
        after = replace(after, children_due=Duty.REVIVE, children_told=0)
    batches.save(tx, batch, after)
    feed.append(tx, batches.events(after, ["repaired", *names]))
    return Repaired(batch, after, counts.groups, problems, "completed" in names, "succeeded" in names)


def _lock_groups(tx: Connection, batch_id: int) -> set[int] | None:
    """Lock all groups of the batch, if transactions of callers change them without the lock of its row; otherwise
    return None. Another group may get a row until the batch's own is locked."""
    if not batches.get(tx, batch_id).no_journal:
        return None
    return set(tx.scalars(_group_numbers(batch_id).with_for_update()))


def _group_numbers(batch_id: int) -> sa.Select[tuple[int]]:
    columns = tables.item_groups.c
    return sa.select(columns.group_no).where(columns.batch_id == batch_id).order_by(columns.group_no)


def _fine(batch: Batch, fingerprint: bytes) -> Repaired:
    """The result if there are no faults. `newly` is true for a retry of the repair that completed the batch."""
    return Repaired(batch, batch, 0, [], batch.completed_by == fingerprint, batch.succeeded_by == fingerprint)


def _settled(batch: Batch, counts: _Recounted, now: datetime, fingerprint: bytes) -> tuple[Batch, list[str]]:
    """The batch with these counts, and the names of its events. `updated_at` changes: otherwise a batch that goes back
    from complete to sealed might seem idle for so long that it expires immediately."""
    change = replace(
        batch,
        state=State.SEALED if batch.complete and counts.resolved < batch.items else batch.state,
        acked=counts.acked,
        failed=counts.failed,
        skipped=counts.skipped,
        full_prefix=min(batch.full_prefix, counts.full_prefix),
        generation=batch.generation + 1,
        updated_at=max(batch.updated_at, now),
    )
    return batches.settled(batch, change, now, fingerprint)


def _recount(tx: Connection, batch: Batch, *, write: bool) -> tuple[_Recounted, list[str]]:
    """The counts after the repair, and the faults; `write` also corrects the groups and reasons."""
    recount = verify.Recount(batch, verify.waiting(tx, batch.id))
    counts = _Recounted()
    rows: list[str] = []
    stray: list[int] = []
    stray_skips: list[int] = []
    for stored_group in verify.groups(tx, batch):
        wrong = recount.add(stored_group)
        issued = verify.issued_of(batch, stored_group.number)
        group = _restored(stored_group, batch.group_size, issued)
        counts.acked += group.resolved_count - group.failed_count - group.skipped_count
        counts.failed += group.failed_count
        counts.skipped += group.skipped_count
        if stored_group.number == counts.full_prefix and group.resolved_count == batch.group_size:
            counts.full_prefix += 1
        counts.groups += wrong
        if write and (wrong or stored_group.acked):
            rows.append(group_rows.row(tx, (batch.id, stored_group.number), group, issued))
        first = stored_group.number * batch.group_size
        stray += [first + i for i in stored_group.reasons if i >= issued or group.failed is None or not group.failed[i]]
        stray_skips += [
            first + i for i in stored_group.skip_reasons if i >= issued or group.skipped is None or not group.skipped[i]
        ]
        if sum(map(len, rows)) > statements.TEXT:
            statements.run(tx, *group_rows.upsert(tx, rows))
            rows.clear()
    if write:
        statements.run(tx, *group_rows.upsert(tx, rows))
        for table, numbers in ((tables.failures, stray), (tables.skips, stray_skips)):
            for part in chunks(numbers, LIST):
                tx.execute(sa.delete(table).where(table.c.batch_id == batch.id, table.c.number.in_(part)))
    return counts, recount.verification().faults


def _restored(stored_group: StoredGroup, size: int, issued: int) -> bitfield.Group:
    """The repaired group, by the rules of the module's docstring."""
    acked = bitfield.mask_of([index for index in stored_group.acked if index < size], size)
    skipped_bits = stored_group.skipped[:size]
    skipped_bits[list(stored_group.skip_reasons)] = True
    skipped_bits &= ~acked
    failed = stored_group.failed[:size]
    failed[list(stored_group.reasons)] = True
    failed &= ~(acked | skipped_bits)
    resolved = stored_group.resolved[:size] | acked | skipped_bits | failed
    for bits in (resolved, failed, skipped_bits):
        bits[issued:] = False
    group = bitfield.Group(resolved, failed if failed.any() else None, resolved.count(), failed.count())
    group.skipped, group.skipped_count = skipped_bits if skipped_bits.any() else None, skipped_bits.count()
    return group
