"""A batch's callback: the webhook that an open makes for this batch alone. Its row is inserted in the transaction of
the open, and removed with the batch. `core.webhooks.callbacks` plans its deliveries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import feed
from core.batches.lifecycle import State
from core.storage import dialects, statements, tables
from core.storage.statements import LIST, Pipeline, as_text, chunks, inserts

DEFAULT_TYPES: Final = tuple(
    f"{feed.BATCH}.{name}" for name in sorted(("completed", "succeeded", State.EXPIRED, State.CANCELLED))
)
"""The types of events that tell how a batch ended. A completed batch can still succeed later, when failed items are
acked after all."""
CHUNK: Final = 500
"""Deliveries that one transaction removes."""
ACTIVE: Final = "active"
DISABLED: Final = "disabled"
"""States of a webhook (see `core.webhooks.subscriptions`)."""
PENDING: Final = "pending"
"""The state of a delivery that must be sent (see `core.webhooks.delivery_log`)."""

_table = tables.webhooks.c
_deliveries = tables.deliveries.c
_feed = tables.feed.c


class Callback(NamedTuple):
    """What an open asks for. `types` is sorted and has no duplicates."""

    url: str
    types: tuple[str, ...] = DEFAULT_TYPES


@dataclass(frozen=True, slots=True)
class Issued:
    """A callback with the id of its webhook, and its secret."""

    id: int
    url: str
    types: tuple[str, ...]
    secret: str = field(repr=False)


def insert(pipeline: Pipeline, new: Mapping[int, tuple[Callback, str]]) -> dict[int, Issued]:
    """Insert the callbacks (with their secrets) of these new batches, in one round trip."""
    dialect = dialects.of(pipeline.tx)
    now = dialect.one_time(pipeline.tx)
    rows = []
    for batch, (callback, secret) in new.items():
        texts = map(dialect.literal, (callback.url, json.dumps(callback.types), secret))
        rows.append(f"({','.join(texts)},'{ACTIVE}',0,{batch},{lane_of(callback.url)},{now})")
    table = dialect.name(pipeline.tx, "webhooks")
    pipeline.later(*inserts(table, "url, types, secret, state, position, batch_id, lane, created_at", rows))
    inserted = pipeline.query_keys(
        new,
        lambda part: (
            f"SELECT batch_id, id FROM {table} WHERE batch_id IN ({','.join(map(str, part))})"  # noqa: S608
        ),
    )
    ids = {batch: id for batch, id in inserted.rows()}  # noqa: C416
    return {batch: Issued(ids[batch], *callback, secret) for batch, (callback, secret) in new.items()}


def lane_of(url: str) -> int:
    """The lane that callbacks to the host of this URL share."""
    digest = hashlib.sha256(urlsplit(url).netloc.lower().encode()).digest()
    return -1 - int.from_bytes(digest[:6])


def of_batches(tx: Connection, batches: Collection[int]) -> dict[int, Issued]:
    """The callbacks of these batches; those without one are left out."""
    table = dialects.of(tx).name(tx, "webhooks")
    texts = [
        f"SELECT batch_id, id, url, types, secret FROM {table} WHERE batch_id IN ({','.join(map(str, part))})"  # noqa: S608
        for part in chunks(sorted(batches), LIST)
    ]
    return {
        batch: Issued(id, as_text(url) or "", tuple(json.loads(types)), as_text(secret) or "")
        for rows in statements.run(tx, *texts)
        for batch, id, url, types, secret in rows
    }


def _id(tx: Connection, batch: int) -> int | None:
    id: int | None = tx.scalar(sa.select(_table.id).where(_table.batch_id == batch))
    return id


def is_owed(tx: Connection, batch: int) -> bool:
    """Whether the batch has a callback for which an event must still be planned or sent. Events that are planned in
    between are not missed: the position is read before the deliveries."""
    webhook = tx.scalar(sa.select(_table.id).where(_table.batch_id == batch, _table.state == ACTIVE))
    if webhook is None:
        return False
    position = tx.scalar(sa.select(tables.callback_cursor.c.position))
    not_planned = sa.select(_feed.position).where(_feed.batch_id == batch, _feed.position > position)
    pending = sa.select(_deliveries.id).where(_deliveries.webhook_id == webhook, _deliveries.state == PENDING)
    return any(tx.scalar(query.limit(1)) is not None for query in (not_planned, pending))


def disable(tx: Connection, batch: int) -> None:
    """Send nothing more to the callback of the batch, if it has one."""
    webhook = _id(tx, batch)
    if webhook is not None:
        tx.execute(sa.update(tables.webhooks).where(_table.id == webhook).values(state=DISABLED))


def remove_chunk(tx: Connection, batch: int) -> bool:
    """Remove the deliveries of the callback in chunks, and then the callback. Returns whether nothing is left."""
    webhook = _id(tx, batch)
    if webhook is None:
        return True
    ids = list(tx.scalars(sa.select(_deliveries.id).where(_deliveries.webhook_id == webhook).limit(CHUNK)))
    attempts: Any = tables.delivery_attempts
    for part in chunks(sorted(ids), LIST):
        # The deliveries first: once they are locked, no dispatcher logs another attempt.
        tx.execute(sa.delete(tables.deliveries).where(_deliveries.id.in_(part)))
        tx.execute(sa.delete(attempts).where(attempts.c.delivery_id.in_(part)))
    if len(ids) == CHUNK:
        return False
    tx.execute(sa.delete(tables.webhooks).where(_table.id == webhook))
    return True
