"""A batch's tolerance of failures: judged exactly, in the transaction of the failure, with one event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors
from core.acks.call import AckResult, Completed
from core.batches.batch import Batch, Opening
from core.batches.lifecycle import State, Verb
from core.batches.tolerance import OnExceeded
from core.batches.update import Patch
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import GROUP, ROUNDS, ack, race, recount
from tests.mutants import mutant


def open_batch(service: Service, items: int, **opening: Any) -> int:
    return service.batches.open(Opening(group_size=GROUP, items=items, **opening)).batch.id


def resolve(service: Service, batch: int, numbers: Iterable[int], verb: Verb = Verb.ACK) -> AckResult:
    return ack(service, *((batch, *divmod(number, GROUP)) for number in numbers), verb=verb)


def fail(service: Service, batch: int, numbers: Iterable[int]) -> AckResult:
    return resolve(service, batch, numbers, Verb.FAIL)


def events_of(service: Service, batch: int) -> list[str]:
    return [event.type.removeprefix("batch.") for event in service.feed.read(0, 1000, batch=batch).events]


BOUNDS = [
    # (items, tolerance, the largest number of failures within it)
    (10, {"tolerated_failures": 3}, 3),
    (10, {"tolerated_failures": 0}, 0),
    (10, {"tolerated_failures": 20}, 10),
    (10, {"tolerated_failure_percentage": 0}, 0),
    (10, {"tolerated_failure_percentage": 100}, 10),
    (10, {"tolerated_failure_percentage": 29}, 2),
    (100, {"tolerated_failure_percentage": 29}, 29),
    (70, {"tolerated_failure_percentage": 10}, 7),
    (71, {"tolerated_failure_percentage": 10}, 7),
    (79, {"tolerated_failure_percentage": 10}, 7),
    (10, {"tolerated_failures": 3, "tolerated_failure_percentage": 20}, 2),
    (10, {"tolerated_failures": 1, "tolerated_failure_percentage": 20}, 1),
]


@mutant(
    "one-failure-more-is-tolerated",
    "core.batches.tolerance:Tolerance.is_passed",
    "failed > self.failures",
    "failed > self.failures + 1",
)
@mutant(
    "one-failure-less-is-tolerated",
    "core.batches.tolerance:Tolerance.is_passed",
    "failed > self.failures",
    "failed >= self.failures",
)
@mutant(
    "the-percentage-is-rounded",
    "core.batches.tolerance:Tolerance.is_passed",
    "failed * 100 > self.percentage * items",
    "failed > round(self.percentage / 100 * items)",
)
@pytest.mark.parametrize(("items", "tolerance", "most"), BOUNDS)
def test_a_batch_succeeds_exactly_up_to_its_tolerance(
    service: Service, items: int, tolerance: dict[str, int], most: int
) -> None:
    """One failure less, and the batch succeeds; one more, and it is exceeded. Both limits apply."""
    for failed in {max(0, most - 1), most, min(items, most + 1)}:
        batch = open_batch(service, items, sealed=True, **tolerance)
        fail(service, batch, range(failed))
        is_within = failed <= most
        assert service.batches.get(batch).exceeded is not is_within
        completed = resolve(service, batch, range(items))  # acks the others, and redrives the failed ones
        assert completed.completed[batch].succeeded
        other = open_batch(service, items, sealed=True, **tolerance)
        resolve(service, other, range(failed, items))
        result = fail(service, other, range(failed))
        if failed:
            assert result.completed[other] == Completed(other, None, True, is_within, is_within)
        state = service.batches.get(other)
        assert (state.state, state.succeeded, state.exceeded) == (State.COMPLETE, is_within, not is_within)
        ending = ["completed", "succeeded"] if is_within else ["failures_exceeded", "completed"]
        assert events_of(service, other) == ["opened", "sealed", *ending]


def test_a_batch_without_a_tolerance_is_never_exceeded(service: Service) -> None:
    """Its first failure makes it fail, as ever, and there is no event."""
    batch = open_batch(service, 2, sealed=True)
    result = fail(service, batch, [0, 1])
    assert not result.completed[batch].succeeded
    assert not service.batches.get(batch).exceeded
    assert events_of(service, batch) == ["opened", "sealed", "completed"]


@mutant(
    "failures-pass-the-tolerance-again",
    "core.batches.settle:settle",
    "Transition(before, change)",
    "Transition(before._replace(exceeded=False), change)",
)
@mutant(
    "the-event-of-passed-failures-is-written-twice",
    "core.batches.settle:Transition.events",
    "[name for name, has_happened in happenings.items() if has_happened]",
    "[name for name, has_happened in happenings.items() if has_happened] * 2",
)
def test_failures_pass_the_tolerance_once(service: Service) -> None:
    """One event, though failures are redriven and others fail; `exceeded` stays true."""
    batch = open_batch(service, 10, tolerated_failures=1)
    fail(service, batch, [0])
    assert not service.batches.get(batch).exceeded
    fail(service, batch, [1, 2])
    resolve(service, batch, [0, 1, 2])
    assert service.batches.get(batch).exceeded
    fail(service, batch, [3])
    fail(service, batch, [4])
    assert events_of(service, batch) == ["opened", "failures_exceeded"]


@mutant(
    "a-percentage-is-judged-before-the-seal",
    "core.batches.tolerance:Tolerance.is_passed",
    "sealed and self.percentage is not None and failed * 100 > self.percentage * items",
    "self.percentage is not None and failed * 100 > self.percentage * items",
)
@mutant(
    "a-seal-judges-no-percentage",
    "core.batches.settle:settle",
    "state is not State.OPEN",
    "False",
)
def test_a_percentage_is_judged_when_the_batch_is_sealed(service: Service) -> None:
    """Not before, as its items may grow; with the items at that time."""
    grown, exceeded = (open_batch(service, 2, tolerated_failure_percentage=25) for _ in range(2))
    for batch in (grown, exceeded):
        fail(service, batch, [0, 1])
        assert not service.batches.get(batch).exceeded
    service.batches.extend(grown, 6)
    assert not service.batches.seal(grown).batch.exceeded
    sealed = service.batches.seal(exceeded)
    assert (sealed.newly, sealed.newly_succeeded, sealed.batch.exceeded) == (True, False, True)
    assert events_of(service, exceeded) == ["opened", "sealed", "failures_exceeded", "completed"]
    succeeding = open_batch(service, 2, tolerated_failure_percentage=50)
    fail(service, succeeding, [0])
    resolve(service, succeeding, [1])
    sealed = service.batches.seal(succeeding)
    assert (sealed.newly, sealed.newly_succeeded) == (True, True)


@mutant(
    "a-batch-succeeds-with-each-redrive",
    "core.batches.settle:Transition.events",
    "self.succeeded",
    "self.after.succeeded",
)
def test_a_redrive_within_the_tolerance_makes_the_batch_succeed_once(service: Service) -> None:
    """The redrive that reaches the limit gets `newly_succeeded`, later ones don't."""
    batch = open_batch(service, 10, sealed=True, tolerated_failures=2)
    resolve(service, batch, range(5))
    assert not fail(service, batch, range(5, 10)).completed[batch].succeeded
    for redriven, expected in [(5, (False, False)), (6, (False, False)), (7, (True, True)), (8, (True, False))]:
        completed = resolve(service, batch, [redriven]).completed[batch]
        assert (completed.succeeded, completed.newly_succeeded) == expected
    assert events_of(service, batch) == ["opened", "sealed", "failures_exceeded", "completed", "succeeded"]


