"""The transaction that writing verbs share: opens, extends and seals of batches, appends to the feed, handlings of
process managers, tally entries and positions.

Calls that arrive during a transaction share the next one (see `commits`). Each has its own outcome: a refused operation
doesn't affect the others, as it changes nothing. Only an open with a parent has a transaction of its own, as it reads
the parent's bits.

Nothing here knows what a verb does. A `Kind`, in the module of its noun, applies the operations of one or several
verbs; a transaction has the kinds of its operations and no others. They come in the order of their locks, which
`lock_order.sort` makes: first the partitions of all fences, then what each kind locks, at last the feed's head. A new
verb becomes an `Operation` and a `Kind` (or a part of one), and an entry in `core.service.writes.KINDS`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.commits.kind import Kind
from core.commits.operation import Done, Operation
from core.consumer_groups import positions
from core.storage.database import Database
from core.storage.statements import Pipeline


def flush(
    tx: Connection, operations: Sequence[Operation], kinds: Sequence[type[Kind]], outbox: str | None = None
) -> list[Done]:
    """Apply the operations. The caller commits. With the name of an `outbox`, events are left there, and the head isn't
    locked (see `feed.leave`). Raises `faults.BeginAgain` if the transaction must be run again."""
    pipeline = Pipeline(tx)
    parts = [
        kind(pipeline, chosen)
        for kind in kinds
        if (chosen := [operation for operation in operations if isinstance(operation, kind.handles)])
    ]
    refusals = positions.lock(pipeline, {fence for part in parts for fence in part.fences()})
    for part in parts:
        part.prepare()
    refused = refusals()
    for part in parts:
        part.judge(refused)

    def events(position: int) -> list[feed.NewEvent]:
        new: list[feed.NewEvent] = []
        for part in parts:
            new += part.finish(position + len(new))
        return new

    def look() -> None:
        for part in parts:
            part.look()

    if outbox is not None:
        feed.leave(pipeline, events(0), outbox)
    elif any(part.has_events() for part in parts):
        feed.write(pipeline, events, look, batches={batch for part in parts for batch in part.batches()})
    else:
        events(0)
    pipeline.finish()
    outcomes = {operation: outcome for part in parts for operation, outcome in part.outcomes.items()}
    return [outcomes[operation] for operation in operations]


def commit(
    database: Database,
    operations: Sequence[Operation],
    kinds: Sequence[type[Kind]],
    *,
    lock_waits: int = 4,
    lock_wait: float | None = None,
) -> list[Done]:
    """Apply the operations in one transaction and commit it. The parameters and exceptions are those of
    `Database.write`; a `LockTimeout` names the batches whose rows are locked."""
    try:
        return database.write(flush, operations, kinds, lock_waits=lock_waits, lock_wait=lock_wait)
    except errors.LockTimeout as error:
        error.batches = database.read(batches.locked, {operation.batch for operation in operations})
        raise
