"""Each operation alone, in each scene: the answer to each of its COMMITs is lost, or its process dies with it.

*The answer is lost*: the response, the rows and the bits must be those of the run in which it arrived. The explorer
also loses answers between the steps of other operations (`test_explorer`).

*The process dies* after the COMMIT, before anything that follows from it. Then its client, or the next round of its
job, does the same again: the rows and the bits must be those of the run in which nothing died, and the response may
differ only in that it calls things repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests import mutants
from tests.conftest import need, running_mariadb
from tests.explorer.arena import Arena, Outcome
from tests.explorer.combinations import Combination, parse
from tests.explorer.databases import OnMariaDB, OnPostgreSQL
from tests.explorer.operations import LONG, OPERATIONS
from tests.explorer.scene import SCENES, Scene
from tests.explorer.search import Search
from tests.explorer.sessions import LOSS, explored
from tests.explorer.workers import POSTGRESQL_SETTINGS, SETTINGS
from tests.support.postgresql import programs, running_postgresql

mutants.from_environment()

QUICK: Final = (Scene("growing", "cold"), Scene("ending", "journaled-warm"))
LEFT_OVER: Final = {
    # A repeat finds no batch; the janitor removes what is left.
    "delete",
    # The dispatcher that died never records it again.
    "record",
    # The next round of the janitor pays what the expired batch owes.
    "expire",
    # And ends its children.
    "expire-overdue",
    # A sweep pays what a batch owes that was ended when a caller's failures were moved.
    "enlisted-fail",
}
"""Operations that leave other rows if they are done again."""
SAME_RESPONSE: Final = {
    *("ack-few", "ack-other-group", "ack-many", "ack-mask", "fail-few", "fail-with-reason", "override", "skip"),
    # In `ending`, `fail-beyond` and `fail-mask` cancel the batch. Items that were never issued are rejected by their
    # repeats as well, but with the batch's state as the reason.
}


@pytest.fixture(scope="module", params=["mariadb", pytest.param("postgresql", marks=pytest.mark.nightly)])
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with explored():
        if request.param == "mariadb":
            with running_mariadb(options=SETTINGS) as server:
                yield from _arena(lambda: Arena(OnMariaDB(server), every_stop=True))
        else:
            need("postgresql", programs() is not None)
            with running_postgresql(options=POSTGRESQL_SETTINGS) as server:
                yield from _arena(lambda: Arena(OnPostgreSQL(server), every_stop=True))


def _arena(make: Callable[[], Arena]) -> Iterator[Arena]:
    arena = make()
    yield arena
    arena.close()


def run(arena: Arena, combination: Combination, place: int, *, dies: bool) -> tuple[bool, Outcome]:
    """Run the only operation, and lose the answer to the COMMIT at this place, or the process with it. Returns whether
    there was such a COMMIT, and the outcome."""
    arena.begin(combination)
    commits, is_lost = 0, False
    while arena.ready():
        is_next = arena.sessions[0].next == "COMMIT" and commits == place and not is_lost
        commits += arena.sessions[0].next == "COMMIT"
        is_lost |= is_next
        arena.step(LOSS if is_next and not dies else 0)
        if is_next and dies:
            arena.begin_again(combination)
    outcome, trouble = arena.outcome()
    assert not trouble, f"{combination}, COMMIT {place}: {trouble}"
    return is_lost, outcome


def differences(outcome: Outcome, expected: Outcome) -> list[str]:
    """What differs, as text. Whether an item was applied or repeated makes no difference."""
    (responses, rows), (expected_responses, expected_rows) = outcome, expected
    lines = [
        f"{table}: {part}, expected {expected_part}"
        for (table, part), (_, expected_part) in zip(rows, expected_rows, strict=True)
        if part != expected_part
    ]
    counts = re.compile(r"'applied': (\d+), 'repeated': (\d+)")

    def counted(response: str) -> str:
        response = response.replace("'status': 'repeated'", "'status': 'applied'")
        return counts.sub(lambda match: f"{int(match[1]) + int(match[2])} items", response)

    if list(map(counted, responses)) != list(map(counted, expected_responses)):
        lines.append(f"response: {responses}, expected {expected_responses}")
    return lines


def scenes(*quick: Scene) -> list[object]:
    return [pytest.param(scene, marks=() if scene in quick else pytest.mark.nightly, id=str(scene)) for scene in SCENES]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", scenes(*QUICK))
def test_a_lost_answer_leaves_no_trace(arena: Arena, scene: Scene) -> None:
    """Each COMMIT of each operation, except for a sequence of the others."""
    for operation in OPERATIONS.keys() - LONG:
        combination = Combination(scene, (operation,))
        _, expected = run(arena, combination, -1, dies=False)
        place = 0
        while True:
            is_lost, outcome = run(arena, combination, place, dies=False)
            assert outcome == expected, f"{combination}, COMMIT {place}: {differences(outcome, expected)}"
            if not is_lost:
                break
            place += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", scenes(QUICK[1]))
def test_a_repeat_after_a_death_finishes_what_was_begun(arena: Arena, scene: Scene) -> None:
    """The process dies after each COMMIT of each operation, and another one does the same. Calls of acks and failures
    have the same response, too."""
    for operation in OPERATIONS.keys() - LONG - LEFT_OVER:
        combination = Combination(scene, (operation,))
        _, expected = run(arena, combination, -1, dies=True)
        place = 0
        while True:
            is_lost, outcome = run(arena, combination, place, dies=True)
            found = differences(outcome, expected)
            if operation not in SAME_RESPONSE:
                found = [line for line in found if not line.startswith("response")]
            assert not found, f"{combination}, COMMIT {place}: {found}"
            if not is_lost:
                break
            place += 1


BETWEEN: Final = [
    "growing/cold:ack-few+delete",
    "ending/warm:fail-few+open-child",
    "ending/cold:fail-with-reason+ack-other-group",
    "ending/warm:share-seal+fail-few",
]


@pytest.fixture(scope="module")
def pairs(arena: Arena) -> Iterator[Arena]:
    pairs = Arena(arena.database, 2)
    yield pairs
    for session in pairs.all:
        session.close()


@pytest.mark.parametrize("text", BETWEEN)
def test_an_answer_is_lost_between_the_steps_of_another_operation(pairs: Arena, text: str) -> None:
    """The slow tests and `make explore` lose answers in all pairs."""
    found = Search(pairs, parse(text)[0], None, loses=True).run()
    assert not found.findings, "\n".join(map(str, found.findings))
