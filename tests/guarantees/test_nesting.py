"""Nested batches: a child's end reaches its parent, level by level, through crashes, and counts once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors, janitor
from core.acks import flush, parents
from core.acks.call import AckResult, Call, Rejected
from core.batches import batch as batches
from core.batches import expiry, nesting, purge
from core.batches.lifecycle import State, Verb
from core.bits.cache import BitfieldCache
from core.commits.combiner import Combiner
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import ack, nobody_pays
from tests.guarantees.models.service import events_of
from tests.guarantees.programs.dying import mortals
from tests.mutants import mutant
from tests.support import plans

pytestmark = pytest.mark.usefixtures("some_journaled")

GROUP = 64
DEPTH = 5
LEAVES = 1_000


@dataclass
class Tree:
    """Batches by level, the root first, and the items that have no child batch."""

    levels: list[list[int]] = field(default_factory=lambda: [[] for _ in range(DEPTH)])
    children: dict[int, list[int]] = field(default_factory=dict)
    leaves: list[tuple[int, int, int]] = field(default_factory=list)

    def grow(
        self, service: Service, dice: random.Random, leaves: int, level: int = 0, parent: ItemId | None = None
    ) -> int:
        last = level == DEPTH - 1
        parts = [leaves] if last else _split(dice, leaves)
        items = leaves if last else len(parts)
        batch = service.batches.open(
            batches.Opening(group_size=GROUP, items=items, sealed=True, parent=parent)
        ).batch.id
        self.levels[level].append(batch)
        if last:
            self.leaves += [(batch, *divmod(number, GROUP)) for number in range(items)]
        else:
            self.children[batch] = [
                self.grow(service, dice, part, level + 1, ItemId(batch, 0, number)) for number, part in enumerate(parts)
            ]
        return batch


def _split(dice: random.Random, leaves: int) -> list[int]:
    count = min(leaves, dice.randint(2, 4))
    cuts = sorted(dice.sample(range(1, leaves), count - 1)) if count > 1 else []
    return [end - start for start, end in zip([0, *cuts], [*cuts, leaves], strict=True)]


@mutant(
    "what-is-not-journaled-yet-is-known",
    "core.bits.journal:catch_up",
    "next != 0 and state is not None and state.next <= next and len(entries) == next - state.next",
    "state is not None and state.next <= next and len(entries) == next - state.next",
)
@mutant(
    "a-childs-end-notifies-its-process-only",
    "core.acks.parents:sweep",
    "until is None or time.monotonic() < until",
    "False",
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_tree_of_batches_completes_level_by_level_though_its_consumers_die(database: Database) -> None:
    """A thousand leaves at depth five, acked in random order, several at a time; sometimes a process dies at a random
    point and its items are delivered again. Each batch completes once, after all of its children."""
    dice = random.Random(5)
    service = Service(database, combiner=Combiner)
    tree = Tree()
    tree.grow(service, dice, LEAVES)
    all_batches = [batch for level in tree.levels for batch in level]
    assert all(tree.levels)
    dice.shuffle(tree.leaves)
    url = database.url.render_as_string(hide_password=False)
    deaths = 0
    with mortals() as dying:
        for start in range(0, LEAVES, 10):
            leaves = tree.leaves[start : start + 10]
            if start % 50 == 0:
                request = {"verb": "ack", "items": [list(item) for item in leaves]}
                deaths += dying.run(url, request, dice.randrange(60), with_combiner=True) is not None
            futures = [service.acks.ack(Call.of(Verb.ACK, [item])) for item in leaves]
            for future in futures:
                future.result(120)
    assert deaths > LEAVES / 50 / 4
    # After a crash between a child's commit and its parent's, a sweep pays the parents.
    parents.sweep(database)
    position = {event.id: event.position for event in _all_events(service)}
    for batch in all_batches:
        batch_ = service.batches.get(batch)
        assert (batch_.state, batch_.succeeded, batch_.pending) == (State.COMPLETE, True, 0)
        assert service.batches.verify(batch).ok
        assert events_of(service, batch) == ["opened", "sealed", "completed", "succeeded"]
        for child in tree.children.get(batch, ()):
            assert position[f"batch:{child}:completed"] < position[f"batch:{batch}:completed"]
    service.stop()


def _all_events(service: Service) -> list[Any]:
    events: list[Any] = []
    while len((page := service.feed.read(len(events), 1000)).events) > 0:
        events += page.events
    return events


@pytest.fixture
def parent(service: Service) -> int:
    return service.batches.open(batches.Opening(group_size=GROUP, items=GROUP + 2)).batch.id


def _child(service: Service, item: ItemId, **opening: Any) -> int:
    opening = {"group_size": GROUP, "items": 2, "sealed": True, "parent": item, **opening}
    return service.batches.open(batches.Opening(**opening)).batch.id


def succeeds(service: Service, child: int) -> None:
    ack(service, (child, 0, 0), (child, 0, 1))


def completes_with_failures(service: Service, child: int) -> None:
    ack(service, (child, 0, 0))
    ack(service, (child, 0, 1), verb=Verb.FAIL, reason="no parser")


def is_redriven(service: Service, child: int) -> None:
    completes_with_failures(service, child)
    ack(service, (child, 0, 1))


def is_cancelled(service: Service, child: int) -> None:
    service.batches.cancel(child)


def is_deleted(service: Service, child: int) -> None:
    service.batches.delete(child)


def expires(service: Service, child: int) -> None:
    _pass_time(service, child)
    assert child in janitor.run_once(service.database, expiry.Policy()).expired_sealed


def _pass_time(service: Service, batch: int) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=100)
    with service.database.engine.begin() as tx:
        times = {"updated_at": long_ago, "seen_updated_at": long_ago}
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(times))


@mutant("a-child-holds-its-item-against-itself", "core.acks.parents:payment", "call.pays = True", "pass")
@mutant("a-childs-payment-is-skipped", "core.acks.parents:Payer._pay_level", "pay", "lambda *_: PaymentResult()")
@mutant(
    "a-child-that-failed-acks-its-parent",
    "core.batches.settle:owed",
    "Verb.ACK if succeeded else Verb.FAIL",
    "Verb.ACK",
)
@pytest.mark.parametrize(
    ("ends", "acked", "failed", "reason"),
    [
        (succeeds, 1, 0, None),
        (completes_with_failures, 0, 1, "completed with failures"),
        (is_redriven, 1, 0, None),
        (is_cancelled, 0, 1, "cancelled"),
        (is_deleted, 0, 1, "cancelled"),
        (expires, 0, 1, "expired"),
    ],
)
def test_a_childs_end_resolves_its_item_in_the_parent(
    service: Service, parent: int, ends: Callable[[Service, int], None], acked: int, failed: int, reason: str | None
) -> None:
    """Before the call that ended it is answered, with a reason if it didn't succeed."""
    item = ItemId(parent, 1, 1)
    child = _child(service, item)
    if ends is not is_deleted:
        assert service.batches.get(child).parent == str(item)
    ends(service, child)
    parent_ = service.batches.get(parent)
    assert (parent_.acked, parent_.failed) == (acked, failed)
    spans = service.batches.ranges(parent, "failed", 0, 10)[1].ranges
    assert [span.reasons for span in spans] == (
        [] if reason is None else [{GROUP + 1: f"batch {child}, which stands for this item, {reason}"}]
    )
    assert nested_debts(service) == []