@mutant(
    "a-child-cancelled-by-its-failures-owes-nothing",
    "core.batches.settle:Transition.debt",
    "self.ended_early",
    "False",
)
@pytest.mark.parametrize("by_seal", [False, True])
def test_a_batch_is_cancelled_in_the_transaction_that_passes_its_tolerance(service: Service, by_seal: bool) -> None:
    """Its parent's item fails before the response; later acks are rejected."""
    parent = open_batch(service, 1, sealed=True)
    limit = {"tolerated_failure_percentage": 10} if by_seal else {"tolerated_failures": 1}
    batch = open_batch(service, 10, parent=ItemId(parent, 0, 0), on_exceeded=OnExceeded.CANCEL, **limit)
    fail(service, batch, [0, 1])
    if by_seal:
        assert service.batches.get(batch).state is State.OPEN
        assert service.batches.seal(batch).batch.state is State.CANCELLED
    state = service.batches.get(batch)
    assert (state.state, state.exceeded, state.ended_at is not None) == (State.CANCELLED, True, True)
    assert service.batches.get(parent).failed == 1
    assert [entry.reason for entry in resolve(service, batch, [5]).rejected] == ["cancelled"]
    sealed = ["sealed"] if by_seal else []
    assert events_of(service, batch) == ["opened", *sealed, "failures_exceeded", "cancelled"]


