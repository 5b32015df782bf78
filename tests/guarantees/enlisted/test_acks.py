"""Acks in transactions of callers: what one transaction does, and what follows from its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from core import errors, feed, janitor
from core.acks import outbox
from core.acks.call import AckResult, Call
from core.batches import expiry
from core.batches.batch import Opening
from core.batches.lifecycle import State, Verb
from core.batches.tolerance import OnExceeded
from core.batches.writing import Extend
from core.service import Service
from core.service.batches import opening_of
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.enlisted.callers import engine_of, over, transaction
from tests.mutants import mutant

pytestmark = [pytest.mark.mariadb]
SIZE = 64


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    engine = engine_of(database)
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def nothing_moves_by_itself(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.enlisted._mover, "expect", lambda changed: None)


def open_batch(service: Service, items: int, *, sealed: bool = True, **opening: Any) -> int:
    return service.batches.open(Opening(items=items, sealed=sealed, group_size=SIZE, **opening)).batch.id


def call_of(batch: int, *numbers: int, verb: Verb = Verb.ACK, reason: str | None = None) -> Call:
    return Call.of(verb, [ItemId(batch, *divmod(number, SIZE)) for number in numbers], reason=reason)


def enlist(
    service: Service,
    connection: Connection,
    batch: int,
    *numbers: int,
    verb: Verb = Verb.ACK,
    reason: str | None = None,
) -> AckResult:
    return service.enlisted.resolve(over(connection), call_of(batch, *numbers, verb=verb, reason=reason)).answer


def counts(service: Service, batch: int) -> tuple[int, int, int]:
    found = service.batches.get(batch)
    return found.acked, found.failed, found.skipped


def events_of(service: Service, batch: int) -> list[str]:
    page = service.database.snapshot(lambda tx: feed.read(tx, 0, 100, batch=batch))
    return [event.type for event in page.events]


def left(database: Database) -> int:
    """The number of rows in the outboxes."""

    def count(tx: Connection) -> int:
        return sum(
            tx.scalar(sa.select(sa.func.count()).select_from(table)) or 0
            for table in (tables.count_outbox, tables.event_outbox)
        )

    return database.read(count)


def test_an_item_counts_when_it_is_moved_after_the_commit(service: Service, engine: Engine) -> None:
    batch = open_batch(service, 3)
    for index in range(3):
        call = call_of(batch, index)
        with transaction(engine) as tx:
            resolved = service.enlisted.resolve(tx, call)
            answer = resolved.answer
            assert (answer.applied, answer.repeated, answer.rejected, answer.completed) == (1, 0, [], {})
        assert service.batches.get(batch).acked == 0
        assert service.batches.verify(batch).ok
        service.enlisted.settled(call, resolved)
        assert bool(answer.completed) is (index == 2)
    assert answer.completed[batch].newly
    assert answer.completed[batch].newly_succeeded
    assert service.batches.get(batch).state is State.COMPLETE
    assert counts(service, batch) == (3, 0, 0)
    assert events_of(service, batch) == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]
    assert left(service.database) == 0
    assert service.batches.verify(batch).ok


@mutant(
    "an-answer-waits-for-one-page-of-what-is-left",
    "core.service.enlisted:EnlistedService._settled",
    "moved.has_more",
    "not moved.batches",
)
def test_a_completion_is_told_though_more_waits_than_one_transaction_moves(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a time in which nobody could move."""
    monkeypatch.setattr(outbox, "PAGE", 2)
    batch = open_batch(service, 5)
    for index in range(5):
        call = call_of(batch, index)
        with transaction(engine) as tx:
            resolved = service.enlisted.resolve(tx, call)
    answer = service.enlisted.settled(call, resolved)
    assert answer.completed[batch].newly
    assert left(service.database) == 0


