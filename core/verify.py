"""Recount a batch: do its counts agree with its bits, and its state with its counts?

Counts move by the bits that changed, in the same transaction; a disagreement is a bug or a broken row, and is
shown, never mended in silence. Reads one snapshot, so a batch that is being acked meanwhile doesn't look inconsistent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import batches, bitfield, journal, tables
from core.batches import Batch
from core.lifecycle import State
from core.ranges import STEP


@dataclass(frozen=True, slots=True)
class Verification:
    """The batch row's numbers, and what the bits say. `faults` names what disagrees, in words."""

    items: int
    acked: int
    failed: int
    pending: int
    counted_acked: int
    counted_failed: int
    faults: list[str]

    @property
    def ok(self) -> bool:
        return not self.faults


def verify(tx: Connection, batch_id: int) -> Verification:
    """`tx` is a snapshot. Raises `errors.BatchNotFound`."""
    batch = batches.get(tx, batch_id)
    resolved = failed = 0
    faults: list[str] = []
    for number, group, indexes in _groups(tx, batch):
        issued = max(0, min(batch.group_size, batch.items - number * batch.group_size))
        found = _faults(group, issued)
        if any(index >= issued for index in indexes):
            found.append("its journal names items that were never issued")
        if group.failed is not None and any(group.failed[index] for index in indexes):
            found.append("its journal names items that are failed")
        faults += [f"group {number}: {fault}" for fault in found]
        resolved += journal.union(group, indexes).resolved.count()
        failed += 0 if group.failed is None else group.failed.count()
    acked = resolved - failed
    if (acked, failed) != (batch.acked, batch.failed):
        faults.append(f"counts say {batch.acked} acked, {batch.failed} failed; bits say {acked} and {failed}")
    done = resolved == batch.items
    if batch.state is State.COMPLETE and not done:
        faults.append(f"it is complete, and {batch.items - resolved} items are pending")
    if batch.state is State.SEALED and done:
        faults.append("it is sealed and nothing is pending, and it is not complete")
    return Verification(batch.items, batch.acked, batch.failed, batch.pending, acked, failed, faults)


def _groups(tx: Connection, batch: Batch) -> Iterator[tuple[int, bitfield.Group, Sequence[int]]]:
    """(number, the group as its row has it, what the journal names of it)."""
    size = batch.group_size
    known = tables.item_groups.c
    recent = journal.recent(tx, batch.id, size)
    last = -1
    while True:
        query = sa.select(tables.item_groups).where(known.batch_id == batch.id, known.group_no > last)
        rows = tx.execute(query.order_by(known.group_no).limit(STEP)).all()
        for row in rows:
            last = row.group_no
            group = bitfield.Group.load(row.resolved, row.failed, row.resolved_count, row.failed_count, size)
            yield last, group, recent.pop(last, ())
        if len(rows) < STEP:
            break
    for number in sorted(recent):
        yield number, bitfield.Group.empty(size), recent[number]


def _faults(group: bitfield.Group, issued: int) -> list[str]:
    found = []
    if group.resolved.count() != group.resolved_count:
        found.append(f"resolved_count is {group.resolved_count}, its bits say {group.resolved.count()}")
    if group.resolved.count(1, issued):
        found.append("bits are set of items that were never issued")
    if group.failed is not None:
        if group.failed.count() != group.failed_count:
            found.append(f"failed_count is {group.failed_count}, its bits say {group.failed.count()}")
        if (group.failed & ~group.resolved).any():
            found.append("items are failed and not resolved")
    elif group.failed_count:
        found.append(f"failed_count is {group.failed_count} and it has no failed bits")
    return found
