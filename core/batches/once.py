"""Verbs that append one event, which remembers the request: its id contains a digest of the Idempotency-Key, and one of
what was asked for.

The event is looked up under the batch's lock and before the state is judged. So of two equal requests at once, one
appends the event and the other one finds it, and a repeat gets its answer even if the batch has ended since. A request
without a key gets a random one: it repeats nothing, but its transaction can run again after a COMMIT whose result is
unknown.

The key lives as long as its event. When the janitor has trimmed the event, the same request acts again.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from core import errors, feed
from core.storage import tables

_feed = tables.feed.c


@dataclass(frozen=True, slots=True)
class Request:
    verb: str
    idempotency_key: str | None
    stem: str
    """The beginning of its event's id. All requests to the batch with this verb and key have the same."""
    event_id: str

    @classmethod
    def of(cls, verb: str, batch: int, idempotency_key: str | None, content: str) -> Request:
        """`content`: a text that is equal for requests with the same meaning."""
        stem = f"{feed.BATCH}:{batch}:{verb}:{_digest(idempotency_key or str(uuid.uuid4()))}:"
        return cls(verb, idempotency_key, stem, stem + _digest(content))

    def event(self, tx: Connection) -> Any:
        """The row of the request's event (`position`, `data`), or None if it is new. Raises
        `errors.IdempotencyKeyReused`."""
        query = sa.select(_feed.event_id, _feed.position, _feed.data)
        row = tx.execute(query.where(tables.begins(_feed.event_id, self.stem))).first()
        if row is not None and row.event_id != self.event_id:
            raise errors.IdempotencyKeyReused(str(self.idempotency_key), self.verb)
        return row


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
