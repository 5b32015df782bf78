"""Repair a batch whose counts or state disagree with its bits (see `verify`): both are restored from the bits.

Bits that were lost can't be restored. Their items are pending again, and their redelivery resolves them. What is known
of an item, in this order:

1. It is acked if the journal names it.
2. It is failed if its bit in `failed` is set, or if a reason is stored for it: a redrive removes the reason in the same
   transaction, so a reason without the bit means that the bit was lost. If the item was acked after that, this is the
   one case in which the repair errs. It errs visibly: the item is listed as failed, and one more ack corrects it. An
   acked item in the place of a failed one would never be found.
3. It is acked if its bit in `resolved` is set.
4. It is pending otherwise. Bits and reasons of items that were never issued are removed.

What could go wrong, and why it can't:

*An ack slips in between the recount and the write.* Every transaction that changes a bit of the batch locks the batch
row before it commits, and a repair holds that lock from its first read on. So what it reads is committed, and nothing
else of the batch is committed before the repair is.

*A bitfield in another process's memory is taken for the repaired one.* `cache` identifies a bitfield by
(resolved_count, failed_count), and relies on each pair naming the bits exactly. That is no longer true once a repair
lowers a count: a process may hold ten resolved items, of which the repair keeps seven; when another process acks three
other items, the pair is the same, and the bits are not. So a repaired batch is journaled from then on. No process uses
`cache`'s pairs for a journaled batch: every ack transaction reads `batches.journal_next`, and starts over as one of a
journaled batch if it isn't 0. What processes hold of a journaled batch they identify by `journal_next` and the entries
since. A repair moves `journal_next` without an entry, so an entry is missing to all of them, and they read everything
again (`journal.catch_up`). `journal_next` never goes back to 0.

*A transaction that has locked groups waits for the batch row, and the repair waits for the groups.* That would be a
deadlock with each flush of a busy batch, and the repair might lose each of them. So the batch becomes journaled in a
transaction of its own, first. After that commit a process meets the mark at the latest in its next flush.

*An earlier release works on the database.* It would announce the second completion of a batch under the id of the first
one, which is refused, and hold bitfields by rules that a repair breaks if it knows no journal. So a repair asks that
the schema serves no such release (`schema.finish`).

*The second completion is taken for the first one.* Each repair increments `batches.repairs`, which is part of the ids
of all later events of the batch: `batch:7:completed:1`. See decision 18.

*The item that a child batch resolved is pending again.* No queue redelivers it. So the children that have ended and
whose item is pending owe it again (`owe_again`). In the other direction nothing is taken back: if a batch that was
wrongly complete has resolved its parent's item, that item stays resolved.

Cost: one read of all groups under the lock of the batch row, and one write of those that are wrong. Acks, extends and
the seal of this batch wait for that, other batches don't.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed, tables
from core.batches import batch as batches
from core.batches import nesting, verify
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, TERMINAL, State, completes
from core.batches.verify import StoredGroup
from core.bits import bitfield, group_rows, journal
from core.storage import schema, statements
from core.storage.statements import LIST, chunks

SINCE: Final = "0009"
"""The revision of the schema that brought it."""

_batches = tables.batches.c
_failures = tables.failures.c


@dataclass(frozen=True, slots=True)
class Repaired:
    """The batch as it was found and as it is now, or would be. `groups`: how many rows of groups were wrong."""

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
    full_prefix: int = 0
    groups: int = 0


def plan(tx: Connection, batch_id: int, fingerprint: bytes = b"") -> Repaired:
    """What a repair would do now. `tx` is a snapshot. Raises `errors.BatchNotFound`."""
    batch = batches.get(tx, batch_id)
    recounted, faults = _recount(tx, batch, write=False)
    if not faults:
        return _fine(batch, fingerprint)
    return Repaired(batch, replace(batch, **_values(batch, recounted, batch.updated_at, b"")), recounted.groups, faults)


def prepare(tx: Connection, batch_id: int) -> None:
    """Make the batch journaled, in a transaction before that of `repair`. Raises `errors.BatchNotFound`,
    `errors.UpgradeNotFinished`."""
    batch, _ = batches.lock(tx, batch_id)
    if not schema.serves_only(tx, SINCE):
        raise errors.UpgradeNotFinished(SINCE)
    if not batch.journal_next:
        batches.update(tx, batch_id, journal_next=1)


def repair(tx: Connection, batch_id: int, fingerprint: bytes) -> Repaired:
    """Repair a batch after `prepare`. `fingerprint` names the request. Raises `errors.BatchNotFound`."""
    batch, now = batches.lock(tx, batch_id)
    recounted, faults = _recount(tx, batch, write=True)
    tx.execute(sa.delete(tables.ack_journal).where(tables.ack_journal.c.batch_id == batch_id))
    # Moved in any case: the groups that the journal named were written, without an entry that says so.
    batches.update(tx, batch_id, journal_next=batch.journal_next + 1)
    if not faults:  # somebody else has repaired it in the meantime
        return _fine(batch, fingerprint)
    batches.update(tx, batch_id, **_values(batch, recounted, now, fingerprint))
    after = batches.get(tx, batch_id)
    newly = after.complete and not batch.complete
    newly_succeeded = after.succeeded and not batch.succeeded
    happened = ["repaired", *(["completed"] if newly else []), *(["succeeded"] if newly_succeeded else [])]
    feed.append(tx, [batches.event(after, name) for name in happened])
    return Repaired(batch, after, recounted.groups, faults, newly, newly_succeeded)


def _fine(batch: Batch, fingerprint: bytes) -> Repaired:
    """Nothing disagrees. A retry of the repair that completed the batch sees that it did."""
    return Repaired(batch, batch, 0, [], batch.completed_by == fingerprint, batch.succeeded_by == fingerprint)


def _values(batch: Batch, recounted: _Recounted, now: datetime, fingerprint: bytes) -> dict[str, Any]:
    """What changes in the batch row. The time of the last change too, or a batch that goes back from complete to sealed
    might be so idle that it expires at once."""
    acked, failed = recounted.acked, recounted.failed
    values: dict[str, Any] = {
        "acked": acked,
        "failed": failed,
        "full_prefix": min(batch.full_prefix, recounted.full_prefix),
        "repairs": batch.repairs + 1,
        "updated_at": now,
    }
    if batch.complete and acked + failed < batch.items:
        values |= {"state": State.SEALED, "ended_at": None, "completed_by": None, "succeeded_by": None}
        return values | {"parent_due": None}
    newly = completes(batch.state, batch.items, acked, failed)
    if newly:
        values |= {"state": State.COMPLETE, "ended_at": now, "completed_by": fingerprint}
    if not newly and (not batch.complete or batch.succeeded == (failed == 0)):
        return values
    values["succeeded_by"] = None if failed else fingerprint
    if batch.parent_batch is not None:
        values["parent_due"] = nesting.owed(State.COMPLETE, failed)
    return values


def _recount(tx: Connection, batch: Batch, *, write: bool) -> tuple[_Recounted, list[str]]:
    """The counts after the repair, and what disagrees now; with `write` the groups and reasons are written."""
    recount = verify.Recount(batch)
    found = _Recounted()
    rows: list[str] = []
    stray: list[int] = []
    for stored in verify.groups(tx, batch):
        wrong = recount.add(stored)
        issued = verify.issued_of(batch, stored.number)
        group = _restored(stored, batch.group_size, issued)
        found.acked += group.resolved_count - group.failed_count
        found.failed += group.failed_count
        if stored.number == found.full_prefix and group.resolved_count == batch.group_size:
            found.full_prefix += 1
        found.groups += wrong
        if write and (wrong or stored.acked):
            rows.append(group_rows.row((batch.id, stored.number), group, issued))
        first = stored.number * batch.group_size
        stray += [first + i for i in stored.reasons if i >= issued or group.failed is None or not group.failed[i]]
        if sum(map(len, rows)) > group_rows.TEXT:
            statements.run(tx, *group_rows.upsert(tx, rows))
            rows.clear()
    if write:
        statements.run(tx, *group_rows.upsert(tx, rows))
        for part in chunks(stray, LIST):
            tx.execute(sa.delete(tables.failures).where(_failures.batch_id == batch.id, _failures.number.in_(part)))
    return found, recount.verification().faults


def _restored(stored: StoredGroup, size: int, issued: int) -> bitfield.Group:
    """The group as the module says."""
    acked = bitfield.mask_of([index for index in stored.acked if index < size], size)
    failed = stored.failed[:size]
    failed[list(stored.reasons)] = True
    failed &= ~acked
    resolved = stored.resolved[:size] | acked | failed
    resolved[issued:] = False
    failed[issued:] = False
    return bitfield.Group(resolved, failed if failed.any() else None, resolved.count(), failed.count())


def owe_again(tx: Connection, batch_id: int, after: int) -> tuple[list[int], int | None]:
    """Have children of the batch that have ended owe their item again where it is pending. A page of them, those of
    items above the number `after`: which children owe, and the `after` of the next page. Raises
    `errors.BatchNotFound`."""
    batch = batches.get(tx, batch_id)
    ended = (_batches.state.in_(TERMINAL), _batches.parent_due.is_(None))
    query = sa.select(_batches.id, _batches.parent_number).where(
        _batches.parent_batch == batch_id, _batches.parent_number > after, *ended
    )
    rows = tx.execute(query.order_by(_batches.parent_number).limit(LIST)).all() if batch.state in LIVE else []
    resolved = _resolved(tx, batch, [row.parent_number for row in rows])
    children = [row.id for row in rows if row.parent_number not in resolved]
    query = sa.select(_batches.id, _batches.state, _batches.failed).where(_batches.id.in_(children), *ended)
    owing = tx.execute(query.order_by(_batches.id).with_for_update()).all() if children else []
    for child in owing:
        batches.update(tx, child.id, parent_due=nesting.owed(State(child.state), child.failed))
    return [child.id for child in owing], rows[-1].parent_number if len(rows) == LIST else None


def _resolved(tx: Connection, batch: Batch, numbers: Sequence[int]) -> set[int]:
    """Those of `numbers` that are resolved; at most `LIST` of them."""
    size = batch.group_size
    found = {
        group * size + index for group, named in journal.recent(tx, batch.id, size).items() for index in named
    }.intersection(numbers)
    columns = tables.item_groups.c
    wanted = {number // size for number in numbers}
    for row in tx.execute(
        sa.select(tables.item_groups).where(columns.batch_id == batch.id, columns.group_no.in_(wanted))
    ):
        group = bitfield.Group.load(row.resolved, row.failed, row.resolved_count, row.failed_count, size)
        found |= {number for number in numbers if number // size == row.group_no and group.resolved[number % size]}
    return found
