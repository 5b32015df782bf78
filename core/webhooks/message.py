"""The message of a webhook: the body and the signed headers, as in the Standard Webhooks specification."""

from __future__ import annotations

import json
from datetime import datetime

import standardwebhooks

from core import feed


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
