"""Writing verbs that share a transaction: each has the outcome that it would have alone, and none affects another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVarTuple

import pytest
import sqlalchemy as sa
import tenacity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import errors, feed, tallies, writes
from core.batches.batch import Opened, Opening
from core.batches.lifecycle import State
from core.batches.writing import Extend, Open, Seal
from core.commits.combiner import Combiner, Commit, GroupCommit, Inline
from core.commits.lanes import FLUSH_COST
from core.commits.operation import Done, Operation
from core.consumer_groups import positions
from core.consumer_groups.leases import Caller
from core.feed import Append
from core.processes import outbox, timers
from core.processes.handling import Handle, handle_many_of, handle_of
from core.processes.instances import Handled, Handling
from core.service import Service
from core.service.batches import opening_of, seal_of
from core.service.consumer_groups import commits_of
from core.service.tallies import apply_of, apply_ranges_of
from core.service.writes import KINDS
from core.storage import tables
from core.storage.database import Database
from lastbit.ids import INTEGER_LIMIT, MAX_ITEMS, ItemId
from lastbit.streams.snapshot import Snapshot
from tests.guarantees.drivers.strangers import locked
from tests.mutants import mutant
from tests.support import templates
from tests.support.servers import sqlite_file

Args = TypeVarTuple("Args")


@pytest.fixture(params=[Inline, Combiner])
def any_service(request: pytest.FixtureRequest, database: Database) -> Iterator[Service]:
    """A service whose writes share transactions, and one in which each has its own."""
    combiner: Callable[[Commit], GroupCommit] = request.param
    service = Service(database, writes=combiner)
    yield service
    service.stop()


def merged(database: Database, *operations: Operation) -> list[Done]:
    """The outcomes of the operations in one transaction."""
    return database.write(writes.flush, operations, KINDS)


def open_batch(database: Database, **facts: Any) -> int:
    (outcome,) = merged(database, opening_of(Opening(**facts)))
    opened: Opened = outcome.value
    return opened.batch.id


def events_of(database: Database) -> list[feed.Event]:
    return database.snapshot(feed.read, None, 1000).events


def test_many_callers_at_once_get_numbers_of_their_own(any_service: Service) -> None:
    """Sixteen threads extend one batch; no two extends share a number, and no number is missing."""
    batch = any_service.batches.open(Opening()).batch.id

    def extend_often(count: int) -> list[range]:
        extensions = [any_service.batches.extend(batch, count) for _ in range(20)]
        return [range(extension.start, extension.start + extension.count) for extension in extensions]

    with ThreadPoolExecutor(16) as pool:
        ranges = list(itertools.chain.from_iterable(pool.map(extend_often, range(1, 17))))
    numbers = sorted(itertools.chain.from_iterable(ranges))
    assert numbers == list(range(20 * sum(range(1, 17))))
    assert any_service.batches.get(batch).items == len(numbers)


@mutant(
    "a-servers-ids-of-new-batches-are-confused",
    "core.storage.dialects.mariadb:MariaDB.batch_ids",
    "sorted(row[0] for row in rows)",
    "sorted((row[0] for row in rows), reverse=True)",
    only="mariadb",
)
def test_many_callers_at_once_get_batches_of_their_own(any_service: Service) -> None:
    """Each batch has the key and the labels of its request, and the feed announces each once, without a gap."""

    def open_some(caller: int) -> list[tuple[int, str]]:
        openings = [Opening(key=f"{caller}-{number}", labels={"caller": f"ü{caller}"}, items=1) for number in range(10)]
        return [
            (any_service.batches.open(opening, f"k{opening.key}").batch.id, opening.key or "") for opening in openings
        ]

    with ThreadPoolExecutor(16) as pool:
        opened = dict(itertools.chain.from_iterable(pool.map(open_some, range(16))))
    assert len(opened) == 160
    for batch, key in opened.items():
        state = any_service.batches.get(batch)
        assert (state.key, state.labels) == (key, {"caller": f"ü{key.partition('-')[0]}"})
    events = events_of(any_service.database)
    assert [event.position for event in events] == list(range(1, 161))
    assert sorted((event.batch, event.key) for event in events) == sorted(opened.items())


class Gate:
    """Holds the first commit until `opened`, so that later operations wait and share the next one."""

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, units: Sequence[Any], /, *, lock_waits: int) -> Any:
        self.sizes.append(len(units))
        self.arrived.release()
        assert self.opened.wait(60)
        return self._commit(units, lock_waits=lock_waits)

    def waits_for(self, service: Service, operations: int) -> None:
        """Wait until this number of operations are queued or in the first commit."""
        while service.writes._combiner._backlog.units < operations:  # type: ignore[attr-defined]
            threading.Event().wait(0.001)


@contextmanager
def gated(database: Database) -> Iterator[tuple[Service, Gate]]:
    gates: list[Gate] = []

    def with_gate(commit: Commit) -> Combiner:
        gates.append(Gate(commit))
        return Combiner(gates[0], what="writes")

    service = Service(database, writes=with_gate)
    try:
        yield service, gates[0]
    finally:
        gates[0].opened.set()
        service.stop()


def test_operations_that_arrive_during_a_commit_share_the_next_one(database: Database) -> None:
    with gated(database) as (service, gate), ThreadPoolExecutor(9) as pool:
        first = pool.submit(service.batches.open, Opening())
        assert gate.arrived.acquire(timeout=60)
        others = [pool.submit(service.batches.open, Opening(items=number)) for number in range(1, 9)]
        gate.waits_for(service, 9)
        gate.opened.set()
        ids = {first.result(60).batch.id, *(other.result(60).batch.id for other in others)}
        assert [other.result().count for other in others] == list(range(1, 9))
        assert (len(ids), gate.sizes) == (9, [1, 8])


@mutant(
    "a-refused-extend-fails-its-neighbours",
    "core.batches.writing:BatchWrites._change",
    "errors.CoreError",
    "ZeroDivisionError",
)
def test_a_refused_operation_does_not_affect_its_neighbours(database: Database) -> None:
    sealed, large = open_batch(database, items=1, sealed=True), open_batch(database, items=MAX_ITEMS - 1)
    live = open_batch(database)
    outcomes = merged(
        database,
        Extend(batch=live, count=1),
        Extend(batch=10**9, count=1),
        Extend(batch=sealed, count=1),
        Extend(batch=large, count=2),
        Append(events=[feed.NewEvent("a", "x")]),
        opening_of(Opening(items=3)),
        Extend(batch=large, count=1),
        Extend(batch=live, count=5),
    )
    assert [type(outcome.error) for outcome in outcomes] == [
        *(type(None), errors.BatchNotFound, errors.BatchSealed, errors.InvalidRequest),
        *(type(None), type(None), type(None), type(None)),
    ]
    assert (outcomes[-1].value.start, outcomes[-1].value.batch.items) == (1, 6)
    service = Service(database)
    assert [service.batches.get(batch).items for batch in (live, sealed, large)] == [6, 1, MAX_ITEMS]


@mutant(
    "a-shared-operation-is-judged-by-the-row-as-it-was-read",
    "core.batches.writing:BatchWrites._change",
    "current[batch.id] = result.batch",
    "pass",
)
def test_operations_on_one_batch_take_place_in_their_order(database: Database) -> None:
    """An extend before the seal is accepted, one after it is refused, and a repeated one returns its numbers."""
    batch = open_batch(database)
    outcomes = merged(
        database,
        Extend(batch=batch, count=2, idempotency_key="once", digest="a"),
        seal_of(batch),
        Extend(batch=batch, count=2),
        Extend(batch=batch, count=2, idempotency_key="once", digest="a"),
        Extend(batch=batch, count=3, idempotency_key="once"),
        Extend(batch=batch, count=2, idempotency_key="once", digest="b"),
        seal_of(batch),
    )
    assert [type(outcome.error) for outcome in outcomes] == [
        *(type(None), type(None), errors.BatchSealed),
        *(type(None), errors.IdempotencyKeyReused, errors.IdempotencyKeyReused, type(None)),
    ]
    assert (outcomes[3].value.replayed, outcomes[3].value.start) == (True, 0)
    assert outcomes[1].value.batch.items == 2
    assert Service(database).batches.get(batch) == outcomes[-1].value.batch
    assert [event.type for event in events_of(database)] == ["batch.opened", "batch.sealed"]


def test_an_empty_batch_that_is_sealed_in_a_shared_transaction_completes_once(database: Database) -> None:
    batch = open_batch(database)
    first, second = merged(database, seal_of(batch, "a"), seal_of(batch, "b"))
    assert (first.value.newly, second.value.newly) == (True, False)
    assert first.value.batch.state is State.COMPLETE
    types = [event.type for event in events_of(database)]
    assert types == ["batch.opened", "batch.sealed", "batch.completed", "batch.succeeded"]


@mutant(
    "a-key-that-comes-twice-opens-two-batches",
    "core.batches.writing:BatchWrites._open",
    "key is not None and key in first_of",
    "False",
)
def test_opens_with_one_key_in_one_transaction_make_one_batch(database: Database) -> None:
    same, other = Opening(key="a", items=2), Opening(key="b")
    outcomes = merged(
        database, opening_of(same, "k"), opening_of(same, "k"), opening_of(other, "k"), opening_of(other, "l")
    )
    first, again, refused, neighbour = outcomes
    assert (first.value.replayed, again.value.replayed, again.value.count) == (False, True, 2)
    assert first.value.batch == again.value.batch
    assert isinstance(refused.error, errors.IdempotencyKeyReused)
    assert neighbour.value.batch.key == "b"
    assert len(events_of(database)) == 2


@mutant(
    "an-event-that-two-callers-append-stands-twice",
    "core.feed:Appends.finish",
    "event.id not in positions",
    "True",
)
def test_an_event_that_two_callers_append_stands_once(database: Database) -> None:
    first, second = merged(
        database,
        Append(events=[feed.NewEvent("a", "x"), feed.NewEvent("b", "x")]),
        Append(events=[feed.NewEvent("b", "x"), feed.NewEvent("c", "x", "ü", '"ü"')]),
    )
    assert [(event.position, event.repeated) for event in first.value] == [(1, False), (2, False)]
    assert [(event.position, event.repeated) for event in second.value] == [(2, True), (3, False)]
    assert [(event.id, event.key, event.data) for event in events_of(database)][-1] == ("c", "ü", '"ü"')


@mutant(
    "a-merged-handling-does-not-see-the-version-before-it",
    "core.processes.instances:LockedInstances.get",
    "self._changed.get((process, instance)) or self._stored.get((process, instance))",
    "self._stored.get((process, instance))",
)
@mutant(
    "a-merged-handling-does-not-see-the-event-before-it",
    "core.processes.inbox:LockedEvents._change",
    "self._statuses[key] = status",
    "pass",
)
@mutant(
    "a-merged-handling-does-not-see-the-commands-before-it",
    "core.processes.outbox:Issues.issue",
    "self._issuers |= dict.fromkeys(new, event)",
    "pass",
)
def test_handlings_of_one_instance_take_place_in_their_order(database: Database) -> None:
    """Each sees the version, the events, the commands and the end that the ones before it left."""
    service = with_process(database)
    outcomes = merged(
        database,
        handle("i", 1, 0, "commands"),
        handle("i", 1, 0, "commands"),
        handle("i", 2, 0),
        handle("i", 2, 1, "commands"),
        handle("j", 2, 0, "error"),
        handle("j", 2, 0),
        handle("i", 3, 2, "finish"),
        handle("i", 3, 2, "finish"),
        handle("j", 3, 0, "stale"),
        handle("k", 3, 0),
    )
    assert [
        (type(outcome.error).__name__ if outcome.error else (str(outcome.value.status), outcome.value.repeated))
        for outcome in outcomes
    ] == [
        *(("handled", False), ("handled", True), "VersionConflict", ("handled", False)),
        *(("parked", False), ("parked", True), ("handled", False), ("handled", True), "StaleEpoch"),
        ("handled", False),
    ]
    first, _, _, second, *_ = outcomes
    assert [(command.step, command.position, command.repeated) for command in first.value.commands] == [
        *(("same", 4, False), ("1", 5, False), ("same", 4, True))
    ]
    assert [(command.step, command.position, command.repeated) for command in second.value.commands] == [
        *(("same", 4, True), ("2", 6, False), ("same", 4, True))
    ]
    assert [event.position for event in events_of(database)] == list(range(1, 8))
    details = service.processes.instance(PROCESS, "i")
    assert details.instance == outcomes[6].value.instance == outcomes[7].value.instance
    assert (details.instance.version, details.instance.state) == (3, '"i3"')
    assert [command.position for command in details.commands] == [7, 6, 5, 4]
    assert [(entry.event, entry.error) for entry in service.processes.instance(PROCESS, "j").history] == [
        ("h2", "brokenbroken")
    ]
    assert service.processes.instance(PROCESS, "k").instance.version == 1


@mutant(
    "a-refused-handling-issues-its-first-commands",
    "core.processes.outbox:Issues.issue",
    "new: dict[str, _New] = {}",
    "new = self._new",
)
def test_a_handling_that_reuses_a_step_issues_none_of_its_commands(database: Database) -> None:
    """Nor do the handlings before and after it in its transaction issue any for it, or see its state."""
    with_process(database)
    reusing = handle("i", 2, 1, "step").handling
    commands = [outbox.NewCommand("own", "ship"), *reusing.commands]
    first, refused, last = merged(
        database, handle("i", 1, 0, "step"), handle_of(replace(reusing, commands=commands)), handle("i", 3, 1)
    )
    assert [command.repeated for command in first.value.commands] == [False]
    assert str(refused.error).startswith(
        "body.commands[1].step: expected a step of its own, not 'same': event 'h1' has"
    )
    assert last.value.instance.version == 2
    assert [event.id.partition(":")[0] for event in events_of(database)] == ["h1", "h2", "h3", "command"]


@mutant(
    "a-refused-handling-counts",
    "core.processes.handling:Handlings._judge",
    "if handling.version != version:\n    raise errors.VersionConflict(handling.process, "
    "handling.instance, handling.version, version)",
    """
        self._inbox.record(key, handling.position, inbox.Status.LATE)
        if handling.version != version:
            raise errors.VersionConflict(handling.process, handling.instance, handling.version, version)
    """,
)
@mutant("events-get-the-positions-of-others", "core.writes:flush", "position + len(new)", "position")
def test_a_refused_handling_does_not_affect_its_neighbours(database: Database) -> None:
    """Nor does an operation of another kind."""
    service = with_process(database)
    absent = handle_of(Handling(PROCESS, "j", "h9", 2, "w", 1, 0, error="its event is not at that position"))
    outcomes = merged(
        database,
        handle("i", 1, 0, "stale"),
        handle("i", 1, 0, "unknown"),
        handle("i", 1, 1),
        absent,
        Append(events=[feed.NewEvent("a", "x")]),
        opening_of(Opening(items=3)),
        handle("i", 1, 0, "finish"),
        handle("i", 2, 0),
        Extend(batch=10**9, count=1),
    )
    assert [type(outcome.error) for outcome in outcomes] == [
        *(errors.StaleEpoch, errors.ProcessNotFound, errors.VersionConflict, errors.InvalidRequest),
        *(type(None), type(None), type(None), type(None), errors.BatchNotFound),
    ]
    assert outcomes[7].value.status == "late"
    assert [event.id.partition(":")[0] for event in events_of(database)] == ["h1", "h2", "h3", "command", "batch", "a"]
    [instance], _ = service.processes.page(PROCESS, None, None, 10)
    assert instance == outcomes[6].value.instance
    [command] = service.processes.commands(0, 10).commands
    assert command.position == outcomes[6].value.commands[0].position == 4
    assert outcomes[4].value == [feed.Appended(6, repeated=False)]


@mutant(
    "a-conflict-without-end-fails-its-neighbours",
    "core.errors:is_outage",
    "LockTimeout | Contended",
    "LockTimeout",
)
def test_a_transaction_that_meets_a_conflict_each_time_fails_alone(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its row in the outbox, a command is issued again, but the feed has its event."""
    with_process(database)
    assert merged(database, handle("i", 1, 0, "commands"))[0].error is None
    with database.engine.begin() as tx:
        tx.execute(sa.delete(tables.outbox))
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=lambda seconds: None))
    with gated(database) as (service, gate), ThreadPoolExecutor(6) as pool:
        first = pool.submit(service.batches.open, Opening())
        assert gate.arrived.acquire(timeout=60)
        conflict = pool.submit(service.processes.handle, handle("i", 2, 1, "commands").handling)
        others = [pool.submit(service.batches.open, Opening()) for _ in range(4)]
        gate.waits_for(service, 6)
        gate.opened.set()
        assert isinstance(conflict.exception(60), errors.Contended)
        assert len({call.result(60).batch.id for call in (first, *others)}) == 5
        assert gate.sizes[:2] == [1, 5]


