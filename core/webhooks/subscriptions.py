"""Webhooks, their deliveries, and the message, which is signed as in the Standard Webhooks specification.

A webhook's `position` is the last event of the feed for which its deliveries were planned; it begins at the feed's
head. Each event of its types becomes one delivery, a row that is kept as long as its event (see `deliveries`). Only
`create` returns the secret; no other response, log or error has it.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Protocol

import sqlalchemy as sa
import standardwebhooks
from sqlalchemy.engine import Connection

from core import errors, feed, tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks
from core.webhooks import addresses

CHUNK: Final = 500
"""Deliveries that one transaction removes or makes due again."""
NEWEST: Final = 100
"""Deliveries of one batch that are shown."""
TEST: Final = "webhook.test"

_webhooks = tables.webhooks.c
_deliveries = tables.deliveries.c
_attempts = tables.delivery_attempts.c
_feed = tables.feed.c


class State(StrEnum):
    """Of a webhook. Disabled: the receiver answered 410 Gone, so nothing more is sent."""

    ACTIVE = "active"
    DISABLED = "disabled"


class Progress(StrEnum):
    """Of a delivery. Dead: the last try failed; it is sent again only by `redeliver`."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of one request. `error` explains why there is no complete response; there may be a `status` as
    well."""

    status: int | None
    error: str | None
    milliseconds: int
    retry_after: float | None = None
    """Seconds, from the receiver's Retry-After."""

    @property
    def delivered(self) -> bool:
        return self.error is None and self.status is not None and 200 <= self.status < 300


class Sender(Protocol):
    """An HTTP client. It blocks, and is called from several threads at once, with no transaction open."""

    def check(self, url: str) -> None:
        """Raises `addresses.Unfit` if this service may not send to the URL."""

    def send(self, url: str, headers: dict[str, str], body: bytes) -> SendResult:
        """POST it. Never raises for errors of the network or the receiver."""


@dataclass(frozen=True, slots=True)
class Webhook:
    id: int
    url: str
    types: list[str] | None
    label: str | None
    state: State
    position: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Created:
    webhook: Webhook
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Attempt:
    at: datetime
    status: int | None
    error: str | None
    milliseconds: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one webhook. `attempts` counts those since it was planned or redelivered; `log` has all."""

    id: int
    webhook: int
    position: int
    event: str
    type: str
    batch: int | None
    state: Progress
    attempts: int
    next_attempt_at: datetime | None
    """If pending. While it is being sent, the end of its lease."""
    log: list[Attempt]

    @property
    def last(self) -> Attempt | None:
        return self.log[-1] if self.log else None


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def fit(sender: Sender, url: str) -> None:
    """Check the URL. It resolves the host, so don't call it in a transaction. Raises `errors.InvalidRequest`."""
    try:
        sender.check(url)
    except addresses.Unfit as cause:
        raise errors.InvalidRequest("body.url", str(cause)) from None


def create(tx: Connection, url: str, types: Sequence[str] | None, label: str | None, secret: str) -> Created:
    """Create a webhook that gets the events after the feed's current end."""
    # The head stays locked until the commit, so that no event that this webhook must plan is trimmed. Inserting a new
    # row needs no other lock.
    position, _ = feed.hold(tx)
    result = tx.execute(
        sa.insert(tables.webhooks).values(
            url=url,
            types=None if types is None else json.dumps(sorted(set(types))),
            label=label,
            secret=secret,
            state=State.ACTIVE,
            position=position,
            created_at=tables.utc_now(),
        )
    )
    assert result.inserted_primary_key is not None
    return Created(get(tx, result.inserted_primary_key[0]), secret)


_SHOWN: Final = (
    *(_webhooks.id, _webhooks.url, _webhooks.types, _webhooks.label, _webhooks.state, _webhooks.position),
    _webhooks.created_at,
)


def types_of(row: Any) -> list[str] | None:
    """The types that a webhook subscribes to; None for all."""
    types: list[str] | None = None if row.types is None else json.loads(row.types)
    return types


def _webhook(row: Any) -> Webhook:
    return Webhook(row.id, row.url, types_of(row), row.label, State(row.state), row.position, row.created_at)


def get(tx: Connection, webhook: int) -> Webhook:
    """Raises `errors.WebhookNotFound`."""
    row = tx.execute(sa.select(*_SHOWN).where(_webhooks.id == webhook)).first()
    if row is None:
        raise errors.WebhookNotFound(webhook)
    return _webhook(row)


def page(tx: Connection, before: int | None, limit: int) -> tuple[list[Webhook], int | None]:
    """The webhooks, newest first, and the id below which the next page begins."""
    query = sa.select(*_SHOWN).order_by(_webhooks.id.desc()).limit(limit)
    if before is not None:
        query = query.where(_webhooks.id < before)
    webhooks = [_webhook(row) for row in tx.execute(query)]
    return webhooks, webhooks[-1].id if len(webhooks) == limit else None


def delete(database: Database, webhook: int) -> None:
    """Delete the webhook first, so that nothing more is planned or sent, then its deliveries in chunks. If that is
    interrupted, `deliveries.trim` removes the rest. Raises `errors.WebhookNotFound`."""

    def forget(tx: Connection) -> None:
        if not tx.execute(sa.delete(tables.webhooks).where(_webhooks.id == webhook)).rowcount:
            raise errors.WebhookNotFound(webhook)

    database.write(forget)
    database.write_in_chunks(remove, _deliveries.webhook_id == webhook)


