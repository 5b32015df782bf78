"""Consumer groups: exactly one owner for each partition, equal shares, few moves, and no worker waits forever.

A state machine of workers that join, leave, crash, restart under their old names, freeze and drain slowly, while the
database's clock jumps; races on real MariaDB sessions; crashes at each statement; and a test for each failure known
from earlier systems, under its name.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from core import errors, feed
from core.commits.combiner import Inline
from core.consumer_groups import shares
from core.consumer_groups.leases import Caller, Held, Synced
from core.consumer_groups.positions import Fence, Position, fence
from core.service import Service
from core.storage import schema, tables
from core.storage.database import Database
from lastbit.streams.snapshot import Snapshot
from tests import mutants
from tests.conftest import KINDS
from tests.guarantees.drivers.rounds import race
from tests.guarantees.programs.dying import Mortals, mortals
from tests.mutants import mutant
from tests.support import plans
from tests.support.clocks import Clock
from tests.support.waits import waits_for_a_lock

TTL, RELEASE = 10, 30
SOAK = 20 if os.environ.get("LASTBIT_SOAK") == "1" else 1
ROUNDS = 100 * SOAK
positions = tables.positions.c
sessions = itertools.count()


@dataclass(eq=False)
class Worker:
    """A worker process: the assignments it has received, and the drained partitions it reports at its next sync."""

    service: Service
    name: str
    group: str = "g"
    capacity: int | None = None
    drains: bool = True
    """Whether it drains a released partition at once and reports it at its next sync."""
    session: str = field(default_factory=lambda: f"session-{next(sessions)}")
    epochs: dict[int, int] = field(default_factory=dict)
    release: list[int] = field(default_factory=list)

    def sync(self, *drained: int) -> Synced:
        drained_partitions: list[tuple[int, int | None]] = [(number, None) for number in drained]
        drained_partitions += [(number, self.epochs[number]) for number in self.release if self.drains]
        answer = self.service.consumer_groups.sync(
            self.group, Caller(self.name, self.session, self.capacity, drained_partitions)
        )
        self.epochs = {lease.partition: lease.epoch for lease in answer.assigned}
        self.release = answer.release
        assert set(self.release) <= self.epochs.keys()
        return answer

    def forget(self) -> None:
        """Another process has replaced this one: it holds nothing, and has nothing to release."""
        self.epochs, self.release = {}, []

    def fence(self, partition: int) -> Fence:
        return Fence(self.group, partition, self.name, self.epochs[partition])

    def commit(self, partition: int, floor: int) -> Position:
        return self.service.consumer_groups.commit(self.fence(partition), Snapshot(floor, floor))


def made(service: Service, partitions: int, group: str = "g", ttl: float = TTL, release: float = RELEASE) -> None:
    service.consumer_groups.put(group, partitions, timedelta(seconds=ttl), timedelta(seconds=release))


def owners(service: Service, group: str = "g") -> dict[int, str | None]:
    return {position.partition: position.owner for position in service.consumer_groups.get(group).positions}


def settle(workers: list[Worker], clock: Clock | None = None) -> None:
    """Sync them in turn until nothing changes any more."""
    quiet_rounds = 0
    for _ in range(3 + 3 * len(workers)):
        before = [dict(worker.epochs) for worker in workers]
        for worker in workers:
            worker.sync()
            if clock is not None:
                clock.go(TTL / 3 / len(workers))
        is_unchanged = before == [worker.epochs for worker in workers] and not any(worker.release for worker in workers)
        quiet_rounds = quiet_rounds + 1 if is_unchanged else 0
        if quiet_rounds == 2:
            return
    raise AssertionError("the assignments never settled")


def shared(workers: list[Worker]) -> list[int]:
    """The number of partitions that each worker holds; each partition has one holder."""
    partitions = [partition for worker in workers for partition in worker.epochs]
    assert len(partitions) == len(set(partitions))
    return sorted(len(worker.epochs) for worker in workers)


@pytest.fixture
def clock(database: Database) -> Clock:
    return Clock(database)


@pytest.fixture
def server_service(server_database: Database) -> Iterator[Service]:
    service = Service(server_database, combiner=Inline)
    yield service
    service.stop()


# Any sequence.

NAMES = ["ann", "bob", "cid", "dan"]


class Machine(RuleBasedStateMachine):
    """One example: a group on an emptied database, its workers, and all that each of them was ever assigned."""

    service: Service
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, Worker] = {}
        self.frozen: list[Worker] = []
        """Workers that were replaced or lost contact; they may wake up."""
        self.assigned_to: dict[tuple[int, int], Worker] = {}
        """The worker that was assigned each partition at each epoch."""
        self.rows: dict[int, Any] = {}

    def teardown(self) -> None:
        with self.service.database.engine.begin() as tx:
            for table in (tables.positions, tables.consumers, tables.consumer_groups):
                tx.execute(sa.delete(table))

    @initialize(partitions=st.sampled_from([1, 3, 7, 12]), release=st.sampled_from([0, 4, RELEASE]))
    def begin(self, partitions: int, release: int) -> None:
        self.partitions, self.release = partitions, release
        made(self.service, partitions, release=release)
        self.look()

    def sync(self, worker: Worker, *drained: int) -> Synced | None:
        try:
            answer = worker.sync(*drained)
        except errors.SessionReplaced:
            assert worker not in self.alive.values()
            worker.forget()
            return None
        for place in worker.epochs.items():
            assert self.assigned_to.setdefault(place, worker) is worker, f"{place} belonged to another worker"
        for partition, row in self.look().items():
            assert (row.owner == worker.name) == (partition in worker.epochs)
        assert {lease.epoch for lease in answer.assigned} <= {row.epoch for row in self.rows.values()}
        return answer

    def look(self) -> dict[int, Any]:
        """All rows of the tables; no epoch or owner went back."""
        with self.service.database.engine.connect() as tx:
            rows = {row.partition_no: row for row in tx.execute(sa.select(tables.positions))}
            leases = tx.execute(sa.select(tables.consumers)).all()
        for number, row in rows.items():
            before = self.rows.get(number, row)
            assert row.epoch >= before.epoch
            assert row.owner in (before.owner, None) or row.epoch > before.epoch, "a new owner with an old epoch"
            assert row.owner is None or row.owner in {lease.worker for lease in leases}
        self.rows = rows
        return rows

    @rule(name=st.sampled_from(NAMES), drains=st.booleans())
    def start(self, name: str, drains: bool) -> None:
        """Start a new process under the name, whether or not another one had it."""
        if name in self.alive:
            self.frozen.append(self.alive[name])
        self.alive[name] = Worker(self.service, name, drains=drains)
        self.sync(self.alive[name])

    @precondition(lambda self: self.alive)
    @rule(place=st.integers(0, 3), drained=st.sets(st.integers(0, 2)))
    def beat(self, place: int, drained: set[int]) -> None:
        """Sync; the worker may report any partition as drained, as a delayed message would."""
        worker = list(self.alive.values())[place % len(self.alive)]
        self.sync(worker, *(number for number in drained if number < self.partitions))

    @precondition(lambda self: self.frozen)
    @rule(place=st.integers(0, 3))
    def wake(self, place: int) -> None:
        """A worker that the others consider dead syncs."""
        worker = self.frozen[place % len(self.frozen)]
        if self.sync(worker) is not None:  # the worker was in time, or its successor is gone
            self.frozen.remove(worker)
            if worker.name in self.alive:
                self.frozen.append(self.alive[worker.name])
            self.alive[worker.name] = worker

    @precondition(lambda self: self.alive)
    @rule(place=st.integers(0, 3), way=st.sampled_from(["frozen", "killed", "leaves"]))
    def end(self, place: int, way: str) -> None:
        worker = list(self.alive.values())[place % len(self.alive)]
        del self.alive[worker.name]
        if way == "frozen":
            self.frozen.append(worker)
        elif way == "leaves":
            self.service.consumer_groups.leave("g", worker.name, worker.session)
            assert worker.name not in {row.owner for row in self.look().values()}

    @precondition(lambda self: self.assigned_to)
    @rule(partition=st.integers(0, 11))
    def write(self, partition: int) -> None:
        """Each worker commits under every epoch that it ever got for the partition; only the current owner's commit
        succeeds."""
        partition %= self.partitions
        row = self.rows[partition]
        assignments = sorted(
            (epoch, worker.name) for (number, epoch), worker in self.assigned_to.items() if number == partition
        )
        for epoch, name in assignments[-6:]:
            current = (name, epoch) == (row.owner, row.epoch)
            try:
                self.service.consumer_groups.commit(Fence("g", partition, name, epoch), Snapshot(epoch, epoch))
                assert current
            except errors.StaleEpoch:
                assert not current

    @rule(seconds=st.sampled_from([1, 3, TTL + 1, RELEASE + 1, 100_000, -3, -TTL, -100_000]))
    def time_passes(self, seconds: float) -> None:
        """Let time pass, or let the clock jump."""
        self.clock.go(seconds)

    @precondition(lambda self: self.alive)
    @rule(name=st.sampled_from(NAMES))
    def comes_to_rest(self, name: str) -> None:
        """Live workers sync as often as they should, and drain what they must release, at once or never: after a ttl
        and a release, the partitions are shared equally. A worker that joins then takes its own share and no more."""
        self.come_to_rest()
        if name in self.alive:
            return
        before = owners(self.service)
        self.start(name, drains=True)
        self.come_to_rest()
        after = owners(self.service)
        moves = {partition for partition in after if after[partition] != before[partition]}
        assert {after[partition] for partition in moves} <= {name}
        assert len(moves) <= -(-self.partitions // len(self.alive))

    def come_to_rest(self) -> None:
        """Afterwards every worker knows its partitions."""
        workers = list(self.alive.values())
        rounds = 5
        for _ in range(2):  # the first hand-over may leave a partition for a second one
            until = self.clock.now + timedelta(seconds=TTL + self.release)
            while self.clock.now <= until:
                for worker in workers:
                    self.sync(worker)
                self.clock.go((TTL + self.release) / rounds if self.release < TTL else TTL - 1)
        for _ in range(2):
            for worker in workers:
                self.sync(worker)
        counts = shared(workers)
        assert sum(counts) == self.partitions
        assert counts[-1] - counts[0] <= 1
        assert not any(worker.release for worker in workers)


def machine_on(database: Database) -> type[Machine]:
    class Here(Machine):
        service = Service(database, combiner=Inline)
        clock = Clock(database)

    return Here


def machine(database: Database, examples: int) -> None:
    settings = hypothesis.settings(
        hypothesis.settings.get_profile("lastbit"), max_examples=examples * SOAK, stateful_step_count=25
    )
    if mutants.VARIABLE in os.environ:  # a failure is enough then; the smallest example doesn't matter
        settings = hypothesis.settings(settings, phases=[hypothesis.Phase.generate])
    run_state_machine_as_test(machine_on(database), settings=settings)


@mutant(
    "a-new-owner-keeps-the-epoch", "core.consumer_groups.leases:sync", "_positions.epoch + 1", "_positions.epoch + 0"
)
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "examples"), [(kind, 20 if kind == "sqlite" else 5) for kind in KINDS])
def test_each_partition_has_one_owner_and_assignments_settle(
    request: pytest.FixtureRequest, kind: str, examples: int
) -> None:
    """No worker gets another one's partition, a delayed one can't write, and in the end the shares are equal."""
    with Database(request.getfixturevalue(f"{kind}_url")) as database:
        schema.migrate(database)
        machine(database, examples)


@mutant(
    "positions-are-locked-as-they-are-changed",
    "core.consumer_groups.leases:sync",
    "_lock(tx, name, _positions.partition_no.in_(part))",
    "pass",
)
def test_a_replaced_worker_that_was_releasing_wakes_twice(database: Database) -> None:
    """It is frozen when it must release a partition, and another process takes its name. Each of its syncs is refused,
    and the process with its name keeps the partitions."""
    state = machine_on(database)()
    state.begin(partitions=3, release=RELEASE)
    state.start(name="ann", drains=True)
    state.start(name="bob", drains=True)
    state.beat(place=0, drained=set())
    ann = state.alive["ann"]
    assert ann.release
    state.end(place=0, way="frozen")
    state.start(name="ann", drains=True)
    before = owners(state.service)
    for _ in range(2):
        state.wake(place=0)
        assert state.frozen == [ann]
    assert owners(state.service) == before
    state.comes_to_rest(name="ann")
    state.teardown()


# Shares.


@hypothesis.given(
    holding=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50), min_size=1),
    capacities=st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 20)),
    partitions=st.integers(0, 100),
)
def test_shares_are_equal_within_capacities(
    holding: dict[str, int], capacities: dict[str, int | None], partitions: int
) -> None:
    """All partitions are shared if the capacities allow it. A worker with fewer than another one is at its capacity or
    has one less. Where shares must differ by one, a worker that holds more gets the larger one."""
    result = shares.targets(holding, capacities, partitions)
    assert result.keys() == holding.keys()
    limits = {worker: partitions if (cap := capacities.get(worker)) is None else cap for worker in holding}
    assert sum(result.values()) == min(partitions, sum(limits.values()))
    for first, other in itertools.permutations(result, 2):
        assert result[first] <= limits[first]
        assert result[first] >= min(limits[first], result[other] - 1)
        if result[first] < result[other] and result[first] < limits[first]:
            assert (-holding[other], other) < (-holding[first], first)


def test_a_capacity_is_respected_and_the_others_take_more(database: Database, clock: Clock) -> None:
    """One worker takes two, one takes none, two take any number; and a capacity may change."""
    service = Service(database, combiner=Inline)
    made(service, 12)
    workers = [
        Worker(service, name, capacity=capacity) for name, capacity in zip("abcd", (2, 0, None, None), strict=True)
    ]
    settle(workers, clock)
    assert {worker.name: len(worker.epochs) for worker in workers} == {"a": 2, "b": 0, "c": 5, "d": 5}
    workers[1].capacity = None
    workers[2].capacity = 1
    settle(workers, clock)
    assert {worker.name: len(worker.epochs) for worker in workers} == {"a": 2, "b": 4, "c": 1, "d": 5}


def test_a_capacity_counts_partitions_not_drained_yet(database: Database, clock: Clock) -> None:
    """A worker with a capacity of two that must release two takes none until it has drained one."""
    service = Service(database, combiner=Inline)
    made(service, 4)
    worker = Worker(service, "worker", capacity=2, drains=False)
    worker.sync()
    worker.capacity = 0
    assert worker.sync().release == [0, 1]
    worker.capacity = 2
    worker.sync()
    assert worker.epochs == {0: 1, 1: 1}
    worker.sync(1)
    assert worker.epochs == {0: 1, 1: 2}


# Moves and hand-overs.


@mutant(
    "the-larger-share-goes-to-newcomers", "core.consumer_groups.shares:targets", "-holding[worker]", "holding[worker]"
)
@pytest.mark.parametrize(("partitions", "workers"), [(40, 4), (7, 3), (12, 5), (3, 4), (64, 1)])
def test_a_worker_that_joins_takes_its_share_and_nothing_else_moves(
    database: Database, clock: Clock, partitions: int, workers: int
) -> None:
    """At most ceil(P / (n + 1)) partitions move, all to the newcomer; when it leaves, only those move again."""
    service = Service(database, combiner=Inline)
    made(service, partitions)
    members = [Worker(service, f"worker-{number}") for number in range(workers)]
    settle(members, clock)
    before = owners(service)
    newcomer = Worker(service, "a-newcomer")  # the first by name, so that it would win a tie
    settle([newcomer, *members], clock)
    middle = owners(service)
    moves = {partition for partition in before if before[partition] != middle[partition]}
    assert {middle[partition] for partition in moves} <= {newcomer.name}
    assert len(moves) == len(newcomer.epochs) <= -(-partitions // (workers + 1))
    service.consumer_groups.leave("g", newcomer.name)
    settle(members, clock)
    after = owners(service)
    assert {partition for partition in after if after[partition] != middle[partition]} == moves


def drains_at_once(owner: Worker, newcomer: Worker) -> None:
    owner.sync()


def is_frozen(owner: Worker, newcomer: Worker) -> None:
    """The owner doesn't sync after the newcomer has come."""


