"""A cache of bitfields between the transactions of this process, so that a group is not read for each of its acks.

A cached bitfield is never wrong, for this reason: an item only moves from pending to failed, skipped or acked, from
failed to skipped or acked, and from skipped to acked. So the numbers of items that are resolved, that are skipped or
acked, and that are acked never decrease, and each change increases one of them. They follow from the row's three
counts. So each change of a group gives it counts that it never had before, and the counts determine the bits. A
transaction that has locked the row compares the row's counts with those of the cached bitfield. If they differ, another
process has changed the group, and the blobs are read. Ids of batches are never reused, so a deleted group never comes
back with other bits.

A bitfield is removed from the cache when its row is locked, and put back only after the commit. After a rollback it is
dropped. The cache is cleared whenever the database may be another one, or an older state of the same one (see
`continuity`): the same counts could then stand for other bits. A batch that is never journaled (`no_journal`) has none
here: a repair may take counts of it back.
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
"""Maximum cached groups: 16 MB of bits at the default group size; 128 MB at the largest, with failures."""
SKIPS: Final = "0025"
"""The revision of the schema that introduced skipped items."""
ASK_EVERY: Final = 10.0
"""Seconds between two checks of whether batches may be journaled."""


class BitfieldCache:
    """The groups as of the last commit of this process. Thread-safe."""

    def __init__(self, capacity: int = MOST) -> None:
        self._groups: OrderedDict[Key, Group] = OrderedDict()
        self._journaled: OrderedDict[int, None] = OrderedDict()
        """Journaled batches, the most recently used one last."""
        self._states: OrderedDict[int, JournalState] = OrderedDict()
        """The bits of journaled batches, the most recently put back last."""
        self._state_groups = 0
        """The number of groups in `_states`. Counting them at each commit would visit thousands of batches."""
        self._capacity = capacity
        self._may_journal = False
        self._may_skip = False
        self._ask_at = -math.inf
        self._lock = threading.Lock()
        self._era = 0

    @property
    def era(self) -> int:
        """Pass it to `put`, which ignores bitfields that were taken before a `clear`."""
        return self._era

    def take(self, key: Key, version: tuple[int, int, int]) -> Group | None:
        """Remove and return the group, whose row is locked and has these counts (see `Group.version`). None if the
        cache lacks it."""
        group = self._groups.pop(key, None)
        return None if group is None or group.version != version else group

    def put(
        self, groups: Mapping[Key, Group], era: int, states: Mapping[int, JournalState] = MappingProxyType({})
    ) -> None:
        """Cache the groups and the journaled batches of a committed transaction."""
        with self._lock:
            if era != self._era:
                return
            self._groups.update(groups)
            while len(self._groups) > self._capacity:
                self._groups.popitem(last=False)
            for batch, latest in states.items():
                before = self._states.get(batch)
                if before is None or before.next < latest.next:
                    self._drop(batch)
                    self._journaled.setdefault(batch)
                    self._states[batch] = latest
                    self._state_groups += len(latest.groups)
            while self._state_groups > self._capacity:
                self._drop(next(iter(self._states)))
            while len(self._journaled) > self._capacity:
                self._drop(self._journaled.popitem(last=False)[0])

    def _drop(self, batch: int) -> JournalState | None:
        """Remove and return the bits of a journaled batch."""
        state = self._states.pop(batch, None)
        if state is not None:
            self._state_groups -= len(state.groups)
        return state

    def journal(self, batches: Iterable[int]) -> None:
        """Remember that these batches are journaled, or should be."""
        with self._lock:
            for batch in batches:
                self._journaled.setdefault(batch)

    def may_journal(self, tx: Connection) -> bool:
        """Whether batches may become journaled. An earlier release would count the items of a journal a second time, so
        none may be running. The database is asked again until it confirms that."""
        now = time.monotonic()
        if not self._may_journal and now >= self._ask_at:
            self._ask_at = now + ASK_EVERY
            self._may_journal = schema.serves_only(tx, SINCE)
        return self._may_journal

    def may_skip(self, tx: Connection) -> bool:
        """Whether items may be skipped. An earlier release would take skipped items for acked ones, so none may be
        running."""
        self._may_skip = self._may_skip or schema.serves_only(tx, SKIPS)
        return self._may_skip

    def keep_groups(self, batches: Iterable[int]) -> None:
        """Remember that these batches are never journaled, although they were, or seemed worth it."""
        with self._lock:
            for batch in batches:
                self._journaled.pop(batch, None)
                self._drop(batch)

    def is_journaled(self, batch: int) -> bool:
        return batch in self._journaled

    def take_state(self, batch: int) -> JournalState | None:
        """Remove and return the bits of a journaled batch, whose row is locked. The caller changes them, and puts them
        back after the commit."""
        with self._lock:
            if batch in self._journaled:
                self._journaled.move_to_end(batch)
            return self._drop(batch)

    def clear(self) -> None:
        with self._lock:
            self._era += 1
            self._groups.clear()
            self._states.clear()
            self._state_groups = 0