def remove(tx: Connection, condition: sa.ColumnElement[bool]) -> bool:
    """Remove a chunk of the deliveries and their attempts. Return whether there may be more."""
    ids = list(tx.scalars(sa.select(_deliveries.id).where(condition).limit(CHUNK)))
    for part in chunks(sorted(ids), LIST):
        tx.execute(sa.delete(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)))
        tx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))
    return len(ids) == CHUNK


def _read(tx: Connection, limit: int, *conditions: sa.ColumnElement[bool]) -> list[Delivery]:
    """Newest first, each with its attempts in their order."""
    query = (
        sa.select(
            *(_deliveries.id, _deliveries.webhook_id, _deliveries.position, _deliveries.state, _deliveries.attempts),
            *(_deliveries.due_at, _feed.event_id, _feed.type, _feed.batch_id),
        )
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
            *(row.id, row.webhook_id, row.position, row.event_id, row.type, row.batch_id),
            *(Progress(row.state), row.attempts, row.due_at, logs[row.id]),
        )
        for row in rows
    ]


def log(
    tx: Connection, webhook: int, state: Progress | None, before: int | None, limit: int
) -> tuple[list[Delivery], int | None]:
    """The webhook's deliveries, newest first, and the position below which the next page begins. Raises
    `errors.WebhookNotFound`."""
    get(tx, webhook)
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
    """The newest deliveries of the batch's events that are pending or dead; `last` is the last answer."""
    return _read(tx, NEWEST, _feed.batch_id == batch, _deliveries.state != Progress.DELIVERED)


def redeliver(database: Database, webhook: int, *, position: int | None = None, event: str | None = None) -> int:
    """Make the delivery of one event due again, or all dead deliveries, and reset their attempts. Return how many. A
    delivery that is being sent is not sent twice at the same time.

    Raises `errors.WebhookNotFound`, `WebhookDisabled`, `PositionTrimmed`, `InvalidRequest`.
    """
    if position is None and event is None:
        return _redeliver_dead(database, webhook)
    place = "body.position" if event is None else "body.event"

    def one(tx: Connection) -> int:
        _active(tx, webhook)
        target = position
        if target is None:
            target = tx.scalar(sa.select(_feed.position).where(_feed.event_id == event))
        delivery = None
        if target is not None:
            delivery = tx.scalar(
                sa.select(_deliveries.id).where(_deliveries.webhook_id == webhook, _deliveries.position == target)
            )
        if delivery is not None:
            _make_due(tx, [delivery])
        # Locked last, so that the janitor can't trim an event whose delivery has just become due.
        _, trimmed = feed.hold(tx)
        if target is not None and target <= trimmed:
            raise errors.PositionTrimmed(target - 1, trimmed)
        if delivery is None:
            raise errors.InvalidRequest(place, f"expected an event that was planned for webhook {webhook}")
        return 1

    return database.write(one, repeatable=True)


def _redeliver_dead(database: Database, webhook: int) -> int:
    def some(tx: Connection, after: int) -> tuple[int, int]:
        """Returns the last delivery it read (0: there was none), and how many became due again."""
        _active(tx, webhook)
        query = (
            sa.select(_deliveries.id, _deliveries.position)
            .where(_deliveries.webhook_id == webhook, _deliveries.state == Progress.DEAD, _deliveries.id > after)
            .order_by(_deliveries.id)
            .limit(CHUNK)
        )
        rows = tx.execute(query).all()
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


def _active(tx: Connection, webhook: int) -> None:
    if get(tx, webhook).state is not State.ACTIVE:
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


def body(event: feed.Event) -> bytes:
    """The body: `type` and `timestamp` as specified, and `data` as in `GET /v1/events`."""
    head = json.dumps({"type": event.type, "timestamp": feed.time(event.at)}, separators=(",", ":")).encode()
    return b'%b,"data":%b}' % (head[:-1], feed.encoded(event))


def headers(secret: str, event: str, time: datetime, content: bytes) -> dict[str, str]:
    """The headers of the specification. The id is the event's, so it is the same for each try."""
    return {
        "webhook-id": event,
        "webhook-timestamp": str(int(time.timestamp())),
        "webhook-signature": standardwebhooks.Webhook(secret).sign(event, time, content.decode()),
    }


def test(database: Database, sender: Sender, webhook: int) -> tuple[str, SendResult]:
    """Send an event that is not in the feed. Return its id and the result. Raises `errors.WebhookNotFound`."""
    row = database.read(
        lambda tx: tx.execute(
            sa.select(_webhooks.url, _webhooks.secret, tables.utc_now().label("now")).where(_webhooks.id == webhook)
        ).first()
    )
    if row is None:
        raise errors.WebhookNotFound(webhook)
    data = json.dumps({"webhook": webhook})
    event = feed.Event(0, f"test:{webhook}:{secrets.token_hex(8)}", TEST, None, None, data, row.now)
    content = body(event)
    return event.id, sender.send(row.url, headers(row.secret, event.id, row.now, content), content)
