"""Repair: counts and state are restored from the bits, whatever was lost, while other processes go on with cached bits
that are no longer stored."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from core import errors
from core.batches import batch as batches
from core.batches import verify
from core.batches.batch import Opening
from core.batches.lifecycle import State, Verb
from core.batches.settle import owed
from core.bits.cache import BitfieldCache
from core.commits.combiner import Inline
from core.service import Service
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import ItemId
from tests.guarantees.drivers import journaled
from tests.guarantees.drivers.rounds import GROUP, ack, recount
from tests.mutants import mutant
from tests.support.waits import waits_for_a_lock

ITEMS = 2 * GROUP + 40
"""Of a batch of three groups, the last one partly issued."""
_batches = tables.batches.c
_groups = tables.item_groups.c


def open_batch(service: Service, resolved: Iterable[int], *, sealed: bool = False, items: int = ITEMS) -> int:
    """Open a batch and ack some of its items."""
    batch = service.batches.open(Opening(group_size=GROUP, items=items)).batch.id
    ack_numbers(service, batch, resolved)
    if sealed:
        service.batches.seal(batch)
    return batch


def ack_numbers(
    service: Service, batch: int, numbers: Iterable[int], verb: Verb = Verb.ACK, reason: str | None = None
) -> int:
    items = [(batch, *divmod(number, GROUP)) for number in numbers]
    return ack(service, *items, verb=verb, reason=reason).applied


def bits(numbers: Iterable[int], width: int = GROUP) -> bytes:
    """A blob with these indexes set."""
    return sum(1 << number for number in numbers).to_bytes(width // 8, "little")


def damage_group(service: Service, batch: int, group: int, **values: Any) -> None:
    with service.database.engine.begin() as tx:
        result = tx.execute(
            sa.update(tables.item_groups).where(_groups.batch_id == batch, _groups.group_no == group).values(values)
        )
        assert result.rowcount == 1


def damage_batch(service: Service, batch: int, **values: Any) -> None:
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).where(_batches.id == batch).values(values))


def everything_stored(service: Service) -> list[Any]:
    with service.database.engine.connect() as tx:
        stored_tables = (tables.batches, tables.item_groups, tables.ack_journal, tables.failures, tables.feed)
        return [sorted(map(tuple, tx.execute(sa.select(table))), key=str) for table in stored_tables]


def pending(service: Service, batch: int) -> set[int]:
    page = service.batches.ranges(batch, "pending", 0, 1000)[1]
    return {number for span in page.ranges for number in range(span.start, span.end)}


def event_ids(service: Service, batch: int) -> list[str]:
    """The ids of the batch's events in the order of the feed, without their common prefix."""
    return [event.id.removeprefix(f"batch:{batch}:") for event in service.feed.read(0, 1000, batch=batch).events]


def other_process(service: Service) -> Service:
    """Another process with its own cache."""
    return Service(service.database, combiner=Inline)


# Each kind of damage, how it is detected and repaired.

DAMAGES: Mapping[str, tuple[int, dict[str, Any], str, set[int]]] = {
    # (group, its columns, verify's finding, the group's numbers that are acked after the repair)
    "a truncated blob": (1, {"resolved": b"\x05"}, "it was truncated", {64, 66}),
    "bits lost": (1, {"resolved": bits([0, 2])}, "resolved_count is 12, but 2 bits are set", {64, 66}),
    "a count too low": (1, {"resolved_count": 11}, "resolved_count is 11, but 12 bits are set", set(range(64, 88, 2))),
    "a prefix too short": (
        0,
        {"resolved_count": 60},
        "full_prefix is 1, so all groups below must be full",
        set(range(60)),
    ),
    "failed bits lost": (1, {"failed_count": 1}, "failed_count is 1, but 0 bits are set", set(range(64, 88, 2))),
    "failed, not resolved": (
        1,
        {"failed": bits([1]), "failed_count": 1},
        "failed but not resolved",
        set(range(64, 88, 2)),
    ),
    "never issued": (2, {"resolved": bits([0, 63]), "resolved_count": 2}, "never issued", {128}),
}
ACKED = [*range(GROUP), *range(64, 88, 2), 128]


