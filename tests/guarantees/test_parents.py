"""Payments to the parents of nested batches: whatever is locked, only the call that ended the child waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from core import errors
from core.acks.call import Call
from core.acks.parents import Stuck, sweep
from core.batches import batch as batches
from core.batches import nesting
from core.batches.lifecycle import Verb
from core.commits.combiner import Combiner
from core.service import Service
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import ack, nobody_pays
from tests.guarantees.drivers.strangers import lock_waits, locked
from tests.mutants import mutant

GROUP = 64


def child_of(service: Service, item: ItemId, *, items: int) -> int:
    return service.batches.open(batches.Opening(group_size=GROUP, items=items, sealed=True, parent=item)).batch.id


def debts(service: Service) -> list[nesting.Due]:
    return service.database.read(nesting.debts)


@pytest.fixture
def combining_service(server_database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A combining service whose calls wait for payments without a limit."""
    monkeypatch.setattr("core.acks.parents.PATIENCE", 120.0)
    service = Service(server_database, combiner=Combiner)
    yield service
    service.stop()


def _parents(service: Service, count: int) -> tuple[list[int], list[int]]:
    """Parents of two items: one item is acked, and the other has a child of one item."""
    parents = [service.batches.open(batches.Opening(group_size=GROUP, items=2)).batch.id for _ in range(count)]
    for parent in parents:
        ack(service, (parent, 0, 1))
    return parents, [child_of(service, ItemId(parent, 0, 0), items=1) for parent in parents]


@mutant(
    "a-flush-waits-for-payments",
    "core.service.acks:AckService._commit",
    "outcome.paid = payments.get(unit.batch)",
    "payments[unit.batch].result()",
)
@mutant(
    "a-call-is-answered-before-its-parent-is-paid",
    "core.service.acks:AckService._commit",
    "outcome.paid = payments.get(unit.batch)",
    "pass",
)
@pytest.mark.mariadb
@pytest.mark.parametrize("groups", [False, True], ids=["row", "group"])
def test_a_locked_parent_delays_only_the_call_that_ended_its_child(combining_service: Service, *, groups: bool) -> None:
    """Acks of other batches go on, including those that end children of other parents; once the parent is free its item
    is resolved, and then the call is answered."""
    (locked_child, free), (child, other) = _parents(combining_service, 2)
    plain = combining_service.batches.open(batches.Opening(group_size=GROUP, items=40)).batch.id
    with locked(combining_service.database, locked_child, groups=groups):
        waiting = combining_service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0)]))
        for index in range(20):
            assert ack(combining_service, (plain, 0, index)).applied == 1
        calls = [
            combining_service.acks.ack(Call.of(Verb.ACK, [item]))
            for item in ((other, 0, 0), (plain, 0, 20), (child, 0, 0))
        ]
        assert calls[0].result(60).completed[other].newly
        assert combining_service.batches.get(free).acked == 2
        assert [call.result(60).applied for call in calls[1:]] == [1, 0]
        assert combining_service.batches.get(child).complete
        assert not waiting.done()
    assert waiting.result(60).completed[child].newly
    assert combining_service.batches.get(locked_child).acked == 2
    assert debts(combining_service) == []