def is_frozen_after_the_request(owner: Worker, newcomer: Worker) -> None:
    if not owner.release:
        owner.sync()


def never_drains(owner: Worker, newcomer: Worker) -> None:
    """KCL #1718, #1765: the worker is alive and renews its lease, but nothing processes the partition and could report
    it."""
    owner.drains = False
    owner.sync()


def is_killed_and_replaced(owner: Worker, newcomer: Worker) -> None:
    """The new process was never asked to release anything."""
    owner.drains = False
    if owner.release:
        owner.session, owner.release = "another", []
    owner.sync()


@mutant("a-live-owner-may-drain-forever", "core.consumer_groups.leases:_look", "release_by <= now", "False")
@pytest.mark.parametrize("release", [0, 4, 30])
@pytest.mark.parametrize(
    "owner_does", [drains_at_once, is_frozen, is_frozen_after_the_request, never_drains, is_killed_and_replaced]
)
def test_kcl_1718_1765_no_hand_over_gets_stuck(
    database: Database, clock: Clock, owner_does: Callable[[Worker, Worker], None], release: int
) -> None:
    """A newcomer has its share after ttl + release, at its next sync, even if the owner doesn't release its own."""
    service = Service(database, combiner=Inline)
    made(service, 4, release=release)
    owner, newcomer = Worker(service, "owner"), Worker(service, "newcomer")
    owner.sync()
    newcomer.sync()
    start = clock.now
    while len(newcomer.epochs) < 2:
        assert clock.now - start <= timedelta(seconds=TTL + release)
        clock.go(1)
        owner_does(owner, newcomer)
        newcomer.sync()
    owner_by_partition = owners(service)
    assert sum(owner == newcomer.name for owner in owner_by_partition.values()) == len(newcomer.epochs)


