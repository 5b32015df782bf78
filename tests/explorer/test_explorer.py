"""The explorer in CI: the pairs and a share of the triples; the slow tests take a larger share.

`make explore` runs every combination in every scene.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests import mutants
from tests.conftest import need
from tests.explorer.arena import Arena
from tests.explorer.combinations import Combination, combinations, parse
from tests.explorer.databases import OnMariaDB, OnSQLite
from tests.explorer.operations import MANIFOLD, OPERATIONS, RARE
from tests.explorer.scene import SCENES as ALL_SCENES
from tests.explorer.scene import Scene
from tests.explorer.search import Search, replay
from tests.explorer.sessions import explored
from tests.explorer.workers import SETTINGS
from tests.mutants import mutant
from tests.support.servers import MariaDB, sqlite_file

mutants.from_environment()

PARTS = 3
"""Tests among which the combinations are divided, so that processes can share them."""
SCENES = [Scene("growing", "cold"), Scene("ending", "journaled-warm"), Scene("fresh", "cold")]
EVERY_PAIR = 9
"""On SQLite, one of this many pairs is run."""
EVERY_TRIPLE = 300
"""One of this many triples is run."""


@pytest.fixture(scope="module")
def on_one_file() -> Iterator[Arena]:
    with explored(), sqlite_file() as url:
        arena = Arena(OnSQLite(url))
        yield arena
        arena.close()


@pytest.fixture(scope="module")
def mariadb_server() -> Iterator[MariaDB]:
    server = MariaDB(options=SETTINGS)
    need("mariadb-server", server.available)
    try:
        server.install()
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="module")
def arena(mariadb_server: MariaDB) -> Iterator[Arena]:
    with explored():
        arena = Arena(OnMariaDB(mariadb_server))
        yield arena
        arena.close()


FOUND_BEFORE = [
    # Items were rejected as never issued, based on a read before the extend; the counts in the extend's answer were
    # older.
    "growing/cold:ack-many+extend",
    # The read came before the group's lock: a bitfield was truncated to a width that the extend had outgrown.
    "growing/cold:ack-mask+extend+ack-new",
    # The key was looked up before the parent was locked: the retry was refused as the item's second child.
    "growing/cold:open-child+open-child",
    # A paid debt remained because the child's row was locked for a moment, and the child couldn't be deleted.
    "growing/cold:ack-few+delete",
    # An item was acked before its failure, in a transaction of a caller, was counted: the batch refused it.
    "growing/cold:enlisted-fail+ack-many",
    # One janitor had chosen an instance to remove; the other had removed it, and a late event had started it again.
    pytest.param("fresh/cold:forget+forget+handle-late", marks=pytest.mark.nightly),
]


def find_nothing(arena: Arena, text: str, preemptions: int | None) -> None:
    """Search the combination; fail if there is a finding."""
    combination, _ = parse(text)
    findings = Search(arena, combination, preemptions).run()
    assert not findings.findings, "\n".join(map(str, findings.findings))


def break_no_order(arena: Arena) -> None:
    """Run each operation alone in each scene; fail if one breaks the order of the locks."""
    for scene, name in itertools.product(ALL_SCENES, OPERATIONS):
        arena.run(Combination(scene, (name,)), lambda ready: ready[0])
        (session,) = arena.sessions
        assert session.steps
        assert session.disorder == [], f"{scene}:{name}"


@pytest.mark.mariadb
def test_every_operation_keeps_the_order_of_the_locks(arena: Arena) -> None:
    """In every scene. Beside others, a statement out of order is a finding."""
    break_no_order(arena)


@mutant(
    "a-rejected-item-is-issued-before-the-counts-are-locked",
    "core.acks.completion:write",
    "any(batch in all_rows and all_rows[batch].items != items for batch, items in refusals.items())",
    "False",
)
@mutant(
    "a-debt-stays-where-a-childs-row-is-locked-for-a-moment",
    "core.batches.nesting:strike_out",
    "query.with_for_update(skip_locked=skip_locked)",
    "query.with_for_update(skip_locked=True)",
)
@mutant(
    "a-childs-key-is-looked-up-before-its-parent-is-locked",
    "core.batches.writing:BatchWrites.judge",
    """
parents = self._lock_parents()
found = _look(self.pipeline, self._opens, self._changes)
""",
    """
