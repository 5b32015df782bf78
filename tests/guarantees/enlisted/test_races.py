"""Transactions of callers beside each other and beside a service, on real sessions: the last items complete their batch
once, no item counts twice, and a transaction that takes its time holds up nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from sqlalchemy.engine import Engine

from core import errors
from core.acks.call import AckResult, Call
from core.batches.batch import Opened, Opening
from core.batches.lifecycle import State, Verb
from core.commits.combiner import Inline
from core.service import Service
from core.service.batches import opening_of
from core.service.mover import Mover
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import GROUP, ROUNDS, ack, newly, prepare, race
from tests.guarantees.enlisted.callers import engine_of, over
from tests.mutants import mutant
from tests.support.exposition import Change

pytestmark = [pytest.mark.mariadb, pytest.mark.timeout(7200), pytest.mark.usefixtures("some_journaled")]

Item = tuple[int, int, int]


@pytest.fixture
def referee(server_database: Database) -> Iterator[Service]:
    service = Service(server_database, combiner=Inline)
    yield service
    service.stop()


def enlist(service: Service, *items: Item, verb: Verb = Verb.ACK) -> AckResult:
    """Ack in a transaction of a caller, which repeats it after a conflict."""
    call = Call.of(verb, items)
    resolved = service.database.write(lambda connection: service.enlisted.resolve(over(connection), call))
    return service.enlisted.settled(call, resolved)


def enlist_and_move(service: Service, *items: Item) -> AckResult:
    answer = enlist(service, *items)
    service.enlisted.move({batch for batch, _, _ in items})
    return answer


WAYS = {"a caller": enlist, "a service": ack}


@mutant("counts-are-moved-without-the-lock", "core.enlisted.mover:move", 'dialects.of(tx).for_update("id")', '""')
@pytest.mark.parametrize("other", WAYS)
def test_one_of_two_last_acks_completes_the_batch(referee: Service, other: str) -> None:
    shapes = [(2 * GROUP, {0: GROUP - 1, 1: GROUP - 1}), (GROUP + 1, {0: GROUP - 1})]
    ids = prepare(referee.database, ROUNDS, lambda number: shapes[number % 2])

    def last_of_first_group(service: Service, number: int) -> AckResult:
        return enlist(service, (ids[number], 0, GROUP - 1))

    def last_of_second_group(service: Service, number: int) -> AckResult:
        return WAYS[other](service, (ids[number], 1, GROUP - 1 if number % 2 == 0 else 0))

    def check(number: int, *answers: Any) -> None:
        referee.enlisted.move([ids[number]])
        batch = referee.batches.get(ids[number])
        assert batch.state is State.COMPLETE
        assert [answer.applied for answer in answers] == [1, 1]
        told = sum(newly(answer, batch.id) for answer in answers)
        assert told == 1 or (told == 0 and other == "a service")

    race(referee.database, ROUNDS, last_of_first_group, last_of_second_group, check=check)


@pytest.mark.parametrize("other", WAYS)
def test_an_item_of_two_deliveries_counts_once(referee: Service, other: str) -> None:
    ids = prepare(referee.database, ROUNDS, lambda number: (GROUP, {0: GROUP - 1} if number % 2 else {}))

    def check(number: int, *answers: AckResult) -> None:
        assert sorted((answer.applied, answer.repeated) for answer in answers) == [(0, 1), (1, 0)]
        referee.enlisted.move([ids[number]])
        verification = referee.batches.verify(ids[number])
        assert verification.ok, verification.faults
        assert verification.acked == (GROUP if number % 2 else 1)

    race(
        referee.database,
        ROUNDS,
        lambda service, number: enlist(service, (ids[number], 0, GROUP - 1)),
        lambda service, number: WAYS[other](service, (ids[number], 0, GROUP - 1)),
        check=check,
    )


@mutant(
    "a-batch-becomes-journaled-while-a-caller-acks",
    "core.acks.flush:_begin",
    "[batch for batch in journal_states if batch in state.seen and state.seen[batch].no_journal]",
    "[]",
)
def test_no_bit_is_lost_beside_a_journal(referee: Service) -> None:
    """A service that takes the batch for a journaled one, or has just made it one, acks some of the same items."""
    ids = prepare(referee.database, ROUNDS, lambda number: (2 * GROUP, {0: 5} if number % 2 else {}))

    def check(number: int, *_: AckResult) -> None:
        referee.enlisted.move([ids[number]])
        verification = referee.batches.verify(ids[number])
        assert verification.ok, verification.faults
        assert verification.acked == 4 + (5 if number % 2 else 0)

    race(
        referee.database,
        ROUNDS,
        lambda service, number: [enlist(service, (ids[number], 0, index)) for index in (10, 11, 12)],
        lambda service, number: [ack(service, (ids[number], 0, index)) for index in (12, 11, 20)],
        check=check,
    )


@mutant(
    "a-child-is-opened-without-the-lock-of-the-group",
    "core.batches.nesting:lock_parent",
    "group.with_for_update()",
    "group",
)
def test_an_item_is_acked_or_gets_a_child(referee: Service) -> None:
    ids = prepare(referee.database, ROUNDS, lambda number: (GROUP, {0: 5} if number % 2 else {}))

    def check(number: int, answer: AckResult, opened: Opened | errors.CoreError) -> None:
        is_refused = isinstance(opened, errors.InvalidRequest)
        assert is_refused or isinstance(opened, Opened), opened
        assert answer.applied == is_refused
        assert [rejection.reason for rejection in answer.rejected] == ([] if is_refused else ["held"])

    race(
        referee.database,
        ROUNDS,
        lambda service, number: enlist(service, (ids[number], 0, 9)),
        lambda service, number: service.batches.open(Opening(items=1, parent=ItemId(ids[number], 0, 9))),
        check=check,
    )


def test_a_repair_beside_a_caller_counts_each_item(referee: Service) -> None:
    ids = prepare(
        referee.database,
        ROUNDS,
        lambda number: (2 * GROUP, {0: 5, 1: 3}),
        columns=lambda number: {"acked": 7, "no_journal": number % 2},
    )

    def repair(service: Service, number: int) -> object:
        return service.batches.repair(ids[number])

    def check(number: int, answer: AckResult, _: object) -> None:
        assert answer.applied == 2
        referee.batches.repair(ids[number])
        referee.enlisted.move([ids[number]])
        verification = referee.batches.verify(ids[number])
        assert verification.ok, verification.faults
        assert verification.acked == 10

    race(
        referee.database,
        ROUNDS,
        lambda service, number: enlist_and_move(service, (ids[number], 0, 9), (ids[number], 1, 9)),
        repair,
        check=check,
    )


class Slow:
    """A transaction of a caller that opens a batch, completes one, and then takes its time."""

    def __init__(self, service: Service, engine: Engine) -> None:
        self.shared = service.batches.open(Opening(items=3 * GROUP, group_size=GROUP)).batch.id
        self.completing = service.batches.open(Opening(items=1, sealed=True)).batch.id
        self.connection = engine.connect()
        tx = over(self.connection)
        self.opened = service.enlisted.open(tx, opening_of(Opening(key="slow", items=2))).batch.id
        service.enlisted.seal(tx, self.shared)
        for items in ([(self.shared, 0, 0)], [(self.completing, 0, 0)], [(self.opened, 0, 0), (self.opened, 0, 1)]):
            assert service.enlisted.resolve(tx, Call.of(Verb.ACK, items)).answer.applied == len(items)
        service.enlisted.seal(tx, self.opened)


OTHERS: dict[str, Callable[[Service, Slow], object]] = {
    "an ack of another group by a service": lambda service, slow: ack(service, (slow.shared, 1, 0)),
    "an ack of another group by a caller": lambda service, slow: enlist_and_move(service, (slow.shared, 2, 0)),
    "an ack by a mask": lambda service, slow: service.acks.ack(
        Call.of(Verb.FAIL, masks=[(slow.shared, 1, b"\xff")], reason="late")
    ).result(30),
    "an extend": lambda service, slow: service.batches.extend(slow.shared, 5),
    "an open": lambda service, slow: service.batches.open(Opening(key="fast", items=1)),
    "a completion": lambda service, slow: ack(
        service, (service.batches.open(Opening(items=1, sealed=True)).batch.id, 0, 0)
    ),
    "a cancel": lambda service, slow: service.batches.cancel(slow.completing),
    "a look": lambda service, slow: service.batches.verify(slow.shared),
    "a sweep": lambda service, slow: service.enlisted.move([slow.shared, slow.completing, slow.opened]),
}


@pytest.mark.parametrize("others", [list(OTHERS), *[[name] for name in OTHERS]], ids=lambda names: "+".join(names)[:40])
def test_a_slow_transaction_holds_up_nobody_else(
    referee: Service, server_database: Database, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(referee.enlisted._mover, "expect", lambda changed: None)
    engine = engine_of(server_database)
    slow = Slow(referee, engine)
    waits = [Change("lastbit_retries_total", cause=cause) for cause in ("lock_wait", "head_wait")]
    with contextlib.closing(slow.connection):
        for name in others:
            OTHERS[name](referee, slow)
        assert [wait() for wait in waits] == [0, 0]
        slow.connection.commit()
    referee.enlisted.move([slow.shared, slow.completing, slow.opened])
    for batch in (slow.shared, slow.completing, slow.opened):
        assert referee.batches.verify(batch).ok
    assert referee.batches.get(slow.opened).state is State.COMPLETE
    assert referee.batches.get(slow.shared).state is State.SEALED
    engine.dispose()


@mutant(
    "the-thread-locks-batches-before-the-commit",
    "core.service.mover:Mover._pass",
    "self._database.read(outbox.among, due_batches)",
    "due_batches",
)
def test_the_thread_that_moves_locks_nothing_before_the_commit(referee: Service, server_database: Database) -> None:
    """It would wait for the row of a batch that the transaction has opened, with those of others locked."""
    engine = engine_of(server_database)
    slow = Slow(referee, engine)
    batches = [slow.shared, slow.completing, slow.opened]
    mover = Mover(server_database, referee.acks)

    def look() -> None:
        mover._expected = dict.fromkeys(batches, (0.0, 1.0))
        mover._pass(batches, looks=False)

    with contextlib.closing(slow.connection):
        with engine.begin() as holder, structlog.testing.capture_logs() as lines:
            holder.execute(sa.text(f"SELECT id FROM batches WHERE id = {slow.completing} FOR UPDATE"))
            look()
        assert lines == []
        slow.connection.commit()
    look()
    assert [referee.batches.get(batch).state for batch in batches] == [State.SEALED, State.COMPLETE, State.COMPLETE]
    engine.dispose()