@pytest.mark.parametrize("release", [0, 4, 30])
def test_a_request_to_release_that_its_owner_never_got_outlasts_its_lease(
    database: Database, clock: Clock, release: int
) -> None:
    """The owner's lease began with its sync before the request; until it ends, the owner goes on."""
    service = Service(database, combiner=Inline)
    made(service, 2, release=release)
    owner, newcomer = Worker(service, "owner", drains=False), Worker(service, "newcomer")
    owner.sync()
    start = clock.now
    newcomer.sync()
    clock.go(1)
    owner.sync()
    end = start + max(timedelta(seconds=TTL), timedelta(seconds=1 + release))
    while newcomer.epochs == {}:
        clock.go(0.5)
        owner.sync()
        newcomer.sync()
        assert clock.now <= end
    assert clock.now == end


@mutant(
    "each-sync-postpones-the-release",
    "core.consumer_groups.leases:_look",
    "release_by is not None and release_by > deadline",
    "release_by is not None",
)
def test_a_release_is_repeated_until_it_is_drained_and_keeps_its_deadline(database: Database, clock: Clock) -> None:
    """A lost answer costs nothing, and a sync doesn't postpone the deadline."""
    service = Service(database, combiner=Inline)
    made(service, 4)
    owner, newcomer = Worker(service, "owner", drains=False), Worker(service, "newcomer")
    owner.sync()
    newcomer.sync()
    assert owner.sync().release == [2, 3]
    deadline = [position.release_by for position in service.consumer_groups.get("g").positions]
    clock.go(3)
    assert owner.sync().release == [2, 3]
    assert [position.release_by for position in service.consumer_groups.get("g").positions] == deadline
    assert owner.sync(2).release == [3]
    assert owner.sync(2).release == [3], "the report is repeated as its answer was lost"
    newcomer.sync()
    assert newcomer.epochs == {2: 2}
    assert owner.sync(2, 3).release == []
    assert owners(service)[2] == newcomer.name
    newcomer.sync()
    assert newcomer.epochs == {2: 2, 3: 2}