def nested_debts(service: Service) -> list[nesting.Due]:
    return service.database.read(nesting.debts)


@mutant("a-held-item-is-acked", "core.acks.flush:flush", "state.held and not unit.call.pays", "False")
@mutant(
    "an-open-child-is-not-counted",
    "core.batches.writing:BatchWrites._insert",
    'self.pipeline.later(nesting.counted(parent_columns["parent_batch"]))',
    "pass",
)
@pytest.mark.parametrize("verb", Verb)
@pytest.mark.parametrize("ends", [succeeds, completes_with_failures, is_cancelled, expires])
def test_an_item_is_held_from_the_open_of_its_child_until_its_end(
    service: Service, ends: Callable[[Service, int], None], verb: Verb
) -> None:
    """The consumer of its message acks or fails it at the end of its handler, while the child runs. The child resolves
    it; until then the parent isn't complete."""
    parent = service.batches.open(batches.Opening(group_size=GROUP, items=2, sealed=True)).batch.id
    item = ItemId(parent, 0, 1)
    child = _child(service, item)
    answer = ack(service, (parent, 0, 0), item, verb=verb)
    assert (answer.applied, answer.repeated, answer.completed) == (1, 0, {})
    assert answer.rejected == [Rejected("held", item=item)]
    assert service.batches.get(parent).pending == 1
    assert service.batches.ranges(parent, "failed", 1, 10)[1].ranges == []
    ends(service, child)
    assert service.batches.get(parent).complete
    repeat = ack(service, item, verb=Verb.FAIL)
    assert (repeat.applied, repeat.repeated, repeat.rejected) == (0, 1, [])
    assert not repeat.completed[parent].newly


