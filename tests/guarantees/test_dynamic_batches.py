"""Work that adds work: a pending item extends its batch, sealed or not, and the batch still completes exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, writes
from core.batches import batch as batches
from core.batches.batch import Extended, Opening
from core.batches.lifecycle import State, Verb
from core.batches.tolerance import OnExceeded
from core.batches.writing import Extend
from core.commits.combiner import Inline
from core.commits.operation import Done, Operation
from core.service import Service
from core.service.batches import seal_of
from core.service.writes import KINDS
from core.storage import schema, tables
from core.storage.database import Database
from lastbit.ids import MAX_ITEMS, ItemId
from tests.guarantees.drivers import journaled
from tests.guarantees.drivers.rounds import GROUP, ROUNDS, ack, newly, prepare, race, recount
from tests.guarantees.test_tolerance import events_of, fail, open_batch
from tests.mutants import mutant


@pytest.fixture(params=["grouped", "journaled"])
def any_bits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits in the rows of groups, or in a journal that is folded often."""
    if request.param == "journaled":
        journaled.everything(monkeypatch, numbers=3)


def extend_by(service: Service, batch: int, number: int, count: int = 2, key: str | None = None) -> Extended:
    return service.batches.extend(batch, count, key, by=ItemId(batch, *divmod(number, GROUP)))


def refusal(call: Callable[[], object]) -> str | None:
    """The code of the error, or None if the call is accepted."""
    try:
        call()
    except errors.CoreError as error:
        return error.code
    return None


def merged(database: Database, *operations: Operation) -> list[Done]:
    """The outcomes of the operations in one transaction."""
    return database.write(writes.flush, operations, KINDS)


@mutant(
    "a-resolved-item-adds-items",
    "core.batches.writing:_check_pending",
    "item in resolved",
    "False",
)
@mutant(
    "items-in-the-journal-are-taken-as-pending",
    "core.bits.items:resolved",
    "number in acked.get(item.batch, ())",
    "False",
)
@mutant(
    "items-in-groups-are-taken-as-pending",
    "core.bits.items:resolved",
    "group_bits is not None and bool(group_bits[item.index])",
    "False",
)
@mutant("another-bit-of-the-group-is-looked-at", "core.bits.items:resolved", "group_bits[item.index]", "group_bits[0]")
@pytest.mark.usefixtures("any_bits")
def test_an_item_adds_items_exactly_as_long_as_it_is_pending(service: Service) -> None:
    """Each item, after each ack or failure, in a batch that is open and then sealed."""
    batch = open_batch(service, GROUP + 6)
    resolved: set[int] = set()
    numbers = [3, GROUP + 1, 0, 5, GROUP + 2, 4, 1, GROUP]
    for place, number in enumerate(numbers):
        if place == 4:
            service.batches.seal(batch)
        ack(service, (batch, *divmod(number, GROUP)), verb=Verb.FAIL if place % 3 == 2 else Verb.ACK)
        resolved.add(number)
        before = service.batches.get(batch).items
        for other in (*numbers, 2, GROUP - 1, before - 1):
            code = refusal(lambda other=other: extend_by(service, batch, other, 0))  # type: ignore[misc]
            assert code == ("item_resolved" if other in resolved else None)
        extension = extend_by(service, batch, 2)
        assert (extension.start, extension.count, extension.batch.items) == (before, 2, before + 2)
        assert extension.batch.state is (State.OPEN if place < 4 else State.SEALED)
    pending = sorted(set(range(service.batches.get(batch).items)) - resolved)
    assert not newly(ack(service, *((batch, *divmod(number, GROUP)) for number in pending[1:])), batch)
    assert newly(ack(service, (batch, *divmod(pending[0], GROUP))), batch)
    assert events_of(service, batch).count("completed") == 1
    recount(service.database)


