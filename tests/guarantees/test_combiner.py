"""Group commit: one suite for the combiner and its inline counterpart, and one for the promises of the combiner alone.

Where a test needs to know which calls are waiting, a gate stands before the commit: nothing depends on timing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
import structlog
from prometheus_client import REGISTRY
from sqlalchemy.engine import Connection

from core import errors
from core.acks import apply, commit, flush, parents
from core.acks.call import AckResult, Call, Outcome, Unit
from core.batches import batch as batches
from core.batches.lifecycle import State, Verb
from core.bits.cache import BitfieldCache
from core.commits import aside, lanes
from core.commits.admission import Admission
from core.commits.combiner import Combiner, Commit, GroupCommit, Inline
from core.commits.lanes import FLUSH_COST, LEAST_COST, UNIT_GROUPS
from core.commits.operation import UnitOutcome
from core.commits.pending import HERE, Pending
from core.feed import Append
from core.service import Service
from core.storage import database, schema, tables
from core.storage.database import Database
from tests.guarantees.drivers.strangers import head_locked, head_waits, lock_waits, locked
from tests.mutants import mutant
from tests.support.exposition import Change

GROUP = 64


class Gate:
    """Stands before the commit: records each flush that arrives, and lets it pass once the gate is open."""

    def __init__(self, commit: Commit) -> None:
        self.commit = commit
        self.flushes: list[list[Unit]] = []
        self.lock_waits: list[int] = []
        """The lock waits of each flush."""
        self.came = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, units: Sequence[Unit], *, lock_waits: int) -> list[Outcome]:
        self.lock_waits.append(lock_waits)
        self.flushes.append(list(units))
        self.came.release()
        assert self.opened.wait(60)
        return self.commit(units, lock_waits=lock_waits)


class Gated:
    """A service whose combiner has a gate."""

    def __init__(self, database: Database, **options: Any) -> None:
        self.service = Service(database, combiner=lambda commit: Combiner(self._gate(commit), **options))

    def _gate(self, commit: Commit) -> Gate:
        self.gate = Gate(commit)
        return self.gate

    def occupy(self) -> None:
        """Make one flush wait at the gate, so that all later calls must wait."""
        self.service.acks.ack(Call.of(Verb.ACK, [(10**9, 0, 0)]))
        assert self.gate.came.acquire(timeout=60)


@pytest.fixture(params=[Inline, Combiner])
def any_service(request: pytest.FixtureRequest, database: Database) -> Iterator[Service]:
    """A service with the combiner, and one with its inline counterpart."""
    combiner: Callable[[Commit], GroupCommit] = request.param
    service = Service(database, combiner=combiner)
    yield service
    service.stop()


@contextlib.contextmanager
def gated(database: Database, **options: Any) -> Iterator[Gated]:
    gate = Gated(database, **options)
    try:
        yield gate
    finally:
        gate.gate.opened.set()
        gate.service.stop()


def new(service: Service, items: int, *, sealed: bool = True) -> int:
    return service.batches.open(batches.Opening(group_size=GROUP, items=items, sealed=sealed)).batch.id


def ack(service: Service, *items: tuple[int, int, int], key: str | None = None) -> AckResult:
    return service.acks.ack(Call.of(Verb.ACK, items, idempotency_key=key)).result(30)


def break_counts(database: Database, batch: int) -> None:
    """Store counts that no request could: they say that everything is acked, the bits that nothing is."""
    with database.engine.begin() as tx:
        batches.update(tx, batch, acked=tables.batches.c["items"])


# The combiner and its inline counterpart.


def test_a_call_is_answered_with_what_it_changed_in_all_its_batches(any_service: Service) -> None:
    """A call's applied, repeated, rejected and completed are the totals of its parts."""
    first, other = new(any_service, 2), new(any_service, GROUP + 1)
    assert ack(any_service, (first, 0, 0)).applied == 1
    call = Call.of(Verb.ACK, [(first, 0, 0), (first, 0, 1), (first, 0, 2), (10**9, 0, 0)], [(other, 0, b"\xff" * 8)])
    answer = any_service.acks.ack(call).result(30)
    assert (answer.applied, answer.repeated) == (GROUP + 1, 1)
    assert sorted((rejection.reason, str(rejection.item)) for rejection in answer.rejected) == [
        ("unknown_batch", f"{10**9}:0:0"),
        ("unknown_item", f"{first}:0:2"),
    ]
    assert {batch: completion.newly for batch, completion in answer.completed.items()} == {first: True}
    assert any_service.batches.get(other).pending == 1


def test_a_call_without_items_is_answered_at_once(any_service: Service) -> None:
    """It has nothing to commit, so it doesn't wait."""
    assert any_service.acks.ack(Call.of(Verb.ACK)).result(0) == AckResult()


