"""Committing a flush: the transaction, what is kept in memory after it, and which batches were in its way."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, tables
from core.acks import flush
from core.acks.call import Unit
from core.bits import group_rows
from core.bits.cache import BitfieldCache
from core.storage import dialects
from core.storage.database import Database
from core.storage.statements import LIST, chunks


def commit(
    database: Database,
    units: Sequence[Unit],
    held: BitfieldCache,
    *,
    lock_waits: int = 4,
    lock_wait: float | None = None,
) -> flush.Flushed:
    """Apply the units in one transaction and commit it; the parameters are those of `Database.write`.

    Raises what that does; a `LockTimeout` names the batches whose rows are locked.
    """
    try:
        flushed = database.write(flush.flush, units, held, repeatable=True, lock_waits=lock_waits, lock_wait=lock_wait)
    except errors.LockTimeout as error:
        error.batches = database.read(locked, units)
        raise
    held.put(flushed.groups, flushed.era, flushed.known)
    return flushed


def locked(tx: Connection, units: Sequence[Unit]) -> frozenset[int]:
    """The batches of which a row that these units need is locked at the moment, their own or a group's. Waits for
    nothing, and ends with the caller's rollback. A group that another transaction has inserted and not committed is not
    seen."""
    if not dialects.of(tx).locks_rows:
        return frozenset()
    by_batch: dict[int, set[int]] = {}
    for unit in units:
        by_batch.setdefault(unit.batch, set()).update(unit.groups())
    found: set[int] = set()
    for part in chunks(sorted(by_batch), LIST):
        own = sa.select(tables.batches.c.id).where(tables.batches.c.id.in_(part))
        free = set(tx.scalars(own.with_for_update(skip_locked=True)))
        found |= set(tx.scalars(own)) - free
        among = group_rows.among({batch: by_batch[batch] for batch in part})
        text = f"SELECT batch_id, group_no FROM item_groups WHERE {among}"  # noqa: S608
        free_groups = set(map(tuple, tx.exec_driver_sql(f"{text} FOR UPDATE SKIP LOCKED")))
        found |= {batch for batch, number in tx.exec_driver_sql(text) if (batch, number) not in free_groups}
    return frozenset(found)