@mutant(
    "held-bits-of-a-mask-are-listed-as-one",
    "core.acks.apply:withhold",
    "Rejected(HELD, group=(unit.batch, number), count=bits)",
    "Rejected(HELD, group=(unit.batch, number), count=1)",
)
def test_held_items_of_a_mask_are_counted_by_group(service: Service, parent: int) -> None:
    """An id of the call that is also in a mask counts as the mask's bit; the other items are applied."""
    for item in (ItemId(parent, 0, 2), ItemId(parent, 0, 3), ItemId(parent, 0, 9), ItemId(parent, 1, 1)):
        _child(service, item)
    call = Call.of(Verb.ACK, [(parent, 0, 3), (parent, 0, 9), (parent, 1, 0), (parent, 1, 1)], [(parent, 0, b"\xff")])
    answer = service.acks.ack(call).result(60)
    assert (answer.applied, answer.repeated) == (7, 0)
    assert sorted(answer.rejected, key=repr) == [
        Rejected("held", item=ItemId(parent, 0, 9)),
        Rejected("held", item=ItemId(parent, 1, 1)),
        Rejected("held", group=(parent, 0), count=2),
    ]
    every = Call.of(Verb.FAIL, masks=[(parent, 0, b"\xff" * 8), (parent, 1, b"\xff")], reason="no parser")
    answer = service.acks.ack(every).result(60)
    assert (answer.applied, answer.repeated) == (GROUP - 6 - 3, 7)
    assert sorted(answer.rejected, key=repr) == [
        Rejected("held", group=(parent, 0), count=3),
        Rejected("held", group=(parent, 1), count=1),
        Rejected("unknown_item", group=(parent, 1), count=6),
    ]
    assert service.batches.verify(parent).ok
    assert service.batches.get(parent).pending == 4


@mutant(
    "a-child-that-has-ended-holds-nothing", "core.batches.nesting:holders", "(*sorted(LIVE), *Verb)", "sorted(LIVE)"
)
def test_an_item_is_held_until_its_ended_child_has_resolved_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies after the child's failure was committed and before the parent's. The ack of a handler that comes
    in between must not make it a success."""
    parent = service.batches.open(batches.Opening(group_size=GROUP, items=1, sealed=True)).batch.id
    item = ItemId(parent, 0, 0)
    child = _child(service, item)
    with monkeypatch.context() as patches:
        nobody_pays(patches)
        completes_with_failures(service, child)
    assert ack(service, item).rejected == [Rejected("held", item=item)]
    assert parents.sweep(service.database) == 1
    parent_ = service.batches.get(parent)
    assert (parent_.complete, parent_.acked, parent_.failed) == (True, 0, 1)
    assert ack(service, item).completed[parent].newly_succeeded


@mutant("a-paid-debt-holds-the-item", "core.acks.apply:_is_final", "holder == Verb.FAIL", "False")
@mutant(
    "a-failed-item-is-final-though-its-child-was-redriven", "core.acks.apply:_is_final", "holder == Verb.FAIL", "True"
)
def test_an_item_that_its_child_has_resolved_is_not_held_though_the_debt_was_not_removed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an answer could call an item held, and its batch complete. A debt that would change the item, after a
    redrive, holds it again."""
    parent = service.batches.open(batches.Opening(group_size=GROUP, items=1, sealed=True)).batch.id
    item = ItemId(parent, 0, 0)
    child = _child(service, item)
    nobody_pays(monkeypatch)
    completes_with_failures(service, child)
    pay(service, nested_debts(service))
    repeat = ack(service, item, verb=Verb.FAIL)
    assert (repeat.repeated, repeat.rejected, list(repeat.completed)) == (1, [], [parent])
    ack(service, (child, 0, 1))
    held = ack(service, item)
    assert (held.repeated, held.rejected) == (0, [Rejected("held", item=item)])
    assert list(held.completed) == [parent]
    pay(service, nested_debts(service))
    assert (ack(service, item).repeated, service.batches.get(parent).succeeded) == (1, True)


