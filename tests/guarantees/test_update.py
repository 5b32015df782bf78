"""Updates of a live batch, and redrives, while failures, expiry and other requests change the same batch."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, janitor
from core.acks.call import AckResult
from core.batches.lifecycle import State, Verb
from core.batches.redrive import Redriven, Wish
from core.batches.tolerance import OnExceeded
from core.batches.update import Patch, Updated
from core.commits.combiner import Inline
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import GROUP, ROUNDS, ack, race, recount
from tests.guarantees.test_deadlines import HOUR, now, pass_deadline
from tests.guarantees.test_tolerance import events_of, fail, open_batch
from tests.mutants import mutant
from tests.support.clocks import START, Clock


@mutant(
    "an-update-tolerates-one-failure-more",
    "core.batches.settle:settle",
    "change.tolerance.is_passed(change.items, change.failed, sealed=state is not State.OPEN)",
    "change.tolerance.is_passed(change.items, change.failed - 1, sealed=state is not State.OPEN)",
)
@mutant(
    "an-update-tolerates-one-failure-less",
    "core.batches.settle:settle",
    "change.tolerance.is_passed(change.items, change.failed, sealed=state is not State.OPEN)",
    "change.tolerance.is_passed(change.items, change.failed + 1, sealed=state is not State.OPEN)",
)
@mutant(
    "an-update-exceeds-a-batch-again",
    "core.batches.settle:Transition.events",
    "self.after.exceeded and not self.before.exceeded",
    "self.after.exceeded",
)
@mutant(
    "an-update-exceeds-a-batch-without-an-event",
    "core.batches.settle:Transition.events",
    "self.after.exceeded and not self.before.exceeded",
    "False",
)
def test_an_update_judges_the_failures_by_the_new_tolerance(service: Service) -> None:
    """As many as are tolerated are within it; one more passes it, once."""
    batch = open_batch(service, 5, tolerated_failures=3)
    fail(service, batch, [0, 1])
    assert not service.batches.update(batch, Patch(tolerated_failures=2)).batch.exceeded
    assert service.batches.update(batch, Patch(tolerated_failures=1)).batch.exceeded
    service.batches.update(batch, Patch(tolerated_failures=0))
    assert events_of(service, batch) == ["opened", "updated", "updated", "failures_exceeded", "updated"]
    assert service.batches.verify(batch).ok


@mutant(
    "a-child-that-an-update-cancels-owes-nothing",
    "core.batches.batch:settled",
    "change.parent_batch is not None",
    "False",
)
def test_a_child_that_an_update_cancels_fails_its_parents_item(service: Service) -> None:
    parent = open_batch(service, 1, sealed=True)
    batch = open_batch(service, 5, parent=ItemId(parent, 0, 0), tolerated_failures=1)
    fail(service, batch, [0, 1])
    assert service.batches.update(batch, Patch(on_exceeded=OnExceeded.CANCEL)).batch.state is State.CANCELLED
    assert events_of(service, batch) == ["opened", "failures_exceeded", "updated", "cancelled"]
    assert service.batches.get(parent).failed == 1
    assert service.batches.get(batch).parent_due is None


def test_an_overdue_batch_that_gets_a_later_deadline_does_not_expire(service: Service) -> None:
    batch = open_batch(service, 5, deadline=now(service) + HOUR)
    pass_deadline(service, batch)
    service.batches.update(batch, Patch(deadline=now(service) + HOUR))
    assert janitor.expire_overdue(service.database) == []
    pass_deadline(service, batch)
    service.batches.update(batch, Patch(deadline=None))
    assert janitor.expire_overdue(service.database) == []
    service.batches.update(batch, Patch(deadline=now(service) + HOUR))
    pass_deadline(service, batch)
    assert janitor.expire_overdue(service.database) == [batch]


@mutant(
    "an-update-judges-its-deadline-by-the-services-clock",
    "core.batches.update:update",
    "tables.clock(tx)",
    "datetime.now().astimezone()",
)
def test_an_update_judges_its_deadline_by_the_databases_clock(database: Database) -> None:
    """This database's clock is in the past."""
    Clock(database)
    service = Service(database, combiner=Inline)
    batch = open_batch(service, 1)
    deadline = START + timedelta(seconds=10)
    assert service.batches.update(batch, Patch(deadline=deadline)).batch.deadline == deadline
    with pytest.raises(errors.InvalidRequest, match="in the future"):
        service.batches.update(batch, Patch(deadline=START))
    assert service.batches.get(batch).deadline == deadline


