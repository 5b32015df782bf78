"""Update: changing the tolerance, deadline and labels of a live batch, by a JSON Merge Patch (RFC 7396). Fields that
the patch doesn't name stay as they are, and null removes.

What could go wrong, and why it can't:

*Failures arrive while the tolerance changes.* Acks and failures read the tolerance under the lock of the batch's row,
which is held here too. So each failure is judged by the tolerance before the update or after it. If the failures that
were committed before pass the new tolerance, the update itself sets `exceeded`, appends the event and cancels the
batch, as the failure that passes a limit does.

*The batch expires at a deadline that was postponed.* The deadline is read again under the lock before the batch
expires.

*The response is lost, and another client updates the batch before the repeat.* The repeat finds the event of the first
request and changes nothing (see `once`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from enum import Enum
from typing import Any, Final

from sqlalchemy.engine import Connection

from core import errors, feed
from core.batches import batch as batches
from core.batches import labels, once, writing
from core.batches.batch import Batch
from core.batches.lifecycle import judge
from core.batches.tolerance import NONE, OnExceeded
from core.storage import tables
from core.storage.database import Database


class Keep(Enum):
    """The value of a field that the patch doesn't name."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP


@dataclass(frozen=True, slots=True)
class Patch:
    """None removes a limit, the deadline, a label or all labels, and restores the default of `on_exceeded`."""

    labels: Mapping[str, str | None] | Keep | None = KEEP
    tolerated_failures: int | Keep | None = KEEP
    tolerated_failure_percentage: int | Keep | None = KEEP
    on_exceeded: OnExceeded | Keep | None = KEEP
    deadline: datetime | Keep | None = KEEP
    """In UTC."""

    def content(self) -> dict[str, Any]:
        """The patch as a JSON object."""
        named = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not KEEP}
        if isinstance(self.deadline, datetime):
            named["deadline"] = self.deadline.isoformat()
        return named

    @property
    def sets_policy(self) -> bool:
        """Whether the batch gets a policy that every release that works on it must know."""
        policies = self.tolerated_failures, self.tolerated_failure_percentage, self.deadline
        return any(policy is not None and policy is not KEEP for policy in policies)

    def applied_to(self, batch: Batch) -> Batch:
        """Raises `errors.InvalidRequest` if the batch would have too many or too large labels, or would be cancelled
        beyond a tolerance that it doesn't have."""
        changes = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not KEEP}
        if self.labels is not KEEP:
            changes["labels"] = labels.merged(batch.labels, self.labels)
        if self.on_exceeded is None:
            changes["on_exceeded"] = OnExceeded.CONTINUE
        after = replace(batch, **changes)
        if isinstance(self.on_exceeded, OnExceeded) and after.tolerance == NONE:
            raise errors.InvalidRequest(
                "body.on_exceeded", "it needs tolerated_failures or tolerated_failure_percentage"
            )
        return after


@dataclass(frozen=True, slots=True)
class Updated:
    """`batch`: as it is now. A replay may find it changed by others, or ended."""

    batch: Batch
    replayed: bool


def update(database: Database, batch_id: int, patch: Patch, idempotency_key: str | None = None) -> Updated:
    """Apply the patch and append the event. The caller must pay the batch's debt to its parent, if any. Raises
    `errors.BatchNotFound`; `BatchEnded` unless the batch is open or sealed; `InvalidRequest` for a deadline that has
    passed, and as `Patch.applied_to`; `IdempotencyKeyReused`; `UpgradeNotFinished`."""
    content = json.dumps(patch.content(), ensure_ascii=False, sort_keys=True)
    request = once.Request.of("updated", batch_id, idempotency_key, content)

    def write(tx: Connection) -> Updated:
        batch, _ = batches.lock(tx, batch_id)
        if request.event(tx) is not None:
            return Updated(batch, replayed=True)
        judge("update", batch_id, batch.state)
        if patch.sets_policy:
            writing.check_policies(tx)
        now = tables.clock(tx)
        if isinstance(patch.deadline, datetime):
            writing.check_deadline(patch.deadline, now)
        change = replace(patch.applied_to(batch), updated_at=max(batch.updated_at, now))
        after, names = batches.settled(batch, change, now)
        batches.save(tx, batch, after)
        # Not all labels, or each change of one would store all of them again.
        new_labels = {name: value for name, value in after.labels.items() if batch.labels.get(name) != value}
        event = batches.event(after, "updated", labels=new_labels, patch=patch.content())
        feed.append(tx, [replace(event, id=request.event_id), *batches.events(after, names)])
        return Updated(after, replayed=False)

    return database.write(write)