@mutant(
    "a-call-of-many-handlings-has-one-outcome",
    "core.processes.handling:Handlings.finish",
    "[self.outcomes[handle] for handle in operation.handles]",
    "[self.outcomes[operation.handles[0]] for handle in operation.handles]",
)
def test_each_handling_of_a_call_of_many_has_an_outcome_of_its_own(database: Database) -> None:
    """In their order, and with those of other calls in one transaction: a refused one affects no other."""
    service = with_process(database)
    [call] = handle_many_of(
        [
            handle(*words).handling
            for words in (
                *(("i", 1, 0, "commands"), ("j", 1, 0, "stale"), ("i", 2, 1, "finish"), ("i", 3, 2)),
                *(("k", 1, 7), ("j", 2, 0, "error"), ("i", 1, 0)),
            )
        ]
    )
    [again] = handle_many_of([handle("i", 1, 0).handling, handle("k", 1, 0, "unknown").handling])
    first, single, second = merged(database, call, handle("j", 1, 0), again)
    assert [
        (type(outcome.error).__name__ if outcome.error else (str(outcome.value.status), outcome.value.repeated))
        for outcome in (*first.value, single, *second.value)
    ] == [
        *(("handled", False), "StaleEpoch", ("handled", False), ("late", False), "VersionConflict"),
        *(("parked", False), ("handled", True), ("handled", False), ("handled", True), "ProcessNotFound"),
    ]
    assert [
        (instance.instance, instance.version, instance.status)
        for instance in service.processes.page(PROCESS, None, None, 9)[0]
    ] == [*(("i", 2, "finished"), ("j", 1, "running"))]


