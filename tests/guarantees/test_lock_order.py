"""Transactions that want the same rows wait for each other one after the other, never in a circle.

Each test brings two of them to the places from which an earlier release went on into a deadlock. (That the statements
of all other tests keep the order is checked by `conftest`.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core import errors, writes
from core.acks.call import Call
from core.batches import nesting
from core.batches.batch import Opening
from core.batches.callbacks import Callback
from core.batches.lifecycle import Verb
from core.batches.writing import Extend
from core.commits.combiner import Inline
from core.errors import Fault
from core.feed import Append, NewEvent
from core.service import Service
from core.service.tallies import apply_of
from core.service.writes import KINDS
from core.storage import faults
from core.storage.database import Database
from core.tallies import Entry
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import ack, nobody_pays
from tests.guarantees.drivers.strangers import locked
from tests.guarantees.programs.dying import Written
from tests.mutants import mutant
from tests.support.waits import waits_for_a_lock

GROUP = 64

pytestmark = pytest.mark.mariadb


@pytest.fixture
def service(server_database: Database) -> Iterator[Service]:
    service_ = Service(server_database, combiner=Inline)
    yield service_
    service_.stop()


@pytest.fixture
def server_faults(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of all deadlocks and lock waits that the server reports to this process."""
    messages: list[str] = []
    classify = faults.classify

    def noted(error: BaseException) -> Fault | None:
        fault = classify(error)
        if fault in (Fault.CONFLICT, Fault.LOCK_WAIT) and not isinstance(error, faults.BeginAgain):
            messages.append(str(error))
        return fault

    monkeypatch.setattr(faults, "classify", noted)
    return messages


def new(service: Service, items: int = 4 * GROUP) -> int:
    return service.batches.open(Opening(group_size=GROUP, items=items)).batch.id


@mutant(
    "journaled-batches-are-locked-before-all-others",
    "core.acks.flush:_begin",
    "locked_groups = _lock(pipeline, direct)",
    """
completion.ask(pipeline, list(journal_states), locking)
locked_groups = _lock(pipeline, direct)
""",
)
def test_acks_and_extends_of_a_journaled_and_a_plain_batch_take_turns(
    service: Service, server_faults: list[str]
) -> None:
    """The flush would hold the journaled batch's row while it waits for the other one, which the extends get first."""
    plain, journaled = new(service), new(service)
    service.acks._bitfields.journal([journaled])
    assert ack(service, (plain, 0, 0), (journaled, 0, 0)).applied == 2
    with ThreadPoolExecutor(2) as pool:
        with locked(service.database, plain):
            extends = pool.submit(
                writes.commit, service.database, [Extend(batch=batch, count=1) for batch in (plain, journaled)], KINDS
            )
            assert waits_for_a_lock(service.database, extends)
            units = Call.of(Verb.ACK, [(plain, 0, 1), (journaled, 0, 1)]).chunks()
            acks = pool.submit(service.acks._commit, units, lock_waits=4)
            assert waits_for_a_lock(service.database, extends, acks)
        assert [outcome.value.start for outcome in extends.result(60)] == [4 * GROUP] * 2
        assert [outcome.applied for outcome in acks.result(60)] == [1, 1]
    assert server_faults == []


@mutant(
    "a-group-is-inserted-before-its-batch-is-locked",
    "core.acks.flush:_write_groups",
    "return group_rows.insert(new)",
    "pipeline.later(*group_rows.insert(new))\nreturn []",
)
@pytest.mark.parametrize("reason", [None, "late"])
def test_two_calls_that_create_a_group_take_turns(
    service: Service, server_faults: list[str], reason: str | None
) -> None:
    """The mask would have inserted the group's row when it waits for the batch's, which the other call gets first."""
    batch = new(service)
    verb = Verb.ACK if reason is None else Verb.FAIL
    with ThreadPoolExecutor(2) as pool:
        with locked(service.database, batch):
            few = pool.submit(ack, service, (batch, 1, 0), verb=verb, reason=reason)
            assert waits_for_a_lock(service.database, few)
            mask = pool.submit(service.acks.ack, Call.of(verb, masks=[(batch, 1, b"\xff" * 8)], reason=reason))
            assert waits_for_a_lock(service.database, few, mask)
        assert few.result(60).applied == 1
        assert (mask.result(60).result().applied, mask.result(60).result().repeated) == (GROUP - 1, 1)
    assert server_faults == []
    assert service.batches.verify(batch).ok


@mutant(
    "tallies-are-locked-after-batches",
    "core.writes:flush",
    """
for part in parts:
    part.judge(refused)
""",
    """
for part in reversed(parts):
    part.judge(refused)
""",
)
def test_all_verbs_that_share_a_transaction_keep_the_order(service: Service) -> None:
    """Also those of batches and of tallies."""
    batches = [new(service), new(service)]
    outcomes = writes.commit(
        service.database,
        [
            *(Extend(batch=batch, count=1, idempotency_key="more") for batch in reversed(batches)),
            apply_of("sales", [Entry(key, 1, "orders", 0, 0, 7, 0) for key in ("b", "a")], None),
            Append(events=[NewEvent("mine", "paid")]),
        ],
        KINDS,
    )
    assert [outcome.error for outcome in outcomes] == [None] * 4


@mutant(
    "debts-are-locked-verb-by-verb",
    "core.batches.nesting:strike_out",
    "set(tx.scalars(query.with_for_update(skip_locked=skip_locked)))",
    "{due.child for due in debts}",
)
def test_debts_of_both_kinds_are_struck_out_in_the_order_of_the_children(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the verbs are ordered."""
    nobody_pays(monkeypatch)
    parent = new(service)
    children = [
        service.batches.open(Opening(group_size=GROUP, items=1, sealed=True, parent=ItemId(parent, 0, index))).batch.id
        for index in range(3)
    ]
    for child, verb in zip(children, (Verb.FAIL, Verb.ACK, Verb.FAIL), strict=True):
        ack(service, (child, 0, 0), verb=verb)
    dues = service.database.read(nesting.debts)
    assert [due.child for due in dues] == children
    service.database.write(nesting.strike_out, dues)
    assert service.database.read(nesting.debts) == []


@mutant(
    "a-deletion-locks-the-feed-before-its-callback",
    "core.batches.purge:condemn",
    """
        if not owes:
            callbacks.disable(tx, batch_id)
        if is_live:
            batches.end(tx, batch, State.CANCELLED, now, children=False)
    """,
    """
        if False:
            pass
        if is_live:
            batches.end(tx, batch, State.CANCELLED, now, children=False)
            callbacks.disable(tx, batch_id)
    """,
)
def test_a_deletion_disables_the_callback_before_it_locks_the_feed(server_database: Database) -> None:
    """Of a live batch, which it cancels first; conftest checks the order."""
    service = Service(server_database, combiner=Inline, sender=Written(Path(os.devnull)))
    callback = Callback("https://receiver.example/hook")
    batch = service.batches.open(Opening(items=1, callback=callback)).batch.id
    service.batches.delete(batch)
    with pytest.raises(errors.BatchNotFound):
        service.batches.get(batch)
