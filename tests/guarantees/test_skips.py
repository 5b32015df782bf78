"""Skipped items: not needed, deliberately not done. Between failed and acked, and no failures."""

from __future__ import annotations

import itertools

import pytest
import sqlalchemy as sa

from core import errors
from core.acks.call import AckResult, Call
from core.batches.batch import Opening
from core.batches.lifecycle import State, Verb
from core.batches.tolerance import OnExceeded
from core.bits import cache
from core.service import Service
from core.storage import schema, tables
from lastbit.ids import ItemId
from tests.guarantees.drivers.rounds import GROUP, ack
from tests.guarantees.test_tolerance import events_of, open_batch, resolve
from tests.mutants import mutant


def counts(service: Service, batch: int) -> tuple[int, int, int, int]:
    state = service.batches.get(batch)
    return state.acked, state.failed, state.skipped, state.pending


def mask(service: Service, batch: int, bits: bytes, verb: Verb, reason: str | None = None) -> AckResult:
    return service.acks.ack(Call.of(verb, masks=[(batch, 0, bits)], reason=reason)).result(60)


def stored_reasons(service: Service, table: sa.Table) -> dict[int, str]:
    rows = service.database.read(lambda tx: tx.execute(sa.select(table.c.number, table.c.reason)).all())
    return dict(map(tuple, rows))


@mutant(
    "a-skip-counts-as-an-ack",
    "core.acks.apply:apply",
    "delta.skipped += resolved_now + redriven_now",
    "delta.acked += resolved_now + redriven_now",
)
@mutant("skipped-items-are-pending", "core.batches.settle:settle", "change.resolved", "change.acked + change.failed")
def test_a_batch_of_which_items_are_skipped_succeeds(service: Service) -> None:
    """Nothing of it has failed, and nothing is pending."""
    batch = open_batch(service, 4, sealed=True)
    assert not resolve(service, batch, [0, 1], Verb.SKIP).completed
    assert counts(service, batch) == (0, 0, 2, 2)
    completed = resolve(service, batch, [2, 3]).completed[batch]
    assert (completed.newly, completed.succeeded) == (True, True)
    assert counts(service, batch) == (2, 0, 2, 0)
    assert events_of(service, batch) == ["opened", "sealed", "completed", "succeeded"]
    assert "2 of its 4 items are acked, and 2 skipped" in service.batches.explain(batch).reasons[0].text


@mutant("a-skip-leaves-a-failure-counted", "core.acks.apply:apply", "delta.failed -= redriven_now", "pass")
@pytest.mark.parametrize("by_mask", [False, True])
def test_a_skip_of_the_failed_items_lets_a_complete_batch_succeed(service: Service, by_mask: bool) -> None:
    """And its parent's item, which had failed, becomes acked."""
    parent = open_batch(service, 1, sealed=True)
    batch = open_batch(service, 3, sealed=True, parent=ItemId(parent, 0, 0))
    resolve(service, batch, [0, 1], Verb.FAIL)
    assert not resolve(service, batch, [2]).completed[batch].succeeded
    assert counts(service, parent) == (0, 1, 0, 0)
    answer = mask(service, batch, b"\x03", Verb.SKIP) if by_mask else resolve(service, batch, [0, 1], Verb.SKIP)
    completed = answer.completed[batch]
    assert (answer.applied, completed.newly, completed.newly_succeeded) == (2, False, True)
    assert counts(service, batch) == (1, 0, 2, 0)
    assert counts(service, parent) == (1, 0, 0, 0)


ORDERS = [list(order) for count in (1, 2, 3) for order in itertools.permutations(Verb, count)]


@mutant("an-ack-leaves-the-item-counted-as-skipped", "core.acks.apply:apply", "delta.skipped -= unskipped_now", "pass")
@pytest.mark.parametrize("by_mask", [False, True])
def test_an_item_ends_in_the_highest_state_whatever_the_order(service: Service, by_mask: bool) -> None:
    """Every order of an ack, a skip and a failure, each of them twice; also in the memory of another process."""
    stranger = Service(service.database)
    try:
        for order in ORDERS:
            batch = open_batch(service, 9)
            for verb, sender in zip(order + order, itertools.cycle((service, stranger, stranger)), strict=False):
                if by_mask:
                    mask(sender, batch, b"\xaa", verb, reason=f"a {verb}")
                else:
                    ack(sender, *[(batch, 0, n) for n in (1, 3, 5, 7)], verb=verb, reason=f"a {verb}")
            levels = [verb in order for verb in (Verb.ACK, Verb.SKIP, Verb.FAIL)]
            expected = [0, 0, 0, 5]
            expected[(0, 2, 1)[levels.index(True)]] = 4
            assert counts(service, batch) == tuple(expected)
            verification = service.batches.verify(batch)
            assert verification.ok, verification.faults
            service.batches.delete(batch)
    finally:
        stranger.stop()


