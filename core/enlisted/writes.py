"""Opens, extends and seals in a transaction that the caller commits: as in `core.batches.writing`, but their events
wait in the outbox, and a seal too.

A batch that the transaction has opened is invisible to others until the commit, so its row holds up nobody. An extend
of any other batch must know the next number, and locks the batch's row until the caller's commit: nobody can count
items of that batch until then. A seal needs no answer, so the `mover` seals.
"""

from __future__ import annotations

from typing import Any, Final

from core import errors, writes
from core.acks import outbox
from core.batches.batch import Extended
from core.batches.lifecycle import State, judge
from core.batches.writing import BatchWrites, Extend, Open
from core.enlisted import acks
from core.storage import dialects, faults, statements
from core.storage.statements import LAST, Pipeline

GROUPS: Final = 64
"""Groups of new items that get a row at once."""


def apply(tx: Any, operation: Open | Extend) -> Any:
    """Apply the operation: an `Opened` or an `Extended`. Raises its errors, `errors.Contended`, `errors.Misconfigured`,
    and the driver's errors."""
    check(tx)
    dialect = dialects.of(tx)
    try:
        [outcome] = writes.flush(tx, [operation], [BatchWrites], dialect.name(tx, "event_outbox"))
        pipeline: Pipeline = tx.info.pop(LAST)
        pipeline.flush()
    except faults.BeginAgain as error:
        raise errors.Contended(
            "another transaction has opened the batch of this Idempotency-Key at the same time: repeat yours"
        ) from error
    if outcome.error is not None:
        raise outcome.error
    if isinstance(operation, Extend):
        _make_rows(tx, outcome.value)
    return outcome.value


def _make_rows(tx: Any, extended: Extended) -> None:
    """Make rows for the first groups of the new items, in case this transaction also acks some: the row of the batch is
    locked, so no other transaction could."""
    size = extended.batch.group_size
    first, end = extended.start // size, -(-(extended.start + extended.count) // size)
    acks.prepare(tx, {extended.batch.id: range(first, min(end, first + GROUPS))})


def seal(tx: Any, batch: int) -> None:
    """Leave the wish to seal the batch. Raises `errors.BatchNotFound`, `BatchEnded` if it can't be sealed now. If it
    has ended by the commit, it stays as it is."""
    dialect = dialects.of(tx)
    [rows] = statements.run(
        tx,
        f"SELECT state, {dialect.isolation(tx)} FROM {dialect.name(tx, 'batches')} WHERE id = {batch}",  # noqa: S608
    )
    if not rows:
        raise errors.BatchNotFound(batch)
    state, isolation = map(statements.as_text, rows[0])
    acks.check_isolation(isolation)
    if state == State.DELETING:
        raise errors.BatchNotFound(batch)
    judge("seal", batch, State(state or ""))
    statements.run(tx, *outbox.leave_seal(dialect.name(tx, "count_outbox"), batch))


def check(tx: Any) -> None:
    """Raise `errors.Misconfigured` for a wrong isolation level."""
    [[(isolation,)]] = statements.run(tx, f"SELECT {dialects.of(tx).isolation(tx)}")
    acks.check_isolation(statements.as_text(isolation))
