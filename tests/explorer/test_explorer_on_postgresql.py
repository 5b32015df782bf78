"""The explorer on PostgreSQL: a quarter of the pairs; `make explore` runs all.

PostgreSQL's statements keep the snapshot with which they began while they wait for a lock, and its transactions don't
see rows that others have inserted and not committed. So it has schedules with outcomes that MariaDB doesn't.
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
from tests.explorer.test_explorer import FOUND_BEFORE, PARTS, explore, is_predicted
from tests.explorer.workers import POSTGRESQL_SETTINGS
from tests.support.postgresql import PostgreSQL, programs, running_postgresql

pytestmark = pytest.mark.slow

EVERY_PAIR = 4
"""One of this many pairs is run."""


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", FOUND_BEFORE)
def test_earlier_findings_stay_fixed(arena: Arena, text: str) -> None:
    """Each combination in which the explorer has found a bug, on whichever database."""
    combination, _ = parse(text)
    findings = Search(arena, combination, 2).run()
    assert not findings.findings, "\n".join(map(str, findings.findings))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_interleaved_operations_have_a_serial_outcome(arena: Arena, part: int) -> None:
    """A fixed share of the pairs, with all interleavings of their statements."""
    explore(arena, 2, part * EVERY_PAIR, PARTS * EVERY_PAIR)


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