END: dict[str, Callable[[Service, int], object]] = {
    "open": lambda service, batch: None,
    "sealed": lambda service, batch: service.batches.seal(batch),
    "complete": lambda service, batch: (service.batches.seal(batch), ack(service, (batch, 0, 1))),
    "cancelled": lambda service, batch: service.batches.cancel(batch),
    "deleted": lambda service, batch: service.batches.delete(batch),
}
STATES = [
    # (what happened to the batch, whether item 1 adds items, whether item 0, which is acked, does)
    ("open", None, "item_resolved"),
    ("sealed", None, "item_resolved"),
    ("complete", "item_resolved", "item_resolved"),
    ("cancelled", "batch_cancelled", "item_resolved"),
    ("deleted", "batch_not_found", "batch_not_found"),
]


@mutant(
    "an-ended-batch-is-extended-by-its-pending-items",
    "core.batches.writing:_extended",
    'judge("extend on behalf of an item", batch.id, batch.state)',
    "",
)
@mutant(
    "a-pending-item-does-not-add-to-a-sealed-batch", "core.batches.writing:_extended", "operation.by is None", "True"
)
@pytest.mark.parametrize(("name", "of_pending", "of_acked"), STATES, ids=[name for name, *_ in STATES])
def test_the_state_of_the_batch_decides_about_its_pending_items(
    service: Service, name: str, of_pending: str | None, of_acked: str
) -> None:
    batch = open_batch(service, 2)
    ack(service, (batch, 0, 0))
    END[name](service, batch)
    assert refusal(lambda: extend_by(service, batch, 1)) == of_pending
    assert refusal(lambda: extend_by(service, batch, 0)) == of_acked


@mutant(
    "an-item-that-was-never-issued-adds-items", "core.batches.writing:_check_pending", "number >= batch.items", "False"
)
@mutant(
    "an-item-of-another-batch-adds-items",
    "core.batches.writing:_check_pending",
    "item.number(batch.group_size) if item.batch == batch.id else None",
    "item.number(batch.group_size)",
)
@mutant(
    "an-index-beyond-its-group-is-an-item-of-the-next",
    "core.batches.writing:_check_pending",
    "item.number(batch.group_size) if item.batch == batch.id else None",
    "item.group * batch.group_size + item.index if item.batch == batch.id else None",
)
def test_what_is_no_item_of_the_batch_adds_nothing(service: Service) -> None:
    batch, other = open_batch(service, GROUP + 2), open_batch(service, 5)
    strangers = [(other, 0, 0), (batch, 1, 2), (batch, 0, GROUP), (batch, 2, 0), (batch + 7, 0, 0), (batch, 2**52, 1)]
    for item in strangers:
        with pytest.raises(errors.InvalidRequest, match=r"body\.by"):
            service.batches.extend(batch, 1, by=ItemId(*item))
    with pytest.raises(errors.InvalidRequest, match=r"body\.count"):
        extend_by(service, batch, 0, MAX_ITEMS)
    assert service.batches.get(batch).items == GROUP + 2


LATER: dict[str, Callable[[Service, int], object]] = {
    "acked": lambda service, batch: ack(service, (batch, 0, 0)),
    "failed": lambda service, batch: ack(service, (batch, 0, 0), verb=Verb.FAIL),
    "sealed": lambda service, batch: service.batches.seal(batch),
    "complete": lambda service, batch: (
        service.batches.seal(batch),
        ack(service, *((batch, 0, index) for index in range(4))),
    ),
    "cancelled": lambda service, batch: service.batches.cancel(batch),
}


