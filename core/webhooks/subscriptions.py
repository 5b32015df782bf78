"""Webhooks: the URL, the event types and the secret of each subscription.

A webhook's `position` is the last event of the feed for which its deliveries were planned; it begins at the feed's
head. Each event of its types becomes one delivery, a row that is kept as long as its event (see `deliveries`). Only
`create` and `rotate_secret` return the secret. No other response, log or error contains it.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.storage import tables
from core.storage.database import Database
from core.storage.statements import LIST, chunks
from core.webhooks import addresses, message, rotation
from core.webhooks.sender import Sender, SendResult

CHUNK: Final = 500
"""Deliveries that one transaction removes or makes due again."""
TEST: Final = "webhook.test"

_webhooks = tables.webhooks.c
_deliveries = tables.deliveries.c
_attempts = tables.delivery_attempts.c
_feed = tables.feed.c


class State(StrEnum):
    """The state of a webhook. Disabled: the receiver responded with 410 Gone, so nothing more is sent."""

    ACTIVE = "active"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class Webhook:
    id: int
    url: str
    types: list[str] | None
    label: str | None
    state: State
    position: int
    batch: int | None
    """The batch whose callback it is."""
    overlap_until: datetime | None
    """When the last earlier secret ends (see `rotation`)."""
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Created:
    webhook: Webhook
    secret: str = field(repr=False)
    replayed: bool = False


def new_secret() -> str:
    return "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


def fit(sender: Sender, url: str, place: str = "body.url") -> None:
    """Check the URL, without a lookup. Raises `errors.InvalidRequest`."""
    try:
        sender.check(url)
    except addresses.Unfit as cause:
        raise errors.InvalidRequest(place, str(cause)) from None


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
    _webhooks.id,
    _webhooks.url,
    _webhooks.types,
    _webhooks.label,
    _webhooks.state,
    _webhooks.batch_id,
    _webhooks.rotation,
    _webhooks.created_at,
    tables.utc_now().label("now"),
    # All callbacks share a position.
    sa.case(
        (_webhooks.batch_id.is_(None), _webhooks.position),
        else_=sa.select(tables.callback_cursor.c.position).scalar_subquery(),
    ).label("position"),
)


def types_of(row: Any) -> list[str] | None:
    """The types that a webhook subscribes to; None for all."""
    types: list[str] | None = None if row.types is None else json.loads(row.types)
    return types


def _webhook(row: Any) -> Webhook:
    types, state = types_of(row), State(row.state)
    until = rotation.overlap_until(row.rotation, row.now)
    return Webhook(row.id, row.url, types, row.label, state, row.position, row.batch_id, until, row.created_at)


def get(tx: Connection, webhook: int) -> Webhook:
    """Raises `errors.WebhookNotFound`."""
    row = tx.execute(sa.select(*_SHOWN).where(_webhooks.id == webhook)).first()
    if row is None:
        raise errors.WebhookNotFound(webhook)
    return _webhook(row)


def disabled(tx: Connection, webhooks: Collection[int]) -> set[int]:
    """Those of these webhooks that are disabled."""
    if not webhooks:
        return set()
    query = sa.select(_webhooks.id).where(_webhooks.id.in_(webhooks), _webhooks.state == State.DISABLED)
    return set(tx.scalars(query))


def rotate_secret(
    tx: Connection, webhook: int, secret: str, overlap: timedelta, idempotency_key: str | None
) -> Created:
    """Give the webhook a new secret. Raises what `rotation.rotate` raises."""
    result = rotation.rotate(tx, webhook, secret, overlap, idempotency_key)
    return Created(get(tx, webhook), result.secret, result.replayed)


def of_batch(tx: Connection, batch: int) -> Webhook | None:
    """The callback of the batch."""
    row = tx.execute(sa.select(*_SHOWN).where(_webhooks.batch_id == batch)).first()
    return None if row is None else _webhook(row)


def page(tx: Connection, before: int | None, limit: int) -> tuple[list[Webhook], int | None]:
    """The webhooks without the callbacks of batches, newest first, and the id below which the next page begins."""
    query = sa.select(*_SHOWN).where(_webhooks.batch_id.is_(None)).order_by(_webhooks.id.desc()).limit(limit)
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
        # The deliveries first: once they are locked, no dispatcher logs another attempt.
        tx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))
        tx.execute(sa.delete(tables.delivery_attempts).where(_attempts.delivery_id.in_(part)))
    return len(ids) == CHUNK


def test(database: Database, sender: Sender, webhook: int) -> tuple[str, SendResult]:
    """Send an event that is not in the feed. Return its id and the result. Raises `errors.WebhookNotFound`."""
    row = database.read(
        lambda tx: tx.execute(
            sa.select(_webhooks.url, _webhooks.secret, _webhooks.rotation, tables.utc_now().label("now")).where(
                _webhooks.id == webhook
            )
        ).first()
    )
    if row is None:
        raise errors.WebhookNotFound(webhook)
    data = json.dumps({"webhook": webhook})
    event = feed.Event(0, f"test:{webhook}:{secrets.token_hex(8)}", TEST, None, None, data, row.now)
    content = message.body(event)
    valid = rotation.valid(row.secret, row.rotation, row.now)
    return event.id, sender.send(row.url, message.headers(valid, event.id, row.now, content), content)
