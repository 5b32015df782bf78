"""Descendants: the end of a batch ends the live batches below it, at any depth, through crashes and locked rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa

from core import errors, explain, janitor
from core.acks import parents
from core.acks.call import Rejected
from core.batches import batch as batches
from core.batches import descendants, expiry, nesting
from core.batches.lifecycle import Duty, State, Verb
from core.batches.tolerance import OnExceeded
from core.batches.update import Patch
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import ack
from tests.guarantees.drivers.strangers import locked
from tests.guarantees.models.service import events_of
from tests.mutants import mutant

pytestmark = pytest.mark.usefixtures("some_journaled")

GROUP = 64


@pytest.fixture
def server_service(server_database: Database) -> Iterator[Service]:
    service = Service(server_database, combiner=Inline)
    yield service
    service.stop()


def open_(
    service: Service, parent: ItemId | None = None, *, items: int = 3, sealed: bool = True, **more: object
) -> int:
    opening = batches.Opening(group_size=GROUP, items=items, sealed=sealed, parent=parent, **more)  # type: ignore[arg-type]
    return service.batches.open(opening).batch.id


def child_of(service: Service, parent: int, number: int = 0) -> int:
    return open_(service, ItemId(parent, *divmod(number, GROUP)))


def states(service: Service, *ids: int) -> list[State]:
    return [service.batches.get(batch).state for batch in ids]


def duty(service: Service, batch: int) -> Duty | None:
    return service.batches.get(batch).children_due


def with_children(service: Service, root: int) -> None:
    service.batches.cancel(root, reason="the wrong catalog", children=True)


def forgotten_at_first(service: Service, root: int) -> None:
    service.batches.cancel(root, reason="the wrong catalog")
    service.batches.cancel(root, children=True)


def by_its_deadline(service: Service, root: int) -> None:
    pass_deadline(service, root)
    assert janitor.expire_overdue(service.database) == [root]


def pass_deadline(service: Service, batch: int) -> None:
    with service.database.engine.begin() as tx:
        past = tables.clock(tx) - timedelta(days=1)
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(deadline=past))


def by_the_janitor(service: Service, root: int) -> None:
    pass_deadline(service, root)
    assert janitor.run_once(service.database, expiry.Policy()).expired_sealed == [root]


def by_a_failure(service: Service, root: int) -> None:
    ack(service, (root, 0, 2), verb=Verb.FAIL)
    assert descendants.sweep(service.database).ended == 3


def by_an_update(service: Service, root: int) -> None:
    service.batches.update(root, Patch(on_exceeded=OnExceeded.CONTINUE))
    ack(service, (root, 0, 2), verb=Verb.FAIL)
    service.batches.update(root, Patch(on_exceeded=OnExceeded.CANCEL))


@mutant(
    "the-end-of-a-batch-stays-above",
    "core.batches.settle:Transition.columns",
    "self.ended_early and has_children",
    "False",
)
@mutant("children-dont-pass-their-end-on", "core.batches.descendants:_end", "passed_on.append(child.id)", "pass")
@mutant(
    "an-ended-child-keeps-the-end-to-itself",
    "core.batches.descendants:_page",
    "row.state in LIVE or (row.children and row.state in TERMINAL)",
    "row.state in LIVE",
)
@mutant("a-forgotten-flag-stays-forgotten", "core.batches.batch:cancel", "not children or not batch.children", "True")
@mutant(
    "a-batch-ends-by-its-parent-and-not-by-the-root",
    "core.batches.descendants:_end",
    "parent.id if parent.ended_by is None else parent.ended_by",
    "parent.id",
)
@mutant("the-reason-stays-above", "core.batches.descendants:_end", "parent.reason", "None")
@mutant(
    "children-that-end-owe-their-parent", "core.batches.descendants:_end", "replace(result, parent_due=None)", "result"
)
@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (with_children, State.CANCELLED, "the wrong catalog"),
        (forgotten_at_first, State.CANCELLED, "the wrong catalog"),
        (by_its_deadline, State.EXPIRED, None),
        (by_the_janitor, State.EXPIRED, None),
        (by_a_failure, State.CANCELLED, None),
        (by_an_update, State.CANCELLED, None),
    ],
)
def test_the_end_of_a_batch_ends_all_live_batches_below_it(
    service: Service, end: Callable[[Service, int], None], state: State, reason: str | None
) -> None:
    """Three levels, at once, or with the next sweep after a failure. They name the root, take no acks, and owe nothing.
    A batch that has ended stays as it is, and its own live children end."""
    root = open_(service, items=4, tolerated_failures=1, on_exceeded=OnExceeded.CANCEL)
    child = child_of(service, root)
    grandchild = child_of(service, child, 2)
    complete = child_of(service, child)
    ack(service, (complete, 0, 0), (complete, 0, 1), (complete, 0, 2))
    sibling = child_of(service, root, 1)
    nephew = child_of(service, sibling)
    service.batches.cancel(sibling, reason="a mistake")
    end(service, root)
    root_ = service.batches.get(root)
    assert (root_.state, root_.reason, root_.ended_by) == (state, reason, None)
    for batch, ancestor, why in ((child, root, reason), (grandchild, root, reason), (nephew, sibling, "a mistake")):
        batch_ = service.batches.get(batch)
        assert (batch_.state, batch_.ended_by, batch_.reason) == (State.CANCELLED, ancestor, why)
        assert events_of(service, batch) == ["opened", "sealed", "cancelled"]
        assert ack(service, (batch, 0, 1)).rejected == [Rejected("cancelled", item=ItemId(batch, 0, 1))]
        assert f"batch {ancestor} above it" in service.batches.explain(batch).reasons[0].text
    assert states(service, complete, sibling) == [State.COMPLETE, State.CANCELLED]
    assert (service.batches.get(sibling).reason, service.batches.get(sibling).ended_by) == ("a mistake", None)
    assert service.database.read(nesting.debts) == []
    assert [duty(service, batch) for batch in (root, child, sibling)] == [None] * 3


def test_a_cancel_without_children_leaves_them_alone(service: Service) -> None:
    """So does the deletion of a live batch."""
    for end in (service.batches.cancel, service.batches.delete):
        root = open_(service)
        child = child_of(service, root)
        end(root)
        descendants.sweep(service.database)
        assert states(service, child) == [State.SEALED]


def test_the_first_reason_stays(service: Service) -> None:
    """A repeat of the call, with another reason or none, gets the same answer and makes no event."""
    root = open_(service)
    for reason in ("the wrong catalog", None, "another one"):
        assert service.batches.cancel(root, reason=reason, children=True).reason == "the wrong catalog"
    assert events_of(service, root) == ["opened", "sealed", "cancelled"]
    (event,) = (event for event in service.feed.read(0, 100, batch=root).events if event.type == "batch.cancelled")
    assert '"reason": "the wrong catalog"' in (event.data or "")


@mutant(
    "a-page-begins-at-the-first-child",
    "core.batches.descendants:_page",
    "parent.children_told if start is None else start",
    "0 if start is None else start",
)
@mutant(
    "a-page-doesnt-note-how-far-it-came",
    "core.batches.descendants:_page",
    "next_start or 0",
    "0",
)
def test_a_sweep_continues_where_the_last_one_stopped(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is a transaction of its own. Whoever continues reads no child twice."""
    monkeypatch.setattr(descendants, "PAGE", 2)
    root = open_(service, items=5)
    children = [child_of(service, root, number) for number in range(5)]
    service.database.write(lambda tx: batches.cancel(tx, root, b"", children=True))
    for told in (2, 4):
        descendants._do_page(service.database, root, None, False)
        assert service.batches.get(root).children_told == told
        assert states(service, *children) == [State.CANCELLED] * told + [State.SEALED] * (5 - told)
    assert descendants.sweep(service.database).ended == 1
    assert (duty(service, root), service.batches.get(root).children_told) == (None, 0)


