"""Deliveries: from the feed to the receivers, at least once each.

Three steps, each a transaction of its own, with no transaction open while something is sent:

* *plan*: the events above a webhook's position become its deliveries, and the position moves up, in one transaction
  under the webhook's row lock. Positions of the feed have no gaps, so a page is a span of them. (webhook, position) is
  unique besides.
* *claim*: due deliveries get a random token and a lease, which is `due_at` in the future, by one UPDATE that asks again
  whether they are due: of two dispatchers that saw the same one, the second finds it no longer so. Time is the
  database's.
* *record*: the attempt goes into the log, and the delivery moves on if it still has the token.

Where the database's clock goes back, nothing waits for it to come by again (`bring_closer`).

A dispatcher that is killed between sending and recording leaves a claim that runs out; the same event is sent again
under the same webhook-id. That is what "at least once" means here, and why receivers go by the id.

What a webhook still has to plan or send keeps its event from being trimmed (`needed`). Of those two facts the position
is read first: whatever is planned in between moves from the one to the other, and is seen in either.
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
from core.webhooks.subscriptions import Progress, SendResult, State

PAGE: Final = 500
"""Positions of the feed that one transaction plans."""
CANDIDATES: Final = 64
"""Due deliveries among which a claim chooses. By chance, so that dispatchers seldom want the same."""
PARTITIONS: Final = 64
"""Into which deliveries are divided by their ids, so that dispatchers can share them (see `replicas`)."""
OVERDUE: Final = timedelta(seconds=5)
"""After which a due delivery is anybody's, whose partition it may be in."""
GONE: Final = 410
PATIENT: Final = (429, 503)
"""Answers whose Retry-After is heeded."""

_webhooks = tables.webhooks.c
_deliveries = tables.deliveries.c
_feed = tables.feed.c
_head = tables.feed_head.c


@dataclass(frozen=True, slots=True)
class Claim:
    """A delivery that is ours until its lease ends. `at` is the database's time when it was claimed."""

    delivery: int
    token: bytes = field(repr=False)
    webhook: int
    url: str
    secret: str = field(repr=False)
    event: feed.Event
    at: datetime


def behind(tx: Connection) -> list[int]:
    """The webhooks that have something to plan."""
    head = sa.select(_head.position).scalar_subquery()
    return list(
        tx.scalars(
            sa.select(_webhooks.id).where(_webhooks.state == State.ACTIVE, _webhooks.position < head).order_by("id")
        )
    )


def plan(tx: Connection, webhook: int) -> bool:
    """Plan a page of the feed; whether there may be more."""
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
    """Whether anything is, that `claim` may claim with the same `partitions`."""
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
    own = (_deliveries.id % PARTITIONS).in_(sorted(partitions))
    return (sa.or_(own, _deliveries.due_at <= now - OVERDUE),)


def claim(
    tx: Connection,
    lease: timedelta,
    limit: int,
    room: Mapping[int, int],
    share: int,
    partitions: Collection[int] | None = None,
) -> tuple[list[Claim], int]:
    """Claim at most `limit` due deliveries: of each webhook at most its `room`, or `share` where that says nothing; of
    these `partitions`, where they are given, and what is overdue.

    Due deliveries of webhooks that are disabled or gone die here; the second value is how many did.
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
    full = sorted(webhook for webhook, left in room.items() if left <= 0)
    if full:
        query = query.where(_deliveries.webhook_id.not_in(full))
    candidates = list(tx.execute(query))
    random.shuffle(candidates)
    wanted: list[int] = []
    lost: list[int] = []
    left = dict(room)
    for row in candidates:
        if row.state != State.ACTIVE:
            lost.append(row.id)
        elif len(wanted) < limit and left.setdefault(row.webhook_id, share) > 0:
            left[row.webhook_id] -= 1
            wanted.append(row.id)
    if lost:
        tx.execute(
            sa.update(tables.deliveries)
            .where(_deliveries.id.in_(sorted(lost)), due)
            .values(state=Progress.DEAD, due_at=None, token=None)
        )
    if not wanted:
        return [], len(lost)
    token = secrets.token_bytes(16)
    tx.execute(
        sa.update(tables.deliveries)
        .where(_deliveries.id.in_(sorted(wanted)), due)
        .values(token=token, due_at=now + lease)
    )
    claimed = (
        sa.select(_deliveries.id, _deliveries.webhook_id, _webhooks.url, _webhooks.secret, tables.feed)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
        .join(tables.feed, _feed.position == _deliveries.position)
        .where(_deliveries.id.in_(wanted), _deliveries.token == token)
    )
    claims = [
        Claim(row.id, token, row.webhook_id, row.url, row.secret, feed.event(row), now) for row in tx.execute(claimed)
    ]
    return claims, len(lost)


def record(tx: Connection, claim: Claim, answer: SendResult, backoff: Backoff, chance: float) -> Progress | None:
    """Log the attempt, and settle the delivery; what it is now, None where it is somebody else's by now, or gone."""
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
    """After the database's clock went back: what is pending is due no later than if it had been planned, claimed or
    failed now. May be repeated."""
    now = _now(tx)
    claimed = _deliveries.token.is_not(None)
    tx.execute(
        sa.update(tables.deliveries)
        .where(_deliveries.state == Progress.PENDING, _deliveries.due_at > now)
        .values(
            due_at=sa.case(
                (sa.and_(claimed, _deliveries.due_at > now + lease), now + lease),
                (claimed, _deliveries.due_at),
                (_deliveries.attempts == 0, now),
                (_deliveries.due_at > now + longest, now + longest),
                else_=_deliveries.due_at,
            )
        )
    )


def needed(tx: Connection) -> int | None:
    """The lowest position that a webhook still has to plan or send: see above for the order."""
    planned: int | None = tx.scalar(sa.select(sa.func.min(_webhooks.position)).where(_webhooks.state == State.ACTIVE))
    pending: int | None = tx.scalar(
        sa.select(_deliveries.position)
        .join_from(tables.deliveries, tables.webhooks, _webhooks.id == _deliveries.webhook_id)
        .where(_deliveries.state == Progress.PENDING, _webhooks.state == State.ACTIVE)
        .order_by(_deliveries.position)
        .limit(1)
    )
    lowest = [] if planned is None else [planned + 1]
    return min(lowest if pending is None else [*lowest, pending], default=None)


def trim(database: Database) -> None:
    """Remove what belonged to events that were trimmed."""
    trimmed = database.read(lambda tx: tx.execute(sa.select(_head.trimmed)).scalar_one())
    database.write_in_chunks(subscriptions.remove, _deliveries.position <= trimmed)