@mutant(
    "a-delayed-report-frees-a-later-epoch",
    "core.consumer_groups.leases:_look",
    "not drained.isdisjoint({(number, epoch), (number, None)})",
    "any(number == each for each, _ in drained)",
)
def test_a_delayed_report_of_an_earlier_release_frees_nothing(database: Database, clock: Clock) -> None:
    """A duplicated sync arrives again after its worker got the partitions back and drains them once more."""
    service = Service(database, combiner=Inline)
    made(service, 4)
    owner, newcomer = Worker(service, "owner", drains=False), Worker(service, "newcomer")
    owner.sync()
    newcomer.sync()
    assert owner.sync().release == [2, 3]
    late = Caller(owner.name, owner.session, drained=[(2, 1), (3, 1)])
    assert service.consumer_groups.sync("g", late).release == []
    newcomer.sync()
    assert newcomer.epochs == {2: 2, 3: 2}
    service.consumer_groups.leave("g", newcomer.name)
    owner.sync()
    assert owner.epochs == {0: 1, 1: 1, 2: 3, 3: 3}
    other = Worker(service, "other")
    other.sync()
    assert owner.sync().release == [2, 3]
    for _ in range(2):
        assert service.consumer_groups.sync("g", late).release == [2, 3]
        assert set(owners(service).values()) == {"owner"}
        other.sync()
        assert other.epochs == {}
    owner.drains = True
    assert owner.sync().release == []
    other.sync()
    assert other.epochs == {2: 4, 3: 4}


def test_a_requested_release_is_finished_though_the_share_grows_again(database: Database, clock: Clock) -> None:
    """The newcomer leaves before it got anything: the owner still drains the partition, and gets it back at another
    epoch."""
    service = Service(database, combiner=Inline)
    made(service, 4)
    owner, newcomer = Worker(service, "owner", drains=False), Worker(service, "newcomer")
    owner.sync()
    newcomer.sync()
    owner.sync()
    service.consumer_groups.leave("g", newcomer.name)
    assert owner.sync().release == [2, 3]
    assert owner.sync(2).release == [3]
    assert owner.epochs == {0: 1, 1: 1, 2: 2, 3: 1}


# The clock.


def test_a_lease_ends_by_the_databases_clock(database: Database, clock: Clock) -> None:
    """After the ttl and not earlier; another worker's sync finds the expired lease, the worker's own sync renews it."""
    service = Service(database, combiner=Inline)
    made(service, 2)
    quiet, other = Worker(service, "quiet"), Worker(service, "other")
    settle([quiet, other])
    clock.go(TTL)
    assert other.sync().gone == []
    quiet.sync()
    clock.go(TTL)
    assert other.sync().gone == []
    clock.go(0.001)
    assert other.sync().gone == ["quiet"]
    assert other.epochs == {0: 2, 1: 2}
    with pytest.raises(errors.StaleEpoch):
        quiet.commit(0, 1)


def test_a_late_worker_that_syncs_first_keeps_partitions_that_no_one_took(database: Database, clock: Clock) -> None:
    """Nothing has happened meanwhile, so nothing moves and no epoch changes."""
    service = Service(database, combiner=Inline)
    made(service, 2)
    late = Worker(service, "late")
    late.sync()
    epochs = late.epochs
    clock.go(100 * TTL)
    late.sync()
    assert late.epochs == epochs


@mutant(
    "after-an-outage-the-first-takes-it-all",
    "core.consumer_groups.leases:_gone",
    "before is not None and before.lease_until < now",
    "False",
)
@pytest.mark.parametrize("seconds", [TTL + 1, 86_400])
def test_nothing_moves_when_all_workers_were_cut_off_and_return(
    database: Database, clock: Clock, seconds: float
) -> None:
    """The service was away for longer than a ttl, or the clock jumped: the first worker to sync doesn't take
    everything."""
    service = Service(database, combiner=Inline)
    made(service, 9)
    workers = [Worker(service, name) for name in "abc"]
    settle(workers, clock)
    epochs = [dict(worker.epochs) for worker in workers]
    clock.go(seconds)
    settle(workers, clock)
    assert [worker.epochs for worker in workers] == epochs


@mutant(
    "an-always-late-worker-spares-dead-ones",
    "core.consumer_groups.leases:_gone",
    "late and row.last_seen + group.ttl >= before.last_seen",
    "late",
)
def test_a_worker_that_is_always_late_spares_a_dead_worker_only_once(database: Database, clock: Clock) -> None:
    """Even if its own lease has ended each time it syncs."""
    service = Service(database, combiner=Inline)
    made(service, 2)
    late, dead = Worker(service, "late"), Worker(service, "dead")
    settle([late, dead])
    clock.go(TTL + 1)
    assert late.sync().gone == []
    clock.go(TTL + 1)
    assert late.sync().gone == ["dead"]
    assert late.epochs.keys() == {0, 1}


