"""The keys with a prefix, as a range."""

from __future__ import annotations

import sys

from hypothesis import example, given
from hypothesis import strategies as st

from core.batches import search
from core.batches.batch import Opening
from core.batches.search import Filter
from core.service import Service
from core.storage.database import Database
from core.storage.tables import types

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
LAST = chr(sys.maxunicode)


@given(TEXT, TEXT)
@example("\ud7ff", "\ud7ff\ue000")
@example("\ud7ff", "\ue000")
@example(f"a{LAST}", f"a{LAST}x")
@example(f"a{LAST}", "b")
@example(LAST, LAST)
def test_the_range_of_a_prefix_has_exactly_its_keys(prefix: str, text: str) -> None:
    """By bytes, as databases compare them; including the first and last characters."""
    after = types._successor(prefix)
    for key in (text, prefix + text, prefix):
        in_range = prefix.encode() <= key.encode() and (after is None or key.encode() < after.encode())
        assert in_range is key.startswith(prefix)


def test_a_page_of_a_prefix_has_only_its_keys(database: Database) -> None:
    """No wildcard is interpreted, case is kept, and nothing is folded."""
    keys = ["a%", "a_", "ab", "A%", "a%b", "ä", "a", "a% ", f"a%{LAST}", "a&"]
    service = Service(database)
    for key in [*keys, None]:
        service.batches.open(Opening(key))
    for prefix in ("a%", "a_", "a", "A", "ä", LAST):
        page = database.read(lambda tx, prefix=prefix: search.page(tx, Filter(key_prefix=prefix)))  # type: ignore[misc]
        assert {batch.key for batch in page.batches} == {key for key in keys if key.startswith(prefix)}