@mutant(
    "a-repeat-on-behalf-of-an-item-is-judged-by-its-bit",
    "core.batches.writing:_extended",
    "extend_key = operation.extend_key()",
    "if operation.by: _check_pending(batch, operation.by, found.resolved)\nextend_key = operation.extend_key()",
)
@pytest.mark.parametrize("name", LATER)
def test_a_lost_answer_is_repeated_whatever_happened_since(service: Service, name: str) -> None:
    batch = open_batch(service, 2)
    extension = extend_by(service, batch, 0, key="links")
    LATER[name](service, batch)
    repeat = extend_by(service, batch, 0, key="links")
    assert (repeat.start, repeat.count, repeat.replayed) == (extension.start, 2, True) == (2, 2, True)
    assert repeat.batch == service.batches.get(batch)
    with pytest.raises(errors.IdempotencyKeyReused):
        extend_by(service, batch, 0, count=3, key="links")


@mutant(
    "items-share-their-keys",
    "core.batches.writing:Extend.extend_key",
    "self.idempotency_key is None or self.by is None",
    "True",
)
def test_each_item_has_keys_of_its_own(service: Service) -> None:
    """A handler has the same key for each item. It is none of the producer's keys, either."""
    batch = open_batch(service, 2)
    starts = [
        service.batches.extend(batch, 2, "links").start,
        extend_by(service, batch, 0, key="links").start,
        extend_by(service, batch, 1, key="links").start,
    ]
    assert starts == [2, 4, 6]
    assert service.batches.extend(batch, 2, "links").start == 2
    assert [extend_by(service, batch, number, key="links").start for number in (0, 1)] == starts[1:]
    assert service.batches.get(batch).items == 8


def test_a_held_item_adds_items_until_its_child_has_resolved_it(service: Service) -> None:
    batch = open_batch(service, 1, sealed=True)
    child = open_batch(service, 1, sealed=True, parent=ItemId(batch, 0, 0))
    assert extend_by(service, batch, 0).start == 1
    ack(service, (child, 0, 0))
    assert refusal(lambda: extend_by(service, batch, 0)) == "item_resolved"
    assert newly(ack(service, (batch, 0, 1), (batch, 0, 2)), batch)


def test_extends_on_behalf_of_items_share_a_transaction_with_others(service: Service) -> None:
    """In their order: the seal between them makes no difference to a pending item."""
    batch, other = open_batch(service, 2), open_batch(service, 1, sealed=True)
    ack(service, (batch, 0, 1))
    item = ItemId(batch, 0, 0)
    outcomes = merged(
        service.database,
        Extend(batch=batch, count=1, by=item, idempotency_key="links"),
        seal_of(batch),
        Extend(batch=batch, count=1),
        Extend(batch=batch, count=2, by=item),
        Extend(batch=batch, count=1, by=ItemId(batch, 0, 1)),
        Extend(batch=batch, count=3, by=ItemId(batch, 0, 4)),  # an item that this transaction issues
        Extend(batch=batch, count=1, by=item, idempotency_key="links"),
        Extend(batch=other, count=1, by=item),
        Extend(batch=other, count=1, by=ItemId(other, 0, 0)),
    )
    codes = [outcome.error.code if isinstance(outcome.error, errors.CoreError) else None for outcome in outcomes]
    assert codes == [None, None, "batch_sealed", None, "item_resolved", None, None, "invalid_request", None]
    assert [outcomes[place].value.start for place in (0, 3, 5, 6, 8)] == [2, 3, 5, 2, 1]
    assert service.batches.get(batch).items == 8
    assert service.batches.get(batch).state is State.SEALED
    assert events_of(service, batch) == ["opened", "sealed"]


def test_a_percentage_is_judged_by_the_items_issued_so_far(service: Service) -> None:
    """What exceeded once stays exceeded, but the batch can still succeed as it grows."""
    batch = open_batch(service, 4, sealed=True, tolerated_failure_percentage=20)
    extend_by(service, batch, 0, 1)
    fail(service, batch, [1])
    assert not service.batches.get(batch).exceeded  # 1 of 5
    fail(service, batch, [2])
    assert service.batches.get(batch).exceeded
    extend_by(service, batch, 0, 5)
    info = service.batches.get(batch)
    assert (info.items, info.exceeded, info.state) == (10, True, State.SEALED)
    assert ack(service, *((batch, 0, index) for index in range(10) if index not in (1, 2))).completed[batch].succeeded
    assert events_of(service, batch).count("failures_exceeded") == 1

    strict = open_batch(service, 4, sealed=True, tolerated_failure_percentage=20, on_exceeded=OnExceeded.CANCEL)
    fail(service, strict, [1])
    assert refusal(lambda: extend_by(service, strict, 0)) == "batch_cancelled"


