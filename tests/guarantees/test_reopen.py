"""Reopened batches: as they were before they ended, once, with events of their own, and with their places in a tree."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from core import errors, janitor
from core.acks import parents
from core.acks.call import Rejected
from core.batches import batch as batches
from core.batches import descendants, expiry
from core.batches.callbacks import Callback
from core.batches.lifecycle import State, Verb
from core.batches.tolerance import OnExceeded
from core.batches.update import Patch
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from core.webhooks import callbacks
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import ack, nobody_pays, recount
from tests.guarantees.models.service import events_of
from tests.guarantees.programs.dying import Written
from tests.guarantees.test_descendants import child_of, open_, pass_deadline, states
from tests.mutants import mutant

pytestmark = pytest.mark.usefixtures("some_journaled")

LATER = datetime(2099, 1, 1, tzinfo=UTC)


def is_cancelled(service: Service, batch: int) -> None:
    service.batches.cancel(batch, reason="a mistake")


def is_overdue(service: Service, batch: int) -> None:
    pass_deadline(service, batch)
    assert janitor.expire_overdue(service.database) == [batch]


def is_idle(service: Service, batch: int) -> None:
    time_passes(service, batch)
    janitor.run_once(service.database, expiry.Policy())


def time_passes(service: Service, batch: int) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=100)
    with service.database.engine.begin() as tx:
        times = {"updated_at": long_ago, "seen_updated_at": long_ago}
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(times))


@mutant("a-reopened-batch-is-always-sealed", "core.batches.reopen:revived", "State.OPEN", "State.SEALED")
@mutant("a-reopened-batch-keeps-its-end", "core.batches.settle:Transition.columns", "self.reopened", "False")
@mutant(
    "a-second-end-has-the-id-of-the-first",
    "core.batches.reopen:revived",
    "batch.generation + 1",
    "batch.generation",
)
@mutant(
    "a-reopened-batch-is-idle-at-once",
    "core.batches.reopen:revived",
    "max(batch.updated_at, now)",
    "batch.updated_at",
)
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("end", [is_cancelled, is_overdue, is_idle])
def test_a_batch_that_ended_is_as_before(service: Service, end: Callable[[Service, int], None], sealed: bool) -> None:
    """Open or sealed, with what was resolved; it takes acks, completes, and each of its ends is an event."""
    batch = open_(service, sealed=sealed)
    ack(service, (batch, 0, 0))
    ack(service, (batch, 0, 1), verb=Verb.FAIL, reason="no parser")
    for number in range(2):
        end(service, batch)
        assert [rejection.item for rejection in ack(service, (batch, 0, 2)).rejected] == [ItemId(batch, 0, 2)]
        time_passes(service, batch)
        service.batches.reopen(batch, deadline=None, reason="the disk is back")
        batch_ = service.batches.get(batch)
        assert (batch_.state, batch_.generation) == (State.SEALED if sealed else State.OPEN, number + 1)
        assert (batch_.acked, batch_.failed, batch_.ended_at, batch_.reason) == (1, 1, None, None)
        report = janitor.run_once(service.database, expiry.Policy())
        assert (report.expired_open, report.expired_sealed) == ([], [])
    if not sealed:
        service.batches.seal(batch)
    assert ack(service, (batch, 0, 2)).completed[batch].newly
    assert ack(service, (batch, 0, 1)).completed[batch].newly_succeeded
    word = "cancelled" if end is is_cancelled else "expired"
    sealing = [["sealed"], []] if sealed else [[], ["sealed"]]
    ends = [word, "reopened", word, "reopened"]
    assert events_of(service, batch) == ["opened", *sealing[0], *ends, *sealing[1], "completed", "succeeded"]
    recount(service.database)


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (lambda service, batch: None, errors.BatchLive),
        (lambda service, batch: ack(service, (batch, 0, 0)), errors.BatchComplete),
        (lambda service, batch: service.batches.delete(batch), errors.BatchNotFound),
    ],
)
def test_only_a_batch_that_ended_early_is_reopened(
    service: Service, prepare: Callable[[Service, int], object], error: type[errors.CoreError]
) -> None:
    """A complete one stays complete; a live one has nothing to reopen."""
    batch = open_(service, items=1)
    prepare(service, batch)
    head = service.feed.head()
    with pytest.raises(error):
        service.batches.reopen(batch)
    assert service.feed.head() == head


@mutant(
    "a-batch-is-reopened-after-its-deadline",
    "core.batches.reopen:reopen",
    "is_overdue(State.OPEN, ended.deadline, now=now)",
    "False",
)
def test_a_deadline_that_has_passed_is_replaced(service: Service) -> None:
    """By one in the future, or none; one that has not passed stays."""
    batch = open_(service)
    is_overdue(service, batch)
    for deadline in ({}, {"deadline": datetime(2020, 1, 1, tzinfo=UTC)}):
        with pytest.raises(errors.InvalidRequest, match=r"body\.deadline"):
            service.batches.reopen(batch, **deadline)  # type: ignore[arg-type]
    assert service.batches.reopen(batch, deadline=LATER).batch.deadline == LATER
    service.batches.cancel(batch)
    assert service.batches.reopen(batch).batch.deadline == LATER
    service.batches.cancel(batch)
    assert service.batches.reopen(batch, deadline=None).batch.deadline is None


@mutant(
    "a-reopened-batch-is-cancelled-by-old-failures",
    "core.batches.reopen:revived",
    "change.passes_tolerance",
    "False",
)
def test_a_batch_that_its_failures_cancelled_continues(service: Service) -> None:
    """It isn't cancelled again by the failures that it has, nor by the next ones, until an update says so. With fewer
    failures than that, its policy stays."""
    batch = open_(service, items=5, tolerated_failures=1, on_exceeded=OnExceeded.CANCEL)
    service.batches.cancel(batch)
    assert service.batches.reopen(batch).batch.on_exceeded is OnExceeded.CANCEL
    ack(service, (batch, 0, 0), (batch, 0, 1), verb=Verb.FAIL)
    batch_ = service.batches.reopen(batch).batch
    assert (batch_.state, batch_.exceeded, batch_.on_exceeded) == (State.SEALED, True, OnExceeded.CONTINUE)
    (event, *_) = reversed(service.feed.read(0, 100, batch=batch).events)
    assert '"on_exceeded": "continue"' in (event.data or "")
    ack(service, (batch, 0, 2), verb=Verb.FAIL)
    assert states(service, batch) == [State.SEALED]
    service.batches.update(batch, Patch(on_exceeded=OnExceeded.CANCEL))
    assert states(service, batch) == [State.CANCELLED]


@mutant(
    "a-repeated-cancel-ends-a-reopened-batch",
    "core.batches.reopen:revived",
    "replace(after, completed_by=batch.completed_by, children_due=Duty.REVIVE, children_told=0)",
    "replace(after, children_due=Duty.REVIVE, children_told=0)",
)
@mutant(
    "a-reopened-batch-calls-its-seal-newly",
    "core.batches.writing:BatchWrites._seal",
    "batch.complete and batch.completed_by == fingerprint",
    "batch.completed_by == fingerprint",
)
def test_repeats_of_what_ended_a_batch_dont_end_it_again(service: Service) -> None:
    """Under their keys: the cancel, and the seal that cancelled it. So does the repeat of the reopen itself, also after
    the next end."""
    batch = open_(service, sealed=False, tolerated_failure_percentage=10, on_exceeded=OnExceeded.CANCEL)
    ack(service, (batch, 0, 0), verb=Verb.FAIL)
    assert service.batches.seal(batch, "seal").batch.state is State.CANCELLED
    assert service.batches.reopen(batch, "reopen").batch.state is State.SEALED
    repeat = service.batches.seal(batch, "seal")
    assert (repeat.batch.state, repeat.newly) == (State.SEALED, False)
    service.batches.cancel(batch, "cancel")
    again = service.batches.reopen(batch, "reopen")
    assert (again.replayed, again.batch.state) == (True, State.CANCELLED)
    assert service.batches.reopen(batch, "again").batch.state is State.SEALED
    assert service.batches.cancel(batch, "cancel").state is State.SEALED
    with pytest.raises(errors.IdempotencyKeyReused):
        service.batches.reopen(batch, "again", reason="another one")
    assert service.batches.cancel(batch, "another").state is State.CANCELLED


@mutant(
    "a-reopened-child-owes-its-first-end",
    "core.batches.settle:Transition.columns",
    '("ended_at", "completed_by", "succeeded_by", "parent_due")',
    '("ended_at", "completed_by", "succeeded_by")',
)
@pytest.mark.parametrize("is_paid", [True, False])
@pytest.mark.parametrize("parent_is", [State.OPEN, State.COMPLETE])
def test_a_reopened_child_resolves_its_item_when_it_succeeds(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_paid: bool, parent_is: State
) -> None:
    """Its first end failed the item, or the process died before. The item is held from the reopen to the second end,
    though the parent is complete."""
    root = open_(service, items=2, sealed=parent_is is State.COMPLETE)
    ack(service, (root, 0, 1))
    child = child_of(service, root)
    with monkeypatch.context() as patches:
        if not is_paid:
            nobody_pays(patches)
        service.batches.cancel(child)
    service.batches.reopen(child)
    assert parents.sweep(service.database) == 0
    assert service.batches.get(root).failed == int(is_paid)
    for verb in Verb:
        answer = ack(service, (root, 0, 0), verb=verb)
        assert (answer.applied, answer.rejected) == (0, [Rejected("held", item=ItemId(root, 0, 0))])
    ack(service, *((child, 0, index) for index in range(3)))
    root_ = service.batches.get(root)
    assert (root_.acked, root_.failed, root_.state) == (2, 0, parent_is)
    assert root_.succeeded is (parent_is is State.COMPLETE)


@mutant(
    "a-reopened-batch-asks-no-child",
    "core.batches.reopen:revived",
    "replace(after, completed_by=batch.completed_by, children_due=Duty.REVIVE, children_told=0)",
    "replace(after, completed_by=batch.completed_by)",
)
def test_a_reopened_batch_collects_what_its_children_owed_it(service: Service) -> None:
    """Only of children that ended while it took no acks: nobody else would resolve their items. A live child still
    holds its own."""
    root = open_(service, items=4)
    complete, failing, running, cancelled_before = (child_of(service, root, number) for number in range(4))
    service.batches.cancel(cancelled_before)
    service.batches.cancel(root)
    ack(service, *((complete, 0, index) for index in range(3)))
    service.batches.cancel(failing)
    service.batches.reopen(root)
    root_ = service.batches.get(root)
    assert (root_.acked, root_.failed, root_.pending, root_.children_due) == (1, 2, 1, None)
    assert ack(service, (root, 0, 2)).rejected == [Rejected("held", item=ItemId(root, 0, 2))]
    ack(service, *((running, 0, index) for index in range(3)))
    assert states(service, root) == [State.COMPLETE]
    service.batches.reopen(failing)
    ack(service, *((failing, 0, index) for index in range(3)))
    service.batches.reopen(cancelled_before)
    ack(service, *((cancelled_before, 0, index) for index in range(3)))
    assert service.batches.get(root).succeeded


@mutant(
    "what-ended-with-a-batch-stays-ended", "core.batches.descendants:_revive", "child.ended_by is not None", "False"
)
@mutant(
    "what-comes-back-with-a-batch-expires-at-once",
    "core.batches.descendants:_revive",
    "not is_overdue(State.OPEN, child.deadline, now=now)",
    "True",
)
@pytest.mark.parametrize("at_first", ["root", "leaf"])
def test_a_tree_comes_back_with_its_root(service: Service, at_first: str) -> None:
    """All that ended with it, at any depth, and nothing else; each holds its item. A batch whose deadline has passed
    meanwhile fails its item. What somebody has reopened before stays live."""
    root = open_(service, items=3)
    child, own_end, overdue_child = (child_of(service, root, number) for number in range(3))
    leaf = open_(service, ItemId(child, 0, 0), items=1)
    ack(service, (child, 0, 1), (child, 0, 2))
    service.batches.cancel(own_end)
    service.batches.cancel(root, children=True)
    pass_deadline(service, overdue_child)
    for batch in (root,) if at_first == "root" else (leaf, root):
        service.batches.reopen(batch)
    assert states(service, root, child, leaf) == [State.SEALED] * 3
    assert states(service, own_end, overdue_child) == [State.CANCELLED] * 2
    assert [service.batches.get(batch).ended_by for batch in (child, leaf)] == [None, None]
    assert [service.batches.get(root).failed, service.batches.get(root).pending] == [2, 1]
    ack(service, (leaf, 0, 0))
    assert states(service, root, child, leaf) == [State.COMPLETE] * 3
    assert service.batches.get(child).succeeded
    assert events_of(service, leaf) == ["opened", "sealed", "cancelled", "reopened", "completed", "succeeded"]


def test_a_reopen_stops_the_end_of_the_children(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that it hasn't reached stay live, and the others come back."""
    monkeypatch.setattr(descendants, "PAGE", 1)
    root = open_(service, items=2)
    child, sibling = child_of(service, root), child_of(service, root, 1)
    service.database.write(lambda tx: batches.cancel(tx, root, b"", children=True))
    descendants._do_page(service.database, root, None, False)
    service.batches.reopen(root)
    descendants.sweep(service.database)
    assert states(service, root, child, sibling) == [State.SEALED] * 3
    assert len(events_of(service, child)) == 4
    assert len(events_of(service, sibling)) == 2


def test_a_reopened_batch_completes_at_once_if_nothing_is_pending(service: Service) -> None:
    """A repair has found its lost acks."""
    batch = open_(service, items=2)
    ack(service, (batch, 0, 0))
    service.batches.cancel(batch)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(items=1))
    assert service.batches.reopen(batch).batch.succeeded
    assert events_of(service, batch) == ["opened", "sealed", "cancelled", "reopened", "completed", "succeeded"]


def test_each_end_is_delivered_to_the_callback(database: Database) -> None:
    """The later one has an id of its own."""
    service = Service(database, combiner=Inline, sender=Written(Path(os.devnull)))
    batch = open_(service, callback=Callback("https://receiver.example/hook"))
    service.batches.cancel(batch)
    service.batches.reopen(batch)
    ack(service, *((batch, 0, index) for index in range(3)))
    while database.write(callbacks.plan):
        pass
    event_ids = sorted(delivery.event for delivery in service.webhooks.deliveries_of_batch(batch))
    assert event_ids == [f"batch:{batch}:{end}" for end in ("cancelled", "completed:1", "succeeded:1")]
