"""Removing a batch for good, however large, so that no ack can ever find half of it.

Deleting everything in one transaction locks a hundred thousand rows; deleting groups first lets a redelivered ack find
a complete batch with missing rows and count it again; deleting the batch first leaves the groups orphaned. So:

1. the state `deleting` is committed: from there on the batch is unknown to callers. Its open_key and its place in a
   parent are set free;
2. its groups, journal, extends and failures go in bounded chunks;
3. the batch row goes last, together with any group that an ack made meanwhile: such an ack locks the batch row next,
   finds `deleting` (or nothing), and rolls its group back.

It can be killed anywhere; the janitor takes it up again from step 2.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import tables
from core.batches import batch as batches
from core.batches.lifecycle import LIVE, State
from core.storage.database import Database

CHUNK: Final = 500
"""Rows that one transaction deletes."""

_BY_BATCH: Final = (
    (tables.item_groups, tables.item_groups.c.group_no),
    (tables.ack_journal, tables.ack_journal.c.entry_no),
    (tables.extends, tables.extends.c.idempotency_key),
    (tables.failures, tables.failures.c.number),
)


def condemn(tx: Connection, batch_id: int) -> bool:
    """Step 1; a live batch is cancelled with it. False where it has ended but is still to tell its parent: first that.
    Raises `errors.BatchNotFound`."""
    batch, now = batches.lock(tx, batch_id)
    if batch.state in LIVE:
        batch = batches.end(tx, batch, State.CANCELLED, now)
    if batch.parent_due is not None:
        return False
    mark(tx, batch_id)
    return True


def mark(tx: Connection, batch_id: int) -> None:
    """Set the state `deleting` on a batch whose lock is held."""
    batches.update(
        tx, batch_id, state=State.DELETING, open_key=None, open_hash=None, parent_batch=None, parent_number=None
    )


def remove_chunk(tx: Connection, batch_id: int) -> bool:
    """One transaction of steps 2 and 3; True when the batch is gone."""
    for table, key in _BY_BATCH:
        last = tx.execute(
            sa.select(key).where(table.c.batch_id == batch_id).order_by(key).limit(1).offset(CHUNK - 1)
        ).scalar()
        tx.execute(sa.delete(table).where(table.c.batch_id == batch_id, *([] if last is None else [key <= last])))
        if last is not None:
            return False
    tx.execute(
        sa.delete(tables.batches).where(tables.batches.c.id == batch_id, tables.batches.c.state == State.DELETING)
    )
    return True


def purge(database: Database, batch_id: int) -> None:
    """Steps 2 and 3 of a condemned batch, to the end."""
    while not database.write(remove_chunk, batch_id, repeatable=True):
        pass
