"""Completion: what an ack transaction does last, under the locks of the batch rows.

This is where a batch becomes complete, and the only place beside seal. Everything is decided in Python from what the
lock shows, and absolute values are written (MariaDB assigns from left to right within an UPDATE, SQLite does not).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, faults, tables
from core.calls import Completed, Unit
from core.lifecycle import TAKES_ACKS, State, completes

PREFIX_STEP: Final = 64
"""How many groups the full-prefix hint may advance in one transaction."""

_batch = tables.batches.c


@dataclass(slots=True)
class Touched:
    """What a flush did to one batch."""

    acked: int = 0
    failed: int = 0
    filled: bool = False
    """A group became full."""
    last_resolver: Unit | None = None
    """The last unit that resolved a pending item; if the batch completes, this one completed it."""
    last_changer: Unit | None = None


@dataclass(slots=True)
class Complete:
    """A complete batch, as this transaction leaves it."""

    id: int
    key: str | None
    failed: int
    completed_by: bytes | None
    succeeded_by: bytes | None
    completed_now: bool = False
    succeeded_now: bool = False


def write(tx: Connection, touched_batches: Mapping[int, Touched]) -> dict[int, Complete]:
    """Lock the batch rows, judge their state again, decide, write. Returns those that are complete.

    Raises `faults.BeginAgain` where a batch takes no acks any more, `errors.InconsistentBatch`.
    """
    if not touched_batches:
        return {}
    query = (
        sa.select(
            *(_batch.id, _batch.batch_key, _batch.state, _batch["items"], _batch.acked, _batch.failed),
            *(_batch.full_prefix, _batch.completed_by, _batch.succeeded_by, _batch.group_size),
            *(_batch.updated_at, _batch.ended_at),
            tables.utc_now().label("now"),
        )
        .where(_batch.id.in_(sorted(touched_batches)))
        .order_by(_batch.id)
        .with_for_update()
    )
    rows = {row.id: row for row in tx.execute(query)}
    complete: dict[int, Complete] = {}
    writes: list[dict[str, Any]] = []
    for batch, touched in sorted(touched_batches.items()):
        row = rows.get(batch)
        if row is None or row.state not in TAKES_ACKS:
            raise faults.BeginAgain
        state, acked, failed = State(row.state), row.acked + touched.acked, row.failed + touched.failed
        _check(row, state, acked, failed, touched)
        prefix, ended_at, completed_by, succeeded_by = row.full_prefix, row.ended_at, row.completed_by, row.succeeded_by
        if touched.filled:
            prefix = _advance_prefix(tx, batch, prefix, row.group_size)
        if completed_now := completes(state, row.items, acked, failed):
            assert touched.last_resolver is not None
            state, ended_at, completed_by = State.COMPLETE, row.now, touched.last_resolver.call.fingerprint()
        if succeeded_now := state is State.COMPLETE and failed == 0:
            assert touched.last_changer is not None
            succeeded_by = touched.last_changer.call.fingerprint()
        if state is State.COMPLETE:
            complete[batch] = Complete(
                batch, row.batch_key, failed, completed_by, succeeded_by, completed_now, succeeded_now
            )
        writes.append(
            {
                "b_id": batch,
                "new_acked": acked,
                "new_failed": failed,
                "new_state": state,
                "new_full_prefix": prefix,
                "new_updated_at": max(row.now, row.updated_at),
                "new_ended_at": ended_at,
                "new_completed_by": completed_by,
                "new_succeeded_by": succeeded_by,
            }
        )
    tx.execute(_UPDATE_BATCH, writes)
    return complete


_WRITTEN: Final = ["acked", "failed", "state", "full_prefix", "updated_at", "ended_at", "completed_by", "succeeded_by"]
_UPDATE_BATCH: Final = (
    sa.update(tables.batches)
    .where(_batch.id == sa.bindparam("b_id"))
    .values({name: sa.bindparam(f"new_{name}") for name in _WRITTEN})
)


def _check(row: Any, state: State, acked: int, failed: int, touched: Touched) -> None:
    """Counts are never clamped: what doesn't add up is a bug, and is surfaced before it is written."""
    if acked < 0 or failed < 0 or acked + failed > row.items:
        raise errors.InconsistentBatch(row.id, f"{acked} acked and {failed} failed of {row.items} items")
    if state is State.COMPLETE and touched.last_resolver is not None:
        raise errors.InconsistentBatch(row.id, "it is complete, and an issued item was pending")


def _advance_prefix(tx: Connection, batch: int, prefix: int, group_size: int) -> int:
    """Move the hint over the full groups that follow it. Bits are never cleared, so it never goes back."""
    known = tables.item_groups.c
    rows = tx.execute(
        sa.select(known.group_no, known.resolved_count)
        .where(known.batch_id == batch, known.group_no >= prefix)
        .order_by(known.group_no)
        .limit(PREFIX_STEP)
    )
    for group, resolved in rows:
        if group != prefix or resolved < group_size:
            break
        prefix += 1
    return prefix


def look_again(tx: Connection, batches: Collection[int]) -> dict[int, Complete]:
    """Of batches of which nothing changed, those that are complete. To be read after the group locks were taken.

    Raises `faults.BeginAgain` where one takes no acks any more: its items are then rejected, not repeats.
    """
    if not batches:
        return {}
    columns = (_batch.id, _batch.state, _batch.batch_key, _batch.failed, _batch.completed_by, _batch.succeeded_by)
    rows = {row.id: row for row in tx.execute(sa.select(*columns).where(_batch.id.in_(sorted(batches))))}
    if any(batch not in rows or rows[batch].state not in TAKES_ACKS for batch in batches):
        raise faults.BeginAgain
    return {
        row.id: Complete(row.id, row.batch_key, row.failed, row.completed_by, row.succeeded_by)
        for row in rows.values()
        if row.state == State.COMPLETE
    }


def told(batch: Complete, touched: Touched | None, unit: Unit) -> Completed:
    """What one unit is told of a complete batch. `newly` is the unit's that did it, and its retry's."""
    newly = newly_succeeded = False
    if touched is not None and batch.completed_now and touched.last_resolver is not None:
        newly = touched.last_resolver.call is unit.call
    if touched is not None and batch.succeeded_now and touched.last_changer is not None:
        newly_succeeded = touched.last_changer.call is unit.call
    if unit.call.may_be_retry:
        mine = unit.call.fingerprint()
        newly = newly or batch.completed_by == mine
        newly_succeeded = newly_succeeded or batch.succeeded_by == mine
    return Completed(batch.id, batch.key, newly, batch.failed == 0, newly_succeeded)