def test_many_concurrent_calls_are_all_answered_and_exactly_one_gets_newly(any_service: Service) -> None:
    """Twelve threads ack a batch in strides, each item twice; the counts agree, and exactly one call completed the
    batch."""
    batch = new(any_service, 5 * GROUP)

    def consume(worker: int) -> list[AckResult]:
        return [ack(any_service, (batch, *divmod(number, GROUP))) for number in range(worker // 2, 5 * GROUP, 6)]

    with ThreadPoolExecutor(12) as pool:
        answers = [answer for part in pool.map(consume, range(12)) for answer in part]
    assert sum(answer.applied for answer in answers) == sum(answer.repeated for answer in answers) == 5 * GROUP
    assert [answer.completed[batch].newly for answer in answers if batch in answer.completed].count(True) == 1
    assert any_service.batches.verify(batch).ok
    assert any_service.batches.get(batch).state is State.COMPLETE


def test_a_call_of_more_groups_than_fit_a_flush_is_split_and_gets_one_answer(any_service: Service) -> None:
    """1,100 groups in one call: three transactions, one answer, and `newly` once and again for the retry."""
    groups = 2 * UNIT_GROUPS + 76
    batch = new(any_service, groups * GROUP)
    masks = [(batch, group, b"\xff" * 8) for group in range(groups)]
    for attempt in range(2):
        answer = any_service.acks.ack(Call.of(Verb.ACK, (), masks, idempotency_key="all")).result(30)
        assert (answer.applied, answer.repeated)[attempt] == groups * GROUP
        assert not answer.rejected
        assert [(completion.newly, completion.newly_succeeded) for completion in answer.completed.values()] == [
            (True, True)
        ]
    assert any_service.batches.verify(batch).ok


@mutant(
    "counts-are-clamped",
    "core.acks.completion:_judge",
    "_check(batch, change, delta)",
    "change = change._replace(acked=min(change.acked, row.items - change.failed))",
)
def test_a_batch_whose_counts_are_broken_fails_alone(any_service: Service) -> None:
    """Impossible counts are reported, not clamped, and only to calls that name items of that batch."""
    damaged, sound = new(any_service, 3), new(any_service, 3)
    break_counts(any_service.database, damaged)
    with pytest.raises(errors.InconsistentBatch):
        ack(any_service, (damaged, 0, 0))
    assert ack(any_service, (sound, 0, 0)).applied == 1
    with pytest.raises(errors.InconsistentBatch):
        ack(any_service, (damaged, 0, 0), (sound, 0, 1))
    assert not any_service.batches.verify(damaged).ok
    assert any_service.batches.verify(damaged).counted_acked == 0
    # The other part of that call may be applied or not; a retry is right in either case.
    repeat = ack(any_service, (sound, 0, 1), (sound, 0, 2))
    assert repeat.applied + repeat.repeated == 2
    assert any_service.batches.get(sound).state is State.COMPLETE


# The combiner.


@mutant(
    "every-call-in-the-flush-gets-newly",
    "core.acks.completion:completed_for",
    "delta.last_resolver.call is unit.call",
    "True",
)
@mutant(
    "the-first-call-of-the-flush-gets-newly",
    "core.acks.apply:apply",
    "delta.last_resolver = unit",
    "delta.last_resolver = delta.last_resolver or unit",
)
def test_merged_calls_share_one_flush_and_exactly_one_gets_newly(database: Database) -> None:
    """Calls that wait during a transaction join the next one, in order of arrival, and get its outcome."""
    with gated(database) as gate:
        batch = new(gate.service, 100)
        gate.occupy()
        futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, *divmod(number, GROUP))])) for number in range(100)]
        late = gate.service.acks.ack(Call.of(Verb.FAIL, [(batch, 0, 5)]))
        assert not any(future.done() for future in futures), "answered before the commit"
        gate.gate.opened.set()
        answers = [future.result(30) for future in futures]
        assert [len(flush) for flush in gate.gate.flushes] == [1, 101]
        assert [(answer.applied, answer.repeated) for answer in answers] == [(1, 0)] * 100
        assert [answer.completed[batch].newly for answer in answers] == [False] * 99 + [True]
        assert (late.result(30).applied, late.result(30).repeated) == (0, 1)
        assert late.result(30).completed[batch].newly is False


@mutant(
    "a-group-counts-for-each-call-that-names-it",
    "core.commits.lanes:Load.add",
    "groups.update(unit.groups())",
    "groups = groups | unit.groups()",
)
def test_calls_for_the_same_groups_share_a_flush_however_many_they_are(database: Database) -> None:
    """A flush is bounded in distinct groups: a group that ten calls name counts once."""
    groups = UNIT_GROUPS // 4
    with gated(database) as gate:
        batch = new(gate.service, groups * GROUP)
        gate.occupy()
        futures = [
            gate.service.acks.ack(Call.of(Verb.ACK, [(batch, group, index) for group in range(groups)]))
            for index in range(10)
        ]
        gate.gate.opened.set()
        assert [future.result(30).applied for future in futures] == [groups] * 10
        assert [len(flush) for flush in gate.gate.flushes] == [1, 10]


def test_an_item_in_several_merged_calls_counts_for_the_first(database: Database) -> None:
    """Merged duplicates are repeats of the first call, and only the call that acks the failed item again sees it as
    new."""
    with gated(database) as gate:
        batch = new(gate.service, 1)
        gate.occupy()
        verbs = [Verb.FAIL, Verb.ACK, Verb.ACK, Verb.FAIL]
        futures = [gate.service.acks.ack(Call.of(verb, [(batch, 0, 0)])) for verb in verbs]
        gate.gate.opened.set()
        answers = [future.result(30) for future in futures]
        assert len(gate.gate.flushes) == 2
        assert [answer.applied for answer in answers] == [1, 1, 0, 0]
        assert [answer.repeated for answer in answers] == [0, 0, 1, 1]
        completions = [answer.completed[batch] for answer in answers]
        assert [completion.newly for completion in completions] == [True, False, False, False]
        assert [completion.newly_succeeded for completion in completions] == [False, True, False, False]
        assert gate.service.batches.get(batch).succeeded