@mutant(
    "a-batch-is-cancelled-though-nothing-is-pending",
    "core.batches.settle:settle",
    "is_passed and state in LIVE and change.on_exceeded is OnExceeded.CANCEL",
    "is_passed and change.on_exceeded is OnExceeded.CANCEL",
)
def test_a_batch_whose_last_item_fails_beyond_its_tolerance_is_complete(service: Service) -> None:
    """There is nothing left to cancel."""
    batch = open_batch(service, 3, sealed=True, tolerated_failures=0, on_exceeded=OnExceeded.CANCEL)
    completed = fail(service, batch, range(3)).completed[batch]
    assert (completed.newly, completed.succeeded) == (True, False)
    assert events_of(service, batch) == ["opened", "sealed", "failures_exceeded", "completed"]


def test_a_child_that_succeeds_within_its_tolerance_acks_its_parents_item(service: Service) -> None:
    """Also if a redrive makes it succeed later: the ack overrides the failure."""
    for redrives in (False, True):
        parent = open_batch(service, 1, sealed=True)
        child = open_batch(service, 4, sealed=True, parent=ItemId(parent, 0, 0), tolerated_failures=1)
        fail(service, child, [0, 1] if redrives else [0])
        resolve(service, child, [2, 3] if redrives else [1, 2, 3])
        if redrives:
            assert service.batches.get(parent).failed == 1
            resolve(service, child, [1])
        state = service.batches.get(parent)
        assert (state.acked, state.failed, state.succeeded) == (1, 0, True)


@mutant(
    "an-earlier-release-may-ignore-a-tolerance",
    "core.batches.writing:BatchWrites._open",
    "operation.opening.has_policies",
    "False",
)
def test_a_release_that_would_ignore_a_tolerance_must_be_gone(database: Database, service: Service) -> None:
    """A batch with a tolerance can be opened only after the upgrade is finished."""
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0010"))
    with pytest.raises(errors.UpgradeNotFinished):
        open_batch(service, 3, tolerated_failures=1)
    open_batch(service, 3)
    schema.finish(database)
    assert open_batch(service, 3, tolerated_failures=1)


def test_a_repair_judges_the_restored_failures(service: Service) -> None:
    """Failures that were lost pass the tolerance when they are restored."""
    batch = open_batch(service, 5, tolerated_failures=1)
    fail(service, batch, [0, 1])
    with service.database.engine.begin() as tx:
        columns = tables.batches.c
        tx.execute(sa.update(tables.batches).where(columns.id == batch).values(exceeded=0, failed=0))
        tx.execute(sa.delete(tables.feed).where(tables.feed.c.type == "batch.failures_exceeded"))
    assert not service.batches.verify(batch).ok
    assert service.batches.repair(batch).after.exceeded
    assert events_of(service, batch) == ["opened", "repaired", "failures_exceeded"]
    assert service.batches.verify(batch).ok


