"""The explorer in CI: every pair of operations in two scenes, a share of the triples, and that it finds what it should.

`make explore` runs every combination in every scene.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import need
from tests.explorer.databases import OnMariaDB
from tests.explorer.operations import LONG
from tests.explorer.scene import Scene
from tests.explorer.search import Arena, Search, combinations, parse
from tests.explorer.sessions import explored
from tests.explorer.workers import QUICKEST
from tests.guarantees import mutants
from tests.servers import MariaDB

mutants.from_environment()

PARTS = 4
"""Tests among which the pairs are divided, so that processes can share them."""
PAIRS = [Scene("growing", "cold"), Scene("ending", "journaled-warm")]
EVERY_TRIPLE = 211
"""One triple of this many is run."""


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    server = MariaDB(options=QUICKEST)
    need("mariadb-server", server.available)
    try:
        server.install()
        server.start()
        with explored():
            arena = Arena(OnMariaDB(server))
            yield arena
            arena.close()
    finally:
        server.remove()


FOUND_BEFORE = [
    # Items were rejected as never issued, by a look before the extend; the counts in the extend's answer were older.
    "growing/cold:ack-many+extend",
    # The look came before the group's lock: a bitfield was cut to a width that the extend had outgrown.
    "growing/cold:ack-mask+extend+ack-new",
    # The key was looked up before the parent was locked: the retry was refused as the item's second child.
    "growing/cold:open-child+open-child",
]


@pytest.mark.mariadb
@pytest.mark.parametrize("text", FOUND_BEFORE)
def test_what_was_found_before_is_not_found_again(arena: Arena, text: str) -> None:
    """Each combination in which the explorer found something."""
    combination, _ = parse(text)
    found = Search(arena, combination, 2).run()
    assert not found.findings, "\n".join(map(str, found.findings))


@pytest.mark.mariadb
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_of_operations_does_what_one_after_the_other_does(arena: Arena, part: int) -> None:
    """With all interleavings of their statements. (With the janitor, whose statements are many, in `make explore`.)"""
    pairs = [each for each in combinations(arena, 2, PAIRS) if LONG.isdisjoint(each.operations)]
    for combination in pairs[part::PARTS]:
        found = Search(arena, combination, None).run()
        assert not found.findings, "\n".join(map(str, found.findings))


@pytest.mark.mariadb
def test_three_operations_do_what_one_after_the_other_does(arena: Arena) -> None:
    """With two preemptions; of the triples a fixed share."""
    for combination in list(combinations(arena, 3, PAIRS))[::EVERY_TRIPLE]:
        found = Search(arena, combination, 2).run()
        assert not found.findings, "\n".join(map(str, found.findings))
