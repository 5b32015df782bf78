"""The message of a webhook: the body and the signed headers, as in the Standard Webhooks specification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

import standardwebhooks

from core import feed, traces


def happening(event: feed.Event) -> traces.Happening | None:
    """The event for its span, if its batch has a trace context."""
    if event.batch is None or event.data is None or '"traceparent"' not in event.data:
        return None
    context = traces.stored(json.loads(event.data))
    if context is None:
        return None
    return traces.Happening(event.type, event.id, event.position, event.batch, event.key, context)


def body(event: feed.Event) -> bytes:
    """The body: `type` and `timestamp` as specified, and `data` as in `GET /v1/events`."""
    head = json.dumps({"type": event.type, "timestamp": feed.time(event.at)}, separators=(",", ":")).encode()
    return b'%b,"data":%b}' % (head[:-1], feed.encoded(event))


def headers(secrets: Sequence[str], event: str, time: datetime, content: bytes) -> dict[str, str]:
    """The headers of the specification, with one signature by each secret. A receiver accepts the message if one of
    them fits. The id is the event's, so it is the same for each try."""
    text = content.decode()
    signatures = (standardwebhooks.Webhook(secret).sign(event, time, text) for secret in secrets)
    return {
        "webhook-id": event,
        "webhook-timestamp": str(int(time.timestamp())),
        "webhook-signature": " ".join(signatures),
    }