def test_a_call_of_many_handlings_is_one_operation_unless_it_is_costly() -> None:
    """So that the number of events in a call is no overload, and no call delays the others for long. Those of one
    worker are in one queue."""
    handling = handle("i", 1, 0).handling
    [plain] = handle_many_of([handling] * 100)
    assert plain.cost < FLUSH_COST // 2
    large = replace(handling, commands=[outbox.NewCommand(str(step), "ship") for step in range(100)])
    parts = handle_many_of([large] * 100)
    assert {len(part.handles) for part in parts} == {5}
    assert all(part.cost < FLUSH_COST for part in parts)
    assert {part.batch for part in parts} == {plain.batch} != {handle_many_of([replace(handling, worker="v")])[0].batch}
    assert [each.handling for part in parts for each in part.handles] == [large] * 100


def test_many_workers_at_once_issue_each_command_once(any_service: Service) -> None:
    """Sixteen threads deliver the same events of forty instances, and appends and opens go on at the same time."""
    with_process(any_service.database)

    def deliver(turn: int) -> int:
        done = 0
        for number in range(40):
            instance = f"o{(number + 7 * turn) % 40}"
            for event in (1, 2):
                kind = "commands" if event == 1 else "finish"
                with suppress(errors.VersionConflict):
                    done += not any_service.processes.handle(handle(instance, event, event - 1, kind).handling).repeated
            if number % 10 == 0:
                any_service.batches.open(Opening(items=1))
        return done

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(deliver, range(16))) == 80
    assert [event.position for event in events_of(any_service.database)] == list(range(1, 4 + 64 + 3 * 40))
    commands = any_service.processes.commands(0, 1000).commands
    assert sorted((command.instance, command.step) for command in commands) == sorted(
        (f"o{number}", step) for number in range(40) for step in ("same", "1", "last")
    )