@mutant(
    "a-repair-judges-no-reopened-batch",
    "core.batches.repair:_settled",
    "batches.settled(batch, change, now, fingerprint)",
    "(change, []) if batch.complete and not change.complete else batches.settled(batch, change, now, fingerprint)",
)
@pytest.mark.parametrize("on_exceeded", OnExceeded)
def test_a_repair_judges_a_batch_that_was_complete_too_early(service: Service, on_exceeded: OnExceeded) -> None:
    """It is live again, so the failures that pass its tolerance have the same effect as on any live batch."""
    batch = open_batch(service, 5, sealed=True, tolerated_failures=1, on_exceeded=on_exceeded)
    resolve(service, batch, [4])
    fail(service, batch, [0])
    with service.database.engine.begin() as tx:
        columns, groups = tables.batches.c, tables.item_groups.c
        counts = {"acked": 4, "failed": 1, "state": State.COMPLETE}
        tx.execute(sa.update(tables.batches).where(columns.id == batch).values(counts))
        bits = {"resolved": b"\x13", "resolved_count": 3, "failed": b"\x03", "failed_count": 2}
        tx.execute(sa.update(tables.item_groups).where(groups.batch_id == batch).values(bits))
    after = service.batches.repair(batch).after
    verification = service.batches.verify(batch)
    assert verification.ok, verification.faults
    is_cancelled = on_exceeded is OnExceeded.CANCEL
    assert (after.exceeded, after.state) == (True, State.CANCELLED if is_cancelled else State.SEALED)
    names = ["opened", "sealed", "repaired", "failures_exceeded", *(["cancelled"] if is_cancelled else [])]
    assert events_of(service, batch) == names


def test_the_explanation_names_the_tolerance(service: Service) -> None:
    batch = open_batch(service, 5, sealed=True, tolerated_failures=1, tolerated_failure_percentage=20)
    fail(service, batch, [0, 1])
    reasons = {reason.code: reason for reason in service.batches.explain(batch).reasons}
    assert "tolerance of 1 failure and 20 %; 2 of 5 items have failed" in reasons["failures_exceeded"].text
    for patch, words in (
        (
            Patch(tolerated_failures=2, tolerated_failure_percentage=None),
            "had exceeded the batch's tolerance, which is 2 failures now",
        ),
        (Patch(tolerated_failures=None), "had exceeded the batch's tolerance, which is removed now; 2 of 5 items"),
        (Patch(tolerated_failures=1), "exceeded the batch's tolerance of 1 failure; 2 of 5 items have failed"),
    ):
        service.batches.update(batch, patch)
        reasons = {reason.code: reason for reason in service.batches.explain(batch).reasons}
        assert words in reasons["failures_exceeded"].text
    resolve(service, batch, [1])
    reasons = {reason.code: reason for reason in service.batches.explain(batch).reasons}
    assert reasons["failures_exceeded"].text.endswith("which is 1 failure now; 1 of 5 items has failed.")
    resolve(service, batch, [2, 3, 4])
    reasons = {reason.code: reason for reason in service.batches.explain(batch).reasons}
    assert "within its tolerance: 1 of its 5 items failed" in reasons["complete"].text


@mutant(
    "a-tolerance-is-judged-on-a-plain-read",
    "core.acks.flush:_begin",
    "completion.ask(pipeline, batches if little else (), locking)",
    "completion.ask(pipeline, batches if little else ())",
)
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("some_journaled")
def test_one_of_two_failures_in_different_groups_passes_the_tolerance(server_database: Database) -> None:
    """Each is within the tolerance, and both together are not: there is one event, and one batch row that says so."""
    referee = Service(server_database, combiner=Inline)
    cancels = [OnExceeded.CONTINUE, OnExceeded.CANCEL]
    ids = [
        open_batch(referee, 2 * GROUP, sealed=True, tolerated_failures=1, on_exceeded=cancels[number % 2])
        for number in range(ROUNDS)
    ]
    states: list[Batch] = []

    def check(number: int, first: AckResult, other: AckResult) -> None:
        assert (first.applied, other.applied) == (1, 1)
        states.append(referee.batches.get(ids[number]))

    race(
        server_database,
        ROUNDS,
        lambda service, number: fail(service, ids[number], [0]),
        lambda service, number: fail(service, ids[number], [GROUP]),
        check=check,
    )
    assert all(state.exceeded for state in states)
    assert {state.state for state in states[::2]} == {State.SEALED}
    assert {state.state for state in states[1::2]} == {State.CANCELLED}
    rows = recount(server_database)
    assert {rows[batch].failed for batch in ids} == {2}
    with server_database.engine.connect() as tx:
        query = sa.select(sa.func.count()).where(tables.feed.c.type == "batch.failures_exceeded")
        assert tx.scalar(query) == ROUNDS