@mutant("an-earlier-release-may-ignore-an-updated-policy", "core.batches.update:update", "patch.sets_policy", "False")
def test_a_release_that_would_ignore_a_policy_must_be_gone(database: Database, service: Service) -> None:
    """Labels are known to every release."""
    batch = open_batch(service, 3)
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0010"))
    for patch in (Patch(tolerated_failures=1), Patch(deadline=now(service) + HOUR)):
        with pytest.raises(errors.UpgradeNotFinished):
            service.batches.update(batch, patch)
    service.batches.update(batch, Patch(labels={"run": "2"}, deadline=None))
    schema.finish(database)
    assert service.batches.update(batch, Patch(tolerated_failures=1)).batch.tolerated_failures == 1


def _ends(database: Database, *types: str) -> list[tuple[int, str]]:
    with database.engine.connect() as tx:
        query = sa.select(tables.feed.c.batch_id, tables.feed.c.type).order_by(tables.feed.c.position)
        return [(row.batch_id, row.type) for row in tx.execute(query) if row.type in types]


@mutant(
    "an-update-judges-the-tolerance-on-a-plain-read",
    "core.batches.update:update",
    "batch, _ = batches.lock(tx, batch_id)",
    "batch = batches.get(tx, batch_id)",
)
@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("some_journaled")
def test_a_failure_and_a_lower_tolerance_exceed_a_batch_once_in_either_order(server_database: Database) -> None:
    """The failure is within the old tolerance, and the new one is only passed with it."""
    referee = Service(server_database, combiner=Inline)
    actions = [OnExceeded.CONTINUE, OnExceeded.CANCEL]
    ids = [
        open_batch(referee, 2 * GROUP, sealed=True, tolerated_failures=5, on_exceeded=actions[number % 2])
        for number in range(ROUNDS)
    ]
    for batch in ids:
        fail(referee, batch, [0])
    by_update = 0

    def check(number: int, failed: AckResult, updated: Updated) -> None:
        nonlocal by_update
        by_update += updated.batch.exceeded
        assert failed.applied == 1
        state = referee.batches.get(ids[number])
        assert (state.exceeded, state.failed) == (True, 2)
        assert state.state is (State.CANCELLED if number % 2 else State.SEALED)

    race(
        server_database,
        ROUNDS,
        lambda service, number: fail(service, ids[number], [GROUP]),
        lambda service, number: service.batches.update(ids[number], Patch(tolerated_failures=1)),
        check=check,
    )
    recount(server_database)
    assert sorted(_ends(server_database, "batch.failures_exceeded")) == [
        (batch, "batch.failures_exceeded") for batch in ids
    ]
    assert ROUNDS // 50 < by_update < ROUNDS - ROUNDS // 50, f"the same call nearly always came first: {by_update}"