@mutant(
    "a-redrive-claims-a-completion",
    "core.service.enlisted:_claimed",
    "batch.completed_by or claim.completer",
    "batch.completed_by or claim.fingerprint",
)
def test_a_redrive_of_a_complete_batch_completes_nothing(service: Service, engine: Engine) -> None:
    """Though nobody has claimed its completion, as its last item was moved for nobody."""
    batch = open_batch(service, 1)
    with engine.begin() as connection:
        enlist(service, connection, batch, 0, verb=Verb.FAIL)
    service.enlisted.move([batch])
    assert service.batches.get(batch).complete
    call = call_of(batch, 0)
    with transaction(engine) as tx:
        resolved = service.enlisted.resolve(tx, call)
    completed = service.enlisted.settled(call, resolved).completed[batch]
    assert (completed.newly, completed.newly_succeeded) == (False, True)


def test_what_is_rolled_back_leaves_nothing(service: Service, engine: Engine) -> None:
    batch = open_batch(service, 3)
    with engine.connect() as connection:
        enlist(service, connection, batch, 0)
        connection.rollback()
        savepoint = connection.begin_nested()
        assert enlist(service, connection, batch, 1).applied == 1
        savepoint.rollback()
        assert enlist(service, connection, batch, 1, 2).applied == 2
        assert enlist(service, connection, batch, 2).repeated == 1, "two calls of a transaction see each other"
        connection.commit()
    service.enlisted.move([batch])
    assert counts(service, batch) == (2, 0, 0)
    assert service.batches.verify(batch).ok


def test_a_failure_and_a_skip_keep_their_reasons_until_an_ack(service: Service, engine: Engine) -> None:
    batch = open_batch(service, SIZE + 2)
    with engine.begin() as connection:
        enlist(service, connection, batch, 0, 1, SIZE, verb=Verb.FAIL, reason="it's 100 % \\ broken ☃")
        enlist(service, connection, batch, 2, verb=Verb.SKIP, reason="not needed")
    service.enlisted.move([batch])
    assert counts(service, batch) == (0, 3, 1)
    _, found = service.batches.failures(batch, 0, 10)
    assert [(reason.reason, reason.count) for reason in found.reasons] == [("it's 100 % \\ broken ☃", 3)]
    with engine.begin() as connection:
        enlist(service, connection, batch, 0, 1, 2, SIZE)
    service.enlisted.move([batch])
    assert counts(service, batch) == (4, 0, 0)
    assert service.batches.failures(batch, 0, 10)[1].reasons == []
    assert service.batches.verify(batch).ok


