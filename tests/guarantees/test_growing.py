"""A batch that grows while a bulk ack waits for one of its groups, and rows whose counts differ from their bits.

It takes three transactions: the bulk ack waits for a group that another one has locked; meanwhile the batch is
extended, and the new items are acked in a group that the bulk ack hasn't reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from core import errors, writes
from core.acks.call import AckResult, Call
from core.batches.batch import Opening
from core.batches.lifecycle import State, Verb
from core.commits.combiner import Inline
from core.service import Service
from core.service.batches import opening_of
from core.service.writes import KINDS
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import GROUP, ack
from tests.mutants import mutant
from tests.support.waits import waits_for_a_lock

FIRST = GROUP + 8
"""Items that are issued before the batch grows: group 1 ends after its first byte."""
_groups = tables.item_groups.c


@pytest.fixture
def other_service(server_database: Database) -> Iterator[Service]:
    """A service other than the one that takes the bulk ack, as in another process."""
    service = Service(server_database, combiner=Inline)
    yield service
    service.stop()


def by_mask(batch: int) -> Call:
    return Call.of(Verb.ACK, masks=[(batch, 0, b"\xff" * (GROUP // 8)), (batch, 1, b"\x0f")])


def by_ids(batch: int) -> Call:
    """Enough ids to make it a large call."""
    indexes = [(0, index) for index in range(GROUP)] + [(1, index) for index in range(60)]
    return Call.of(Verb.ACK, [(batch, *position) for position in indexes])


def by_failing(batch: int) -> Call:
    return Call.of(Verb.FAIL, masks=[(batch, 0, b"\xff" * (GROUP // 8)), (batch, 1, b"\x0f")], reason="broken")


@mutant(
    "items-are-read-before-the-groups-are-locked",
    "core.acks.flush:_begin",
    "locked_groups = _lock(pipeline, direct)",
    """
early = _look(pipeline, () if little else batches)
locked_groups = _lock(pipeline, direct)
""",
    ("seen_batches = _look(pipeline, () if little else batches)", "seen_batches = early"),
)
@pytest.mark.mariadb
@pytest.mark.parametrize("call", [by_mask, by_ids, by_failing])
def test_a_batch_that_grows_while_a_bulk_ack_waits_keeps_every_answered_ack(
    other_service: Service, call: Callable[[int], Call]
) -> None:
    """Items acked in the new part of a group stay acked, and repeated acks don't count again."""
    batch = other_service.batches.open(Opening(group_size=GROUP, items=FIRST)).batch.id
    ack(other_service, (batch, 0, 3), (batch, 1, 5))
    bulk = Service(Database(other_service.database.url.render_as_string(hide_password=False)), combiner=Inline)
    first_group = sa.select(_groups.group_no).where(_groups.batch_id == batch, _groups.group_no == 0)
    new = [(batch, 1, index) for index in (60, 62, 63)]
    with other_service.database.engine.connect() as holder, ThreadPoolExecutor(1) as pool:
        holder.execute(first_group.with_for_update())
        under_way = pool.submit(lambda: bulk.acks.ack(call(batch)).result(60))
        assert waits_for_a_lock(other_service.database, under_way)
        other_service.batches.extend(batch, 2 * GROUP - FIRST)
        assert ack(other_service, *new).applied == 3
        holder.rollback()
        under_way.result(60)
    bulk.stop()
    assert other_service.batches.verify(batch).ok, other_service.batches.verify(batch).faults
    assert ack(other_service, *new).repeated == 3
    ack(other_service, *((batch, *divmod(number, GROUP)) for number in range(2 * GROUP)))
    assert other_service.batches.seal(batch).batch.state is State.COMPLETE
    assert other_service.batches.verify(batch).counted_acked == 2 * GROUP


@pytest.mark.mariadb
def test_no_child_is_opened_for_an_item_acked_while_the_open_waited(other_service: Service) -> None:
    """The item's group has no row when the open starts, and its parent is locked: the item is acked meanwhile."""
    parent = other_service.batches.open(Opening(group_size=GROUP, items=2)).batch.id
    opener = Service(Database(other_service.database.url.render_as_string(hide_password=False)), combiner=Inline)
    the_parent = sa.select(tables.batches.c.id).where(tables.batches.c.id == parent)
    item = f"{parent}:0:0"
    with other_service.database.engine.connect() as holder, ThreadPoolExecutor(1) as pool:
        holder.execute(the_parent.with_for_update())
        opening = pool.submit(lambda: opener.batches.open(Opening(parent=ItemId.parse(item))))
        assert waits_for_a_lock(other_service.database, opening)
        holder.execute(
            sa.insert(tables.item_groups).values(batch_id=parent, group_no=0, resolved_count=1, failed_count=0)
        )
        holder.execute(sa.update(tables.batches).where(tables.batches.c.id == parent).values(acked=1))
        holder.commit()
        with pytest.raises(errors.InvalidRequest, match="already resolved"):
            opening.result(60)
    opener.stop()


