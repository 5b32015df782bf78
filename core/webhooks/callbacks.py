"""The deliveries of callbacks, the webhooks that belong to one batch each.

There may be a hundred thousand of them, so none has a position of its own: all share one, in `callback_cursor`. The
events after it are joined with the callbacks by their batch. So a round costs as much as there are new events, however
many callbacks wait for theirs. As with other webhooks, the deliveries and the new position are written in one
transaction, under the lock of the row with the position.

While there is no callback, the position may stay behind, and keeps no event (see `needed`). That loses nothing: an open
inserts its callback before it locks the feed's head, so the events of its batch come after every head that was read
when the callback was not visible yet.
"""

from __future__ import annotations

import json
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed
from core.storage import tables
from core.webhooks.delivery_log import Progress
from core.webhooks.subscriptions import State

PAGE: Final = 500
"""Maximum positions of the feed that one transaction plans."""
LEAP: Final = 10_000
"""Without callbacks, the position is moved to the head when it is this far behind."""

_webhooks = tables.webhooks.c
_feed = tables.feed.c
_cursor = tables.callback_cursor.c


def exist(tx: Connection) -> bool:
    """Whether there is a callback."""
    return tx.scalar(sa.select(_webhooks.batch_id).where(_webhooks.batch_id.is_not(None)).limit(1)) is not None


def behind(tx: Connection) -> bool:
    """Whether `plan` has something to do."""
    head = feed.head(tx)
    position = tx.execute(sa.select(_cursor.position)).scalar_one()
    return bool(position < head and (head - position >= LEAP or exist(tx)))


def plan(tx: Connection) -> bool:
    """Plan a page of the feed. Return whether there may be more. If the position is locked, another dispatcher plans,
    or somebody holds it, which must not delay webhooks: then nothing is done."""
    query = sa.select(_cursor.position).where(_cursor.id == 1)
    before: int | None = tx.scalar(query.with_for_update(skip_locked=True))
    if before is None:
        return False
    # The head is read before it is known that there is no callback.
    head = feed.head(tx)
    start = max(before, feed.trimmed(tx))
    last = min(head, start + PAGE) if exist(tx) else head
    if last <= before:
        return False
    events = (
        sa.select(_webhooks.id, _webhooks.types, _feed.position, _feed.type)
        .join_from(tables.feed, tables.webhooks, _webhooks.batch_id == _feed.batch_id)
        .where(_feed.position > start, _feed.position <= last, _webhooks.state == State.ACTIVE)
        .order_by(_feed.position)
    )
    rows = tx.execute(events).all() if last - start <= PAGE else []
    planned = [
        {"webhook_id": row.id, "position": row.position, "state": str(Progress.PENDING), "attempts": 0}
        for row in rows
        if row.type in json.loads(row.types)
    ]
    if planned:
        tx.execute(sa.insert(tables.deliveries).values(due_at=tables.utc_now()), planned)
    tx.execute(sa.update(tables.callback_cursor).where(_cursor.id == 1).values(position=last))
    return bool(last < head)


def needed(tx: Connection) -> int | None:
    """The lowest position that must still be planned; None if there is no callback."""
    position: int = tx.execute(sa.select(_cursor.position)).scalar_one()
    return position + 1 if exist(tx) else None
