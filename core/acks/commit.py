"""Committing a flush: the transaction, the update of the cache after it, and finding the batches that block it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors
from core.acks import flush
from core.acks.call import Call, Unit
from core.batches import batch as batches
from core.batches.lifecycle import Verb
from core.bits import group_rows
from core.bits.cache import BitfieldCache
from core.storage import dialects
from core.storage.checks import Finding, Verdict
from core.storage.database import Database
from core.storage.refusals import INSTEAD
from core.storage.statements import LIST, chunks

_MISSING: Final = (2**62, 2**62 + 1)
"""Ids of batches that never exist."""


def commit(
    database: Database,
    units: Sequence[Unit],
    cache: BitfieldCache,
    *,
    lock_waits: int = 4,
    lock_wait: float | None = None,
) -> flush.Flushed:
    """Apply the units in one transaction and commit it. The parameters and exceptions are those of `Database.write`; a
    `LockTimeout` names the batches whose rows are locked.
    """
    try:
        result = database.write(flush.flush, units, cache, lock_waits=lock_waits, lock_wait=lock_wait)
    except errors.LockTimeout as error:
        error.batches = database.read(locked, units)
        raise
    cache.put(result.groups, result.era, result.journal_states)
    return result


def locked(tx: Connection, units: Sequence[Unit]) -> frozenset[int]:
    """The batches of these units whose row, or the row of one of their groups, is locked by another transaction. Never
    waits. The caller must roll back. Doesn't detect group rows that another transaction has inserted but not committed.
    """
    if not dialects.of(tx).locks_rows:
        return frozenset()
    by_batch: dict[int, set[int]] = {}
    for unit in units:
        by_batch.setdefault(unit.batch, set()).update(unit.groups())
    locked_batches = set(batches.locked(tx, by_batch))
    for part in chunks(sorted(by_batch), LIST):
        condition = group_rows.among({batch: by_batch[batch] for batch in part})
        text = f"SELECT batch_id, group_no FROM item_groups WHERE {condition}"  # noqa: S608
        free_groups = set(map(tuple, tx.exec_driver_sql(f"{text} FOR UPDATE SKIP LOCKED")))
        locked_batches |= {batch for batch, number in tx.exec_driver_sql(text) if (batch, number) not in free_groups}
    return frozenset(locked_batches)


def check_merging(database: Database) -> Finding:
    """Whether the database executes the statements of a flush of several batches. These don't exist, so it locks and
    writes nothing."""
    call = Call.of(Verb.ACK, [(batch, 0, 0) for batch in _MISSING])
    try:
        with database.connection() as tx, tx.begin():
            flush.flush(tx, call.chunks(), BitfieldCache())
    except DBAPIError as error:
        return Finding(
            "merging",
            Verdict.BROKEN,
            f"the database refuses statements for several batches, so each ack has a transaction of its own: "
            f"{database.dialect.text_of(error)}",
            INSTEAD,
        )
    return Finding("merging", Verdict.FINE, "acks of several batches share a transaction")
