"""A short chaos run: about a minute, without a JVM. `make chaos` is the long one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.actors import NESTING
from tests.chaos.run import GROWING, Run
from tests.chaos.worlds import LEFT, OnePostgreSQL, OneServer, ThreeNodes
from tests.conftest import need
from tests.mutants import mutant
from tests.support.galera import until

pytestmark = [pytest.mark.slow, pytest.mark.mariadb, pytest.mark.timeout(1200)]


@pytest.fixture
def one_server() -> Iterator[OneServer]:
    world = OneServer()
    try:
        need("mariadb-server", world.available)
        world.start()
        yield world
    finally:
        world.close()


@mutant(
    "a-commit-that-failed-is-answered",
    "core.storage.database:Database._transaction",
    "self._judge(tx, error, committing=committing)\nraise",
    """
        tx.invalidate()
        if not committing:
            self._judge(tx, error, committing=False)
            raise
    """,
)
@mutant(
    "some-completions-are-not-announced",
    "core.acks.completion:_announce",
    "not verdicts",
    "not verdicts or verdicts[0].id % 4 == 0",
)
@mutant(
    "each-call-with-a-key-gets-newly",
    "core.acks.completion:completed_for",
    "newly or batch.completed_by == fingerprint",
    "True",
)
def test_no_answer_contradicts_the_database_whatever_is_killed(one_server: OneServer, tmp_path: Path) -> None:
    """Database, network, service, workers, dispatchers, receiver, producers and consumers fail at random, all at once;
    then each item, batch, event and webhook is compared with all answers."""
    seed = random.randrange(10**6)
    report = Run(one_server, tmp_path / "run", seconds=25, seed=seed, backlog=500, pace=4).go()
    print(report)  # includes the seed; shown if the test fails
    assert not report.violations, report.violations[0].message
    assert report.checks.checked["transitions (newly)"] > 0


@mutant(
    "items-are-read-too-early-while-batches-grow",
    "core.acks.flush:_begin",
    "locked_groups = _lock(pipeline, direct)",
    """
early = _look(pipeline, () if little else batches)
locked_groups = _lock(pipeline, direct)
""",
    ("seen_batches = _look(pipeline, () if little else batches)", "seen_batches = early"),
)
def test_batches_that_grow_keep_every_answered_ack_while_flushes_wait_for_their_groups(
    one_server: OneServer, tmp_path: Path
) -> None:
    """Three processes send masks, single ids and large calls for batches that are extended in small steps; held rows
    are the only disturbance. One actor extends exactly while a flush waits."""
    seed = random.randrange(10**6)
    options = {"backlog": 1000, "harmless": True, "batches": 8}
    report = Run(one_server, tmp_path / "run", seconds=25, seed=seed, actors=GROWING, **options).go()  # type: ignore[arg-type]
    print(report)
    assert not report.violations, report.violations[0].message


@mutant(
    "a-lost-answer-forgets-the-debt-of-the-batch-that-its-call-completed",
    "core.acks.flush:flush",
    "owing |= {batch for batch, look in state.seen.items() if look.owes}",
    "owing &= set(state.deltas)",
    together_with=("a-lost-answer-runs-the-work-again",),
)
@mutant(
    "a-lost-answer-rejects-the-failure-that-cancelled-its-batch",
    "core.acks.ended:outcome",
    "index < group_size and settled[number][index]",
    "False",
    together_with=("a-lost-answer-runs-the-work-again",),
)
@mutant(
    "each-delivery-has-its-effect",
    "lastbit.embedded._transactions:once",
    "if not enlisted.is_resolved(text):\n    effect(connection)",
    "effect(connection)",
    ("if not result.applied:\n    raise _Undo", "pass"),
    case="postgresql",
)
@pytest.mark.parametrize("database", ["mariadb", "postgresql"])
def test_nobody_notices_that_answers_to_commits_are_lost(database: str, tmp_path: Path) -> None:
    """One in five. Each nested batch has paid its parent when its end is answered, though no sweep runs. Each item that
    a call has resolved is answered as applied, also if its failure cancelled the batch. Consumers with transactions of
    their own do notice; each of their items has one effect."""
    world = OneServer() if database == "mariadb" else OnePostgreSQL()
    seed = random.randrange(10**6)
    actors = (NESTING, "shared-producer", "shared-sync", "shared-embedded")
    with contextlib.closing(world):
        need(f"{database}-server" if database == "mariadb" else database, world.available)
        world.start()
        options = {"backlog": 300, "harmless": True, "lose": 5}
        report = Run(world, tmp_path / "run", seconds=20, seed=seed, actors=actors, **options).go()  # type: ignore[arg-type]
    print(report)
    assert not report.violations, report.violations[0].message
    assert report.checks.checked["nested batches cancelled by their failures"] > 0
    assert report.checks.checked["effects"] > 0


@pytest.mark.galera
def test_a_node_that_left_permanently_is_rebuilt_though_no_node_has_a_majority() -> None:
    """At once, as nothing else brings it back; a node that still takes part is made the primary component."""
    world = ThreeNodes()
    with contextlib.closing(world):
        need("galera-4", world.available)
        world.start()
        frozen_node, evicted_node, lone = world.nodes
        with contextlib.closing(evicted_node.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SET GLOBAL wsrep_cluster_address = ''")
        assert evicted_node.membership() == LEFT
        frozen_node.freeze()
        until(lambda: lone.membership() != "Primary", 60, lone.end_of_log)
        world.help()
        facts = world.facts()
        assert facts["clusters without a majority"] == facts["nodes that were rebuilt"] == 1
        until(lambda: lone.membership() == "Primary", 60, lone.end_of_log)
        frozen_node.thaw()
        world.settle()