@mutant(
    "what-waits-is-not-counted-before-a-redrive",
    "core.acks.completion:_add_what_waits",
    "has_more = bool(batches_to_ask)",
    "has_more = False",
)
@mutant(
    "one-page-of-what-waits-is-counted-before-a-redrive",
    "core.acks.completion:_add_what_waits",
    "len(counts.rows()) == outbox.PAGE",
    "False",
)
@mutant(
    "a-redrive-takes-the-wish-to-seal",
    "core.acks.completion:_add_what_waits",
    "outbox.ask(pipeline, batches_to_ask, seals=False)",
    "outbox.ask(pipeline, batches_to_ask)",
)
@pytest.mark.parametrize(
    ("given_up", "again", "expected"),
    [
        (Verb.FAIL, Verb.ACK, (2, 0, 0)),
        (Verb.SKIP, Verb.ACK, (2, 0, 0)),
        (Verb.FAIL, Verb.SKIP, (0, 0, 2)),
    ],
)
def test_an_item_may_change_again_before_its_failure_is_moved(
    service: Service,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    given_up: Verb,
    again: Verb,
    expected: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(outbox, "PAGE", 1)
    batch = open_batch(service, 2, sealed=False)
    for index in range(2):
        with engine.begin() as connection:
            enlist(service, connection, batch, index, verb=given_up, reason="late")
    with engine.begin() as connection:
        service.enlisted.seal(over(connection), batch)
    answer = service.acks.ack(call_of(batch, 0, 1, verb=again)).result()
    assert answer.applied == 2
    assert counts(service, batch) == expected
    assert service.batches.verify(batch).ok
    assert left(service.database) == 1, "the wish to seal"
    service.enlisted.move([batch])
    assert service.batches.get(batch).complete
    assert left(service.database) == 0


@mutant(
    "an-end-is-judged-without-what-waits",
    "core.acks.completion:_add_what_waits",
    "delta.overrides or not settle.settle(rows_by_id[id].standing, _changed(rows_by_id[id], delta)).is_quiet",
    "delta.overrides",
)
@pytest.mark.parametrize("last", [Verb.FAIL, Verb.ACK])
def test_a_batch_is_judged_with_the_acks_that_wait(service: Service, engine: Engine, last: Verb) -> None:
    """Of an item that had failed: before another failure cancels the batch, or another ack completes it."""
    limit = {"tolerated_failures": 1, "on_exceeded": OnExceeded.CANCEL} if last is Verb.FAIL else {}
    batch = open_batch(service, 2, **limit)
    service.acks.ack(call_of(batch, 0, verb=Verb.FAIL)).result()
    with engine.begin() as connection:
        enlist(service, connection, batch, 0)
    completed = service.acks.ack(call_of(batch, 1, verb=last)).result().completed[batch]
    assert completed.newly
    assert completed.succeeded
    assert not service.batches.get(batch).exceeded
    assert counts(service, batch) == ((2, 0, 0) if last is Verb.ACK else (1, 1, 0))
    assert service.batches.verify(batch).ok
    assert left(service.database) == 0


def test_a_completion_is_told_once_if_another_call_counts_the_last_item(service: Service, engine: Engine) -> None:
    batch = open_batch(service, 2)
    service.acks.ack(call_of(batch, 0, verb=Verb.FAIL)).result()
    call = call_of(batch, 1)
    with transaction(engine) as tx:
        resolved = service.enlisted.resolve(tx, call)
    other = service.acks.ack(call_of(batch, 0)).result().completed[batch]
    assert (other.newly, other.newly_succeeded) == (False, True)
    own = service.enlisted.settled(call, resolved).completed[batch]
    assert (own.newly, own.newly_succeeded) == (True, False)
    assert events_of(service, batch) == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]


