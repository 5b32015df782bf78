"""Batches that are journaled from their first ack, next to batches that aren't: both must keep the same guarantees.

In production a batch becomes journaled once many of its groups were acked in no particular order (see
`core.bits.journal.is_worthwhile`). Here the batch's id decides, so that small batches are journaled too and any of
their entries may trigger the fold."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest

from core.acks import flush
from core.acks.call import Unit
from core.bits import journal
from core.bits.cache import BitfieldCache


def everything(patches: pytest.MonkeyPatch, numbers: int = 6) -> None:
    """Journal every batch: each ack becomes an entry, and a journal that names `numbers` items is folded."""
    _often(patches, numbers)
    kept = _kept(patches)
    patches.setattr(BitfieldCache, "is_journaled", lambda cache, batch: batch not in kept)


def _kept(patches: pytest.MonkeyPatch) -> set[int]:
    """The batches that are never journaled, since a process has found that out."""
    kept: set[int] = set()
    patches.setattr(BitfieldCache, "keep_groups", lambda cache, batches: kept.update(batches))
    return kept


def _often(patches: pytest.MonkeyPatch, numbers: int) -> None:
    patches.setattr(journal, "FEW", 1)
    patches.setattr(journal, "LEAST", numbers)
    patches.setattr(journal, "MOST", numbers)
    patches.setattr(journal, "PORTION", 2)


def mix(patches: pytest.MonkeyPatch, numbers: int = 20) -> None:
    """Journal batches by id: one in three always, one in three never, and one in three only in every other process (or
    service, if a process has several), so that the others find out within a transaction. A journal that names `numbers`
    items is folded. The lock order varies too: of every nine batches, three are locked as in production (small calls
    lock rows together with their groups, large calls last), three always lock their rows last, and three do so in every
    other thread."""
    _often(patches, numbers)
    _mix_lock_orders(patches)
    kept = _kept(patches)
    original = BitfieldCache.is_journaled
    caches: list[BitfieldCache] = []

    def is_journaled(cache: BitfieldCache, batch: int) -> bool:
        if not any(cache is other for other in caches):
            caches.append(cache)
        odd = (next(place for place, other in enumerate(caches) if other is cache) + os.getpid()) % 2 == 1
        is_chosen = original(cache, batch) or batch % 3 == 0 or (batch % 3 == 1 and odd)
        return is_chosen and batch not in kept

    patches.setattr(BitfieldCache, "is_journaled", is_journaled)


def _mix_lock_orders(patches: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    original = flush._is_little

    def is_little(units: Sequence[Unit]) -> bool:
        thread = threading.get_ident()
        if thread not in threads:
            threads.append(thread)
        kind = units[0].batch // 3 % 3 if units else 0
        return original(units) if kind == 0 else kind == 1 and threads.index(thread) % 2 == 0

    patches.setattr(flush, "_is_little", is_little)
