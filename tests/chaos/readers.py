"""A reader: it goes on asking for the feed, for batches that it met there, and for recounts of them. And a verifier,
which has all live batches recounted about each second."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque

from lastbit import Client, errors
from tests.chaos.broker import Link


def read(client: Client, link: Link, dice: random.Random) -> None:
    """Until told to end."""
    position = 0
    met: deque[int] = deque(maxlen=50)
    while link.take("nothing", 1) is not None:
        with contextlib.suppress(errors.LastbitError):
            page = client.events(after=position, limit=dice.choice([1, 10, 1000]), wait=dice.choice([0, 1]))
            position = page.next
            met.extend({event.batch for event in page.events if event.batch is not None})
            for batch in dice.sample(list(met), min(3, len(met))):
                client.batch(batch).refresh()
            if met:
                client.batch(dice.choice(list(met))).verify()


def verify(client: Client, link: Link) -> None:
    """Until told to end."""
    begun = 0.0
    while link.take("nothing", 1) is not None:
        if time.monotonic() < begun + 1:
            continue
        begun = time.monotonic()
        with contextlib.suppress(errors.LastbitError):
            for state in ("open", "sealed"):
                for batch in client.batches(state=state):
                    client.batch(batch.id).verify()
