"""Batches that are journaled from their first ack, beside others that aren't: the same guarantees hold for all of them.

In production a batch is journaled once acks have come in no order to many of its groups (see `core.bits.journal.pays`).
Here its id decides, so that small batches are, and every entry of theirs may be the one that is folded.
"""

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
    """Each batch is journaled, each ack is an entry, and a journal of so many numbers is folded."""
    _often(patches, numbers)
    patches.setattr(BitfieldCache, "journaled", lambda cache, batch: True)


def _often(patches: pytest.MonkeyPatch, numbers: int) -> None:
    patches.setattr(journal, "FEW", 1)
    patches.setattr(journal, "LEAST", numbers)
    patches.setattr(journal, "MOST", numbers)
    patches.setattr(journal, "PORTION", 2)


def mix(patches: pytest.MonkeyPatch, numbers: int = 20) -> None:
    """Of three batches, one is journaled, one isn't, and of one only every other process (or service, where there are
    several in one) thinks so: the others learn it in the middle of a transaction. A journal of so many numbers is
    folded. And of three threes, one is locked as in production (the rows of small calls with their groups, those of
    large ones last), one has its rows locked last, and one so or so by thread."""
    _often(patches, numbers)
    _locked_so_or_so(patches)
    original = BitfieldCache.journaled
    caches: list[BitfieldCache] = []

    def journaled(cache: BitfieldCache, batch: int) -> bool:
        if not any(cache is other for other in caches):
            caches.append(cache)
        odd = (next(place for place, other in enumerate(caches) if other is cache) + os.getpid()) % 2 == 1
        return original(cache, batch) or batch % 3 == 0 or (batch % 3 == 1 and odd)

    patches.setattr(BitfieldCache, "journaled", journaled)


def _locked_so_or_so(patches: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    original = flush._is_little

    def is_little(units: Sequence[Unit]) -> bool:
        thread = threading.get_ident()
        if thread not in threads:
            threads.append(thread)
        three = units[0].batch // 3 % 3 if units else 0
        return original(units) if three == 0 else three == 1 and threads.index(thread) % 2 == 0

    patches.setattr(flush, "_is_little", is_little)
