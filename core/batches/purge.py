"""Removes a batch of any size permanently, so that no ack can find a part of it.

Deleting everything in one transaction would lock a hundred thousand rows. If groups were deleted first, a redelivered
ack would find a complete batch without rows, and its item would count again. If the batch were deleted first, its
groups would be orphaned. So:

1. The state `deleting` is committed. From then on, the batch is unknown to callers. Its open_key and its place in a
   parent become free, and its callback gets nothing more.
2. Its groups, journal, extends, failures, skips and callback (with its deliveries) are deleted in bounded chunks.
3. The batch row is deleted last. An ack that comes in the meantime finds `deleting` (or no row) under the lock of that
   row, before it inserts anything.

The process can be killed anywhere; the janitor continues with step 2.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.batches import batch as batches
from core.batches import callbacks
from core.batches.lifecycle import LIVE, Duty, State
from core.storage import tables
from core.storage.database import Database

CHUNK: Final = 500
"""Rows that one transaction deletes."""

_BY_BATCH: Final = (
    (tables.item_groups, tables.item_groups.c.group_no),
    (tables.ack_journal, tables.ack_journal.c.entry_no),
    (tables.count_outbox, tables.count_outbox.c.id),
    (tables.event_outbox, tables.event_outbox.c.id),
    (tables.extends, tables.extends.c.idempotency_key),
    (tables.failures, tables.failures.c.number),
    (tables.skips, tables.skips.c.number),
)


def condemn(tx: Connection, batch_id: int, state: State | None = None) -> bool:
    """Step 1, which also cancels a live batch. Returns False if the batch has a debt to its parent or must end its
    children, which must be done first. With `state`, only a batch in this state is condemned. Raises
    `errors.BatchNotFound`, `StateConflict`."""
    batch, now = batches.lock(tx, batch_id)
    if state not in (None, batch.state):
        raise errors.StateConflict(batch_id, batch.state, state)
    is_live = batch.state in LIVE
    owes = batch.parent_due is not None or (is_live and batch.parent_batch is not None)
    owes |= batch.children_due is Duty.END
    if not owes:
        callbacks.disable(tx, batch_id)  # before its end locks the head of the feed
    if is_live:
        batches.end(tx, batch, State.CANCELLED, now, children=False)
    if not owes:
        mark(tx, batch_id)
    return not owes


def mark(tx: Connection, batch_id: int) -> None:
    """Set the state `deleting` on a batch whose lock is held, and whose callback is disabled."""
    batches.update(
        tx,
        batch_id,
        state=State.DELETING,
        open_key=None,
        open_hash=None,
        parent_batch=None,
        parent_number=None,
        children_due=None,
    )


def remove_chunk(tx: Connection, batch_id: int) -> bool:
    """One transaction of steps 2 and 3. Returns True when the batch is removed."""
    for table, key in _BY_BATCH:
        last = tx.execute(
            sa.select(key).where(table.c.batch_id == batch_id).order_by(key).limit(1).offset(CHUNK - 1)
        ).scalar()
        tx.execute(sa.delete(table).where(table.c.batch_id == batch_id, *([] if last is None else [key <= last])))
        if last is not None:
            return False
    if not callbacks.remove_chunk(tx, batch_id):
        return False
    tx.execute(
        sa.delete(tables.batches).where(tables.batches.c.id == batch_id, tables.batches.c.state == State.DELETING)
    )
    return True


def purge(database: Database, batch_id: int) -> None:
    """All of steps 2 and 3 for a condemned batch."""
    while not database.write(remove_chunk, batch_id):
        pass