@mutant("leases-outlast-a-clock-that-jumped-back", "core.consumer_groups.leases:_clamp_leases", "tx.execute", "str")
@pytest.mark.parametrize("jump", [-1, -TTL, -86_400])
def test_a_clock_that_jumps_back_makes_no_worker_wait_longer(database: Database, clock: Clock, jump: int) -> None:
    """Neither a dead worker's lease nor a deadline lasts longer than one set now."""
    service = Service(database, combiner=Inline)
    made(service, 3)
    dead, slow, other = Worker(service, "dead"), Worker(service, "stuck", drains=False), Worker(service, "other")
    dead.sync()
    slow.sync()
    dead.sync()
    dead.sync()
    slow.sync()
    other.sync()
    assert (dead.epochs.keys(), slow.epochs.keys()) == ({0, 1}, {2})
    slow.capacity = 0
    assert slow.sync().release == [2]
    clock.go(jump)
    other.sync()
    start = clock.now
    while set(owners(service).values()) != {other.name}:
        assert clock.now - start <= timedelta(seconds=RELEASE)
        clock.go(1)
        slow.sync()
        other.sync()
    assert clock.now - start <= timedelta(seconds=RELEASE)


def test_a_shorter_ttl_applies_to_current_workers(database: Database, clock: Clock) -> None:
    """From the next sync of any worker on."""
    service = Service(database, combiner=Inline)
    made(service, 2, ttl=3600)
    dead, other = Worker(service, "dead"), Worker(service, "other")
    dead.sync()
    made(service, 2, ttl=1)
    other.sync()
    clock.go(1)
    assert other.sync().gone == []
    clock.go(0.001)
    assert other.sync().gone == ["dead"]


@mutant(
    "the-clock-is-read-before-the-lock",
    "core.consumer_groups.leases:sync",
    "group = groups.lock(tx, name)\nnow = tables.clock(tx)",
    "now = tables.clock(tx)\ngroup = groups.lock(tx, name)",
)
def test_a_sync_uses_the_time_after_its_lock_wait(server_service: Service) -> None:
    """A statement that waits for a lock keeps its start time, at which leases that have ended since would still be
    valid."""
    service = server_service
    made(service, 1)
    worker = Worker(service, "worker")
    lock = sa.select(tables.consumer_groups).with_for_update()
    with service.database.engine.connect() as holder, ThreadPoolExecutor(1) as pool:
        holder.execute(lock)
        sync = pool.submit(worker.sync)
        assert waits_for_a_lock(service.database, sync)
        after = service.database.read(lambda tx: tx.scalar(sa.select(tables.utc_now())))
        holder.rollback()
        sync.result(60)
    (worker_row,) = service.consumer_groups.get("g").workers
    assert worker_row.last_seen >= after


# Write permission.


@mutant(
    "events-are-appended-whatever-the-fence",
    "core.feed:Appends.judge",
    "self.refuse(refused)",
    "pass",
)
def test_a_worker_that_was_frozen_past_its_lease_wakes_and_writes_nothing(database: Database, clock: Clock) -> None:
    """Its commit and its events are refused, and what its transaction did before is rolled back."""
    service = Service(database, combiner=Inline)
    made(service, 1)
    frozen_worker, other = Worker(service, "frozen"), Worker(service, "other")
    frozen_worker.sync()
    frozen_worker.commit(0, 5)
    service.feed.append([feed.NewEvent("in-time", "x")], frozen_worker.fence(0))
    clock.go(TTL + 1)
    # No sync has noticed yet: it is still the owner, and does no harm.
    service.feed.append([feed.NewEvent("late", "x")], frozen_worker.fence(0))
    other.sync()
    with pytest.raises(errors.StaleEpoch):
        frozen_worker.commit(0, 9)
    with pytest.raises(errors.StaleEpoch):
        service.feed.append([feed.NewEvent("too-late", "x")], frozen_worker.fence(0))

    def effect_first(tx: sa.Connection) -> None:
        feed.append(tx, [feed.NewEvent("effect", "x")])
        fence(tx, "g", 0, frozen_worker.name, frozen_worker.epochs[0])

    with pytest.raises(errors.StaleEpoch):
        database.write(effect_first)
    assert [event.id for event in service.feed.read(None, 10).events] == ["in-time", "late"]
    assert service.consumer_groups.get("g").positions[0].floor == 5


@mutant(
    "the-fence-asks-for-the-epoch-alone",
    "core.consumer_groups.positions:lock",
    "(fence.worker, fence.epoch)",
    "(owners.get((fence.group, fence.partition), [fence.worker])[0], fence.epoch)",
)
def test_a_worker_whose_partition_is_free_may_not_write(database: Database, clock: Clock) -> None:
    """Its epoch is still the latest, but the partition has no owner."""
    service = Service(database, combiner=Inline)
    made(service, 2)
    silent, leaver, other = Worker(service, "gone"), Worker(service, "left"), Worker(service, "other", capacity=0)
    settle([silent, leaver])
    service.consumer_groups.leave("g", leaver.name)
    clock.go(TTL + 1)
    other.sync()
    assert set(owners(service).values()) == {None}
    for worker in (silent, leaver):
        (partition,) = worker.epochs
        with pytest.raises(errors.StaleEpoch):
            worker.commit(partition, 1)


@mutant("a-new-session-keeps-the-epochs", "core.consumer_groups.leases:sync", "acquired = acquired + kept", "pass")
@mutant(
    "the-fence-asks-for-the-owner-alone",
    "core.consumer_groups.positions:lock",
    "(fence.worker, fence.epoch)",
    "(fence.worker, owners.get((fence.group, fence.partition), [fence.epoch])[-1])",
)
@mutant(
    "a-zombie-takes-its-name-back",
    "core.consumer_groups.leases:sync",
    "caller.session in before.replaced.split()",
    "False",
)
@mutant(
    "a-zombies-zombie-takes-the-name",
    "core.consumer_groups.leases:_renew",
    "[before.session, *before.replaced.split()]",
    "[before.session]",
)
def test_a_worker_restarted_under_its_name_fences_its_zombie(database: Database, clock: Clock) -> None:
    """The same name, the same partitions, other epochs; the zombie can neither write nor take the name back."""
    service = Service(database, combiner=Inline)
    made(service, 3)
    zombie = Worker(service, "worker")
    zombie.sync()
    restarted = Worker(service, "worker")
    assert restarted.sync().joined
    assert restarted.epochs == {0: 2, 1: 2, 2: 2}
    for partition in zombie.epochs:
        with pytest.raises(errors.StaleEpoch):
            zombie.commit(partition, 1)
        restarted.commit(partition, 1)
    with pytest.raises(errors.SessionReplaced):
        zombie.sync()
    service.consumer_groups.leave("g", "worker", zombie.session)
    restarted.sync()
    assert restarted.epochs == {0: 2, 1: 2, 2: 2}
    third = Worker(service, "worker")
    third.sync()
    for worker in (zombie, restarted, zombie):
        with pytest.raises(errors.SessionReplaced):
            worker.sync()
    third.sync()
    assert third.epochs == {0: 3, 1: 3, 2: 3}
    clock.go(TTL + 1)
    zombie.sync()  # its successors are dead, so it takes over
    assert zombie.epochs == {0: 4, 1: 4, 2: 4}


