"""A new secret for a webhook. The earlier ones also sign for a while, so that receivers can change theirs meanwhile.

`webhooks.rotation` has the last rotation as JSON: its Idempotency-Key and overlap, for its repeats, and the earlier
secrets with their ends. Only the database's clock judges the ends.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors
from core.storage import schema, tables

SINCE: Final = "0016"
"""Earlier releases sign with the current secret alone."""
OVERLAP: Final = timedelta(days=1)
LONGEST_OVERLAP: Final = timedelta(days=7)
EARLIER: Final = 4
"""Maximum earlier secrets. One rotation more ends the oldest."""

_webhooks = tables.webhooks.c


@dataclass(frozen=True, slots=True)
class Rotated:
    secret: str = field(repr=False)
    replayed: bool


def rotate(tx: Connection, webhook: int, secret: str, overlap: timedelta, idempotency_key: str | None) -> Rotated:
    """Make `secret` the webhook's own, and let the earlier ones end `overlap` from now at the latest. A repeat of the
    last rotation returns its secret. Raises `errors.WebhookNotFound`, `IdempotencyKeyReused`, `UpgradeNotFinished`."""
    row = tx.execute(
        sa.select(_webhooks.secret, _webhooks.rotation).where(_webhooks.id == webhook).with_for_update()
    ).first()
    if row is None:
        raise errors.WebhookNotFound(webhook)
    if not schema.serves_only(tx, SINCE):
        raise errors.UpgradeNotFinished(SINCE)
    if row.secret == secret:  # this transaction was committed before, without a response
        return Rotated(secret, replayed=False)
    last: dict[str, Any] = {} if row.rotation is None else json.loads(row.rotation)
    seconds = int(overlap.total_seconds())
    if idempotency_key is not None and last.get("key") == idempotency_key:
        if last["overlap"] != seconds:
            raise errors.IdempotencyKeyReused(idempotency_key, "rotate")
        return Rotated(row.secret, replayed=True)
    # Read after the lock, so that this time is not before that of an earlier rotation.
    now = tables.clock(tx)
    end = now + overlap
    earlier = [(row.secret, end), *((old, min(until, end)) for old, until in _earlier(row.rotation, now))]
    rotation = {
        "key": idempotency_key,
        "overlap": seconds,
        "earlier": [[old, until.isoformat()] for old, until in earlier[:EARLIER] if until > now],
    }
    tx.execute(
        sa.update(tables.webhooks)
        .where(_webhooks.id == webhook)
        .values(secret=secret, rotation=json.dumps(rotation, separators=(",", ":")))
    )
    return Rotated(secret, replayed=False)


def valid(secret: str, rotation: str | None, now: datetime) -> tuple[str, ...]:
    """The secrets that sign now, the newest first."""
    return (secret, *(old for old, _ in _earlier(rotation, now)))


def overlap_until(rotation: str | None, now: datetime) -> datetime | None:
    """When the last of the earlier secrets ends; None if all have ended."""
    return max((until for _, until in _earlier(rotation, now)), default=None)


def _earlier(rotation: str | None, now: datetime) -> list[tuple[str, datetime]]:
    """The earlier secrets that have not ended, the newest first."""
    if rotation is None:
        return []
    ends = [(old, datetime.fromisoformat(until)) for old, until in json.loads(rotation)["earlier"]]
    return [(old, until) for old, until in ends if until > now]
