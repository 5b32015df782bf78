"""Deliveries: events of the feed are sent to the receivers, at least once each.

A delivery has three steps, each in a separate transaction. No transaction is open while something is sent:

* *plan*: the events after a webhook's position become its deliveries, and the position advances, in one transaction
  under the webhook's row lock. Positions of the feed have no gaps, so a page is a range of positions. (webhook,
  position) is also unique.
* *claim*: one UPDATE gives due deliveries a random token and a lease, by setting `due_at` in the future. It checks
  again that they are due, so when two dispatchers select the same delivery, only the first claims it. Time is the
  database's.
* *record*: the attempt is logged, and the delivery's state changes if it still has the claim's token.

When the database's clock is set back, no delivery waits until the clock has caught up (`bring_closer`).

If a dispatcher is killed between sending and recording, its claim expires and the event is sent again with the same
webhook-id. That is why delivery is "at least once", and receivers must recognize repeats by the id.

An event that must still be planned or sent for a webhook is not trimmed (`needed`). `needed` reads the webhooks'
positions before their pending deliveries, so it can't miss an event that is planned in between.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed, tables
from core.storage.database import Database
from core.webhooks import subscriptions
from core.webhooks.backoff import Backoff
from core.webhooks.delivery_log import Progress
from core.webhooks.sender import SendResult
from core.webhooks.subscriptions import State

PAGE: Final = 500
"""Maximum positions of the feed that one transaction plans."""
CANDIDATES: Final = 64
"""Due deliveries from which a claim chooses at random, so that dispatchers seldom choose the same ones."""
PARTITIONS: Final = 64
"""Deliveries are partitioned by id, so that dispatchers can share them (see `replicas`)."""
OVERDUE: Final = timedelta(seconds=5)
"""A delivery that has been due for longer may be claimed by any dispatcher."""
GONE: Final = 410
PATIENT: Final = (429, 503)
"""Statuses whose Retry-After is respected."""

_webhooks = tables.webhooks.c
_deliveries = tables.deliveries.c
_feed = tables.feed.c
_head = tables.feed_head.c


@dataclass(frozen=True, slots=True)
class Claim:
    """A claimed delivery. `at` is the database's time of the claim."""

    delivery: int
    token: bytes = field(repr=False)
    webhook: int
    url: str
    secret: str = field(repr=False)
    event: feed.Event
    at: datetime


def behind(tx: Connection) -> list[int]:
    """The ids of the webhooks that have events to plan."""
    head = sa.select(_head.position).scalar_subquery()
    return list(
        tx.scalars(
            sa.select(_webhooks.id).where(_webhooks.state == State.ACTIVE, _webhooks.position < head).order_by("id")
        )
    )


def plan(tx: Connection, webhook: int) -> bool:
    """Plan a page of the feed. Return whether there may be more."""
    row = tx.execute(sa.select(tables.webhooks).where(_webhooks.id == webhook).with_for_update()).first()
    if row is None or row.state != State.ACTIVE:
        return False
    head = feed.head(tx)
    last = min(head, row.position + PAGE)
    types = subscriptions.types_of(row)
    events = sa.select(
        sa.literal(webhook), _feed.position, sa.literal(str(Progress.PENDING)), sa.literal(0), tables.utc_now()
    ).where(_feed.position > row.position, _feed.position <= last)
    if types is not None:
        events = events.where(_feed.type.in_(types))
    tx.execute(
        sa.insert(tables.deliveries).from_select(["webhook_id", "position", "state", "attempts", "due_at"], events)
    )
    tx.execute(sa.update(tables.webhooks).where(_webhooks.id == webhook).values(position=last))
    return bool(last < head)


def is_due(tx: Connection, partitions: Collection[int] | None = None) -> bool:
    """Whether there is a due delivery that `claim` could claim with the same `partitions`."""
    now = _now(tx)
    query = sa.select(_deliveries.id).where(*_due(now), *_shared(partitions, now))
    return tx.execute(query.limit(1)).first() is not None


def _now(tx: Connection) -> datetime:
    now: datetime = tx.execute(sa.select(tables.utc_now())).scalar_one()
    return now


def _due(now: datetime) -> tuple[sa.ColumnElement[bool], ...]:
    return _deliveries.state == Progress.PENDING, _deliveries.due_at <= now


def _shared(partitions: Collection[int] | None, now: datetime) -> tuple[sa.ColumnElement[bool], ...]:
    if partitions is None or len(partitions) == PARTITIONS:
        return ()
    ours = (_deliveries.id % PARTITIONS).in_(sorted(partitions))
    return (sa.or_(ours, _deliveries.due_at <= now - OVERDUE),)


