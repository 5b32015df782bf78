"""Recount a batch: do its counts agree with its bits, and its state with its counts?

Counts move by the bits that changed, in the same transaction; a disagreement is a bug or a broken row, and is
shown, never mended in silence. Reads one snapshot, so a batch that is being acked meanwhile doesn't look inconsistent.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import batches, bitfield, tables
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
    size = batch.group_size
    known = tables.item_groups.c
    resolved = failed = 0
    faults: list[str] = []
    last = -1
    while True:
        query = sa.select(tables.item_groups).where(known.batch_id == batch_id, known.group_no > last)
        rows = tx.execute(query.order_by(known.group_no).limit(STEP)).all()
        for row in rows:
            last = row.group_no
            group = bitfield.Group.load(row.resolved, row.failed, row.resolved_count, row.failed_count, size)
            issued = max(0, min(size, batch.items - last * size))
            bits, lost = group.resolved, group.failed
            resolved += bits.count()
            failed += lost.count() if lost is not None else 0
            faults += [f"group {last}: {fault}" for fault in _faults(group, issued)]
        if len(rows) < STEP:
            break
    acked = resolved - failed
    if (acked, failed) != (batch.acked, batch.failed):
        faults.append(f"counts say {batch.acked} acked, {batch.failed} failed; bits say {acked} and {failed}")
    done = resolved == batch.items
    if batch.state is State.COMPLETE and not done:
        faults.append(f"it is complete, and {batch.items - resolved} items are pending")
    if batch.state is State.SEALED and done:
        faults.append("it is sealed and nothing is pending, and it is not complete")
    return Verification(batch.items, batch.acked, batch.failed, batch.pending, acked, failed, faults)


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