OPENED = [
    # (items, seal_at, state, events)
    (0, 3, State.OPEN, ["opened"]),
    (2, 3, State.OPEN, ["opened"]),
    (3, 3, State.SEALED, ["opened", "sealed"]),
    (0, 0, State.COMPLETE, ["opened", "sealed", "completed", "succeeded"]),
]


@mutant(
    "an-open-with-all-items-does-not-seal-itself",
    "core.batches.writing:_new_batch",
    "State.SEALED if opening.is_sealed else State.OPEN",
    "State.SEALED if opening.sealed else State.OPEN",
)
@mutant(
    "an-open-that-seals-itself-makes-no-event",
    "core.batches.writing:BatchWrites._record",
    "operation.opening.is_sealed",
    "operation.opening.sealed",
)
@pytest.mark.parametrize(("items", "seal_at", "state", "events"), OPENED)
def test_an_open_seals_a_batch_that_has_all_its_items(
    service: Service, items: int, seal_at: int, state: State, events: list[str]
) -> None:
    batch = open_batch(service, items, seal_at=seal_at)
    info = service.batches.get(batch)
    assert (info.state, info.seal_at, info.sealed_at is None) == (state, seal_at, state is State.OPEN)
    assert events_of(service, batch) == events


@mutant(
    "a-batch-seals-itself-one-item-late",
    "core.batches.writing:BatchWrites._extend",
    "after.items != after.seal_at",
    "after.items != (after.seal_at or 0) + 1",
)
@mutant(
    "a-batch-that-seals-itself-can-have-one-item-more",
    "core.batches.writing:_extended",
    "start + count > batch.seal_at",
    "start + count > batch.seal_at + 1",
)
@mutant(
    "a-batch-that-was-sealed-before-seals-itself-again",
    "core.batches.writing:BatchWrites._extend",
    "after.state is not State.OPEN",
    "False",
)
def test_the_extend_that_issues_the_last_item_seals_the_batch(service: Service) -> None:
    """Whether others were acked before, and whoever extends it; one beyond it issues nothing."""
    batch = open_batch(service, 1, seal_at=6)
    assert refusal(lambda: service.batches.extend(batch, 6)) == "batch_sealed"
    assert service.batches.extend(batch, 2, "a").batch.state is State.OPEN
    ack(service, *((batch, 0, index) for index in range(3)))
    assert refusal(lambda: extend_by(service, batch, 0)) == "item_resolved"
    sealing = service.batches.extend(batch, 3, "b")
    assert (sealing.start, sealing.batch.state, sealing.batch.items) == (3, State.SEALED, 6)
    assert sealing.batch == service.batches.get(batch)
    assert sealing.batch.sealed_at == sealing.batch.updated_at
    for key in ("a", "b"):
        repeat = service.batches.extend(batch, {"a": 2, "b": 3}[key], key)
        assert (repeat.start, repeat.replayed) == ({"a": 1, "b": 3}[key], True)
    for count in (0, 1):
        assert refusal(lambda count=count: service.batches.extend(batch, count)) == "batch_sealed"  # type: ignore[misc]
    assert refusal(lambda: extend_by(service, batch, 4, 1)) == "batch_sealed"
    assert extend_by(service, batch, 4, 0).batch.items == 6
    assert service.batches.seal(batch).batch.items == 6
    assert newly(ack(service, *((batch, 0, index) for index in range(3, 6))), batch)
    assert events_of(service, batch) == ["opened", "sealed", "completed", "succeeded"]