@mutant(
    "a-group-that-is-created-again-starts-over",
    "core.consumer_groups.groups:put",
    "0 if row is None else row.first_epoch",
    "0",
)
def test_a_recreated_group_starts_above_the_earlier_groups_epochs(database: Database, clock: Clock) -> None:
    """A zombie from before the deletion finds its own name, but not its own epoch."""
    service = Service(database, combiner=Inline)
    made(service, 2)
    zombie = Worker(service, "worker")
    zombie.sync()
    with pytest.raises(errors.ConsumerGroupInUse):
        service.consumer_groups.delete("g")
    clock.go(TTL + 1)
    service.consumer_groups.delete("g")
    with pytest.raises(errors.ConsumerGroupNotFound):
        zombie.commit(0, 1)
    made(service, 3)
    restarted = Worker(service, "worker")
    restarted.sync()
    assert restarted.epochs == {0: 3, 1: 3, 2: 3}
    with pytest.raises(errors.StaleEpoch):
        zombie.commit(0, 1)


@mutant(
    "a-group-in-which-nobody-worked-is-taken-for-the-next-one", "core.consumer_groups.groups:delete", "last + 1", "last"
)
@mutant(
    "a-group-that-a-failover-lost-is-taken-for-the-next-one",
    "core.consumer_groups.groups:_group",
    'f"{row.first_epoch}-{row.created_at:%Y%m%d%H%M%S%f}"',
    'f"{row.first_epoch}"',
)
def test_each_group_of_a_name_has_an_incarnation_of_its_own(database: Database, clock: Clock) -> None:
    """Also if they are created at the same time and nobody ever owns a partition, or if a failover loses a group, so
    that its epochs are used again."""
    service = Service(database, combiner=Inline)
    incarnations = set()
    for is_lost in (False, False, True):
        made(service, 2)
        worker = Worker(service, "worker", capacity=0)
        incarnations.add(worker.sync().incarnation)
        service.consumer_groups.leave("g", "worker")
        if is_lost:
            with database.engine.begin() as tx:
                for table, name in (
                    (tables.positions, positions.group_name),
                    (tables.consumer_groups, tables.consumer_groups.c.name),
                ):
                    tx.execute(sa.delete(table).where(name == "g"))
            clock.go(0.001)
        else:
            service.consumer_groups.delete("g")
    made(service, 2)
    incarnations.add(Worker(service, "worker").sync().incarnation)
    assert len(incarnations) == 4


@mutant(
    "a-commit-reaches-the-next-group-of-its-name",
    "core.consumer_groups.groups:put",
    "0 if row is None else row.first_epoch",
    "0",
)
def test_no_commit_of_a_deleted_groups_worker_reaches_the_next_group_of_its_name(server_service: Service) -> None:
    """The commit meets the deletion, the creation, and the first sync of a worker with the same name."""
    service = server_service
    workers = [Worker(service, "worker", f"g{number}") for number in range(ROUNDS)]
    for worker in workers:
        made(service, 1, worker.group, ttl=0.001)
        worker.sync()
    outcomes: Counter[str] = Counter()

    def create_again(service_: Service, number: int) -> Held:
        group = workers[number].group
        service_.consumer_groups.delete(group)
        made(service_, 1, group)
        (lease,) = Worker(service_, "worker", group).sync().assigned
        return lease

    def check(number: int, commit: Position | errors.CoreError, lease: Held) -> None:
        outcomes[type(commit).__name__] += 1
        assert lease.epoch > workers[number].epochs[0]
        assert service.consumer_groups.get(workers[number].group).positions[0].floor is None

    race(
        service.database,
        ROUNDS,
        lambda service_, number: service_.consumer_groups.commit(workers[number].fence(0), Snapshot(7, 7)),
        create_again,
        check=check,
    )
    assert min(outcomes["Committed"], outcomes["StaleEpoch"]) > 0, f"the same one always came first: {outcomes}"
    assert outcomes.keys() <= {"Committed", "StaleEpoch", "ConsumerGroupNotFound"}


# Positions.


def test_the_next_owner_starts_at_the_committed_position(database: Database, clock: Clock) -> None:
    """The floor, the outstanding offsets above it, and the floor's token."""
    service = Service(database, combiner=Inline)
    made(service, 1)
    first, second = Worker(service, "first"), Worker(service, "second")
    first.sync()
    window = Snapshot(10, 20, (11, 15))
    position = service.consumer_groups.commit(first.fence(0), window, token="ten", head=25)
    assert (position.floor, position.high, position.outstanding, position.lag) == (10, 20, 2, 15)
    service.consumer_groups.leave("g", first.name)
    (lease,) = second.sync().assigned
    assert lease.outstanding is not None
    assert Snapshot.decode(lease.outstanding) == window
    assert lease == Held(0, 2, 10, 20, lease.outstanding, "ten")


@mutant(
    "a-late-commit-overwrites",
    "core.consumer_groups.positions:_merged",
    "snapshot if earlier is None else earlier.merge(snapshot)",
    "snapshot",
)
def test_commits_may_be_repeated_and_overtaken(database: Database) -> None:
    """No finished offset is lost, the floor never goes back, and the token stays with it."""
    service = Service(database, combiner=Inline)
    made(service, 1)
    worker = Worker(service, "worker")
    worker.sync()
    commits = [
        (Snapshot(3, 8, (4, 6)), "three"),
        (Snapshot(5, 9, (6,)), "five"),
        (Snapshot(5, 9, (6,)), "five"),
        (Snapshot(3, 8, (4, 6)), "three"),
        (Snapshot(3, 12, (4, 10)), "three"),
    ]
    for snapshot, token in commits:
        service.consumer_groups.commit(worker.fence(0), snapshot, token=token)
    position = service.consumer_groups.get("g").positions[0]
    # The second commit says that 4 is done, the last one that 6 is.
    assert (position.floor, position.high, position.outstanding) == (9, 12, 1)
    highest = Snapshot(2**63 - 3, 2**63 - 1, (2**63 - 2,))
    service.consumer_groups.commit(worker.fence(0), highest)
    assert worker.sync().assigned[0].floor == 2**63 - 3