@mutant(
    "a-batch-expires-at-a-deadline-that-was-postponed",
    "core.batches.expiry:expire",
    "lock_wait is not None",
    "False",
    ("batches.lock(tx, batch_id)", "batches.get(tx, batch_id), tables.clock(tx)"),
)
@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
def test_an_overdue_batch_gets_a_later_deadline_or_expires(server_database: Database) -> None:
    """Never both, and the update's answer agrees."""
    referee = Service(server_database, combiner=Inline)
    later = now(referee) + HOUR
    ids = [open_batch(referee, 1, deadline=later) for _ in range(ROUNDS)]
    postponed = 0
    pass_deadline(referee, ids[0])

    def check(number: int, expired: list[int], updated: Updated | Exception) -> None:
        nonlocal postponed
        is_postponed = isinstance(updated, Updated)
        postponed += is_postponed
        assert is_postponed or isinstance(updated, errors.BatchExpired)
        assert expired == ([] if is_postponed else [ids[number]])
        state = referee.batches.get(ids[number])
        assert state.state is (State.OPEN if is_postponed else State.EXPIRED)
        if number + 1 < ROUNDS:
            pass_deadline(referee, ids[number + 1])

    race(
        server_database,
        ROUNDS,
        lambda service, number: janitor.expire_overdue(service.database),
        lambda service, number: service.batches.update(ids[number], Patch(deadline=later)),
        check=check,
    )
    assert ROUNDS // 50 < postponed < ROUNDS - ROUNDS // 50, f"the same call nearly always came first: {postponed}"


@mutant(
    "a-key-redrives-again",
    "core.batches.once:Request.of",
    'f"{feed.BATCH}:{batch}:{verb}:{_digest(idempotency_key or str(uuid.uuid4()))}:"',
    'f"{feed.BATCH}:{batch}:{verb}:{_digest(str(uuid.uuid4()))}:"',
)
@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("verb", ["update", "redrive"])
def test_two_requests_with_one_key_append_one_event(server_database: Database, verb: str) -> None:
    """One of them gets the other one's answer."""
    referee = Service(server_database, combiner=Inline)
    ids = [open_batch(referee, 3) for _ in range(ROUNDS)]
    for batch in ids:
        fail(referee, batch, [0])

    def send(service: Service, number: int) -> Any:
        if verb == "redrive":
            return service.batches.redrive(ids[number], Wish(), "once")
        return service.batches.update(ids[number], Patch(labels={"run": "2"}), "once")

    def check(number: int, *answers: Any) -> None:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        assert sorted(answer.replayed for answer in answers) == [False, True]

    race(server_database, ROUNDS, send, send, check=check)
    type = "batch.redrive" if verb == "redrive" else "batch.updated"
    assert sorted(_ends(server_database, type)) == [(batch, type) for batch in ids]


@mutant(
    "a-redrive-names-items-by-an-earlier-read",
    "core.batches.redrive:_append",
    "version is not None and version != _version(batch)",
    "False",
)
@mutant(
    "a-redrive-compares-the-counts-on-a-plain-read",
    "core.batches.redrive:_append",
    "batch, now = batches.lock(tx, batch_id)",
    "batch = batches.get(tx, batch_id)\nnow = batch.updated_at",
)
@pytest.mark.slow
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("some_journaled")
def test_a_redrive_names_the_items_that_failed_before_it_in_the_feed(server_database: Database) -> None:
    """A failure with an event of its own comes before the redrive, which then names its item; or after it."""
    referee = Service(server_database, combiner=Inline)
    ids = [open_batch(referee, 2 * GROUP, tolerated_failures=1) for _ in range(ROUNDS)]
    for batch in ids:
        fail(referee, batch, [0])
    counts: list[int] = []

    def check(number: int, failed: AckResult, redriven: Redriven) -> None:
        assert failed.applied == 1
        counts.append(redriven.count)
        events = referee.feed.read(0, 10, batch=ids[number]).events
        *_, first, second = [event.type.removeprefix("batch.") for event in events]
        assert {first, second} == {"redrive", "failures_exceeded"}
        assert redriven.count == (1 if first == "redrive" else 2)
        (data,) = [json.loads(event.data or "") for event in events if event.type == "batch.redrive"]
        assert data["count"] == redriven.count

    race(
        server_database,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 1, 0), verb=Verb.FAIL),
        lambda service, number: service.batches.redrive(ids[number], Wish()),
        check=check,
    )
    assert {1, 2} == set(counts)