@mutant(
    "a-locked-child-is-forgotten",
    "core.batches.descendants:_page",
    "has_skipped or len(children) < len(child_ids)",
    "False",
)
@mutant(
    "a-locked-child-delays-the-others",
    "core.batches.descendants:_do_page",
    "database.write(_page, *arguments, True, lock_waits=0, lock_wait=LOCK_WAIT)",
    "database.write(_page, *arguments, False, lock_waits=0, lock_wait=LOCK_WAIT)",
)
@pytest.mark.mariadb
def test_a_locked_child_ends_later_than_the_others(server_service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It delays nothing but itself, also beyond its page; the next sweep ends it."""
    service = server_service
    monkeypatch.setattr(descendants, "PAGE", 2)
    root = open_(service, items=5)
    children = [child_of(service, root, number) for number in range(5)]
    with locked(service.database, children[1]):
        service.batches.cancel(root, children=True)
        assert states(service, *children) == [State.CANCELLED, State.SEALED, *[State.CANCELLED] * 3]
        assert duty(service, root) is Duty.END
    assert descendants.sweep(service.database).ended == 1
    assert (states(service, children[1]), duty(service, root)) == ([State.CANCELLED], None)


@pytest.mark.mariadb
def test_a_locked_parent_is_left_to_the_next_sweep(server_service: Service) -> None:
    """Its sweep goes on with others."""
    service = server_service
    roots = [open_(service) for _ in range(2)]
    children = [child_of(service, root) for root in roots]
    for root in roots:
        service.database.write(lambda tx, root=root: batches.cancel(tx, root, b"", children=True))  # type: ignore[misc]
    with locked(service.database, roots[0]):
        result = descendants.sweep(service.database)
        assert (result.ended, result.left) == (1, [roots[0]])
    assert descendants.sweep(service.database).ended == 1
    assert states(service, *children) == [State.CANCELLED] * 2


@mutant(
    "a-deletion-forgets-the-children",
    "core.batches.purge:condemn",
    "batch.children_due is Duty.END",
    "False",
)
@mutant(
    "the-janitor-forgets-the-children-of-what-it-deletes",
    "core.batches.expiry:remove",
    "batch.children_due is Duty.END",
    "False",
)
def test_a_batch_is_not_deleted_before_its_children_have_ended(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that cancelled it died before that. A deletion ends them first; retention waits for the sweep."""
    for is_call in (True, False):
        root = open_(service)
        child = child_of(service, root)
        service.database.write(lambda tx, root=root: batches.cancel(tx, root, b"", children=True))  # type: ignore[misc]
        if is_call:
            service.batches.delete(root)
        else:
            policy = expiry.Policy(keep=timedelta(0))
            assert not expiry.remove(service.database, root, policy)
            descendants.sweep(service.database)
            assert expiry.remove(service.database, root, policy)
        assert states(service, child) == [State.CANCELLED]
        with pytest.raises(errors.BatchNotFound):
            service.batches.get(root)
        assert "deleted since" in service.batches.explain(child).reasons[0].text


def test_what_is_left_of_the_end_is_explained(service: Service) -> None:
    """A batch says that its children must still end."""
    root = open_(service)
    child_of(service, root)
    service.database.write(lambda tx: batches.cancel(tx, root, b"", children=True))
    codes = [reason.code for reason in service.database.snapshot(explain.explain, root).reasons]
    assert codes == ["ended", "children_not_told"]


def test_the_janitor_ends_what_a_dead_process_left(service: Service) -> None:
    """Without a dispatcher, too."""
    root = open_(service)
    child = child_of(service, root)
    grandchild = child_of(service, child)
    service.database.write(lambda tx: batches.cancel(tx, root, b"", children=True))
    assert janitor.run_once(service.database, expiry.Policy()).children == 2
    assert states(service, child, grandchild) == [State.CANCELLED] * 2


def test_a_payment_that_ends_a_parent_ends_its_other_children(service: Service) -> None:
    """A child's failure passes the tolerance of its parent, which is cancelled, and so is the child's sibling."""
    root = open_(service, tolerated_failures=0, on_exceeded=OnExceeded.CANCEL)
    child, sibling = child_of(service, root), child_of(service, root, 1)
    service.batches.cancel(child)
    assert states(service, root) == [State.CANCELLED]
    descendants.sweep(service.database)
    assert states(service, sibling) == [State.CANCELLED]
    assert parents.sweep(service.database) == 0
