"""Bitfields held in memory between the transactions of this process, so that a group that is acked again and again is
not read again and again.

Why a held bitfield is never a wrong one: bits are never cleared in `resolved`, and `failed` only loses bits that
`resolved` keeps. So within the life of a group each change moves (resolved_count, failed_count) to a pair that it never
had before, and the pair names the bits exactly. A transaction that has locked the row compares the row's pair with that
of the held bitfield, and reads the blobs where they differ: another process was there. Ids of batches never come back,
so a group has one life.

A bitfield is taken out when its row is locked, and put back only after the commit; one whose transaction was rolled
back is dropped. All are dropped whenever the database may be another one, or as it was before (see `continuity`): there
the same pair could name other bits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from sqlalchemy.engine import Connection

from core.bits.bitfield import Group
from core.bits.journal import SINCE, JournalState
from core.storage import schema

Key = tuple[int, int]
"""(batch, group)"""

MOST: Final = 16_384
"""Groups that are held: 16 MB of bits at the default group size, 128 MB with failures at the largest."""
ASK_EVERY: Final = 10.0
"""Seconds until it is asked again whether batches may be journaled."""


class BitfieldCache:
    """Groups as the last commit of this process left them. Threads may share it."""

    def __init__(self, most: int = MOST) -> None:
        self._groups: OrderedDict[Key, Group] = OrderedDict()
        self._journaled: OrderedDict[int, None] = OrderedDict()
        """Batches that are journaled; the one that was used last is the last."""
        self._known: OrderedDict[int, JournalState] = OrderedDict()
        """Their bits, where they are held; the one that was put back last is the last."""
        self._known_groups = 0
        """The number of groups in `_known`. It is kept, not counted: there are thousands of batches, and each commit
        looks at it."""
        self._most = most
        self._may_journal = False
        self._ask_at = -math.inf
        self._lock = threading.Lock()
        self._era = 0

    @property
    def era(self) -> int:
        """To be given back to `put`: what was taken before a `clear` is not put back after it."""
        return self._era

    def take(self, key: Key, resolved_count: int, failed_count: int) -> Group | None:
        """The group whose row is locked and has these counts, to be changed by the caller; None where it isn't held."""
        group = self._groups.pop(key, None)
        if group is None or group.resolved_count != resolved_count or group.failed_count != failed_count:
            return None
        return group

    def put(
        self, groups: Mapping[Key, Group], era: int, known: Mapping[int, JournalState] = MappingProxyType({})
    ) -> None:
        """Hold the groups, and the journaled batches, of a transaction that has been committed."""
        with self._lock:
            if era != self._era:
                return
            self._groups.update(groups)
            while len(self._groups) > self._most:
                self._groups.popitem(last=False)
            for batch, latest in known.items():
                before = self._known.get(batch)
                if before is None or before.next < latest.next:
                    self._drop(batch)
                    self._journaled.setdefault(batch)
                    self._known[batch] = latest
                    self._known_groups += len(latest.groups)
            while self._known_groups > self._most:
                self._drop(next(iter(self._known)))
            while len(self._journaled) > self._most:
                self._drop(self._journaled.popitem(last=False)[0])

    def _drop(self, batch: int) -> JournalState | None:
        """Hold no bits of a journaled batch any more; those that were held."""
        known = self._known.pop(batch, None)
        if known is not None:
            self._known_groups -= len(known.groups)
        return known

    def journal(self, batches: Iterable[int]) -> None:
        """These are journaled, or should be."""
        with self._lock:
            for batch in batches:
                self._journaled.setdefault(batch)

    def may_journal(self, tx: Connection) -> bool:
        """Whether batches may become journaled: releases that know nothing of it would count what is in a journal
        again, so none of them may be left. It is asked again and again until that is so."""
        now = time.monotonic()
        if not self._may_journal and now >= self._ask_at:
            self._ask_at = now + ASK_EVERY
            self._may_journal = schema.serves_only(tx, SINCE)
        return self._may_journal

    def journaled(self, batch: int) -> bool:
        return batch in self._journaled

    def take_known(self, batch: int) -> JournalState | None:
        """What is held of a journaled batch whose row is locked; to be changed by the caller, and put back after the
        commit."""
        with self._lock:
            if batch in self._journaled:
                self._journaled.move_to_end(batch)
            return self._drop(batch)

    def clear(self) -> None:
        with self._lock:
            self._era += 1
            self._groups.clear()
            self._known.clear()
            self._known_groups = 0
