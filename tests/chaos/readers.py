"""A reader: it goes on asking for the feed, for batches that it met there, and for recounts of them."""

from __future__ import annotations

import contextlib
import random
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