def test_a_snapshot_damaged_in_the_database_counts_as_its_floor(database: Database) -> None:
    """The partition replays; it neither skips nor blocks."""
    service = Service(database, combiner=Inline)
    made(service, 1)
    worker = Worker(service, "worker")
    worker.sync()
    service.consumer_groups.commit(worker.fence(0), Snapshot(3, 8, (4, 6)))
    with database.engine.begin() as tx:
        tx.execute(sa.update(tables.positions).values(outstanding=b"\x00"))
    position = worker.commit(0, 2)
    assert (position.floor, position.high) == (3, 3)


# Known failures of earlier systems, by their names; two more are above.


@mutant(
    "a-newcomer-that-holds-nothing-is-not-counted",
    "core.consumer_groups.leases:_look",
    "dict.fromkeys(live, 0)",
    "dict.fromkeys(sorted(live), 0)",
    (
        "return partitions",
        "partitions.holding = {w: n for w, n in partitions.holding.items() if n or w == "
        "caller.worker}\nreturn partitions",
    ),
)
def test_azure_js_6945_a_newcomer_that_holds_nothing_is_seen(database: Database, clock: Clock) -> None:
    """It counts from its first sync on, though it owns nothing: the others release their surplus."""
    service = Service(database, combiner=Inline)
    made(service, 4)
    owner = Worker(service, "a")
    owner.sync()
    newcomers = [Worker(service, "b"), Worker(service, "c")]
    for newcomer in newcomers:
        assert newcomer.sync().assigned == []
    assert owner.sync().release == [2, 3]
    owner.sync()
    for newcomer in newcomers:
        newcomer.sync()
    assert shared([owner, *newcomers]) == [1, 1, 2]


@mutant(
    "a-sync-does-not-lock-its-group",
    "core.consumer_groups.groups:find",
    "query.with_for_update() if locked else query",
    "query",
)
def test_azure_python_38812_the_first_create_makes_no_two_owners(server_service: Service) -> None:
    """Two workers create and join the group at the same moment: one group results, and no partition has two owners."""
    answers: list[bool] = []

    def join(name: str) -> Callable[[Service, int], tuple[bool, set[int]]]:
        def move(service: Service, number: int) -> tuple[bool, set[int]]:
            group = f"g{number}"
            _, new = service.consumer_groups.put(group, 4)
            return new, {lease.partition for lease in Worker(service, name, group).sync().assigned}

        return move

    def check(number: int, first: tuple[bool, set[int]], other: tuple[bool, set[int]]) -> None:
        assert [first[0], other[0]].count(True) == 1
        assert first[1] | other[1] == set(range(4))
        assert not first[1] & other[1]
        answers.append(first[0])

    race(server_service.database, ROUNDS, join("one"), join("other"), check=check)
    assert set(answers) == {True, False}, "the same worker always came first"


@mutant(
    "any-worker-may-report-a-partition-as-drained",
    "core.consumer_groups.leases:_look",
    "owner not in partitions.holding",
    "owner not in partitions.holding or any(number == each for each, _ in drained)",
)
def test_kafka_12984_no_two_members_claim_a_partition_in_one_generation(database: Database, clock: Clock) -> None:
    """A member that was out of the group comes back and assumes its old partitions: the answer to its sync decides, and
    its reports about partitions that others own now are ignored."""
    service = Service(database, combiner=Inline)
    made(service, 6)
    absent, first, other = (Worker(service, name) for name in ("away", "one", "other"))
    settle([absent, first, other], clock)
    old_epochs = dict(absent.epochs)
    clock.go(TTL + 1)
    settle([first, other], clock)
    assert shared([first, other]) == [3, 3]
    answer = absent.sync(*old_epochs)
    assert answer.assigned == []
    settle([absent, first, other], clock)
    assert shared([absent, first, other]) == [2, 2, 2]
    for partition, epoch in old_epochs.items():
        assert owners(service)[partition] is not None
        with pytest.raises(errors.StaleEpoch):
            service.consumer_groups.commit(Fence("g", partition, absent.name, epoch), Snapshot(1, 1))


# Races on MariaDB.


@mutant(
    "the-fence-locks-nothing",
    "core.consumer_groups.positions:lock",
    "f\"SELECT group_name, partition_no, owner, epoch FROM {dialect.by_primary_key('positions')} WHERE "
    "{among(tx, _KEY, part)} ORDER BY {', '.join(_KEY)}{dialect.for_update()}\"",
    "f\"SELECT group_name, partition_no, owner, epoch FROM {dialect.by_primary_key('positions')} WHERE "
    "{among(tx, _KEY, part)} ORDER BY {', '.join(_KEY)}\"",
)
def test_a_commit_reaches_the_next_owner_or_is_refused(server_service: Service) -> None:
    """The owner commits while another worker takes its partition: either the next owner starts with the commit, or it
    is refused."""
    service = server_service
    wins = {"owner": 0, "next": 0}
    workers = []
    for number in range(ROUNDS):
        made(service, 1, f"g{number}")
        owner = Worker(service, "owner", f"g{number}")
        owner.sync()
        workers.append(owner)
    with service.database.engine.begin() as tx:
        tx.execute(sa.update(tables.consumers).values(lease_until=tables.clock(tx) - timedelta(days=1)))

    def check(number: int, commit: Any, sync: Any) -> None:
        (lease,) = sync.assigned
        if isinstance(commit, errors.StaleEpoch):
            wins["next"] += 1
            assert lease.floor is None
        else:
            wins["owner"] += 1
            assert lease.floor == commit.floor == 7

    race(
        service.database,
        ROUNDS,
        lambda service_, number: service_.consumer_groups.commit(workers[number].fence(0), Snapshot(7, 7)),
        lambda service_, number: Worker(service_, "next", f"g{number}").sync(),
        check=check,
    )
    assert min(wins.values()) > 0, f"the same worker always came first: {wins}"