@mutant("what-waits-is-moved-in-any-order", "core.acks.outbox:ask", "_OLDEST_FIRST", "'id DESC'")
def test_a_failure_is_moved_no_later_than_its_redrive(
    service: Service, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though more waits than one transaction moves."""
    monkeypatch.setattr(outbox, "PAGE", 1)
    batch = open_batch(service, 1)
    for verb in (Verb.FAIL, Verb.ACK):
        with engine.begin() as connection:
            enlist(service, connection, batch, 0, verb=verb)
    service.enlisted.move([batch])
    assert counts(service, batch) == (1, 0, 0)
    assert events_of(service, batch) == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]
    assert service.batches.verify(batch).ok


def cancel(service: Service, batch: int) -> None:
    service.batches.cancel(batch)


def hold_the_first_item(service: Service, batch: int) -> None:
    open_batch(service, 1, parent=ItemId(batch, 0, 0))


@pytest.mark.parametrize(
    ("change", "number", "reason"),
    [
        (cancel, 0, "cancelled"),
        (hold_the_first_item, 0, "held"),
        (lambda service, batch: None, 7, "unknown_item"),
        (lambda service, batch: None, 5 * SIZE, "unknown_item"),
        (lambda service, batch: service.batches.delete(batch), 0, "unknown_batch"),
    ],
)
def test_items_are_rejected_for_the_same_reasons(
    service: Service, engine: Engine, change: Callable[[Service, int], None], number: int, reason: str
) -> None:
    batch = open_batch(service, 2)
    change(service, batch)
    with engine.begin() as connection:
        answer = enlist(service, connection, batch, number)
    assert (answer.applied, [rejection.reason for rejection in answer.rejected]) == (0, [reason])
    assert answer == service.acks.ack(call_of(batch, number)).result()
    assert left(service.database) == 0


def test_an_end_that_comes_before_the_commit_keeps_the_item(service: Service, engine: Engine) -> None:
    batch = open_batch(service, 2)
    with engine.begin() as connection:
        assert enlist(service, connection, batch, 0).applied == 1
        if service.database.dialect.locks_rows:
            cancel(service, batch)
    if not service.database.dialect.locks_rows:
        cancel(service, batch)
    service.enlisted.move([batch])
    assert service.batches.get(batch).state is State.CANCELLED
    assert counts(service, batch) == (1, 0, 0)
    assert service.batches.verify(batch).ok
    service.batches.reopen(batch)
    service.acks.ack(call_of(batch, 1)).result()
    assert service.batches.get(batch).state is State.COMPLETE


def test_a_batch_exists_if_the_transaction_that_opens_it_is_committed(service: Service, engine: Engine) -> None:
    for ends_well in (False, True):
        with engine.connect() as connection:
            tx = over(connection)
            opened = service.enlisted.open(
                tx, opening_of(Opening(key="order-7", items=1, labels={"a": "%s"}), "open-1")
            )
            batch = opened.batch.id
            assert not opened.replayed
            extended = service.enlisted.extend(tx, Extend(batch=batch, count=1)) if not ends_well else None
            assert extended is None or (extended.start, extended.count) == (1, 1)
            assert enlist(service, connection, batch, 0).applied == 1
            service.enlisted.seal(tx, batch)
            connection.commit() if ends_well else connection.rollback()
        if not ends_well:
            with pytest.raises(errors.BatchNotFound):
                service.batches.get(batch)
    assert events_of(service, batch) == []
    service.enlisted.move([batch])
    assert service.batches.get(batch).state is State.COMPLETE
    assert events_of(service, batch) == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]
    with engine.begin() as connection:
        again = service.enlisted.open(
            over(connection), opening_of(Opening(key="order-7", items=1, labels={"a": "%s"}), "open-1")
        )
    assert (again.replayed, again.batch.id) == (True, batch)


def test_events_of_a_batch_stay_in_order_if_a_service_is_faster(service: Service, engine: Engine) -> None:
    """The batch completes, and is looked at by a janitor, before anybody has moved what its open left."""
    with engine.begin() as connection:
        batch = service.enlisted.open(over(connection), opening_of(Opening(items=1, sealed=True))).batch.id
    answer = service.acks.ack(call_of(batch, 0)).result()
    assert answer.completed[batch].newly
    assert events_of(service, batch) == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]
    assert left(service.database) == 0


def test_a_janitor_moves_before_it_judges(service: Service, engine: Engine) -> None:
    batch = open_batch(service, 2, expires_in=3600)
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE batches SET updated_at = '2020-01-01 00:00:00', seen_updated_at = updated_at")
        )
    with engine.begin() as connection:
        enlist(service, connection, batch, 0)
    assert janitor.run_once(service.database, expiry.Policy()).expired_sealed == []
    assert counts(service, batch) == (1, 0, 0)


def test_a_repair_counts_what_waits_once(service: Service, engine: Engine) -> None:
    batch = open_batch(service, SIZE + 4)
    with engine.begin() as connection:
        enlist(service, connection, batch, 0, 1, SIZE)
        connection.execute(sa.text("UPDATE batches SET acked = acked + 1, no_journal = no_journal"))
    assert not service.batches.verify(batch).ok
    service.batches.repair(batch)
    assert counts(service, batch) == (3, 0, 0)
    assert service.batches.verify(batch).ok
    service.enlisted.move([batch])
    assert counts(service, batch) == (3, 0, 0)
    with engine.begin() as connection:
        enlist(service, connection, batch, 2)
    service.acks.ack(call_of(batch, 3)).result()
    service.enlisted.move([batch])
    assert counts(service, batch) == (5, 0, 0)
    assert service.batches.verify(batch).ok


def test_what_waits_for_a_deleted_batch_goes_with_it(service: Service, engine: Engine) -> None:
    batch = open_batch(service, 2)
    with engine.begin() as connection:
        enlist(service, connection, batch, 0)
    service.batches.delete(batch)
    assert left(service.database) == 0