@mutant(
    "reasons-of-skips-are-stored-as-failures",
    "core.acks.flush:_write_reasons",
    "_TABLES[verb]",
    "'failures'",
    ("_TIMES[verb]", "'failed_at'"),
)
def test_the_reason_of_a_skip_replaces_that_of_the_failure(service: Service) -> None:
    """And is removed when the item is acked. The failures by reason have none of it."""
    batch = open_batch(service, GROUP)
    ack(service, *[(batch, 0, n) for n in range(4)], verb=Verb.FAIL, reason="broken")
    ack(service, *[(batch, 0, n) for n in (1, 2)], verb=Verb.SKIP, reason="not needed")
    assert stored_reasons(service, tables.failures) == {0: "broken", 3: "broken"}
    assert stored_reasons(service, tables.skips) == {1: "not needed", 2: "not needed"}
    (span,) = service.batches.ranges(batch, "skipped", 0, 10)[1].ranges
    assert (span.start, span.end, span.reasons) == (1, 3, {1: "not needed", 2: "not needed"})
    _, reasons = service.batches.failures(batch, 0, 10)
    assert [(reason.reason, reason.count) for reason in reasons.reasons] == [("broken", 2)]
    resolve(service, batch, [1, 3])
    assert stored_reasons(service, tables.failures) == {0: "broken"}
    assert stored_reasons(service, tables.skips) == {2: "not needed"}
    service.batches.delete(batch)
    assert not stored_reasons(service, tables.failures) | stored_reasons(service, tables.skips)


@mutant(
    "a-skip-resolves-a-held-item",
    "core.acks.flush:_look_for_children",
    "unit.call.pays",
    "unit.call.pays or str(unit.verb) == 'skip'",
)
def test_a_held_item_is_not_skipped(service: Service) -> None:
    """A child that succeeds acks it, also if all of the child's items were skipped."""
    parent = open_batch(service, 1, sealed=True)
    child = open_batch(service, 2, sealed=True, parent=ItemId(parent, 0, 0))
    assert [entry.reason for entry in resolve(service, parent, [0], Verb.SKIP).rejected] == ["held"]
    assert resolve(service, child, [0, 1], Verb.SKIP).completed[child].succeeded
    assert counts(service, parent) == (1, 0, 0, 0)


def test_the_tolerance_is_that_of_failures_among_all_items(service: Service) -> None:
    """Skipped items are no failures, and they count as items. What exceeded the tolerance once stays marked so."""
    batch = open_batch(service, 10, sealed=True, tolerated_failure_percentage=10, on_exceeded=OnExceeded.CANCEL)
    resolve(service, batch, range(8), Verb.SKIP)
    resolve(service, batch, [8], Verb.FAIL)
    assert service.batches.get(batch).state is State.SEALED
    assert resolve(service, batch, [9]).completed[batch].succeeded
    batch = open_batch(service, 2, sealed=True, tolerated_failures=0)
    resolve(service, batch, [0, 1], Verb.FAIL)
    assert resolve(service, batch, [0, 1], Verb.SKIP).completed[batch].newly_succeeded
    assert service.batches.get(batch).exceeded


@pytest.mark.parametrize("state", [State.CANCELLED, State.EXPIRED])
def test_a_batch_that_has_ended_rejects_skips_that_would_change_something(service: Service, state: State) -> None:
    """Skips of skipped and of acked items are repeats."""
    batch = open_batch(service, 4)
    for number, verb in enumerate((Verb.FAIL, Verb.SKIP, Verb.ACK)):
        resolve(service, batch, [number], verb)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.batches).where(tables.batches.c.id == batch).values(state=state))
    answer = resolve(service, batch, range(4), Verb.SKIP)
    assert (answer.applied, answer.repeated) == (0, 2)
    assert {(entry.item, entry.reason) for entry in answer.rejected} == {((batch, 0, n), state) for n in (0, 3)}
    assert resolve(service, batch, range(3), Verb.FAIL).repeated == 3
    assert resolve(service, batch, range(3)).repeated == 1