def test_a_hundred_workers_that_sync_at_once_are_all_answered(server_service: Service) -> None:
    """No partition is assigned to two workers at one epoch, and in the end none has more than its share. All of them
    wait for one row. If a hundred transactions take longer than the lock wait, the last ones are refused and try again,
    as clients do after a 503."""
    service = server_service
    made(service, 250, ttl=600)
    workers = [Worker(service, f"worker-{number:03}") for number in range(100)]
    owners_by_epoch: dict[tuple[int, int], str] = {}
    for _ in range(4):  # the first worker takes all, is asked to release, has drained; the others take their shares
        start = threading.Barrier(len(workers))

        def sync(worker: Worker, start: threading.Barrier = start) -> Synced:
            start.wait(60)
            for _ in range(10):
                with contextlib.suppress(errors.LockTimeout):
                    return worker.sync()
            return worker.sync()

        with ThreadPoolExecutor(len(workers)) as pool:
            for worker, answer in zip(workers, pool.map(sync, workers), strict=True):
                for lease in answer.assigned:
                    assert owners_by_epoch.setdefault((lease.partition, lease.epoch), worker.name) == worker.name
    assert set(owners(service).values()) <= {None, *(worker.name for worker in workers)}
    assert max(len(worker.epochs) for worker in workers) == 3
    assert sum(len(worker.epochs) >= 2 for worker in workers) > 50


# Crashes.


@pytest.fixture(scope="module")
def dying() -> Iterator[Mortals]:
    with mortals() as server:
        yield server


def eventful(service: Service, group: str) -> Worker:
    """A group in which the returned worker's next sync has everything to do: it joins, another worker is dead, and a
    release is overdue."""
    made(service, 6, group, ttl=600, release=600)
    dead, slow = Worker(service, "dead", group), Worker(service, "stuck", group, drains=False)
    dead.sync()
    slow.sync()
    dead.sync()
    dead.sync()
    slow.sync()
    slow.capacity = 2
    assert slow.sync().release == [5]
    past = "2020-01-01 00:00:00"
    with service.database.engine.begin() as tx:
        for table, column, key in (
            ("consumers", "lease_until", "worker = 'dead'"),
            ("positions", "release_by", "partition_no = 5"),
        ):
            tx.exec_driver_sql(f"UPDATE {table} SET {column} = '{past}' WHERE group_name = '{group}' AND {key}")
    return Worker(service, "worker", group)


def releasing(service: Service, group: str) -> Worker:
    """The returned worker's next sync marks what others should have."""
    made(service, 6, group, ttl=600, release=600)
    worker, newcomer = Worker(service, "worker", group), Worker(service, "newcomer", group)
    worker.sync()
    newcomer.sync()
    return worker


def restarting(service: Service, group: str) -> Worker:
    releasing(service, group)
    return Worker(service, "worker", group)


def seen(service: Service, group: str) -> list[Any]:
    details = service.consumer_groups.get(group)
    rows: list[Any] = [(worker.worker, worker.live, worker.partitions, worker.releasing) for worker in details.workers]
    for position in details.positions:
        rows.append(
            (
                position.partition,
                position.owner,
                position.epoch,
                position.release_by is None,
                position.floor,
                position.outstanding,
            )
        )
    return rows


@pytest.mark.parametrize("scenario", [eventful, releasing, restarting])
def test_a_sync_that_dies_at_any_point_is_done_or_not_begun(
    database: Database, dying: Mortals, scenario: Callable[[Service, str], Worker]
) -> None:
    """Before and after each statement and the commit: a retry has the effect of a single sync."""
    service = Service(database, combiner=Inline)
    url = database.url.render_as_string(hide_password=False)
    expected = scenario(service, "expected")
    initial = seen(service, "expected")
    expected.sync()
    final = seen(service, "expected")
    deaths: list[str] = []
    while True:
        group = f"g{len(deaths)}"
        worker = scenario(service, group)
        request = {"verb": "sync", "group": group, "worker": worker.name, "session": worker.session}
        death = dying.run(url, request, len(deaths))
        is_committed = death is None or bool(death.commits)
        assert seen(service, group) == (final if is_committed else initial)
        worker.drains = False
        worker.sync()
        assert seen(service, group) == final
        assert worker.epochs == expected.epochs
        if death is None:
            break
        deaths.append(death.where)
        assert len(deaths) < 100
    assert len(deaths) > 6, deaths
    assert deaths[-1] == "after COMMIT"


def test_a_commit_that_dies_at_any_point_is_done_or_not_begun(database: Database, dying: Mortals) -> None:
    """A retry has the effect of a single commit."""
    service = Service(database, combiner=Inline)
    url = database.url.render_as_string(hide_password=False)
    snapshot = Snapshot(3, 8, (4, 6))
    deaths: list[str] = []
    while True:
        group = f"g{len(deaths)}"
        made(service, 1, group, ttl=600)
        worker = Worker(service, "worker", group)
        worker.sync()
        worker.commit(0, 1)
        request = {"verb": "commit", "group": group, "worker": worker.name, "snapshot": snapshot.encode().hex()}
        death = dying.run(url, request, len(deaths))
        is_committed = death is None or bool(death.commits)
        assert service.consumer_groups.get(group).positions[0].floor == (3 if is_committed else 1)
        position = service.consumer_groups.commit(worker.fence(0), snapshot)
        assert (position.floor, position.high, position.outstanding) == (3, 8, 2)
        if death is None:
            break
        deaths.append(death.where)
    assert len(deaths) > 3, deaths


# Cost.


def test_a_sync_takes_as_many_statements_for_four_hundred_partitions_as_for_four(database: Database) -> None:
    """For as many partitions as fit in one list (`statements.LIST`)."""
    service = Service(database, combiner=Inline)

    def statements(partitions: int, group: str) -> list[int]:
        made(service, partitions, group)
        first, other = Worker(service, "one", group), Worker(service, "other", group)
        counts = []
        for worker in (first, other, first, first, other, first, Worker(service, "one", group)):
            with plans.executions(database) as executions:
                worker.sync()
            counts.append(len(executions))
        return counts

    small = statements(4, "few")
    assert small == statements(400, "many")
    assert max(small) < 12


def test_a_heartbeat_writes_one_row(database: Database) -> None:
    """The worker's row, however many partitions it holds."""
    service = Service(database, combiner=Inline)
    made(service, 100)
    worker = Worker(service, "worker")
    worker.sync()
    writes: list[str] = []

    def executed(connection: object, cursor: Any, statement: str, *_: object) -> None:
        if not statement.startswith(("SELECT", "COMMIT")) and "commit_marks" not in statement:
            writes.append(f"{statement.split(maxsplit=2)[1]}: {cursor.rowcount}")

    sa.event.listen(database.engine, "after_cursor_execute", executed)
    worker.sync()
    assert [write for write in writes if "IMMEDIATE" not in write] == ["consumers: 1"]