@mutant(
    "the-queue-has-no-bound",
    "core.commits.lanes:Backlog.enter",
    "self.units + units > self._most_units",
    "False",
)
def test_calls_above_the_bound_are_refused_and_waiting_calls_are_answered(database: Database) -> None:
    """Above the bound a call is refused at once and asked to come back; nothing of it is queued."""
    with gated(database, max_waiting=4) as gate:
        batch = new(gate.service, 10)
        gate.occupy()
        futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, index)])) for index in range(3)]
        with pytest.raises(errors.Overloaded):
            gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 9)]))
        gate.gate.opened.set()
        assert [future.result(30).applied for future in futures] == [1, 1, 1]
        assert ack(gate.service, (batch, 0, 9)).applied == 1


class TwoUnits(Admission):
    """Admits two units, from the first flush on until it is opened."""

    closed = True

    def taking(self, now: float, wait: float) -> None:
        self.limit = 2 if self.closed and self.before else None
        self.before = True

    before = False


@mutant("refused-acks-are-committed", "core.commits.lanes:MainLane.shorten", "queue.popleft()", "queue[0]")
@mutant(
    "acks-in-excess-are-queued",
    "core.commits.combiner:Combiner.is_full",
    "self._main.waiting < admission.limit",
    "True",
)
def test_a_shortened_queue_refuses_the_oldest_calls_and_every_batch_keeps_its_share(database: Database) -> None:
    """Each batch keeps its share; refused items stay pending, and the others are acked. While there is a bound, later
    calls are refused before they are queued."""
    admission = TwoUnits()
    with gated(database, admission=admission) as gate:
        first, other = new(gate.service, 20), new(gate.service, 20)
        gate.occupy()
        calls = [
            gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, index)]))
            for index in range(4)
            for batch in (first, other)
        ]
        call_of_both = gate.service.acks.ack(Call.of(Verb.ACK, [(first, 0, 19), (other, 0, 19)]))
        assert not gate.service.acks.is_full()
        gate.gate.opened.set()
        sent_away = [future for future in calls if isinstance(future.exception(30), errors.Overloaded)]
        assert sent_away == calls
        assert call_of_both.result(30).applied == 2  # the newest call of each batch
        assert [gate.service.batches.get(batch).acked for batch in (first, other)] == [1, 1]

        gate.gate.opened.clear()
        while gate.gate.came.acquire(blocking=False):
            pass
        gate.occupy()
        waiting = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])) for batch in (first, other)]
        assert gate.service.acks.is_full()
        with pytest.raises(errors.Overloaded, match="more acks arrive"):
            gate.service.acks.ack(Call.of(Verb.ACK, [(first, 0, 1)]))
        admission.closed = False
        gate.gate.opened.set()
        assert [future.result(30).applied for future in waiting] == [1, 1]
        assert ack(gate.service, (first, 0, 18)).applied == 1
        assert not gate.service.acks.is_full()
        assert [gate.service.batches.verify(batch).ok for batch in (first, other)] == [True, True]


@mutant(
    "large-calls-have-no-bound",
    "core.commits.lanes:Backlog.enter",
    "self.bytes + size > self._most_bytes",
    "False",
)
def test_large_calls_are_refused_before_they_fill_the_memory(database: Database) -> None:
    """The bound counts bytes too. Small calls go on meanwhile, and after the large ones are done there is room
    again."""
    with gated(database, max_bytes=150_000) as gate:
        batch = new(gate.service, 1000 * GROUP)
        large = [(batch, group, b"\xff" * (GROUP // 8)) for group in range(400)]
        gate.occupy()
        first = gate.service.acks.ack(Call.of(Verb.ACK, masks=large))
        with pytest.raises(errors.Overloaded, match="bytes"):
            gate.service.acks.ack(Call.of(Verb.ACK, masks=large))
        small = gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 999, 0)]))
        gate.gate.opened.set()
        assert (first.result(30).applied, small.result(30).applied) == (400 * GROUP, 1)
        for _ in range(3):  # all of the room is free again, each time
            assert gate.service.acks.ack(Call.of(Verb.ACK, masks=large)).result(30).repeated == 400 * GROUP


@mutant(
    "a-broken-batch-fails-its-neighbours",
    "core.commits.apart:attempt",
    "errors.batches_of(error).intersection",
    "frozenset",
)
def test_one_broken_batch_in_a_merged_flush_fails_alone(database: Database) -> None:
    """The flush is repeated batch by batch, so the neighbours of a broken batch are applied, once."""
    with gated(database) as gate:
        ids = [new(gate.service, 2) for _ in range(3)]
        break_counts(database, ids[1])
        gate.occupy()
        futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])) for batch in ids]
        gate.gate.opened.set()
        assert futures[0].result(30).applied == futures[2].result(30).applied == 1
        with pytest.raises(errors.InconsistentBatch):
            futures[1].result(30)
        assert [gate.service.batches.get(batch).acked for batch in (ids[0], ids[2])] == [1, 1]


