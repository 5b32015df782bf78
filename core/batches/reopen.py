"""Reopen: bringing back a batch that was cancelled or has expired. It is open or sealed again, whichever it was, with
the bits that it had.

What could go wrong, and why it can't:

*It ends again at once.* A deadline that has passed must be replaced or removed by the call. Its idleness counts from
now. A batch that its failures cancelled still has them: from now on it continues when they exceed its tolerance
(`on_exceeded`), until an update says otherwise.

*Its second end is mistaken for the first.* As after a repair, its generation is increased, which is part of the ids of
its later events.

*A repeat of the cancel, whose answer was lost, cancels it again.* The row keeps the fingerprint of the request that
cancelled it, so a repeat under the same Idempotency-Key is recognized.

*Its item in a parent.* If the end has failed the item, or still owes that, the item is held again while the batch is
live: only its new end resolves it, and an ack wins over the failure, even if the parent is complete by then.

*Its children.* Those that its end has ended come back too, at any depth (see `descendants`). What others owed it while
it took no acks was rejected, so they resolve their items now; so does one that would expire again at once.

*The response is lost, and the batch ends again before the repeat.* The repeat finds the event of the first request (see
`once`).

*An earlier release uses the database.* It must know generations, so this requires what a repair does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import once, writing
from core.batches.batch import Batch
from core.batches.lifecycle import LIVE, Duty, State, is_overdue, judge
from core.batches.repair import check_generations
from core.batches.tolerance import OnExceeded
from core.batches.update import KEEP, Keep
from core.bits import folding
from core.storage import tables
from core.storage.database import Database


@dataclass(frozen=True, slots=True)
class Reopened:
    """`batch`: as it is now. A replay may find it changed by others, or ended again."""

    batch: Batch
    replayed: bool


def reopen(
    database: Database,
    batch_id: int,
    *,
    deadline: datetime | Keep | None = KEEP,
    reason: str | None = None,
    idempotency_key: str | None = None,
) -> Reopened:
    """Reopen the batch and append the event. `deadline`: a new one, in UTC; None removes it. The caller must do the
    batch's duty, and pay its debt, if any. Raises `errors.BatchNotFound`; `BatchComplete`; `BatchLive`;
    `InvalidRequest` for a deadline that has passed; `IdempotencyKeyReused`; `UpgradeNotFinished`."""
    patch = {} if deadline is KEEP else {"deadline": deadline.isoformat() if isinstance(deadline, datetime) else None}
    request = once.Request.of("reopened", batch_id, idempotency_key, json.dumps([patch, reason]))

    def write(tx: Connection) -> Reopened:
        batch, _ = batches.lock(tx, batch_id)
        if request.event(tx) is not None:
            return Reopened(batch, replayed=True)
        judge("reopen", batch_id, batch.state)
        check_generations(tx)
        now = tables.clock(tx)
        if isinstance(deadline, datetime):
            writing.check_policies(tx)
            writing.check_deadline(deadline, now)
        ended = batch if isinstance(deadline, Keep) else replace(batch, deadline=deadline)
        if is_overdue(State.OPEN, ended.deadline, now=now):
            raise errors.InvalidRequest(
                "body.deadline",
                f"the batch's deadline was {ended.deadline:%Y-%m-%dT%H:%M:%SZ}: expected a later one, or null",
            )
        after, (event, *others) = revived(tx, ended, now, reason)
        batches.save(tx, batch, after)
        feed.append(tx, [replace(event, id=request.event_id), *others])
        return Reopened(after, replayed=False)

    return database.write(write)


def revived(
    tx: Connection, batch: Batch, now: datetime, reason: str | None = None
) -> tuple[Batch, list[feed.NewEvent]]:
    """A batch that ended early, under its lock, as it is once it is live again, and the events. It is not overdue. The
    caller saves it, and appends these."""
    change = replace(
        batch,
        state=State.OPEN if batch.sealed_at is None else State.SEALED,
        generation=batch.generation + 1,
        updated_at=max(batch.updated_at, now),
        ended_by=None,
        reason=None,
    )
    if change.passes_tolerance:
        change = replace(change, on_exceeded=OnExceeded.CONTINUE)
    after, names = batches.settled(batch, change, now)
    if after.state in LIVE:
        after = replace(after, completed_by=batch.completed_by, children_due=Duty.REVIVE, children_told=0)
    elif after.journal_next:
        folded = folding.fold(tx, batch.id, after.group_size, after.items, after.journal_next)
        after = replace(after, journal_next=folded)
    facts: dict[str, Any] = {"state": after.state, "on_exceeded": after.on_exceeded}
    facts |= {} if reason is None else {"reason": reason}
    return after, [batches.event(after, "reopened", **facts), *batches.events(after, names)]