def entry(key: str, delta: int, offset: int, topic: str = "x") -> tallies.Entry:
    return tallies.Entry(key, delta, topic, 0, 0, offset, 0)


@mutant(
    "a-refused-call-leaves-some-entries",
    "core.tallies.entries:EntriesCall.effect",
    "steps: dict[Counter, Row] = {}",
    "steps = after.counters",
)
def test_a_refused_call_of_tally_entries_changes_nothing_and_affects_no_neighbour(database: Database) -> None:
    service = with_process(database)
    outcomes = merged(
        database,
        apply_of("t", [entry("k", 1, 1)]),
        apply_of("t", [entry("a", 1, 1), entry("k", 1, 4), entry("k", 1, 3)]),
        apply_of("t", [entry("k", 1, 1), entry("k", 2, 2)]),
        apply_of("t", [entry("a", 1, 1), entry("k", 2, 3), entry("k", 3, 3)]),
        apply_of("t", [entry("a", 1, 1)], fence(2)),
        apply_of("t", [entry("a", 1, 1)], replace(fence(), group="absent")),
        apply_of("t", [entry("a", 8, 1)], fence()),
        apply_of("t", [entry(".", 1, 1)]),
        apply_of("u", [entry("k", 4, 1)]),
    )
    assert [type(outcome.error) for outcome in outcomes] == [
        *(type(None), errors.OutOfOrder, type(None), errors.InvalidRequest, errors.StaleEpoch),
        *(errors.ConsumerGroupNotFound, type(None), errors.InvalidRequest, type(None)),
    ]
    assert outcomes[2].value == tallies.Applied(1, 1)
    totals = [(value.key, value.value) for value in service.tallies.page("t", "", None, 10)]
    assert totals == [("a", 8), ("k", 3)]


