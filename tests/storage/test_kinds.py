"""The kinds of writing operations, and the order in which they lock."""

from __future__ import annotations

from itertools import permutations
from typing import ClassVar

import pytest

from core.service.writes import KINDS
from core.storage import lock_order


def test_kinds_are_in_the_order_of_their_locks() -> None:
    """In whatever order they are listed."""
    for listed in permutations(KINDS):
        assert lock_order.sort(listed) == KINDS


def test_parts_that_would_lock_in_turns_have_no_order() -> None:
    class Outer:
        locks: ClassVar = ("tallies", "feed_head")

    class Inner:
        locks: ClassVar = ("batches",)

    with pytest.raises(ValueError, match="no order"):
        lock_order.sort([Outer(), Inner()])
