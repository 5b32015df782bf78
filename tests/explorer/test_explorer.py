"""The explorer in CI: what was found before, and a share of the pairs; in the slow tests every pair, and some triples.

`make explore` runs every combination in every scene.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import need
from tests.explorer.databases import OnMariaDB, OnSQLite
from tests.explorer.operations import MANIFOLD
from tests.explorer.scene import Scene
from tests.explorer.search import Arena, Search, combinations, parse
from tests.explorer.sessions import explored
from tests.explorer.workers import QUICKEST
from tests.guarantees import mutants
from tests.servers import MariaDB, sqlite_file

mutants.from_environment()

PARTS = 8
"""Tests among which the pairs are divided, so that processes can share them."""
SCENES = [Scene("growing", "cold"), Scene("ending", "journaled-warm")]
EVERY_PAIR = 9
"""Of the pairs, one of this many is run where not all are."""
EVERY_TRIPLE = 1501
"""Of the triples, one of this many."""


@pytest.fixture(scope="module")
def on_one_file() -> Iterator[Arena]:
    with explored(), sqlite_file() as url:
        arena = Arena(OnSQLite(url))
        yield arena
        arena.close()


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
    # A debt that was paid stayed, as the child's row was locked for a moment, and the child couldn't be deleted.
    "growing/cold:ack-few+delete",
]


@pytest.mark.mariadb
@pytest.mark.parametrize("text", FOUND_BEFORE)
def test_what_was_found_before_is_not_found_again(arena: Arena, text: str) -> None:
    """Each combination in which the explorer found something."""
    combination, _ = parse(text)
    found = Search(arena, combination, 2).run()
    assert not found.findings, "\n".join(map(str, found.findings))


def explore(arena: Arena, many: int, first: int, step: int) -> None:
    """Of all combinations of so many operations, each `step`th one from the `first` on."""
    wanted = list(combinations(arena, many, SCENES, in_one=True, without=MANIFOLD))[first::step]
    assert wanted
    for combination in wanted:
        found = Search(arena, combination, None if many == 2 else 2).run()
        assert not found.findings, "\n".join(map(str, found.findings))


@pytest.mark.mariadb
def test_two_operations_do_what_one_after_the_other_does(arena: Arena) -> None:
    """With all interleavings of their statements; of the pairs a fixed share."""
    explore(arena, 2, 0, EVERY_PAIR)


@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(1800)
def test_three_operations_do_what_one_after_the_other_does(arena: Arena) -> None:
    """With two preemptions; of the triples a fixed share."""
    explore(arena, 3, 0, EVERY_TRIPLE)


def test_two_operations_on_sqlite_do_what_one_after_the_other_does(on_one_file: Arena) -> None:
    """With all interleavings of their transactions; of the pairs a fixed share."""
    explore(on_one_file, 2, 0, EVERY_PAIR)


@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_of_operations_does_what_one_after_the_other_does(arena: Arena, part: int) -> None:
    """With all interleavings of their statements. (Those of many transactions, in `make explore`.)"""
    explore(arena, 2, part, PARTS)