@mutant(
    "a-call-beyond-the-limit-is-written",
    "core.tallies.writes:write",
    'pipeline.later("ROLLBACK TO SAVEPOINT tallies")',
    "pass",
)
def test_of_calls_that_together_pass_the_limit_of_a_total_only_the_last_is_refused(database: Database) -> None:
    """It has other keys too, which stay unchanged, and so do its guards: a later call may repeat its entries."""
    service = Service(database)
    half = INTEGER_LIMIT // 2
    outcomes = merged(
        database,
        apply_of("t", [entry("k", half, 1, "a")]),
        apply_of("t", [entry("j", 1, 1, "c"), entry("k", half, 1, "b"), entry("l", 1, 1, "c")]),
        apply_of("t", [entry("l", 5, 1, "c")]),
        apply_of("t", [entry("k", half - 1, 1, "b")]),
        apply_of("t", [entry("k", 1, 1, "d")]),
        apply_of("t", [entry("k", -half, 2, "a")]),
    )
    assert [type(outcome.error) for outcome in outcomes] == [
        *(type(None), errors.InvalidRequest, type(None), type(None), errors.InvalidRequest, type(None))
    ]
    totals = [(value.key, value.value) for value in service.tallies.page("t", "", None, 10)]
    assert totals == [("k", half - 1), ("l", 5)]