@mutant(
    "merging-is-refused-in-silence",
    "core.commits.combiner:Combiner._flush",
    "is_faulty or isinstance(unexplained[0], errors.CoreError)",
    "True",
)
@mutant(
    "each-failure-is-a-refusal-to-merge",
    "core.commits.combiner:Combiner._flush",
    "is_faulty or isinstance(unexplained[0], errors.CoreError)",
    "False",
)
@pytest.mark.parametrize("refuses", [True, False])
def test_a_database_that_refuses_to_merge_is_told_once(database: Database, refuses: bool) -> None:
    """Each batch is committed by itself, and the log says once why. If a batch fails by itself too, merging isn't what
    the database refuses."""
    error = sa.exc.DBAPIError("SELECT …", None, RuntimeError("could not run a distributed query"))
    apart, merging = (Change("lastbit_retries_total", cause=cause) for cause in ("error", "merging"))
    with gated(database) as gate, structlog.testing.capture_logs() as logs:
        ids = [new(gate.service, 2) for _ in range(3)]
        commit = gate.gate.commit

        def refusing(units: Sequence[Unit], *, lock_waits: int) -> Sequence[UnitOutcome]:
            named = {unit.batch for unit in units}
            if len(named) > 1 if refuses else ids[0] in named:
                raise error
            return commit(units, lock_waits=lock_waits)

        gate.gate.commit = refusing
        for place in range(2):
            gate.gate.opened.clear()
            gate.occupy()
            futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, place)])) for batch in ids]
            gate.gate.opened.set()
            if not refuses:
                with pytest.raises(sa.exc.DBAPIError):
                    futures.pop(0).result(30)
            assert [future.result(30).applied for future in futures] == [1] * len(futures)
            gate.gate.flushes.clear()
    told = [entry["error"] for entry in logs if entry["event"] == "merging_refused"]
    assert (len(told), apart() > 0, merging() > 0) == ((1, False, True) if refuses else (0, True, False))


@mutant(
    "batches-take-no-turns", "core.commits.lanes:MainLane.take", "len(queue) if not self.queues else 1", "len(queue)"
)
def test_a_hot_batch_does_not_delay_other_batches(database: Database) -> None:
    """Batches take turns: a call of a quiet batch is in the next flush, however many calls of a hot batch came before
    it."""
    with gated(database) as gate:
        hot, quiet = new(gate.service, 2 * UNIT_GROUPS * GROUP), new(gate.service, 1)
        gate.occupy()
        futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(hot, group, 0)])) for group in range(2 * UNIT_GROUPS)]
        lone_call = gate.service.acks.ack(Call.of(Verb.ACK, [(quiet, 0, 0)]))
        gate.gate.opened.set()
        assert lone_call.result(30).completed[quiet].newly
        assert sum(future.result(30).applied for future in futures) == 2 * UNIT_GROUPS
        assert quiet in {unit.batch for unit in gate.gate.flushes[1]}
        assert len(gate.gate.flushes) == 4
        for flush in gate.gate.flushes:
            assert len({(unit.batch, group) for unit in flush for group in unit.groups()}) <= UNIT_GROUPS