@mutant(
    "a-skipped-item-is-final-though-its-child-was-redriven", "core.acks.apply:_is_final", "holder == Verb.FAIL", "True"
)
@mutant("a-skip-makes-an-item-final", "core.acks.apply:_is_final", "(group.failed, group.skipped)", "(group.failed,)")
def test_a_skipped_item_is_held_only_by_a_child_that_owes_it_an_ack(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has failed the item, and an operator has skipped it. The debt of that failure changes nothing more, so
    others may ack the item. But after a redrive the child acks it, and calls before that must not say otherwise."""
    parent = service.batches.open(batches.Opening(group_size=GROUP, items=2, sealed=True)).batch.id
    item = ItemId(parent, 0, 0)
    child = _child(service, item)
    nobody_pays(monkeypatch)
    completes_with_failures(service, child)
    pay(service, nested_debts(service))
    skip = ack(service, item, verb=Verb.SKIP)
    assert (skip.applied, skip.rejected) == (1, [])
    ack(service, (child, 0, 1))
    for verb in Verb:
        assert ack(service, item, verb=verb).rejected == [Rejected("held", item=item)], verb
    pay(service, nested_debts(service))
    assert (ack(service, item, verb=Verb.SKIP).repeated, service.batches.get(parent).acked) == (1, 1)


def pay(service: Service, dues: list[nesting.Due]) -> None:
    """Pay as a process that dies before it removes the debts."""
    units = [unit for due in dues for unit in parents.payment(due).chunks()]
    service.database.write(lambda tx: flush.flush(tx, units, BitfieldCache()))


def test_only_items_with_a_child_are_held(service: Service, parent: int) -> None:
    """Not the item with the same number in another batch, nor one whose child was deleted."""
    other = service.batches.open(batches.Opening(group_size=GROUP, items=GROUP + 2)).batch.id
    _child(service, ItemId(other, 0, 1))
    child = _child(service, ItemId(parent, 0, 0))
    service.batches.delete(child)
    answer = ack(service, (parent, 0, 1), (other, 0, 0), (parent, 0, 0))
    assert (answer.applied, answer.rejected) == (3, [])


def test_children_that_were_opened_by_an_earlier_release_hold_their_items(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration counts those that are live, and those that owe something."""
    ids = [service.batches.open(batches.Opening(group_size=GROUP, items=2)).batch.id for _ in range(4)]
    live, owing, paid = (_child(service, ItemId(parent, 0, 1)) for parent in ids[:3])
    succeeds(service, paid)
    nobody_pays(monkeypatch)
    succeeds(service, owing)
    schema.migrate(service.database, "0020")
    schema.migrate(service.database)
    with service.database.engine.begin() as tx:
        query = sa.select(tables.batches.c.children).where(tables.batches.c.id.in_(ids)).order_by(tables.batches.c.id)
        assert list(tx.scalars(query)) == [1, 1, 0, 0]
    answer = ack(service, *((parent, 0, 1) for parent in ids))
    assert (answer.applied, answer.repeated) == (1, 1)
    assert [rejection.reason for rejection in answer.rejected] == ["held", "held"]
    assert service.batches.get(live).state is State.SEALED


def test_a_held_item_of_a_batch_that_has_ended_is_rejected_as_its_other_items(service: Service, parent: int) -> None:
    """The reason is the batch's state."""
    item = ItemId(parent, 0, 0)
    child = _child(service, item)
    service.batches.cancel(parent)
    assert [rejection.reason for rejection in ack(service, item).rejected] == ["cancelled"]
    assert service.batches.get(child).state is State.SEALED


@mutant(
    "a-resolved-item-gets-a-child",
    "core.batches.nesting:adopt",
    "items.resolved(pipeline, items.ask(pipeline, [item]), {item.batch: parent}, [item])",
    "False",
)
@pytest.mark.parametrize(
    ("item", "message"),
    [
        (lambda parent: ItemId(parent + 1000, 0, 0), "there is no batch"),
        (lambda parent: ItemId(parent, 1, 2), "was never issued"),
        (lambda parent: ItemId(parent, 0, GROUP), "was never issued"),
        (lambda parent: ItemId(parent, 0, 1), "is already resolved"),
        (lambda parent: ItemId(parent, 0, 2), "is already resolved"),
        (lambda parent: ItemId(parent, 0, 3), "an item has one child"),
    ],
)
def test_an_open_for_an_item_that_can_have_no_child_is_refused(
    service: Service, parent: int, item: Callable[[int], ItemId], message: str
) -> None:
    """An item that is unknown, not issued, acked, failed, or has a child already; nothing is opened."""
    ack(service, (parent, 0, 1))
    ack(service, (parent, 0, 2), verb=Verb.FAIL)
    _child(service, ItemId(parent, 0, 3))
    before = service.feed.head()
    with pytest.raises(errors.InvalidRequest, match=rf"body\.parent: .*{message}"):
        _child(service, item(parent))
    assert service.feed.head() == before


@pytest.mark.parametrize("state", [State.COMPLETE, State.CANCELLED, State.EXPIRED])
def test_a_parent_that_has_ended_takes_no_child(service: Service, parent: int, state: State) -> None:
    """The error names the parent's state."""
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == parent).values(state=state))
    with pytest.raises(errors.BatchEnded) as exception:
        _child(service, ItemId(parent, 0, 0))
    assert exception.value.code == f"batch_{state}"