@mutant(
    "a-shared-commit-forgets-the-one-before-it",
    "core.consumer_groups.positions:Commits.judge",
    "position = stored[place] = _merged(stored.get(place), commit)",
    "position = _merged(stored.get(place), commit)",
)
@mutant(
    "a-refused-position-refuses-its-neighbours",
    "core.consumer_groups.positions:Commits.judge",
    "fence in refused",
    "refused",
    ("refused[fence]", "next(iter(refused.values()))"),
)
def test_commits_of_positions_share_a_transaction_and_a_stale_one_changes_nothing(database: Database) -> None:
    service = Service(database)
    service.consumer_groups.put("g", 3)
    leases = {lease.partition: lease.epoch for lease in service.consumer_groups.sync("g", Caller("w", "s")).assigned}
    holds = [positions.Fence("g", partition, "w", leases[partition]) for partition in range(3)]
    outcomes = merged(
        database,
        commits_of([positions.Commit(holds[0], Snapshot(3, 8, (4, 6)), "three", 20)]),
        commits_of([positions.Commit(replace(holds[0], epoch=9), Snapshot(99, 99))]),
        commits_of(
            [
                positions.Commit(holds[0], Snapshot(5, 9, (6,)), "five"),
                positions.Commit(replace(holds[1], worker="other"), Snapshot(99, 99)),
                positions.Commit(holds[2], Snapshot(1, 1)),
                positions.Commit(replace(holds[2], group="absent"), Snapshot(1, 1)),
                positions.Commit(holds[0], Snapshot(3, 8, (4, 6)), "three"),
            ]
        ),
    )
    [first], [stale], [second, other, third, absent, last] = (outcome.value for outcome in outcomes)
    epoch = leases[0]
    assert first == positions.Committed(0, epoch, 3, 8, 2, "three", 17)
    assert second == last == positions.Committed(0, epoch, 5, 9, 1, "five", 15)
    assert (third.floor, third.token) == (1, None)
    assert [type(error) for error in (stale, other, absent)] == [
        *(errors.StaleEpoch, errors.StaleEpoch, errors.ConsumerGroupNotFound)
    ]
    rows = [(row.floor, row.high, row.token, row.head) for row in service.consumer_groups.get("g").positions]
    assert rows == [(5, 9, "five", 20), (None, None, None, None), (1, 1, None, None)]


def test_many_callers_at_once_count_each_entry_once(any_service: Service) -> None:
    """Sixteen threads send the same entries of one source in their order, in calls of their own."""

    def count(caller: int) -> int:
        return sum(any_service.tallies.apply("t", [entry("k", 1, offset)]).applied for offset in range(1, 31))

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(count, range(16))) == 30
    assert any_service.tallies.get("t", "k").value == 30


@pytest.mark.mariadb
def test_a_locked_batch_does_not_delay_the_others(server_database: Database) -> None:
    """The locked batch leaves the shared transaction. Its operations end after its lock is released."""
    service = Service(server_database, writes=lambda commit: Combiner(commit, what="writes"))
    try:
        stuck, free = (service.batches.open(Opening()).batch.id for _ in range(2))
        with ThreadPoolExecutor(1) as pool, locked(server_database, stuck):
            waiting = pool.submit(service.batches.extend, stuck, 1)
            for _ in range(20):
                service.batches.extend(free, 1)
            assert not waiting.done()
        assert waiting.result(60).batch.items == 1
        assert service.batches.get(free).items == 20
    finally:
        service.stop()


@mutant(
    "extend-looks-its-key-up-without-the-lock",
    "core.batches.writing:_look",
    'columns, table = ([*expressions, dialect.flat(dialect.now, "time")], dialect.by_primary_key(batches_table))',
    """
early = pipeline.query("SELECT batch_id, idempotency_key, start, count, digest FROM extends").rows()
columns, table = ([*expressions, dialect.flat(dialect.now, "time")], dialect.by_primary_key(batches_table))
""",
    ("extended.rows()", "early"),
)
@pytest.mark.mariadb
def test_a_retried_extend_gets_its_numbers_though_the_batch_was_sealed_while_it_waited(
    server_database: Database,
) -> None:
    """The key is looked up under the lock: the first attempt and the seal are committed just before it."""
    service = Service(server_database)
    batch = service.batches.open(Opening()).batch.id
    is_first = True

    with Database(str(server_database.url)) as other:

        def commit_first(_: Any, __: Any, text: str, *___: Any) -> None:
            nonlocal is_first
            if text.endswith(" FOR UPDATE") and is_first:
                is_first = False
                merged(other, Extend(batch=batch, count=2, idempotency_key="k"), seal_of(batch))

        sa.event.listen(server_database.engine, "before_cursor_execute", commit_first)
        extension = service.batches.extend(batch, 2, "k")
    assert (extension.start, extension.replayed, extension.batch.state) == (0, True, State.SEALED)