@mutant(
    "a-call-waits-for-a-locked-parent-without-end",
    "core.acks.parents:Payer._pay_level",
    "time.monotonic() >= bill.until",
    "False",
)
@mutant(
    "a-sweep-tries-locked-parents-again-and-again",
    "core.acks.parents:sweep",
    "stuck_parents.add({due.item.batch for due in remaining})",
    "pass",
)
@mutant("locked-parents-are-found-one-by-one", "core.acks.commit:commit", "database.read(locked, units)", "frozenset()")
@pytest.mark.mariadb
def test_a_call_whose_parent_stays_locked_is_answered_and_the_sweep_pays(
    combining_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bounded time, also if a verb other than an ack ended the child; the sweep pays the others and remembers
    the locked ones. All parents locked at the same time cost one wait."""
    monkeypatch.setattr("core.acks.parents.PATIENCE", 0.2)
    parents, children = _parents(combining_service, 8)
    with (
        locked(combining_service.database, *parents[:3]),
        locked(combining_service.database, *parents[3:6], groups=True),
    ):
        calls = [combining_service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0)])) for child in children[:5]]
        assert all(call.result(60).completed[child].newly for call, child in zip(calls, children, strict=False))
        combining_service.batches.cancel(children[5])
        with monkeypatch.context() as patches:
            nobody_pays(patches)
            for child in children[6:]:
                ack(combining_service, (child, 0, 0))
        assert len(debts(combining_service)) == 8
        blocker = Stuck()
        waits = lock_waits()
        assert sweep(combining_service.database, stuck_parents=blocker) == 2
        assert lock_waits() == waits + 1
        assert [combining_service.batches.get(parent).pending for parent in parents] == [1] * 6 + [0] * 2
        assert sorted(blocker.parents()) == parents[:6]
        assert sweep(combining_service.database, stuck_parents=blocker) == 0
        assert lock_waits() == waits + 1
    assert sweep(combining_service.database, stuck_parents=blocker) == 0
    assert sweep(combining_service.database) == 6
    assert debts(combining_service) == []
    assert [combining_service.batches.get(parent).pending for parent in parents] == [0] * 8


def test_a_chain_is_paid_while_other_acks_go_on(database: Database) -> None:
    """The payment reaches the root before the call is answered; a later ack is answered earlier."""
    service = Service(database, combiner=Combiner)
    plain = service.batches.open(batches.Opening(group_size=GROUP, items=GROUP)).batch.id
    chain = [service.batches.open(batches.Opening(group_size=GROUP, items=1, sealed=True)).batch.id]
    for _ in range(100):
        chain.append(child_of(service, ItemId(chain[-1], 0, 0), items=1))
    waiting = service.acks.ack(Call.of(Verb.ACK, [(chain[-1], 0, 0)]))
    assert ack(service, (plain, 0, 0)).applied == 1
    assert not waiting.done()
    assert waiting.result(60).completed[chain[-1]].newly
    assert all(service.batches.get(batch).succeeded for batch in chain)
    assert debts(service) == []
    service.stop()


def test_a_stop_answers_calls_whose_parents_are_still_to_be_paid(database: Database) -> None:
    """All of them, once they are paid."""
    service = Service(database, combiner=Combiner)
    parents, children = _parents(service, 5)
    calls = [service.acks.ack(Call.of(Verb.ACK, [(child, 0, 0)])) for child in children]
    service.stop()
    assert all(call.result(0).completed[child].newly for call, child in zip(calls, children, strict=True))
    with Database(database.url.render_as_string(hide_password=False)) as database_:
        assert [database_.read(batches.get, parent).acked for parent in parents] == [2] * 5


@mutant(
    "a-combiner-counts-on-a-thread-that-did-not-start",
    "core.threads:QueueThread.start",
    "self._thread = start(self._serve, name=self._name)",
    "self._thread = threading.main_thread()\nself._thread = start(self._serve, name=self._name)",
)
@mutant("a-payment-fails-a-committed-flush", "core.acks.parents:Payer.pay", "errors.Unavailable", "ZeroDivisionError")
def test_calls_go_on_after_the_system_allowed_no_more_threads(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread can't be started at first. The call that ended a child is answered, and the sweep pays its parent."""
    _, children = _parents(Service(database), 2)
    start, refused = threading.Thread.start, set[str]()

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name not in refused and not thread.name.startswith("Thread-"):
            refused.add(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    service = Service(database, combiner=Combiner)
    first, second = ([(child, 0, 0)] for child in children)
    with pytest.raises(errors.Unavailable):
        service.acks.ack(Call.of(Verb.ACK, first))
    assert service.acks.ack(Call.of(Verb.ACK, first)).result(30).completed[children[0]].newly
    assert [due.child for due in debts(service)] == children[:1]
    assert service.acks.ack(Call.of(Verb.ACK, second)).result(60).completed[children[1]].newly
    assert sweep(database) == 1
    with pytest.raises(errors.Unavailable):
        service.reads.batches.submit(children[0], lambda _: None)
    finished = threading.Event()
    service.reads.batches.submit(children[0], lambda _: finished.set())
    assert finished.wait(60)
    service.stop()