@mutant("a-large-call-is-one-flush", "core.commits.lanes:Load.add", "self.cost + unit.cost > self._most_cost", "False")
def test_a_large_call_of_failures_is_split_and_other_calls_come_in_between(database: Database) -> None:
    """Each reason is a row, so a flush writes a bounded number of them. Another batch's ack, and another call of the
    same batch, don't wait for all of them."""
    groups = 3 * FLUSH_COST // GROUP
    with gated(database) as gate:
        large, other = new(gate.service, (groups + 1) * GROUP), new(gate.service, 1)
        masks = [(large, group, b"\xff" * (GROUP // 8)) for group in range(groups)]
        gate.occupy()
        failed = gate.service.acks.ack(Call.of(Verb.FAIL, masks=masks, reason="gone"))
        lone_call = gate.service.acks.ack(Call.of(Verb.ACK, [(other, 0, 0)]))
        later_call = gate.service.acks.ack(Call.of(Verb.ACK, [(large, groups, 0)]))
        gate.gate.opened.set()
        assert failed.result(60).applied == groups * GROUP
        assert lone_call.result(30).completed[other].newly
        assert later_call.result(30).applied == 1
        flushes = gate.gate.flushes[1:]
        sizes = [
            sum(mask.count() for unit in flush if unit.reason is not None for mask in unit.masks.values())
            for flush in flushes
        ]
        assert sum(sizes) == groups * GROUP
        assert max(sizes) <= FLUSH_COST
        last = max(place for place, size in enumerate(sizes) if size)
        for batch in (other, large):
            (place,) = [n for n, flush in enumerate(flushes) if any(u.batch == batch and not u.reason for u in flush)]
            assert place < last
        assert gate.service.batches.verify(large).ok
        assert len(gate.service.batches.ranges(large, "failed", 0, 1)[1].ranges[0].reasons) > 0


@mutant("a-redrive-removes-all-reasons-at-once", "core.acks.flush:_cut", "total > budget", "False")
@mutant(
    "the-rest-of-a-flush-is-lost",
    "core.commits.combiner:Combiner._attempt",
    "self._main.put_back(rests)",
    "[self._main.put(unit, pending) for unit, pending in rests if False]",
)
@mutant(
    "a-skip-removes-all-reasons-at-once", "core.acks.flush:_cut", "unit.verb is not Verb.FAIL", "unit.verb is Verb.ACK"
)
@mutant(
    "an-ack-removes-all-reasons-of-skips-at-once",
    "core.acks.flush:_cut",
    "group.failed + group.skipped",
    "group.failed",
)
@pytest.mark.parametrize(("before", "after"), [("fail", "ack"), ("skip", "ack"), ("fail", "skip")])
def test_a_redrive_removes_a_bounded_number_of_reasons_at_a_time(database: Database, before: str, after: str) -> None:
    """The number of reasons is known once the groups are locked. Those above the bound are left to the next flush, and
    another batch's ack comes in between."""
    groups = 5 * flush.REDRIVEN // 2 // GROUP
    table, kind = {"fail": (tables.failures, "failed"), "skip": (tables.skips, "skipped")}[before]
    with gated(database) as gate:
        large, other = new(gate.service, groups * GROUP), new(gate.service, 1)
        masks = [(large, group, b"\xff" * (GROUP // 8)) for group in range(groups)]
        gate.gate.opened.set()
        given_up = gate.service.acks.ack(Call.of(Verb(before), masks=masks, reason="gone"))
        assert given_up.result(60).applied == groups * GROUP
        begin = len(gate.gate.flushes)
        gate.gate.opened.clear()
        while gate.gate.came.acquire(blocking=False):
            pass
        counts = [groups * GROUP]

        def count(tx: Connection) -> None:
            counts.append(tx.exec_driver_sql(f"SELECT COUNT(*) FROM {table.name}").scalar_one())

        sa.event.listen(database.engine, "commit", count)
        gate.occupy()
        redriven = gate.service.acks.ack(Call.of(Verb(after), masks=masks))
        lone_call = gate.service.acks.ack(Call.of(Verb.ACK, [(other, 0, 0)]))
        gate.gate.opened.set()
        assert redriven.result(60).applied == groups * GROUP
        assert redriven.result(60).completed[large].newly_succeeded == (before == "fail")
        assert lone_call.result(30).completed[other].newly
        assert all(0 <= later_count - earlier <= flush.REDRIVEN for later_count, earlier in itertools.pairwise(counts))
        assert counts[-1] == 0
        flushes = [{unit.batch for unit in flush} == {large} for flush in gate.gate.flushes[begin + 1 :]]
        assert flushes[0] is False, "the other batch waited"
        assert flushes[-1] is True
        assert gate.service.batches.ranges(large, kind, 0, 1)[1].ranges == []
        with database.engine.connect() as tx:
            assert tx.scalar(sa.select(sa.func.count()).select_from(table)) == 0


@mutant(
    "each-piece-of-a-mask-is-rejected-by-itself",
    "core.acks.call:AckResult._reject",
    "rejection.group is not None",
    "False",
)
def test_a_mask_that_is_rejected_in_pieces_is_rejected_once(database: Database) -> None:
    """One entry for each group, however many pieces its mask was sent in."""
    service = Service(database)
    batch = service.batches.open(batches.Opening(group_size=8192, items=8000)).batch.id
    call = Call.of(Verb.FAIL, masks=[(batch, group, b"\xff" * 1024) for group in (0, 1)], reason="x" * 4000)
    answer = service.acks.ack(call).result(60)
    assert (answer.applied, answer.repeated) == (8000, 0)
    assert [(rejection.reason, rejection.group, rejection.count) for rejection in answer.rejected] == [
        ("unknown_item", (batch, 0), 192),
        ("unknown_item", (batch, 1), 8192),
    ]
    service.stop()


@mutant(
    "a-broken-batch-is-merged-again",
    "core.commits.combiner:Combiner._set_aside",
    "retries.items()",
    "retries.items() if is_locked else ()",
)
def test_a_broken_batch_stays_out_of_merged_flushes(database: Database) -> None:
    """Once it has failed, its redelivered items make no merged flush fail; once it was repaired, it is treated like any
    other."""
    with gated(database) as gate:
        damaged, sound = new(gate.service, 3), new(gate.service, 10)
        break_counts(database, damaged)
        gate.gate.opened.set()
        with pytest.raises(errors.InconsistentBatch):
            ack(gate.service, (damaged, 0, 0))
        for index in range(3):
            calls = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, index)])) for batch in (damaged, sound)]
            assert calls[1].result(30).applied == 1
            with pytest.raises(errors.InconsistentBatch):
                calls[0].result(30)
        # A call of both: the broken batch's part fails, and the other batch isn't tried twice because of it.
        flushes = gate.gate.flushes
        before = len(flushes)
        with pytest.raises(errors.InconsistentBatch):
            ack(gate.service, (damaged, 0, 0), (sound, 0, 3))
        assert not [flush for flush in flushes if len({unit.batch for unit in flush}) > 1]
        assert sum(unit.batch == sound for flush in flushes[before:] for unit in flush) == 1
        with database.engine.begin() as tx:
            batches.update(tx, damaged, acked=0)
        assert ack(gate.service, (damaged, 0, 0)).applied == 1
        ack(gate.service, (damaged, 0, 1))
        assert gate.gate.lock_waits[-1] == 0, "the repaired batch is still set aside"


@mutant("a-broken-batch-is-tried-all-the-time", "core.commits.aside:Aside.failed", "entry.failed_at + PAUSE", "0.0")
def test_a_broken_batch_is_retried_with_pauses(database: Database) -> None:
    """However often its items are redelivered, there is a pause between two tries."""
    with gated(database) as gate:
        damaged = new(gate.service, 50)
        break_counts(database, damaged)
        gate.gate.opened.set()
        locks = time.monotonic()
        for index in range(4):
            with pytest.raises(errors.InconsistentBatch):
                ack(gate.service, (damaged, 0, index))
        assert len(gate.gate.flushes) == 4
        assert time.monotonic() - locks >= 3 * aside.PAUSE


@mutant("a-receiver-that-raises-ends-the-combiner", "core.commits.pending:call_receiver", "Exception", "KeyError")
def test_a_receiver_that_raises_costs_no_other_call_its_answer(database: Database) -> None:
    """Neither the calls of its flush nor those of later ones."""

    def fail(_: Pending[AckResult]) -> None:
        raise ZeroDivisionError

    with gated(database) as gate:
        batch = new(gate.service, 3)
        gate.occupy()
        gate.service.acks.submit(Call.of(Verb.ACK, [(batch, 0, 0)]), fail)
        neighbour = gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 1)]))
        gate.gate.opened.set()
        assert neighbour.result(30).applied == 1
        assert ack(gate.service, (batch, 0, 2)).completed[batch].newly