KEYS = st.sampled_from([None, "k", "l"])
ENTRIES = st.lists(
    st.builds(
        tallies.Entry,
        *(st.sampled_from("kl"), st.sampled_from([1, 1, 5, -3, INTEGER_LIMIT - 3, 3 - INTEGER_LIMIT])),
        *(st.sampled_from(["x", "x", "y"]), st.just(0), st.just(0), st.integers(0, 3), st.integers(0, 1)),
    ),
    max_size=3,
)
RANGES = st.lists(
    st.builds(
        tallies.Range,
        *(st.sampled_from(["x", "z", "z"]), st.just(0), st.just(0)),
        *(st.sampled_from([None, "1", "2"]), st.sampled_from(["1", "2", "3"])),
        st.dictionaries(st.sampled_from("kl"), st.sampled_from([1, 5, -3, INTEGER_LIMIT - 3, 3 - INTEGER_LIMIT])),
    ),
    max_size=3,
)
OPERATIONS = st.lists(
    st.one_of(
        st.builds(
            lambda items, seals, key: ("open", items, seals, key),
            *(st.integers(0, 2), st.sampled_from(["", "sealed", "later"]), KEYS),
        ),
        st.builds(
            lambda *words: ("extend", *words),
            *(st.integers(1, 4), st.integers(0, 3), KEYS, st.sampled_from([None, "a", "b"])),
            st.none() | st.builds(ItemId, st.integers(1, 3), st.just(0), st.integers(0, 3)),
        ),
        st.builds(lambda batch, key: ("seal", batch, key), st.integers(1, 4), KEYS),
        st.builds(lambda ids: ("append", *ids), st.lists(st.sampled_from("abc"), max_size=3)),
        st.builds(lambda *words: ("apply", *words), st.sampled_from(["t", "u"]), ENTRIES, st.booleans()),
        st.builds(lambda *words: ("ranges", *words), st.sampled_from(["t", "u"]), RANGES, st.booleans()),
        st.builds(
            lambda *words: ("commit", *words),
            *(st.integers(0, 1), st.integers(0, 4), st.booleans(), st.booleans(), st.sampled_from([None, 9])),
        ),
        st.builds(
            lambda *words: ("handle", *words),
            *(st.sampled_from(["i", "j"]), st.integers(1, 3), st.integers(0, 2)),
            st.sampled_from(["plain", "commands", "step", "timers", "cancel", "finish", "error", "stale", "unknown"]),
        ),
    ),
    max_size=12,
)


PROCESS = "p"


def handle(instance: str, event: int, version: int, kind: str = "plain") -> Handle:
    """The handling of the event `h{event}`, which `with_process` has appended at that position."""
    process, epoch = ("unknown" if kind == "unknown" else PROCESS), 2 if kind == "stale" else 1
    handling = Handling(process, instance, f"h{event}", event, "w", epoch, version, f'"{instance}{event}"')
    match kind:
        case "commands":
            steps = [outbox.NewCommand(step, "ship", '"ü"', once=True) for step in ("same", f"{event}", "same")]
            return handle_of(replace(handling, commands=steps))
        case "step":
            steps = [outbox.NewCommand("same", "ship")]
            return handle_of(replace(handling, commands=steps))
        case "timers":
            changes = [timers.TimerChange(name, timedelta(hours=1), f"{event}") for name in ("same", f"{event}")]
            return handle_of(replace(handling, timers=changes))
        case "cancel":
            return handle_of(replace(handling, timers=[timers.TimerChange("same", None)]))
        case "finish":
            return handle_of(replace(handling, commands=[outbox.NewCommand("last", "ship")], finish=True))
        case "error":
            return handle_of(replace(handling, error="broken" * event))
    return handle_of(handling)


def fence(epoch: int = 1, partition: int = 0) -> positions.Fence:
    """Of the process's only partition, which is held at epoch 1."""
    return positions.Fence(f"process.{PROCESS}", partition, "w", epoch)


def with_process(database: Database) -> Service:
    """A process whose only partition the worker `w` owns at epoch 1, and three events for it."""
    service = Service(database)
    service.feed.append([feed.NewEvent(f"h{number}", "y") for number in (1, 2, 3)])
    service.processes.define(PROCESS, partitions=1)
    [lease] = service.consumer_groups.sync(f"process.{PROCESS}", Caller("w", "s")).assigned
    assert lease.epoch == 1
    return service


