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


def everything(patched: pytest.MonkeyPatch, numbers: int = 6) -> None:
    """Each batch is journaled, each ack is an entry, and a journal of so many numbers is folded."""
    _often(patched, numbers)
    patched.setattr(BitfieldCache, "journaled", lambda held, batch: True)


def _often(patched: pytest.MonkeyPatch, numbers: int) -> None:
    patched.setattr(journal, "FEW", 1)
    patched.setattr(journal, "LEAST", numbers)
    patched.setattr(journal, "MOST", numbers)
    patched.setattr(journal, "PORTION", 2)


def mix(patched: pytest.MonkeyPatch, numbers: int = 20) -> None:
    """Of three batches, one is journaled, one isn't, and of one only every other process (or service, where there are
    several in one) thinks so: the others learn it in the middle of a transaction. A journal of so many numbers is
    folded. And of three threes, one is locked as in production (the rows of small calls with their groups, those of
    large ones last), one has its rows locked last, and one so or so by thread."""
    _often(patched, numbers)
    _locked_so_or_so(patched)
    known = BitfieldCache.journaled
    made: list[BitfieldCache] = []

    def journaled(held: BitfieldCache, batch: int) -> bool:
        if not any(held is each for each in made):
            made.append(held)
        odd = (next(place for place, each in enumerate(made) if each is held) + os.getpid()) % 2 == 1
        return known(held, batch) or batch % 3 == 0 or (batch % 3 == 1 and odd)

    patched.setattr(BitfieldCache, "journaled", journaled)


def _locked_so_or_so(patched: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    known = flush._is_little

    def is_little(units: Sequence[Unit]) -> bool:
        mine = threading.get_ident()
        if mine not in threads:
            threads.append(mine)
        three = units[0].batch // 3 % 3 if units else 0
        return known(units) if three == 0 else three == 1 and threads.index(mine) % 2 == 0

    patched.setattr(flush, "_is_little", is_little)