@mutant("stop-loses-waiting-calls", "core.commits.lanes:MainLane._serve", "not units", "not units or self.stopping")
def test_stop_answers_waiting_calls_and_refuses_new_ones(database: Database) -> None:
    """Calls that wait when the service stops are committed and answered; later calls are refused."""
    with gated(database) as gate:
        batch = new(gate.service, 5)
        gate.occupy()
        futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, index)])) for index in range(5)]
        stopping = threading.Thread(target=gate.service.stop)
        stopping.start()
        gate.gate.opened.set()
        assert [future.result(30).applied for future in futures] == [1] * 5
        stopping.join(60)
        assert not stopping.is_alive()
        with pytest.raises(errors.Unavailable):
            gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)]))
        assert gate.service.batches.get(batch).state is State.COMPLETE


def test_a_measured_wait_includes_all_flushes_before_its_own(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in the third flush have also waited for the two before it, though only the first arrivals read the
    clock."""
    monkeypatch.setattr(lanes, "FLUSH_UNITS", 2)
    now = 1000.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    monkeypatch.setattr(lanes, "time", Clock)

    def measured(name: str) -> float:
        sample = REGISTRY.get_sample_value(f"lastbit_flush_{name}")
        assert sample is not None
        return sample

    with Database(sqlite_url) as database:
        schema.migrate(database)
        with gated(database) as gate:
            batch = new(gate.service, 10)
            before = measured("wait_seconds_count"), measured("wait_seconds_sum"), measured("units_sum")
            gate.occupy()
            futures = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, index)])) for index in range(5)]
            now += 100
            gate.gate.opened.set()
            assert [future.result(30).applied for future in futures] == [1] * 5
            assert [len(flush) for flush in gate.gate.flushes] == [1, 2, 2, 1]
            now += 1000
            ack(gate.service, (batch, 0, 9))  # an idle service: the old wait isn't counted again
        after = measured("wait_seconds_count"), measured("wait_seconds_sum"), measured("units_sum")
        assert [new - old for new, old in zip(after, before, strict=True)] == [5, 300, 7]


@pytest.fixture
def impatient(server_database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A combining service with lock waits of one second, the server's minimum."""
    monkeypatch.setattr(database, "LOCK_WAIT", 1)
    service = Service(Database(server_database.url.render_as_string(hide_password=False)))
    yield service
    service.stop()


@mutant(
    "a-stuck-batch-has-no-lane-of-its-own",
    "core.commits.combiner:Combiner._set_aside",
    "isinstance(error, errors.LockTimeout)",
    "False",
)
@pytest.mark.mariadb
def test_a_row_locked_by_another_session_does_not_stall_other_batches(impatient: Service) -> None:
    """Calls of the locked batch wait separately; all others go on, and the waiting calls succeed once the row is
    free."""
    locked_batch, free = new(impatient, 2), new(impatient, 20)
    with locked(impatient.database, locked_batch):
        waiting = impatient.acks.ack(Call.of(Verb.ACK, [(locked_batch, 0, 0)]))
        assert ack(impatient, (free, 0, 0)).applied == 1
        waiting_call = impatient.acks.ack(Call.of(Verb.ACK, [(locked_batch, 0, 1), (free, 0, 1)]))
        assert [ack(impatient, (free, 0, index)).applied for index in range(2, 20)] == [1] * 18
        assert not waiting.done()
        assert not waiting_call.done()
    assert waiting.result(30).applied == 1
    assert waiting_call.result(30).applied == 2
    assert waiting_call.result(30).completed[locked_batch].newly
    assert impatient.batches.get(free).state is State.COMPLETE


@pytest.mark.mariadb
def test_a_row_that_stays_locked_fails_only_its_own_calls_with_a_lock_timeout(impatient: Service) -> None:
    """No call waits forever: while its row is locked it is refused, and it succeeds later."""
    locked_batch = new(impatient, 1)
    with locked(impatient.database, locked_batch):
        with pytest.raises(errors.LockTimeout):
            ack(impatient, (locked_batch, 0, 0))
        with impatient.database.engine.connect() as tx:
            assert tx.scalar(sa.select(sa.func.count()).select_from(tables.item_groups)) == 0
    assert ack(impatient, (locked_batch, 0, 0)).completed[locked_batch].newly


@mutant(
    "a-batch-set-aside-without-a-thread-ends-the-lane",
    "core.commits.aside:Aside._has_threads",
    "errors.Unavailable",
    "ZeroDivisionError",
)
@pytest.mark.mariadb
def test_without_threads_for_it_a_locked_batch_fails_alone(impatient: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system allows no more threads when a batch must be set aside, its calls are refused and all others go on.
    Later the threads are started."""
    locked_batch, free = new(impatient, 2), new(impatient, 2)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("combiner-aside"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with locked(impatient.database, locked_batch):
        with monkeypatch.context() as patches:
            patches.setattr(threading.Thread, "start", refuse)
            refused = impatient.acks.ack(Call.of(Verb.ACK, [(locked_batch, 0, 0)]))
            assert ack(impatient, (free, 0, 0)).applied == 1
            with pytest.raises(errors.Unavailable, match="no more threads"):
                refused.result(30)
        waiting = impatient.acks.ack(Call.of(Verb.ACK, [(locked_batch, 0, 0)]))
        assert ack(impatient, (free, 0, 1)).completed[free].newly
    assert waiting.result(30).applied == 1


@mutant(
    "a-failed-batch-is-not-set-aside",
    "core.commits.aside:Aside.holds",
    "time.monotonic() - entry.failed_at < PROBATION",
    "False",
)
@mutant(
    "a-repaired-batch-stays-set-aside",
    "core.commits.aside:Aside.committed",
    "return self._batches.pop(batch).queue",
    "self._batches[batch].failed_at = time.monotonic()",
)
@pytest.mark.mariadb
def test_a_batch_that_stays_locked_is_not_merged_again(impatient: Service) -> None:
    """Not even after its calls failed: only the first of them made a flush of the main lane wait."""
    with gated(impatient.database) as gate:
        locked_batch, free = new(gate.service, 3), new(gate.service, 20)
        gate.gate.opened.set()
        with locked(impatient.database, locked_batch):
            for index in range(2):
                waiting = gate.service.acks.ack(Call.of(Verb.ACK, [(locked_batch, 0, index)]))
                assert [ack(gate.service, (free, 0, 5 * index + n)).applied for n in range(5)] == [1] * 5
                assert isinstance(waiting.exception(60), errors.LockTimeout)
            merged_flushes = [
                flush for flush, waits in zip(gate.gate.flushes, gate.gate.lock_waits, strict=True) if not waits
            ]
            assert sum(unit.batch == locked_batch for flush in merged_flushes for unit in flush) == 1
        assert ack(gate.service, (locked_batch, 0, 0)).applied == 1
        assert gate.gate.lock_waits[-1] > 0
        assert ack(gate.service, (locked_batch, 0, 1)).applied == 1
        assert gate.gate.lock_waits[-1] == 0, "the freed batch is still set aside"


@pytest.mark.mariadb
def test_two_locked_batches_do_not_wait_for_each_other(impatient: Service) -> None:
    """The batch whose row is freed first is acked while the other is still being tried."""
    first_batch, other = new(impatient, 2), new(impatient, 2)
    with locked(impatient.database, first_batch):
        with locked(impatient.database, other):
            first = impatient.acks.ack(Call.of(Verb.ACK, [(first_batch, 0, 0)]))
            second = impatient.acks.ack(Call.of(Verb.ACK, [(other, 0, 0)]))
            assert ack(impatient, (new(impatient, 1), 0, 0)).applied == 1  # both were tried by now
        assert second.result(30).applied == 1
        assert not first.done()
    assert first.result(30).applied == 1


@mutant(
    "a-merged-flush-waits-briefly-for-the-feed",
    "core.storage.dialects.mariadb:_hurried",
    'text.endswith(" FOR UPDATE") and text != LOCK_HEAD',
    'text.endswith(" FOR UPDATE")',
    only="mariadb",
)
@mutant(
    "a-merged-flush-waits-briefly-for-the-feed-on-postgresql",
    "core.storage.dialects.postgresql:PostgreSQL.run",
    "text == LOCK_HEAD",
    "False",
    only="postgresql",
)
@mutant(
    "a-wait-for-the-feed-tears-the-flush",
    "core.storage.dialects.dialect:Dialect.lock_wait",
    "error.statement == LOCK_HEAD",
    "False",
)
@pytest.mark.mariadb
def test_a_flush_that_waits_for_the_feed_stays_whole(impatient: Service) -> None:
    """Each part of it would wait for the same row, whoever holds it. It waits as long as any other transaction, and
    blames no batch."""
    with gated(impatient.database) as gate, structlog.testing.capture_logs() as logs:
        opened = [new(gate.service, 1) for _ in range(8)]
        gate.occupy()
        calls = [gate.service.acks.ack(Call.of(Verb.ACK, [(batch, 0, 0)])) for batch in opened]
        before, others = head_waits(), lock_waits()
        with head_locked(impatient.database):
            gate.gate.opened.set()
            assert gate.gate.came.acquire(timeout=60)
            while head_waits() == before and not gate.gate.came.acquire(timeout=0.1):
                pass
        assert all(call.result(60).completed[batch].newly for call, batch in zip(calls, opened, strict=True))
    assert [len(units) for units in gate.gate.flushes] == [1, 8]
    assert gate.gate.lock_waits == [0, 0]
    assert lock_waits() == others
    assert [entry for entry in logs if entry["event"] == "batch_stuck"] == []
    count, seconds = (after - at_first for after, at_first in zip(head_waits(), before, strict=True))
    assert seconds > 0.9 * count, "it gave up before the session's lock wait was over"


@mutant(
    "a-call-waits-for-the-feed-without-end", "core.storage.database:Database.write", "head_waits > HEAD_WAITS", "False"
)
@pytest.mark.mariadb
def test_a_feed_that_stays_locked_is_an_outage(impatient: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever appends is refused in the end, however few lock waits it allows, and no row is named as the cause."""
    monkeypatch.setattr(database, "HEAD_WAITS", 1)
    (batch,) = units = Call.of(Verb.ACK, [(new(impatient, 1), 0, 0)]).chunks()
    before, _ = head_waits()
    with head_locked(impatient.database):
        with pytest.raises(errors.Unavailable, match="keeps the feed locked") as refused:
            ack(impatient, (batch.batch, 0, 0))
        assert type(refused.value) is errors.Unavailable
        with pytest.raises(errors.Unavailable, match="keeps the feed locked"):
            commit.commit(impatient.database, units, BitfieldCache(), lock_waits=0, lock_wait=parents.LOCK_WAIT)
        with pytest.raises(errors.Unavailable, match="keeps the feed locked"):
            impatient.batches.cancel(batch.batch)
    assert head_waits()[0] - before == 6
    assert ack(impatient, (batch.batch, 0, 0)).completed[batch.batch].newly


@mutant(
    "all-reasons-of-a-group-are-looked-for-to-the-next-one",
    "core.acks.flush:_remove_ranges",
    'f"DELETE {source} ORDER BY number LIMIT {count}"',
    'f"DELETE {source}"',
    only="mariadb",
)
@pytest.mark.mariadb
def test_reasons_of_neighbouring_groups_can_be_removed_and_written_concurrently(server_database: Database) -> None:
    """A transaction that removes all reasons of a group doesn't wait for one that wrote those of the next group."""
    service = Service(server_database, combiner=Inline)
    batch = service.batches.open(batches.Opening(group_size=8192, items=3 * 8192)).batch.id
    masks = [(batch, group, b"\xff" * 1024) for group in range(2)]
    service.acks.ack(Call.of(Verb.FAIL, masks=masks[:1], reason="gone")).result(60)
    written_event, redriven = threading.Event(), threading.Event()

    def fail_the_next(tx: sa.Connection) -> None:
        (unit,) = Call.of(Verb.FAIL, [(batch, 1, 0)], reason="gone").chunks()
        locks = flush._begin(tx, [unit], BitfieldCache())
        locks.state.reasons[Verb.FAIL].new[batch, 8192] = "gone"
        flush._write_reasons(tx, locks.state)
        written_event.set()
        assert redriven.wait(60)

    def redrive(tx: sa.Connection) -> None:
        (unit,) = Call.of(Verb.ACK, masks=masks[:1]).chunks()
        locks = flush._begin(tx, [unit], BitfieldCache())
        outcome = apply.admit(locks.state, unit)
        flush._load(tx, locks.state, BitfieldCache(), locks.groups)
        apply.apply(locks.state, unit, outcome)
        flush._write_reasons(tx, locks.state)
        assert tx.scalar(sa.select(sa.func.count()).select_from(tables.failures)) == 0

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server_database.write, fail_the_next)
        assert written_event.wait(60)
        try:
            server_database.write(redrive, lock_waits=0)
        finally:
            redriven.set()
        other.result(60)
    service.stop()


@mutant(
    "the-last-piece-has-a-size-of-its-own",
    "core.acks.call:Unit.take",
    "self.size if self.is_empty() else min(piece.size, self.size)",
    "min(piece.size, self.size)",
)
@pytest.mark.parametrize("most_cost", [LEAST_COST, 1234, FLUSH_COST])
def test_nothing_waits_when_all_is_answered(most_cost: int) -> None:
    """However calls are divided: bytes that stayed would refuse later calls on an idle service."""
    combiner = Combiner(lambda units, *, lock_waits: [Outcome() for _ in units])
    for verb, reason, groups, size in (
        *((Verb.FAIL, "timeout", 200, 1024), (Verb.FAIL, "x" * 4000, 4, 4096), (Verb.FAIL, "x" * 500, 30, 8)),
        *((Verb.FAIL, None, 600, 1024), (Verb.ACK, None, 1500, 64)),
    ):
        combiner._main._most_cost = most_cost
        done = threading.Event()
        masks = [(1, group, b"\xff" * size) for group in range(groups)]
        items = [(1, groups, index) for index in range(3000)] if size < 1024 else []
        combiner.submit(Call.of(verb, items, masks, reason=reason), lambda pending, done=done: done.set())  # type: ignore[misc]
        assert done.wait(60)
        assert (combiner._backlog.units, combiner._backlog.bytes) == (0, 0)
        assert (combiner._main.waiting, combiner._main.waiting_calls) == (0, 0)
    combiner.stop()


@mutant(
    "a-flush-tries-each-unit-that-does-not-fit",
    "core.commits.lanes:MainLane.take",
    "len(passed_over) < PASSED_OVER",
    "True",
)
def test_a_flush_tries_few_units_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the lock meanwhile, for which the event loop waits."""
    lane = lanes.MainLane(threading.Lock(), lanes.Backlog(1, 1, "acks"), lambda units: None, lambda units: None)
    lane._most_cost = 1234
    calls = [Append(events=[], batch=batch, cost=8) for batch in range(5000)]
    for call in calls:
        lane.put(call, Pending(call, None, 1, lambda pending: None, HERE))
    tries = 0
    add = lanes.Load.add

    def counted(load: lanes.Load, *waiting: Any) -> bool:
        nonlocal tries
        tries += 1
        return add(load, *waiting)

    monkeypatch.setattr(lanes.Load, "add", counted)
    for number in range(2):
        load = lane.take(lanes.FLUSH_UNITS)
        assert [unit for unit, _ in load.taken] == calls[154 * number : 154 * (number + 1)]
    assert tries == 2 * (154 + lanes.PASSED_OVER)
    assert lane.waiting == lane.waiting_calls == 5000 - 2 * 154
