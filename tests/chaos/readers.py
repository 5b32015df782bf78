"""A reader, which requests the feed, batches of its events, and recounts of them; and a verifier, which requests a
recount of all live batches about once a second."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque

from lastbit import Client, errors
from tests.chaos.broker import Link


def read(client: Client, link: Link, dice: random.Random) -> None:
    """Work until the broker stops the actor."""
    position = 0
    recent: deque[int] = deque(maxlen=50)
    while link.take("nothing", 1) is not None:
        with contextlib.suppress(errors.LastbitError):
            page = client.events(after=position, limit=dice.choice([1, 10, 1000]), wait=dice.choice([0, 1]))
            position = page.next
            recent.extend({event.batch for event in page.events if event.batch is not None})
            for batch in dice.sample(list(recent), min(3, len(recent))):
                client.batch(batch).refresh()
            if recent:
                client.batch(dice.choice(list(recent))).verify()


def verify(client: Client, link: Link) -> None:
    """Work until the broker stops the actor."""
    start = 0.0
    while link.take("nothing", 1) is not None:
        if time.monotonic() < start + 1:
            continue
        start = time.monotonic()
        with contextlib.suppress(errors.LastbitError):
            for state in ("open", "sealed"):
                for batch in client.batches(state=state):
                    client.batch(batch.id).verify()