@mutant("a-repair-keeps-bits-of-items-never-issued", "core.batches.repair:_restored", "bits[issued:] = False", "pass")
@mutant(
    "verify-does-not-see-a-cut-blob",
    "core.batches.verify:_faults",
    "group.width is not None and group.width < group.resolved_count",
    "False",
)
@mutant(
    "verify-does-not-see-lost-bits",
    "core.batches.verify:_faults",
    "group.resolved.count() != group.resolved_count",
    "False",
)
@mutant(
    "verify-does-not-see-lost-failures",
    "core.batches.verify:_faults",
    "group.failed.count() != group.failed_count",
    "False",
)
@mutant(
    "verify-does-not-see-failed-items-that-are-not-resolved",
    "core.batches.verify:_faults",
    "(group.failed & ~group.resolved).any()",
    "False",
)
@mutant(
    "verify-does-not-see-items-never-issued",
    "core.batches.verify:_faults",
    "any(bits.count(1, issued) for bits in (group.resolved, group.failed, group.skipped))",
    "False",
)
@mutant(
    "verify-does-not-see-a-hint-that-is-too-high",
    "core.batches.verify:Recount.verification",
    "batch.full_prefix > self._full",
    "False",
)
@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("state", [State.OPEN, State.SEALED])
def test_damage_is_detected_and_repaired_from_the_bits(service: Service, name: str, state: State) -> None:
    """A dry run changes nothing; after the repair everything agrees, and redelivered items complete the batch."""
    group, values, fault, remainder = DAMAGES[name]
    batch = open_batch(service, ACKED, sealed=state is State.SEALED)
    bystander = open_batch(service, ACKED)
    damage_group(service, batch, group, **values)
    verification = service.batches.verify(batch)
    assert any(fault in text for text in verification.faults), verification.faults
    before = everything_stored(service)
    plan = service.batches.repair(batch, dry_run=True)
    assert everything_stored(service) == before
    repair = service.batches.repair(batch)
    assert repair.faults == plan.faults == verification.faults
    for name in ("acked", "failed", "state", "full_prefix"):
        assert getattr(repair.after, name) == getattr(plan.after, name)
    second_verification = service.batches.verify(batch)
    assert second_verification.ok, second_verification.faults
    recount(service.database)
    first, end = group * GROUP, (group + 1) * GROUP
    failed = {first + 1} if "failed" in values else set()
    assert set(range(first, min(end, ITEMS))) - pending(service, batch) == remainder | failed
    assert service.batches.get(batch).state is state
    assert not service.batches.repair(batch).faults
    assert service.batches.verify(bystander).ok
    service.batches.seal(batch)
    ack_numbers(service, batch, range(ITEMS))
    assert service.batches.get(batch).succeeded
    assert service.batches.verify(batch).ok
    recount(service.database)


def test_an_undamaged_batch_is_left_unchanged(service: Service) -> None:
    """It does not become journaled, and no event is appended."""
    batch = open_batch(service, [1, 2, 70])
    ack_numbers(service, batch, [3, 71], Verb.FAIL, "broken")
    before = everything_stored(service)
    assert not service.batches.repair(batch).faults
    assert everything_stored(service) == before


# Cached bits.


def lose(service: Service, batch: int) -> None:
    """Ack ten items and truncate the blob to its first byte, without changing the counts."""
    damage_group(service, batch, 0, resolved=b"\x7f")