found = _look(self.pipeline, self._opens, self._changes)
parents = self._lock_parents()
""",
)
@pytest.mark.mariadb
@pytest.mark.parametrize("text", FOUND_BEFORE)
def test_earlier_findings_stay_fixed(arena: Arena, text: str) -> None:
    """Each combination in which the explorer has found a bug."""
    find_nothing(arena, text, 2)


MUTANTS = [
    ("a-batch-that-became-a-parent-is-not-noticed", "fresh/cold:ack-mask+open-other-child"),
    ("a-call-from-before-the-journal-goes-on", "growing/mixed:ack-few+ack-mask"),
    ("a-deleted-batchs-acks-are-not-rejected", "complete/cold:fail-mask+delete"),
    ("a-reason-that-another-transaction-inserted-first-is-an-error", "fresh/cold:fail-with-reason+fail-with-reason"),
    ("expiry-does-not-lock", "fresh/cold:ack-few+expire"),
    ("items-are-read-before-the-groups-are-locked", "growing/cold:ack-new+ack-mask"),
    ("what-waits-is-not-counted-before-a-redrive", "growing/cold:enlisted-fail+ack-many"),
    pytest.param(
        *("the-janitor-removes-what-it-has-chosen", "fresh/cold:forget+forget+handle-late"), marks=pytest.mark.nightly
    ),
]


@pytest.mark.mariadb
@pytest.mark.parametrize(("name", "text"), MUTANTS)
def test_a_race_in_the_code_is_found(
    mariadb_server: MariaDB, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Each of these is found with two preemptions, and not without the mutant."""
    combination, _ = parse(text)
    for is_broken in (False, True):
        if is_broken:
            monkeypatch.setattr(*mutants.named(name).build())
        with explored():
            arena = Arena(OnMariaDB(mariadb_server))
            found = Search(arena, combination, 2).run()
            arena.close()
        assert bool(found.findings) == is_broken


@pytest.mark.mariadb
def test_each_operation_changes_something_in_some_scene(arena: Arena) -> None:
    """An operation that changes nothing can't race. `look` only reads. `trim` finds no event that it may remove: when
    it does, the locks of its DELETE are not the same each time, so that schedules don't repeat. `apply-ranges-again`
    goes on where `apply-ranges` ends."""
    idle = set(OPERATIONS)
    for scene, operation in itertools.product(ALL_SCENES, OPERATIONS):
        if operation in idle:
            arena.run(Combination(scene, (operation,)), lambda ready: ready[0])
            if arena.commits:
                idle.remove(operation)
    assert idle == {"look", "trim", "apply-ranges-again"}


@pytest.mark.mariadb
def test_orders_of_transactions_are_run_in_the_end_whatever_their_number_of_switches(arena: Arena) -> None:
    """Three operations: an outcome that needs many switches between transactions is allowed as well."""
    combination, _ = parse("growing/cold:delete+extend+ack-new")
    search = Search(arena, combination, 2)
    search.begin()
    every = Search(arena, combination, None)
    every.begin()
    assert not search.allows(((), ()))  # runs all orders
    assert len(search.found.findings) == 0


@pytest.mark.mariadb
def test_orders_of_transactions_stop_wherever_the_operations_were_seen_to_meet(arena: Arena) -> None:
    """The janitor pays a debt first, and only then the other operation touches what the janitor reads later."""
    find_nothing(arena, "growing/cold:remove-ended+janitor", 1)


UNPREDICTABLE = {"fresh/cold:ack-other-group+fail-beyond+share"}
"""A triple that is left out, though its pairs are searched: one statement of `share` locks two rows, and waits for the
second one. The states in which it ends the wait don't repeat, so the search can't predict them."""


def explore(arena: Arena, size: int, first: int, step: int) -> None:
    """Search each `step`th combination of `size` operations, starting with the one numbered `first`."""
    excluded = MANIFOLD | RARE
    selection = list(combinations(arena, size, SCENES, in_one=True, excluded_names=excluded))[first::step]
    assert selection
    for combination in selection:
        if str(combination) in UNPREDICTABLE:
            continue
        findings = Search(arena, combination, None if size == 2 else 2).run()
        assert not findings.findings, "\n".join(map(str, findings.findings))


@pytest.mark.mariadb
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_interleaved_operations_have_a_serial_outcome(arena: Arena, part: int) -> None:
    """Every fourth pair, with all interleavings of its statements."""
    explore(arena, 2, 4 * part, 4 * PARTS)