def test_a_replayed_open_is_answered_though_its_parent_has_ended(service: Service, parent: int) -> None:
    """The key is looked up before the parent is checked; another parent under the same key is another request body."""
    opening = batches.Opening(items=1, parent=ItemId(parent, 0, 7))
    opening_ = service.batches.open(opening, "child-1")
    service.batches.cancel(parent)
    repeat = service.batches.open(opening, "child-1")
    assert (repeat.replayed, repeat.batch.id) == (True, opening_.batch.id)
    with pytest.raises(errors.IdempotencyKeyReused):
        service.batches.open(batches.Opening(items=1, parent=ItemId(parent, 0, 8)), "child-1")


@mutant(
    "a-parent-with-live-children-is-idle",
    "core.batches.nesting:has_live_children",
    "tx.execute(query.limit(1)).first() is not None",
    "tx.execute(query.limit(1)).first() is not None and False",
)
def test_a_parent_with_live_children_is_not_idle(service: Service, parent: int) -> None:
    """It expires after its last child has ended, not before."""
    child = _child(service, ItemId(parent, 0, 0))
    _pass_time(service, parent)
    assert janitor.run_once(service.database, expiry.Policy(), dry_run=True).expired_open == []
    assert janitor.run_once(service.database, expiry.Policy()).expired_open == []
    service.batches.cancel(child)
    _pass_time(service, parent)
    assert janitor.run_once(service.database, expiry.Policy(), dry_run=True).expired_open == [parent]
    assert janitor.run_once(service.database, expiry.Policy()).expired_open == [parent]


def test_a_child_whose_parent_is_gone_or_has_ended_owes_nothing(service: Service, parent: int) -> None:
    """It has no debt."""
    first, other = _child(service, ItemId(parent, 0, 0)), _child(service, ItemId(parent, 0, 1))
    service.batches.cancel(parent)
    succeeds(service, first)
    service.batches.delete(parent)
    succeeds(service, other)
    assert service.batches.get(first).succeeded
    assert service.batches.get(other).succeeded
    assert nested_debts(service) == []