@mutant("a-batch-keeps-a-0-of-skips", "core.acks.completion:_columns", "after.skipped or None", "after.skipped")
@mutant(
    "a-group-keeps-the-bits-of-no-skips",
    "core.bits.bitfield:Group.dump",
    "self.skipped is None or not self.skipped_count",
    "self.skipped is None",
)
@mutant(
    "a-new-batch-has-a-0-of-skips",
    "core.storage.row_codec:RowCodec.values",
    "values | {name: values[name] or None for name in self._counts}",
    "values",
)
def test_a_group_without_skipped_items_has_no_byte_for_them(service: Service) -> None:
    """Nor has its batch, also after the last one of them was acked."""
    batch = open_batch(service, GROUP)
    groups, batches = tables.item_groups.c, tables.batches.c
    query = sa.select(groups.skipped, groups.skipped_count, batches.skipped).where(groups.batch_id == batches.id)
    resolve(service, batch, [1, 2])
    resolve(service, batch, [7], Verb.FAIL)

    def stored() -> tuple[object, ...]:
        return tuple(service.database.read(lambda tx: tx.execute(query.where(batches.id == batch)).one()))

    assert stored() == (None, None, None)
    resolve(service, batch, [3, 7], Verb.SKIP)
    assert stored() == (b"\x88" + bytes(7), 2, 2)
    resolve(service, batch, [3, 7])
    assert stored() == (None, None, None)


@mutant("an-item-is-skipped-beside-an-earlier-release", "core.acks.flush:_refuse_skips", "cache.may_skip(tx)", "True")
def test_nothing_is_skipped_while_an_earlier_release_may_run(service: Service) -> None:
    """It would take skipped items for acked ones. Calls that are merged with the skip are not refused."""
    batch = open_batch(service, 4)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest="0024"))
    skip, call = Call.of(Verb.SKIP, [(batch, 0, 0)]), Call.of(Verb.ACK, [(batch, 0, 1)])
    units = [unit for merged in (skip, call) for unit in merged.chunks()]
    outcomes = service.acks._commit(units, lock_waits=1)
    assert isinstance(outcomes[0].error, errors.UpgradeNotFinished)
    assert cache.SKIPS in str(outcomes[0].error)
    assert (outcomes[1].error, outcomes[1].applied) == (None, 1)
    assert counts(service, batch) == (1, 0, 0, 3)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.schema_support).values(oldest=cache.SKIPS))
    assert resolve(service, batch, [0], Verb.SKIP).applied == 1


def test_a_downgrade_counts_skipped_items_as_acked(service: Service) -> None:
    """As an earlier release reads their bits; also after the next upgrade."""
    batch = open_batch(service, GROUP + 4)
    resolve(service, batch, [0, 1], Verb.SKIP)
    ack(service, (batch, 0, 2), (batch, 0, 3), verb=Verb.SKIP, reason="not needed")
    resolve(service, batch, [1, 4])
    resolve(service, batch, [5], Verb.FAIL)
    assert counts(service, batch) == (2, 1, 3, GROUP - 2)
    schema.migrate(service.database, "0024")
    table = sa.table("batches", *map(sa.column, ("id", "acked", "failed")))
    query = sa.select(table.c.acked, table.c.failed).where(table.c.id == batch)
    assert tuple(service.database.read(lambda tx: tx.execute(query).one())) == (5, 1)
    schema.migrate(service.database)
    later = Service(service.database)
    try:
        assert counts(later, batch) == (5, 1, 0, GROUP - 2)
        assert later.batches.verify(batch).ok
        assert resolve(later, batch, [0], Verb.SKIP).repeated == 1
    finally:
        later.stop()


@mutant(
    "a-repair-forgets-lost-skips",
    "core.batches.repair:_restored",
    "skipped_bits[list(stored_group.skip_reasons)] = True",
    "",
)
@mutant(
    "verify-does-not-see-lost-skips",
    "core.batches.verify:_faults",
    "group.skipped.count() != group.skipped_count",
    "False",
)
def test_a_repair_restores_lost_skips_from_their_reasons(service: Service) -> None:
    """An item that is marked as failed and skipped is skipped."""
    batch = service.batches.open(Opening(group_size=GROUP, items=4, sealed=True)).batch.id
    resolve(service, batch, [0])
    ack(service, (batch, 0, 1), (batch, 0, 2), verb=Verb.SKIP, reason="not needed")
    with service.database.engine.begin() as tx:
        columns = tables.item_groups.c
        damage = {"skipped": b"\x02" + bytes(7), "failed": b"\x02" + bytes(7), "failed_count": 1}
        tx.execute(sa.update(tables.item_groups).where(columns.batch_id == batch).values(damage))
    faults = service.batches.verify(batch).faults
    assert any("skipped_count" in fault for fault in faults), faults
    assert any("both failed and skipped" in fault for fault in faults), faults
    service.batches.repair(batch)
    assert counts(service, batch) == (1, 0, 2, 1)
    assert service.batches.verify(batch).ok
    assert resolve(service, batch, [3]).completed[batch].succeeded