def operation_of(words: tuple[Any, ...]) -> Operation:
    match words:
        case ("open", items, seals, key):
            # The key decides the fingerprint; without one it is random.
            opening = Opening(items=items, sealed=seals == "sealed", seal_at=2 if seals == "later" else None)
            return Open(opening=opening, idempotency_key=key, fingerprint=opening.fingerprint())
        case ("extend", batch, count, key, digest, by):
            return Extend(batch=batch, count=count, idempotency_key=key, digest=digest, by=by)
        case ("seal", batch, key):
            return Seal(batch=batch, fingerprint=(key or "none").encode().ljust(32, b"."))
        case ("append", *ids):
            return Append(events=[feed.NewEvent(id, "x") for id in ids])
        case ("apply", tally, entries, is_stale):
            return apply_of(tally, entries, fence(2) if is_stale else None)
        case ("ranges", tally, ranges, is_stale):
            return apply_ranges_of(tally, ranges, fence(2) if is_stale else None)
        case ("commit", partition, offset, is_stale, has_gap, head):
            window = Snapshot(offset, offset + 3, (offset + 1,) if has_gap else ())
            return commits_of([positions.Commit(fence(1 + is_stale, partition), window, f"{offset}", head)])
        case ("handle", instance, event, version, kind):
            return handle(instance, event, version, kind)
    raise AssertionError(words)


def contents(database: Database) -> list[Any]:
    """The rows of all verbs, without times, positions in the feed and what is random."""
    with database.engine.connect() as tx:
        batches = [
            tuple(value for name, value in row.items() if name == "seal_at" or not name.endswith(("_at", "history")))
            for row in tx.execute(sa.select(tables.batches).order_by("id")).mappings()
        ]
        extends = sorted(map(tuple, tx.execute(sa.select(tables.extends))))
        events = sorted(tx.execute(sa.select(tables.feed.c.event_id, tables.feed.c.type, tables.feed.c.data)).all())
        processes = [
            sorted(
                str({name: value for name, value in row.items() if not name.endswith("_at") and name not in hidden})
                for row in tx.execute(sa.select(table)).mappings()
            )
            for table, hidden in (
                (tables.processes, ()),
                (tables.inbox, ("event",)),
                (tables.outbox, ("position",)),
                (tables.timers, ("token",)),
                (tables.tally_sources, ()),
                (tables.tallies, ()),
                (tables.positions, ("owned_since",)),
            )
        ]
    return [batches, extends, list(map(tuple, events)), processes]


def result_of(outcome: Done) -> Any:
    """An outcome without times and positions."""
    if outcome.error is not None:
        return type(outcome.error), str(outcome.error)
    value = outcome.value
    if isinstance(value, list):
        return [
            event.repeated
            if isinstance(event, feed.Appended)
            else event
            if isinstance(event, tallies.Counted)
            else repr(event)
            for event in value
        ]
    if isinstance(value, tallies.Applied):
        return value
    if isinstance(value, Handled):
        facts = asdict(value)
        for part in (facts["instance"], *facts["commands"]):
            for name in [name for name in part or () if name.endswith("_at") or name == "position"]:
                del part[name]
        return facts
    batch = value.batch
    facts = [getattr(value, name) for name in value.__slots__ if name != "batch"]
    return type(value), facts, batch.id, batch.items, batch.state, batch.acked


@mutant(
    "the-ids-of-new-batches-are-confused",
    "core.storage.dialects.sqlite:SQLite.batch_ids",
    "sorted(row[0] for row in rows)",
    "sorted((row[0] for row in rows), reverse=True)",
)
@given(OPERATIONS, st.integers(0, 3))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_shared_transactions_have_the_outcomes_of_separate_ones(words: list[tuple[Any, ...]], prepared: int) -> None:
    """Opens take effect after the extends and seals of their transaction, so no extend or seal names a new batch."""
    with (
        sqlite_file() as alone_url,
        sqlite_file() as together_url,
        Database(alone_url) as alone,
        Database(together_url) as together,
    ):
        for database in (alone, together):
            templates.migrate(database)
            # The highest position that is committed is 7. It may not be one of this transaction's own events.
            with_process(database).feed.append([feed.NewEvent(f"earlier:{number}", "y") for number in range(4)])
            for number in range(prepared):
                open_batch(database, seal_at=4 if number else None)
        changes = [word for word in words if word[0] in ("extend", "seal") and word[1] <= prepared]
        opens_and_appends = [word for word in words if word[0] not in ("extend", "seal")]
        operations = [*changes, *opens_and_appends]
        separate = [result_of(merged(alone, operation_of(word))[0]) for word in operations]
        shared = [result_of(outcome) for outcome in merged(together, *map(operation_of, operations))]
        assert shared == separate
        assert contents(together) == contents(alone)