@mutant("a-repaired-batch-is-not-journaled", "core.batches.repair:repair", "batch.journal_next + 1", "0")
@mutant(
    "a-repair-of-a-journaled-batch-goes-unnoticed",
    "core.batches.repair:repair",
    "batch.journal_next + 1",
    "batch.journal_next",
)
@pytest.mark.parametrize("kind", ["by its groups", "journaled"])
def test_a_process_with_lost_bits_in_its_cache_does_not_bring_them_back(
    service: Service, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It has ten bits of a group in its cache, seven of which are left; other acks add three, so that the count is ten
    again."""
    if kind == "journaled":
        journaled.everything(monkeypatch)
    stale_process, other_service = other_process(service), other_process(service)
    numbers = [*range(7), 20, 21, 22]
    batch = open_batch(stale_process, numbers[:3])
    ack_numbers(stale_process, batch, numbers[3:])
    if kind == "journaled":  # this writes its groups and empties the journal
        with service.database.engine.begin() as tx:
            tx.execute(sa.delete(tables.ack_journal))
            tx.execute(sa.delete(tables.item_groups))
            tx.execute(
                sa.insert(tables.item_groups).values(
                    batch_id=batch, group_no=0, resolved=b"\x7f", resolved_count=7, failed_count=0
                )
            )
    else:
        lose(service, batch)
    repair = other_service.batches.repair(batch)
    assert (repair.before.acked, repair.after.acked) == (10, 7)
    assert ack_numbers(other_service, batch, [30, 31, 32]) == 3
    answer = ack(stale_process, *((batch, 0, number) for number in (20, 21, 30, 5)))
    assert (answer.applied, answer.repeated) == (2, 2), "20 and 21 were lost, 30 and 5 were not"
    assert pending(service, batch) == set(range(ITEMS)) - {*range(7), 20, 21, 30, 31, 32}
    recount(service.database)


@mutant(
    "a-repair-forgets-the-journal",
    "core.batches.verify:groups",
    "journal_items = journal.recent(tx, batch.id, batch.group_size)",
    "journal_items: dict[int, list[int]] = {}",
)
def test_items_in_the_journal_are_kept(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repair folds the journal: its items stay acked, though the batch's count was wrong."""
    journaled.everything(monkeypatch, numbers=1000)
    batch = open_batch(service, [1, 70, 130])
    damage_batch(service, batch, acked=5)
    repair = other_process(service).batches.repair(batch)
    assert repair.after.acked == 3
    assert ack_numbers(service, batch, [1, 2, 70]) == 1
    assert pending(service, batch) == set(range(ITEMS)) - {1, 2, 70, 130}
    recount(service.database)


# Completion after a repair.


@mutant(
    "a-repaired-batch-stays-complete",
    "core.batches.repair:_settled",
    "batch.complete and counts.resolved < batch.items",
    "False",
)
@mutant(
    "a-second-completion-has-the-id-of-the-first",
    "core.batches.batch:events",
    'f":{batch.generation}" if batch.generation else ""',
    '""',
)
@mutant(
    "a-reopened-batch-looks-idle-since-its-completion",
    "core.batches.repair:_settled",
    "max(batch.updated_at, now)",
    "batch.updated_at",
)
@mutant(
    "verify-does-not-see-that-a-complete-batch-is-pending",
    "core.batches.verify:Recount.verification",
    "batch.state is State.COMPLETE and not all_resolved",
    "False",
)
def test_a_batch_that_was_complete_too_early_is_sealed_again_and_completes_as_another_event(service: Service) -> None:
    """The one call that resolves the last item gets `newly`, and each event has its own id."""
    batch = open_batch(service, range(ITEMS), sealed=True)
    damage_group(service, batch, 2, resolved=b"\xff\xff", resolved_count=40)
    assert "it is complete, but 24 items are pending" in service.batches.verify(batch).faults
    repair = service.batches.repair(batch)
    after = service.batches.get(batch)
    assert (repair.before.state, after.state, after.pending, after.ended_at) == (State.COMPLETE, State.SEALED, 24, None)
    assert (after.completed_by, after.succeeded_by) == (None, None)
    assert after.updated_at > repair.before.updated_at
    assert not ack(service, (batch, 0, 1)).completed, "the batch isn't complete"
    last = ack(service, *((batch, 2, index) for index in range(40)))
    assert (last.applied, last.completed[batch].newly, last.completed[batch].newly_succeeded) == (24, True, True)
    transitions = ["opened", "sealed", "completed", "succeeded", "repaired:1", "completed:1", "succeeded:1"]
    assert event_ids(service, batch) == transitions
    # The same again.
    damage_group(service, batch, 0, resolved=b"\xff", resolved_count=64)
    service.batches.repair(batch)
    assert ack_numbers(service, batch, range(GROUP)) == 56
    assert event_ids(service, batch)[-3:] == ["repaired:2", "completed:2", "succeeded:2"]
    recount(service.database)


@mutant(
    "a-repair-completes-nothing",
    "core.batches.repair:_settled",
    "batches.settled(batch, change, now, fingerprint)",
    "(change, [])",
)
def test_a_sealed_batch_with_nothing_pending_completes_and_a_retry_gets_the_same_answer(service: Service) -> None:
    """As a seal would: the event is appended, and a retry of the repair gets `newly` again."""
    batch = open_batch(service, range(ITEMS - 1))
    service.batches.seal(batch)
    with service.database.engine.begin() as tx:
        tx.execute(
            sa.update(tables.item_groups)
            .where(_groups.batch_id == batch, _groups.group_no == 2)
            .values(resolved=None, resolved_count=40)
        )
    repair = service.batches.repair(batch, "a key")
    assert (repair.newly, repair.newly_succeeded, repair.after.complete) == (True, True, True)
    repeat = service.batches.repair(batch, "a key")
    assert (repeat.newly, repeat.newly_succeeded, repeat.faults) == (True, True, [])
    assert not service.batches.repair(batch, "another key").newly
    assert event_ids(service, batch) == ["opened", "sealed", "repaired:1", "completed:1", "succeeded:1"]
    recount(service.database)


def test_corrected_failed_counts_change_whether_the_batch_has_succeeded(service: Service) -> None:
    batch = open_batch(service, range(ITEMS), sealed=True)
    damage_group(service, batch, 1, failed=bits([3]), failed_count=1)
    repair = service.batches.repair(batch)
    assert (repair.after.state, repair.after.failed, repair.after.succeeded_by) == (State.COMPLETE, 1, None)
    redriven = ack(service, (batch, 1, 3))
    assert redriven.completed[batch].newly_succeeded
    damage_batch(service, batch, failed=1, acked=ITEMS - 1)
    repair = service.batches.repair(batch)
    assert (repair.after.succeeded, repair.newly, repair.newly_succeeded) == (True, False, True)
    assert event_ids(service, batch)[4:] == ["repaired:1", "succeeded:1", "repaired:2", "succeeded:2"]
    recount(service.database)


@mutant(
    "a-repair-forgets-failed-items",
    "core.batches.repair:_restored",
    "failed[list(stored_group.reasons)] = True",
    "pass",
)
@mutant(
    "a-repair-leaves-reasons-of-acked-items",
    "core.batches.repair:_recount",
    "chunks(numbers, LIST)",
    "chunks([], LIST)",
)
@mutant("verify-does-not-see-stray-reasons", "core.batches.verify:_faults", "stray > 0", "False")
def test_items_with_a_reason_are_failed_and_other_reasons_are_removed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason survives the lost bits; a redelivered ack redrives the item and removes the reason."""
    batch = open_batch(service, range(10), sealed=True)
    ack_numbers(service, batch, [70, 71, 72], Verb.FAIL, "gave up")
    with monkeypatch.context() as patches:  # acked after its failure was lost, which the journal records
        patches.setattr(BitfieldCache, "is_journaled", lambda self, batch: True)
        damage_group(service, batch, 1, resolved=b"\x80", resolved_count=1, failed=b"\x80", failed_count=1)
        assert ack_numbers(other_process(service), batch, [70]) == 1
    with service.database.engine.begin() as tx:
        extra_row = {"batch_id": batch, "number": ITEMS, "reason": "never issued", "failed_at": tables.utc_now()}
        tx.execute(sa.insert(tables.failures).values(extra_row))
    assert any("have a reason of a failure" in fault for fault in service.batches.verify(batch).faults)
    service.batches.repair(batch)
    failed = service.batches.ranges(batch, "failed", 0, 100)[1].ranges
    assert [(span.start, span.end, span.reasons) for span in failed] == [(71, 73, {71: "gave up", 72: "gave up"})]
    assert service.batches.verify(batch).ok
    assert ack_numbers(service, batch, range(ITEMS)) == ITEMS - 11
    assert service.batches.get(batch).succeeded
    recount(service.database)


def test_a_batch_is_read_in_steps_of_as_many_groups_as_fit_into_memory(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with one group finds the rows, the journal and the reasons of all groups, and of those without a row."""
    journaled.everything(monkeypatch, numbers=1000)
    batch = open_batch(service, [1, 70, 130], items=5 * GROUP)
    ack_numbers(service, batch, [3, 2 * GROUP + 7], Verb.FAIL, "gave up")
    with service.database.engine.begin() as tx:
        for number in (3 * GROUP + 1, 4 * GROUP + 2):
            extra_row = {"batch_id": batch, "number": number, "reason": "lost", "failed_at": tables.utc_now()}
            tx.execute(sa.insert(tables.failures).values(extra_row))
    with service.database.engine.connect() as snapshot:
        stored_batch = batches.get(snapshot, batch)
        at_once = list(verify.groups(snapshot, stored_batch))
        monkeypatch.setattr(verify, "ITEMS", 1)
        assert list(verify.groups(snapshot, stored_batch)) == at_once
    assert [(group.number, list(group.reasons)) for group in at_once] == [
        (0, [3]),
        (1, []),
        (2, [7]),
        (3, [1]),
        (4, [2]),
    ]


# Nested batches.


@mutant(
    "children-owe-a-repaired-parent-nothing",
    "core.batches.descendants:_unresolved",
    "item not in resolved",
    "False",
)
def test_ended_children_pay_again_for_items_that_their_parent_lost(service: Service) -> None:
    """No queue redelivers a child, so the repair pays again."""
    parent = service.batches.open(Opening(group_size=GROUP, items=5)).batch.id
    children = [
        service.batches.open(Opening(group_size=GROUP, items=1, sealed=True, parent=ItemId(parent, 0, index))).batch.id
        for index in range(4)
    ]
    ack(service, *((child, 0, 0) for child in children[:2]))
    service.batches.cancel(children[2])
    ack(service, (parent, 0, 4))
    assert (service.batches.get(parent).acked, service.batches.get(parent).failed) == (3, 1)
    with service.database.engine.begin() as tx:
        tx.execute(sa.delete(tables.item_groups).where(_groups.batch_id == parent))
        tx.execute(sa.delete(tables.failures).where(tables.failures.c.batch_id == parent))
    service.batches.repair(parent)
    after = service.batches.get(parent)
    assert (after.acked, after.failed, pending(service, parent)) == (2, 1, {3, 4})
    recount(service.database)


@mutant(
    "a-reopened-child-still-owes",
    "core.batches.settle:Transition.columns",
    '("ended_at", "completed_by", "succeeded_by", "parent_due")',
    '("ended_at", "completed_by", "succeeded_by")',
)
def test_a_child_that_was_complete_too_early_owes_nothing_until_it_is_complete(service: Service) -> None:
    """Its unpaid debt is no longer due."""
    parent = service.batches.open(Opening(group_size=GROUP, items=2, sealed=True)).batch.id
    child = service.batches.open(Opening(group_size=GROUP, items=9, sealed=True, parent=ItemId(parent, 0, 1))).batch.id
    with service.database.engine.begin() as tx:
        tx.execute(
            sa.insert(tables.item_groups).values(
                batch_id=child, group_no=0, resolved=b"\xff\x00", resolved_count=8, failed_count=0
            )
        )
    now = tables.utc_now()
    damage_batch(service, child, acked=9, state=State.COMPLETE, ended_at=now, parent_due=owed(succeeded=True))
    service.batches.repair(child)
    assert service.batches.get(child).parent_due is None
    assert pending(service, parent) == {0, 1}
    ack(service, (child, 0, 8))
    assert pending(service, parent) == {0}
    recount(service.database)


# Repairs next to other work.


@mutant(
    "a-repair-locks-nothing",
    "core.batches.repair:repair",
    "batches.lock(tx, batch_id)",
    "batches.get(tx, batch_id), tx.scalar(sa.select(tables.utc_now()))",
)
@pytest.mark.mariadb
@pytest.mark.parametrize("kind", ["an ack", "an extend"])
def test_no_change_gets_between_the_recount_and_the_write(
    server_database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After the repair has read all groups, another process changes the batch: the change waits, and counts."""
    service = Service(server_database, combiner=Inline)
    url = server_database.url.render_as_string(hide_password=False)
    other = Service(Database(url), combiner=Inline)
    batch = open_batch(service, [1, 2, 70])
    other_batch = open_batch(other, [1])
    damage_batch(service, batch, acked=7)
    original = verify.Recount.verification
    pool = ThreadPoolExecutor(1)
    under_way: list[Any] = []

    def paused(recount: verify.Recount) -> verify.Verification:
        with service.database.engine.connect() as tx:
            journal_next = tx.scalar(sa.select(_batches.journal_next).where(_batches.id == batch))
        if journal_next and not under_way:  # in the repair, not in its plan
            if kind == "an ack":
                under_way.append(pool.submit(ack_numbers, other, batch, [3, 71]))
            else:
                under_way.append(pool.submit(other.batches.extend, batch, GROUP))
            assert waits_for_a_lock(service.database, under_way[0])
            assert ack_numbers(other, other_batch, [2]) == 1, "acks of other batches must not wait"
        return original(recount)

    monkeypatch.setattr(verify.Recount, "verification", paused)
    service.batches.repair(batch)
    under_way[0].result(60)
    after = service.batches.get(batch)
    assert (after.acked, after.items) == ((5, ITEMS) if kind == "an ack" else (3, ITEMS + GROUP))
    assert service.batches.verify(batch).ok
    recount(server_database)
    pool.shutdown()
    other.stop()


@pytest.mark.mariadb
def test_consumers_continue_while_their_batch_is_repaired_and_every_item_counts_once(
    server_database: Database,
) -> None:
    """Three processes redeliver everything in small calls while the batch is damaged and repaired: exactly one of them
    completes it, and in the end nothing is pending."""
    url = server_database.url.render_as_string(hide_password=False)
    services = [Service(Database(url), combiner=Inline) for _ in range(3)]
    operator = Service(server_database, combiner=Inline)
    for round in range(6):
        batch = open_batch(services[0], range(0, ITEMS, 3), sealed=True)
        ack_numbers(services[1], batch, range(0, ITEMS, 5))
        damage_group(operator, batch, 0, resolved=b"\x0f")
        damage_group(operator, batch, 1, resolved_count=3)
        start = threading.Barrier(len(services) + 1)

        def consume(place: int, batch: int = batch, start: threading.Barrier = start) -> int:
            completions = 0
            start.wait(60)
            for first in range(place, ITEMS, 4):
                items = [(batch, *divmod(number % ITEMS, GROUP)) for number in range(first, first + 6)]
                while True:
                    try:
                        answer = ack(services[place], *items)
                        break
                    except errors.InconsistentBatch:
                        continue  # not repaired yet, so its items are redelivered
                completions += batch in answer.completed and answer.completed[batch].newly
            return completions

        with ThreadPoolExecutor(3) as pool:
            consumers = [pool.submit(consume, place) for place in range(3)]
            start.wait(60)
            repair = operator.batches.repair(batch)
            newly = sum(consumer.result(120) for consumer in consumers)
        assert repair.faults
        assert newly + repair.newly == 1, f"round {round}"
        assert operator.batches.get(batch).succeeded
        assert operator.batches.verify(batch).ok
    recount(server_database)
    for process in services:
        process.stop()


@mutant(
    "a-batch-is-repaired-beside-an-earlier-release",
    "core.batches.repair:check_generations",
    "not schema.serves_only(tx, SINCE)",
    "False",
)
def test_no_batch_is_repaired_while_an_earlier_release_may_run(service: Service) -> None:
    """That release would announce the second completion with the first one's id. A dry run is possible."""
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0008"))
    batch = open_batch(service, [1])
    damage_batch(service, batch, acked=7)
    before = everything_stored(service)
    assert service.batches.repair(batch, dry_run=True).faults
    with pytest.raises(errors.UpgradeNotFinished, match="--finish"):
        service.batches.repair(batch)
    assert everything_stored(service) == before


def test_a_missing_batch_cannot_be_repaired(service: Service) -> None:
    for dry_run in (True, False):
        with pytest.raises(errors.BatchNotFound):
            service.batches.repair(4711, dry_run=dry_run)


@mutant(
    "a-repair-keeps-the-hint-of-the-full-prefix",
    "core.batches.repair:_settled",
    "min(batch.full_prefix, counts.full_prefix)",
    "batch.full_prefix",
)
def test_the_watermark_goes_back_to_the_first_lost_item(service: Service) -> None:
    """The search for it starts at the hint of the full prefix."""
    batch = open_batch(service, range(2 * GROUP), sealed=True)
    assert service.batches.get(batch).full_prefix == 2
    damage_group(service, batch, 0, resolved=bits(range(1, GROUP)), resolved_count=63)
    service.batches.repair(batch)
    assert service.batches.get(batch).full_prefix == 0
    assert service.batches.watermark(batch)[1] == 0
