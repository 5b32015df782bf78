"""The log of deliveries: each event that was planned for a webhook, with all attempts to send it. Also redelivery."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks
from core.webhooks import subscriptions

NEWEST: Final = 100
"""Maximum deliveries of one batch that are returned."""

_deliveries = tables.deliveries.c
_attempts = tables.delivery_attempts.c
_feed = tables.feed.c


class Progress(StrEnum):
    """The state of a delivery. Dead: the last attempt failed, and only `redeliver` sends it again."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Attempt:
    at: datetime
    status: int | None
    error: str | None
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one webhook. `attempts` counts the attempts since it was planned or redelivered; `log` has all
    attempts."""

    id: int
    webhook: int
    position: int
    event: str
    type: str
    batch: int | None
    state: Progress
    attempts: int
    next_attempt_at: datetime | None
    """Set only if the delivery is pending. While it is being sent, this is the end of its lease."""
    log: list[Attempt]

    @property
    def last(self) -> Attempt | None:
        return self.log[-1] if self.log else None


def log(
    tx: Connection, webhook: int, state: Progress | None, before: int | None, limit: int
) -> tuple[list[Delivery], int | None]:
    """The webhook's deliveries, newest first, and the position below which the next page begins. Raises
    `errors.WebhookNotFound`."""
    subscriptions.get(tx, webhook)
    conditions: list[sa.ColumnElement[bool]] = [_deliveries.webhook_id == webhook]
    if state is not None:
        conditions.append(_deliveries.state == state)
    if before is not None:
        conditions.append(_deliveries.position < before)
    deliveries = _read(tx, limit, *conditions)
    return deliveries, deliveries[-1].position if len(deliveries) == limit else None


def of_batch(tx: Connection, batch: int) -> list[Delivery]:
    """The newest deliveries of the batch's events, in any state."""
    return _read(tx, NEWEST, _feed.batch_id == batch)


def undelivered(tx: Connection, batch: int) -> list[Delivery]:
    """The newest deliveries of the batch's events that are pending or dead."""
    return _read(tx, NEWEST, _feed.batch_id == batch, _deliveries.state != Progress.DELIVERED)


def _read(tx: Connection, limit: int, *conditions: sa.ColumnElement[bool]) -> list[Delivery]:
    """The matching deliveries, newest first, with their attempts, oldest first."""
    query = (
        sa.select(tables.deliveries, _feed.event_id, _feed.type, _feed.batch_id)
        .join_from(tables.deliveries, tables.feed, _feed.position == _deliveries.position)
        .where(*conditions)
        .order_by(_deliveries.position.desc(), _deliveries.id.desc())
        .limit(limit)
    )
    rows = tx.execute(query).all()
    logs: dict[int, list[Attempt]] = {row.id: [] for row in rows}
    for part in chunks(list(logs), LIST):
        attempts = sa.select(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)).order_by(_attempts.id)
        for attempt in tx.execute(attempts):
            logs[attempt.delivery_id].append(
                Attempt(attempt.attempted_at, attempt.status, attempt.error, attempt.milliseconds)
            )
    return [
        Delivery(
            id=row.id,
            webhook=row.webhook_id,
            position=row.position,
            event=row.event_id,
            type=row.type,
            batch=row.batch_id,
            state=Progress(row.state),
            attempts=row.attempts,
            next_attempt_at=row.due_at,
            log=logs[row.id],
        )
        for row in rows
    ]


def redeliver(database: Database, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
    """Make the delivery of one event due again, or all dead deliveries, and reset their attempts. Return the number of
    deliveries. A delivery that is being sent is not sent twice at the same time.

    Raises `errors.WebhookNotFound`, `WebhookDisabled`, `PositionTrimmed`, `InvalidRequest`.
    """
    if position is None and event is None:
        return _redeliver_dead(database, webhook)
    place = "body.position" if event is None else "body.event"

    def one(tx: Connection) -> int:
        target = position
        if target is None:
            target = tx.scalar(sa.select(_feed.position).where(_feed.event_id == event))
        delivery = None
        if target is not None:
            delivery = tx.scalar(
                sa.select(_deliveries.id).where(_deliveries.webhook_id == webhook, _deliveries.position == target)
            )
        _require_active(tx, webhook)
        if delivery is not None:
            _make_due(tx, [delivery])
        # Locked last, so that the janitor can't trim an event whose delivery has just become due.
        _, trimmed = feed.hold(tx)
        if target is not None and target <= trimmed:
            raise errors.PositionTrimmed(target - 1, trimmed)
        if delivery is None:
            raise errors.InvalidRequest(place, f"expected an event that was planned for webhook {webhook}")
        return 1

    return database.write(one)


def _redeliver_dead(database: Database, webhook: int) -> int:
    def some(tx: Connection, after: int) -> tuple[int, int]:
        """Make a chunk due again. Returns the id of its last delivery (0: it was empty), and the number of deliveries
        that became due."""
        query = (
            sa.select(_deliveries.id, _deliveries.position)
            .where(_deliveries.webhook_id == webhook, _deliveries.state == Progress.DEAD, _deliveries.id > after)
            .order_by(_deliveries.id)
            .limit(subscriptions.CHUNK)
        )
        rows = tx.execute(query).all()
        _require_active(tx, webhook)
        if not rows:
            return 0, 0
        _make_due(tx, [row.id for row in rows])
        _, trimmed = feed.hold(tx)
        late = [row.id for row in rows if row.position <= trimmed]
        if late:  # their events are about to be removed
            tx.execute(
                sa.update(tables.deliveries).where(_deliveries.id.in_(late)).values(state=Progress.DEAD, due_at=None)
            )
        return rows[-1].id, len(rows) - len(late)

    redelivered = 0
    last, count = database.write(some, 0)
    while last:
        redelivered += count
        last, count = database.write(some, last)
    return redelivered


def _require_active(tx: Connection, webhook: int) -> None:
    """Call it after the deliveries were read: a webhook is deleted before its deliveries, so none of those that were
    read is missing because of a deletion. Raises `errors.WebhookNotFound`, `WebhookDisabled`."""
    if subscriptions.get(tx, webhook).state is not subscriptions.State.ACTIVE:
        raise errors.WebhookDisabled(webhook)


def _make_due(tx: Connection, ids: Collection[int]) -> None:
    under_way = sa.and_(_deliveries.token.is_not(None), _deliveries.due_at > tables.utc_now())
    tx.execute(
        sa.update(tables.deliveries)
        .where(_deliveries.id.in_(ids))
        .values(
            # MySQL assigns from left to right; no value here reads a column that was assigned before.
            attempts=0,
            state=Progress.PENDING,
            due_at=sa.case((under_way, _deliveries.due_at), else_=tables.utc_now()),
        )
    )
