"""The explorer on PostgreSQL: the pairs that run on MariaDB, too.

PostgreSQL's statements keep the snapshot with which they began while they wait for a lock, and its transactions don't
see rows that others have inserted and not committed. So it has schedules with outcomes that MariaDB doesn't. Triples
are not run: which of two transactions that wait for a row gets it first is not the same each time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import need
from tests.explorer.arena import Arena
from tests.explorer.combinations import parse
from tests.explorer.databases import OnPostgreSQL
from tests.explorer.search import Search
from tests.explorer.sessions import explored
from tests.explorer.test_explorer import (
    FOUND_BEFORE,
    PARTS,
    POLICIES,
    break_no_order,
    explore,
    explore_rare,
    find_nothing,
    is_predicted,
)
from tests.explorer.workers import POSTGRESQL_SETTINGS
from tests.support.postgresql import PostgreSQL, programs, running_postgresql

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server() -> Iterator[PostgreSQL]:
    need("postgresql", programs() is not None)
    with running_postgresql(options=POSTGRESQL_SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def arena(server: PostgreSQL) -> Iterator[Arena]:
    with explored():
        arena = Arena(OnPostgreSQL(server))
        yield arena
        arena.close()


def test_every_operation_keeps_the_order_of_the_locks(arena: Arena) -> None:
    """In every scene."""
    break_no_order(arena)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", FOUND_BEFORE)
def test_earlier_findings_stay_fixed(arena: Arena, text: str) -> None:
    """Each combination in which the explorer has found a bug, on whichever database."""
    find_nothing(arena, text, 2)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_interleaved_operations_have_a_serial_outcome(arena: Arena, part: int) -> None:
    """All pairs, with all interleavings of their statements."""
    explore(arena, 2, part, PARTS)


@pytest.mark.parametrize("text", POLICIES)
def test_rare_operations_have_a_serial_outcome(arena: Arena, text: str) -> None:
    find_nothing(arena, text, None)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_of_rare_operations_have_a_serial_outcome(arena: Arena, part: int) -> None:
    explore_rare(arena, part)


@pytest.mark.parametrize("text", ["growing/cold:ack-few+delete", "growing/cold:share+cancel+expire"])
def test_predicted_steps_are_those_that_the_database_takes(arena: Arena, text: str) -> None:
    is_predicted(arena, text)


ALIKE = ["ending/warm:ack-other-group+seal", "growing/cold:apply+sync-newcomer", "growing/cold:open-child+open-child"]


@pytest.mark.parametrize("text", ALIKE)
def test_omitted_stops_hide_no_outcome(server: PostgreSQL, arena: Arena, text: str) -> None:
    """Stopping before every statement reaches the same outcomes with more schedules."""
    combination, _ = parse(text)
    reduced = Search(arena, combination, None).run()
    full_arena = Arena(OnPostgreSQL(server), every_stop=True)
    complete = Search(full_arena, combination, None).run()
    full_arena.close()
    assert reduced.reached == complete.reached
    assert reduced.schedules < complete.schedules