def test_a_batch_that_is_sealed_earlier_keeps_its_bound(service: Service) -> None:
    """Its items add others up to it; that seals nothing again."""
    batch = open_batch(service, 2, seal_at=5)
    service.batches.seal(batch)
    assert refusal(lambda: service.batches.extend(batch, 1)) == "batch_sealed"
    assert extend_by(service, batch, 0, 2).batch.items == 4
    assert refusal(lambda: extend_by(service, batch, 0, 2)) == "batch_sealed"
    assert extend_by(service, batch, 1, 1).batch.items == 5
    assert events_of(service, batch) == ["opened", "sealed"]


@mutant(
    "an-extend-that-ends-a-child-leaves-its-parent-unpaid",
    "core.service.writes:WriteService._commit",
    "Opened | Extended | Sealed",
    "Opened | Sealed",
)
def test_a_batch_that_seals_itself_beyond_its_tolerance_is_cancelled(service: Service) -> None:
    """The percentage is judged then. If it stands for an item, that has failed before the extend is answered."""
    parent = open_batch(service, 1, sealed=True)
    tolerance = {"tolerated_failure_percentage": 20, "on_exceeded": OnExceeded.CANCEL}
    batch = open_batch(service, 3, seal_at=5, parent=ItemId(parent, 0, 0), **tolerance)
    fail(service, batch, [0, 1])
    sealing = service.batches.extend(batch, 2, "last")
    assert (sealing.start, sealing.batch.state) == (3, State.CANCELLED)
    assert events_of(service, batch) == ["opened", "sealed", "failures_exceeded", "cancelled"]
    assert service.batches.get(parent).failed == 1
    assert service.batches.get(batch).parent_due is None
    assert service.batches.extend(batch, 2, "last").replayed


def test_producers_that_share_a_transaction_seal_their_batch_once(service: Service) -> None:
    batch = open_batch(service, 0, seal_at=6)
    outcomes = merged(
        service.database,
        Extend(batch=batch, count=4, idempotency_key="a"),
        Extend(batch=batch, count=3, idempotency_key="b"),
        Extend(batch=batch, count=2, idempotency_key="c"),
        Extend(batch=batch, count=2, idempotency_key="c"),
        Extend(batch=batch, count=1, by=ItemId(batch, 0, 0)),
        seal_of(batch),
    )
    codes = [outcome.error.code if isinstance(outcome.error, errors.CoreError) else None for outcome in outcomes]
    assert codes == [None, "batch_sealed", None, None, "batch_sealed", None]
    assert [outcome.value.batch.state for outcome in outcomes if outcome.value] == [State.OPEN, *[State.SEALED] * 3]
    assert events_of(service, batch) == ["opened", "sealed"]


@mutant(
    "an-earlier-release-may-not-seal-a-batch",
    "core.batches.writing:BatchWrites._open",
    "operation.opening.seal_at is not None",
    "False",
)
@mutant(
    "an-earlier-release-that-knows-the-other-policies-may-not-seal-a-batch",
    "core.batches.writing:BatchWrites._open",
    "check_policies(self.pipeline.tx, SEAL_AT)",
    "check_policies(self.pipeline.tx)",
)
def test_a_release_that_would_not_seal_the_batch_must_be_gone(database: Database, service: Service) -> None:
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0023"))
    with pytest.raises(errors.UpgradeNotFinished):
        open_batch(service, 3, seal_at=5)
    open_batch(service, 3, tolerated_failures=1)
    schema.finish(database)
    assert open_batch(service, 3, seal_at=5)


def test_the_same_open_with_another_bound_is_refused(service: Service) -> None:
    for seal_at in (5, 5, 6, None):
        code = refusal(lambda seal_at=seal_at: service.batches.open(Opening(items=1, seal_at=seal_at), "k"))  # type: ignore[misc]
        assert code == (None if seal_at == 5 else "idempotency_key_reused")


