"""Shares the work among replicas of the dispatcher, through an internal consumer group.

Each delivery is in a partition, by its id. Each replica claims deliveries in the partitions that it owns, so that
replicas don't compete for the same ones. Correctness doesn't depend on this: tokens protect the claims, any replica may
claim a delivery that has been due for a few seconds, and a replica that can't sync keeps working on its last
partitions. So a replica can release a partition without draining it: it claims nothing more there, and finishes the
deliveries in progress.

Deliveries are shared, not webhooks, so that all replicas can send to a busy webhook.
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
    """One dispatcher in the consumer group. Only one thread may call `beat`; any thread may read `partitions`."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.partitions: frozenset[int] = frozenset()
        self.worker = f"{socket.gethostname()}:{os.getpid()}"
        self._database = database
        self._session = secrets.token_hex(16)
        self._clock = clock
        self._next = clock()
        self._made = False

    def beat(self) -> None:
        """Join the consumer group, or renew the lease if it is time. Raises `errors.Unavailable`."""
        if self._clock() < self._next:
            return
        if not self._made:
            self._database.write(groups.put, GROUP, PARTITIONS, None, None)
            self._made = True
        try:
            synced = self._sync()
        except errors.SessionReplaced:  # a process in another container has the same host name and process id
            self.worker += ":" + self._session
            synced = self._sync()
        if synced.release:
            self.partitions -= frozenset(synced.release)
            drained = [
                (partition.partition, partition.epoch)
                for partition in synced.assigned
                if partition.partition in synced.release
            ]
            synced = self._sync(drained)
        self.partitions = frozenset(partition.partition for partition in synced.assigned)
        self._next = self._clock() + synced.ttl.total_seconds() / 3

    def leave(self) -> None:
        """Give up all partitions at once. Raises `errors.Unavailable`."""
        self.partitions = frozenset()
        if self._made:
            self._database.write(leases.leave, GROUP, self.worker, self._session)

    def _sync(self, drained: Collection[tuple[int, int]] = ()) -> leases.Synced:
        caller = leases.Caller(self.worker, self._session, drained=drained)
        return leases.synced(self._database, GROUP, caller)