def claim(
    tx: Connection,
    lease: timedelta,
    limit: int,
    room: Mapping[int, int],
    share: int,
    partitions: Collection[int] | None = None,
) -> tuple[list[Claim], int]:
    """Claim at most `limit` due deliveries, and of each webhook at most its `room` (default: `share`). With
    `partitions`, claim only deliveries in these partitions, and overdue ones.

    Returns the claims, and the number of due deliveries of disabled or deleted webhooks, which become dead.
    """
    now = _now(tx)
    due = sa.and_(*_due(now))
    query = (
        sa.select(_deliveries.id, _deliveries.webhook_id, _webhooks.state)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id, isouter=True)
        .where(due, *_shared(partitions, now))
        .order_by(_deliveries.due_at)
        .limit(CANDIDATES)
    )
    full = sorted(webhook for webhook, places in room.items() if places <= 0)
    if full:
        query = query.where(_deliveries.webhook_id.not_in(full))
    candidates = list(tx.execute(query))
    random.shuffle(candidates)
    chosen: list[int] = []
    dead: list[int] = []
    places = dict(room)
    for row in candidates:
        if row.state != State.ACTIVE:
            dead.append(row.id)
        elif len(chosen) < limit and places.setdefault(row.webhook_id, share) > 0:
            places[row.webhook_id] -= 1
            chosen.append(row.id)
    if dead:
        tx.execute(
            sa.update(tables.deliveries)
            .where(_deliveries.id.in_(sorted(dead)), due)
            .values(state=Progress.DEAD, due_at=None, token=None)
        )
    if not chosen:
        return [], len(dead)
    token = secrets.token_bytes(16)
    tx.execute(
        sa.update(tables.deliveries)
        .where(_deliveries.id.in_(sorted(chosen)), due)
        .values(token=token, due_at=now + lease)
    )
    claimed_rows = (
        sa.select(_deliveries.id, _deliveries.webhook_id, _webhooks.url, _webhooks.secret, tables.feed)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
        .join(tables.feed, _feed.position == _deliveries.position)
        .where(_deliveries.id.in_(chosen), _deliveries.token == token)
    )
    claims = [
        Claim(row.id, token, row.webhook_id, row.url, row.secret, feed.event(row), now)
        for row in tx.execute(claimed_rows)
    ]
    return claims, len(dead)


def record(tx: Connection, claim: Claim, answer: SendResult, backoff: Backoff, chance: float) -> Progress | None:
    """Log the attempt and update the delivery. Return its new state, or None if another dispatcher has claimed the
    delivery since, or if it was removed."""
    row = tx.execute(
        sa.select(_deliveries.token, _deliveries.attempts).where(_deliveries.id == claim.delivery).with_for_update()
    ).first()
    if row is None:
        return None
    tx.execute(
        sa.insert(tables.delivery_attempts).values(
            delivery_id=claim.delivery,
            attempted_at=claim.at,
            status=answer.status,
            error=answer.error,
            milliseconds=answer.milliseconds,
        )
    )
    if row.token != claim.token:
        return None
    attempts = row.attempts + 1
    state, due_at = Progress.DEAD, None
    if answer.delivered:
        state = Progress.DELIVERED
    elif answer.status == GONE:
        tx.execute(sa.update(tables.webhooks).where(_webhooks.id == claim.webhook).values(state=State.DISABLED))
    else:
        retry_after = answer.retry_after if answer.status in PATIENT else None
        pause = backoff.pause(attempts, chance, retry_after)
        if pause is not None:
            state, due_at = Progress.PENDING, _now(tx) + timedelta(seconds=pause)
    tx.execute(
        sa.update(tables.deliveries)
        .where(_deliveries.id == claim.delivery)
        .values(state=state, attempts=attempts, due_at=due_at, token=None)
    )
    return state


def bring_closer(tx: Connection, lease: timedelta, longest: timedelta) -> None:
    """Correct due times after the database's clock was set back: no pending delivery is due later than if it had been
    planned, claimed or failed now. May be repeated."""
    now = _now(tx)
    is_claimed = _deliveries.token.is_not(None)
    tx.execute(
        sa.update(tables.deliveries)
        .where(_deliveries.state == Progress.PENDING, _deliveries.due_at > now)
        .values(
            due_at=sa.case(
                (sa.and_(is_claimed, _deliveries.due_at > now + lease), now + lease),
                (is_claimed, _deliveries.due_at),
                (_deliveries.attempts == 0, now),
                (_deliveries.due_at > now + longest, now + longest),
                else_=_deliveries.due_at,
            )
        )
    )


def needed(tx: Connection) -> int | None:
    """The lowest position that must still be planned or sent for a webhook; None if there is none. The order of the two
    reads matters (see the module)."""
    position: int | None = tx.scalar(sa.select(sa.func.min(_webhooks.position)).where(_webhooks.state == State.ACTIVE))
    pending: int | None = tx.scalar(
        sa.select(_deliveries.position)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
        .where(_deliveries.state == Progress.PENDING, _webhooks.state == State.ACTIVE)
        .order_by(_deliveries.position)
        .limit(1)
    )
    lowest = [] if position is None else [position + 1]
    return min(lowest if pending is None else [*lowest, pending], default=None)


def trim(database: Database) -> None:
    """Remove the deliveries of trimmed events."""
    trimmed = database.read(lambda tx: tx.execute(sa.select(_head.trimmed)).scalar_one())
    database.write_in_chunks(subscriptions.remove, _deliveries.position <= trimmed)