@pytest.fixture
def referee(server_database: Database) -> Service:
    """A service that takes no part in the races; tests use it between and after rounds."""
    return Service(server_database, combiner=Inline)


@mutant(
    "the-bit-is-read-before-the-batch-is-locked",
    "core.batches.writing:_look",
    'columns, table = ([*expressions, dialect.flat(dialect.now, "time")], dialect.by_primary_key(batches_table))',
    """
early = items.ask(pipeline, adding)
early.rows()
columns, table = ([*expressions, dialect.flat(dialect.now, "time")], dialect.by_primary_key(batches_table))
""",
    ("adding_groups = items.ask(pipeline, adding)", "adding_groups = early"),
)
@mutant(
    "a-batch-is-extended-on-a-plain-read",
    "core.batches.writing:_look",
    "f\"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id{dialect.for_update()}\"",
    "f\"{table} WHERE id IN ({','.join(map(str, part))}) ORDER BY id\"",
)
@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("some_journaled")
def test_an_item_adds_items_before_its_ack_or_not_at_all(referee: Service) -> None:
    """The last pending item of a sealed batch is acked while it adds items: the ack completes the batch, or the new
    items belong to it, and their acks do."""
    shapes = [(GROUP, {0: GROUP - 1}), (GROUP + 1, {0: GROUP}), (1, {})]
    ids = prepare(referee.database, ROUNDS, lambda number: shapes[number % 3])
    wins = {"extend": 0, "ack": 0}

    def item(number: int) -> ItemId:
        return ItemId(ids[number], *divmod(shapes[number % 3][0] - 1, GROUP))

    def check(number: int, extension: Any, acked: Any) -> None:
        batch, items = ids[number], shapes[number % 3][0]
        if isinstance(extension, batches.Extended):
            wins["extend"] += 1
            assert (extension.start, extension.batch.state, acked.completed) == (items, State.SEALED, {})
            repeat = referee.batches.extend(batch, 2, "links", by=item(number))
            assert (repeat.start, repeat.replayed) == (items, True)
            new = [(batch, *divmod(items + place, GROUP)) for place in range(2)]
            assert newly(ack(referee, *new), batch)
        else:
            wins["ack"] += 1
            assert isinstance(extension, errors.ItemResolved)
            assert newly(acked, batch)

    race(
        referee.database,
        ROUNDS,
        lambda service, number: service.batches.extend(ids[number], 2, "links", by=item(number)),
        lambda service, number: ack(service, item(number)),
        check=check,
    )
    rows = recount(referee.database)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}
    assert min(wins.values()) > ROUNDS // 50, f"the same call nearly always came first: {wins}"


@pytest.mark.mariadb
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("some_journaled")
def test_exactly_one_of_two_producers_issues_the_last_items(referee: Service) -> None:
    """Both extend the batch, which has room for one of them: that one seals it, and the other issues nothing."""
    ids = prepare(
        referee.database, ROUNDS, lambda number: (5, {0: 5}), state=State.OPEN, columns=lambda number: {"seal_at": 8}
    )

    def check(number: int, *answers: Any) -> None:
        refusals = [answer for answer in answers if isinstance(answer, errors.BatchSealed)]
        issued = [answer for answer in answers if isinstance(answer, Extended)]
        assert [(answer.start, answer.batch.state) for answer in issued] == [(5, State.SEALED)]
        assert len(refusals) == 1
        assert newly(ack(referee, *((ids[number], 0, index) for index in (5, 6, 7))), ids[number])

    def extend(service: Service, number: int) -> Extended:
        return service.batches.extend(ids[number], 3)

    race(referee.database, ROUNDS, extend, extend, check=check)
    rows = recount(referee.database)
    assert {(rows[batch].state, rows[batch].items) for batch in ids} == {(State.COMPLETE, 8)}