@pytest.mark.nightly
@pytest.mark.mariadb
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(3 * PARTS))
def test_the_other_pairs_have_a_serial_outcome(arena: Arena, part: int) -> None:
    explore(arena, 2, part + part // 3 + 1, 4 * PARTS)


POLICIES = [
    "growing/cold:update+fail-beyond",
    "growing/cold:redrive+fail-beyond",
    "growing/cold:redrive+redrive",
    "growing/cold:update-overdue+expire-overdue",
    # The ack of the item, or of the last other one, and whatever else ends the batch.
    *(f"ending/{variant}:ack-few+extend-by" for variant in ("cold", "journaled-warm")),
    "ending/cold:fail-few+extend-by",
    "ending/cold:extend-by+cancel",
    "ending/cold:extend-by+pay-parents",
    "fresh/cold:extend-by+expire",
    # The batch seals itself, for one of them.
    "fresh/cold:extend+extend-by",
    "fresh/cold:share-seal+extend",
    "fresh/cold:seal+extend-by-other",
    "growing/cold:seal+extend-by-other",
    "growing/cold:extend+extend-by-other",
    "growing/cold:ack-other-group+extend-by-other",
    "growing/cold:extend-by+delete",
    # An event waits behind a parked one, which is retried.
    "fresh/cold:handle-strict+retry-strict",
    "fresh/cold:handle-strict+retry-parked",
    "fresh/cold:handle-strict+handle",
]


@pytest.mark.mariadb
@pytest.mark.parametrize("text", POLICIES)
def test_rare_operations_have_a_serial_outcome(arena: Arena, text: str) -> None:
    """The pairs with the races that matter most to them; those of each night have all pairs of rare operations."""
    find_nothing(arena, text, None)


@pytest.mark.nightly
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_pairs_of_rare_operations_have_a_serial_outcome(arena: Arena, part: int) -> None:
    explore_rare(arena, part)


def explore_rare(arena: Arena, part: int) -> None:
    """Search a part of the pairs with a rare operation."""
    pairs = combinations(arena, 2, SCENES, in_one=True, excluded_names=MANIFOLD)
    selection = [pair for pair in pairs if RARE.intersection(pair.operations)][part::PARTS]
    assert selection
    for combination in selection:
        findings = Search(arena, combination, None).run()
        assert not findings.findings, "\n".join(map(str, findings.findings))


def test_two_interleaved_operations_on_sqlite_have_a_serial_outcome(on_one_file: Arena) -> None:
    """A fixed share of the pairs, with all interleavings of their transactions."""
    explore(on_one_file, 2, 0, EVERY_PAIR)


@pytest.mark.nightly
@pytest.mark.mariadb
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_three_interleaved_operations_have_a_serial_outcome(arena: Arena, part: int) -> None:
    """A fixed share of the triples, with two preemptions."""
    explore(arena, 3, part * EVERY_TRIPLE, PARTS * EVERY_TRIPLE)


ALIKE = [
    # These two take a minute each.
    pytest.param("growing/cold:ack-few+extend", marks=pytest.mark.nightly),
    pytest.param("growing/cold:ack-mask+extend", marks=pytest.mark.nightly),
    "ending/warm:ack-other-group+seal",
    "growing/cold:apply+sync-newcomer",
]


@pytest.mark.mariadb
@pytest.mark.parametrize("text", ALIKE)
def test_omitted_stops_hide_no_outcome(mariadb_server: MariaDB, arena: Arena, text: str) -> None:
    """Stopping before every statement reaches the same outcomes with more schedules."""
    combination, _ = parse(text)
    reduced = Search(arena, combination, None).run()
    full_arena = Arena(OnMariaDB(mariadb_server), every_stop=True)
    complete = Search(full_arena, combination, None).run()
    full_arena.close()
    assert reduced.reached == complete.reached
    assert reduced.schedules < complete.schedules


PREDICTED = [
    "growing/cold:ack-few+delete",
    "growing/cold:ack-mask+extend+ack-new",
    pytest.param("growing/cold:share+cancel+expire", marks=pytest.mark.nightly),
    # A payer's COMMIT lets an ack continue, and the payer goes on at the same time.
    pytest.param("growing/journaled-warm:ack-few+fail-few+pay-parents", marks=pytest.mark.nightly),
    pytest.param("ending/warm:ack-few+fail-few+open-child", marks=pytest.mark.nightly),
]


def is_predicted(arena: Arena, text: str) -> None:
    """The search that predicts steps visits the same states as the one that executes each."""
    combination, _ = parse(text)
    preemptions = None if len(combination.operations) == 2 else 2
    Search(arena, combination, preemptions).run()  # so that both know from the start what the operations touch
    predicted = Search(arena, combination, preemptions).run()
    executed = Search(arena, combination, preemptions, predicts=False).run()
    assert predicted.findings == executed.findings == []
    assert predicted.reached == executed.reached
    assert (predicted.schedules, predicted.completed) == (executed.schedules, executed.completed)
    assert predicted.executed < executed.executed


@pytest.mark.mariadb
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("text", PREDICTED)
def test_predicted_steps_are_those_that_the_database_takes(arena: Arena, text: str) -> None:
    is_predicted(arena, text)


@pytest.mark.mariadb
def test_reasons_are_predicted(arena: Arena) -> None:
    """An INSERT takes the reason from a variable. The same INSERT stores different reasons here: the parent's item
    fails because the child was cancelled, or because it was completed with failures."""
    find_nothing(arena, "ending/warm:fail-with-reason+open-child", 1)


PREDICTED_ON_SQLITE = [
    "growing/cold:ack-few+delete",
    "ending/journaled-warm:cancel+pay-parents",
    # Whether the batch expires depends on the time that the janitor reads.
    "fresh/cold:update+janitor",
]


@pytest.mark.parametrize("text", PREDICTED_ON_SQLITE)
def test_predicted_transactions_are_those_that_sqlite_executes(on_one_file: Arena, text: str) -> None:
    is_predicted(on_one_file, text)


@pytest.mark.mariadb
def test_a_schedule_is_replayed_by_its_steps(mariadb_server: MariaDB, arena: Arena) -> None:
    combination, _ = parse("growing/cold:ack-few+extend")
    arena.run(combination, lambda ready: ready[-1])
    steps, (outcome, _) = list(arena.taken), arena.outcome()
    full_arena = Arena(OnMariaDB(mariadb_server), every_stop=True)
    replayed = replay(full_arena, combination, steps)
    assert replayed.schedule == steps
    assert full_arena.outcome()[0] == outcome
    full_arena.close()