@mutant(
    "a-batch-that-became-a-parent-is-not-noticed",
    "core.acks.completion:_lock_and_read",
    "row.journal_next or row.children",
    "row.journal_next",
)
@mutant(
    "children-are-looked-for-before-the-parent-is-locked",
    "core.acks.flush:_begin",
    "completion.ask(pipeline, state.seen, locking)",
    "completion.ask(pipeline, state.seen)",
)
@pytest.mark.mariadb
@pytest.mark.parametrize("call", [by_mask, by_ids, by_failing])
@pytest.mark.parametrize("is_parent", [False, True], ids=["first child", "another child"])
def test_an_item_is_held_though_its_child_was_opened_while_a_bulk_ack_waited(
    other_service: Service, call: Callable[[int], Call], *, is_parent: bool
) -> None:
    """The bulk ack has not found the child, and waits for the parent's row, which the open has locked."""
    parent = other_service.batches.open(Opening(group_size=GROUP, items=FIRST)).batch.id
    item = ItemId(parent, 0, 5)
    if is_parent:
        other_service.batches.open(Opening(items=1, parent=ItemId(parent, 0, 6)))
    bulk = Service(Database(other_service.database.url.render_as_string(hide_password=False)), combiner=Inline)
    opened, may_commit = threading.Event(), threading.Event()

    def open_child(tx: sa.Connection) -> None:
        (outcome,) = writes.flush(tx, [opening_of(Opening(items=1, parent=item))], KINDS)
        assert outcome.error is None
        opened.set()
        assert may_commit.wait(60)

    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(other_service.database.write, open_child)
        assert opened.wait(60)
        under_way = pool.submit(lambda: bulk.acks.ack(call(parent)).result(60))
        assert waits_for_a_lock(other_service.database, under_way)
        may_commit.set()
        opening.result(60)
        answer = under_way.result(60)
    bulk.stop()
    assert sum(rejection.count for rejection in answer.rejected if rejection.reason == "held") == 1 + is_parent
    verification = other_service.batches.verify(parent)
    assert verification.ok
    assert answer.applied == verification.counted_acked + verification.counted_failed
    assert other_service.batches.ranges(parent, "pending", 0, 1)[1].ranges[0].start == item.index


# Rows that are already damaged.


def break_row(service: Service, batch: int, **values: object) -> None:
    """Change the stored row of the batch's first group, as a bug or a restore could."""
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.item_groups).where(_groups.batch_id == batch, _groups.group_no == 0).values(values))


def whole_row(service: Service, batch: int) -> tuple[object, ...]:
    with service.database.engine.connect() as tx:
        return tuple(tx.execute(sa.select(tables.item_groups).where(_groups.batch_id == batch)).one())


@mutant("a-group-is-read-unchecked", "core.acks.flush:_load", "_check(key, group, state.issued(*key))", "pass")
@mutant(
    "bits-lost-are-recounted",
    "core.bits.bitfield:Group.check",
    "(resolved, failed, skipped_count) != self.version",
    "False",
)
@pytest.mark.parametrize(
    "values",
    [
        {"resolved": b"\x05", "resolved_count": 3},
        {"resolved": b"\x05", "resolved_count": 1},
        {"resolved": b"\x05" + b"\x80" * 4, "resolved_count": 6},
        {"resolved": b"\x05", "resolved_count": 2, "failed": b"\x04", "failed_count": 2},
        {"resolved": b"\x05", "resolved_count": 2, "failed": None, "failed_count": 1},
    ],
    ids=["bits lost", "bits too many", "bits never issued", "failed bits lost", "no failed bits"],
)
@pytest.mark.parametrize("message", ["an id", "a mask", "a repeat"])
def test_a_group_whose_counts_differ_from_its_bits_is_reported_and_left_alone(
    service: Service, values: dict[str, object], message: str
) -> None:
    """Nothing is recounted silently, and the row isn't overwritten."""
    batch = service.batches.open(Opening(group_size=GROUP, items=9)).batch.id
    ack(service, (batch, 0, 0), (batch, 0, 2))
    break_row(service, batch, **values)
    cold = Service(service.database, combiner=Inline)
    before = whole_row(service, batch)

    def send() -> AckResult:
        if message == "a mask":
            return cold.acks.ack(Call.of(Verb.ACK, masks=[(batch, 0, b"\xff")])).result(60)
        return ack(cold, (batch, 0, 0 if message == "a repeat" else 4))

    with pytest.raises(errors.InconsistentBatch, match="group 0"):
        send()
    assert whole_row(service, batch) == before
    assert not service.batches.verify(batch).ok
