"""The dispatcher's replicas share their work through a consumer group of the service's own.

Each delivery is in a partition, by its id, and each replica claims those of the partitions that it holds, so that many
replicas don't all want the same ones. Nothing rests on it but that: claims are guarded by their tokens as ever, a
delivery that has been due for a few seconds is anybody's, and a replica that can't sync goes on with what it held. For
the same reason there is nothing to drain: what it is told to release it claims no more, and what it is sending is its
own all the same.

Deliveries and not webhooks are shared, so that all replicas together send to a webhook that has much to be told.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from typing import Final

from core import errors
from core.consumer_groups import groups, leases
from core.storage.database import Database
from core.webhooks.deliveries import PARTITIONS

GROUP: Final = groups.OWN_NAMES + "dispatcher"


class Replica:
    """One dispatcher's place in the group. `beat` belongs to one thread; `partitions` may be read from any."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.partitions: frozenset[int] = frozenset()
        self.worker = f"{socket.gethostname()}:{os.getpid()}"
        self._database = database
        self._session = secrets.token_hex(16)
        self._clock = clock
        self._next = clock()
        self._made = False

    def beat(self) -> None:
        """Join or stay in the group, if it is time. Raises `errors.Unavailable`."""
        if self._clock() < self._next:
            return
        if not self._made:
            self._database.write(groups.put, GROUP, PARTITIONS, None, None, repeatable=True)
            self._made = True
        try:
            synced = self._sync()
        except errors.SessionReplaced:  # another container whose host and process are called the same
            self.worker += ":" + self._session
            synced = self._sync()
        if synced.release:
            self.partitions -= frozenset(synced.release)
            released = [(held.partition, held.epoch) for held in synced.assigned if held.partition in synced.release]
            synced = self._sync(released)
        self.partitions = frozenset(held.partition for held in synced.assigned)
        self._next = self._clock() + synced.ttl.total_seconds() / 3

    def leave(self) -> None:
        """Let the others have it, at once. Raises `errors.Unavailable`."""
        self.partitions = frozenset()
        if self._made:
            self._database.write(leases.leave, GROUP, self.worker, self._session, repeatable=True)

    def _sync(self, drained: Collection[tuple[int, int]] = ()) -> leases.Synced:
        caller = leases.Caller(self.worker, self._session, drained=drained)
        return leases.synced(self._database, GROUP, caller)