@mutant(
    "every-payment-clears-every-debt",
    "core.batches.nesting:strike_out",
    "sa.update(tables.batches).where(_batches.id.in_(children), _batches.parent_due == verb)",
    "sa.update(tables.batches).where(_batches.id.in_(children))",
)
def test_a_late_payment_of_a_failure_does_not_undo_the_redrive(
    service: Service, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payment of the first debt comes too late; the parent's item stays acked, or its ack stays due."""
    child = _child(service, ItemId(parent, 0, 0))
    nobody_pays(monkeypatch)
    completes_with_failures(service, child)
    (old,) = nested_debts(service)
    ack(service, (child, 0, 1))
    (new,) = nested_debts(service)
    assert (old.verb, new.verb) == (Verb.FAIL, Verb.ACK)
    service.database.write(lambda tx: flush.flush(tx, parents.payment(old).chunks(), BitfieldCache()))
    service.database.write(nesting.strike_out, [old])
    assert nested_debts(service) == [new]
    assert parents.sweep(service.database) == 1
    parent_ = service.batches.get(parent)
    assert (parent_.acked, parent_.failed) == (1, 0)


@mutant(
    "debts-are-looked-for-along-all-batches",
    "core.batches.nesting:debts",
    "tables.without_index(_batches.id)",
    "_batches.id",
)
def test_a_look_for_debts_does_not_read_all_batches(service: Service, parent: int) -> None:
    """Though no batch has a debt when the database collects its statistics, as on most days."""
    succeeds(service, _child(service, ItemId(parent, 0, 0)))
    database = service.database
    columns = [column for column in tables.batches.c if column.name not in ("id", "parent_number")]
    copies = sa.select(*columns).where(tables.batches.c.parent_batch.is_not(None))
    for _ in range(11):
        with database.engine.begin() as tx:
            tx.execute(sa.insert(tables.batches).from_select([column.name for column in columns], copies))
    plans.analyze(database, "batches")
    with plans.executions(database) as executions:
        assert nested_debts(service) == []
    plans.finds_nothing_by(database, "batches_parent_due", *next(one for one in executions if "parent_due" in one[0]))


def test_a_look_for_held_items_reads_the_children_of_these_items_alone(service: Service) -> None:
    """A crawler may open a batch for each of a million items, and ack others all the while."""
    parent = service.batches.open(batches.Opening(group_size=8192, items=100_000)).batch.id
    _child(service, ItemId(parent, 0, 1), items=0)
    database = service.database
    columns = [column.name for column in tables.batches.c if column.name not in ("id", "parent_number")]
    number = tables.batches.c.parent_number
    for power in range(11):  # their numbers are odd
        copies = sa.select(*(tables.batches.c[name] for name in columns), number + 2 ** (power + 1))
        with database.engine.begin() as tx:
            tx.execute(
                sa.insert(tables.batches).from_select([*columns, "parent_number"], copies.where(number.is_not(None)))
            )
    plans.analyze(database, "batches")
    others = {parent: [0, 2, 4, 4094], parent + 1000: [1]}
    ranges = [(parent, 8192 * group, 8192 * (group + 1)) for group in (1, 2)]
    with plans.executions(database) as executions:
        assert database.read(nesting.holders, others, ranges) == []
    index = "(parent_batch=? AND parent_number=?)" if database.is_embedded else "batches_parent"
    query = next(one for one in executions if "parent_due" in one[0])
    plans.finds_nothing_by(database, index, *query, most_rows=30)


def test_a_child_is_not_removed_before_its_parent_is_paid(
    service: Service, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion pays first; if it can't, it fails and can be sent again. The janitor pays before it removes."""
    first, other = _child(service, ItemId(parent, 0, 0)), _child(service, ItemId(parent, 0, 1))
    with monkeypatch.context() as patches:
        nobody_pays(patches)
        succeeds(service, first)
        succeeds(service, other)
        with pytest.raises(errors.Unavailable, match="its parent can't be updated, or"):
            service.batches.delete(first)
        assert not service.database.write(purge.condemn, other)
    service.batches.delete(first)
    assert service.batches.get(parent).acked == 1
    policy = expiry.Policy(keep=timedelta(0))
    assert janitor.run_once(service.database, policy).deleted == [other]
    assert service.batches.get(parent).acked == 2


def test_a_stuck_parent_does_not_delay_other_payments(
    service: Service, parent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one parent's counts are broken, the others are paid; its own debt stays."""
    damaged = service.batches.open(batches.Opening(group_size=GROUP, items=2)).batch.id
    children = [_child(service, ItemId(batch, 0, 0), items=1) for batch in (damaged, parent)]
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == damaged).values(acked=2))
    answer: AckResult = ack(service, *((child, 0, 0) for child in children))
    assert all(completion.newly for completion in answer.completed.values())
    assert service.batches.get(parent).acked == 1
    assert [due.child for due in nested_debts(service)] == children[:1]
