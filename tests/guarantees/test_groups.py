"""Consumer groups: one owner and one alone, equal shares, few moves, and nobody waits for ever.

A state machine of workers that join, leave, crash, come back under their old names, are frozen, drain slowly, while the
database's clock jumps; races on real MariaDB sessions; crashes at each statement; and one test for each failure that is
known of earlier systems, under its name.
"""

from __future__ import annotations

import itertools
import os
import threading
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

from core import errors, feed, groups, leases, shares, tables
from core.combiner import Inline
from core.db import Database
from core.groups import Fence
from core.leases import Caller, Held, Synced
from core.service import Service
from lastbit.streams.snapshot import Snapshot
from tests.clocks import Clock
from tests.guarantees import mutants
from tests.guarantees.dying import Mortals, mortals
from tests.guarantees.rounds import race

TTL, RELEASE = 10, 30
SOAK = 20 if os.environ.get("LASTBIT_SOAK") == "1" else 1
ROUNDS = 100 * SOAK
positions = tables.positions.c
sessions = itertools.count()


@dataclass(eq=False)
class Worker:
    """A process: what it was told, and what it says at its next sync."""

    service: Service
    name: str
    group: str = "g"
    capacity: int | None = None
    drains: bool = True
    """At once, so that it says so at the next sync."""
    session: str = field(default_factory=lambda: f"session-{next(sessions)}")
    epochs: dict[int, int] = field(default_factory=dict)
    release: list[int] = field(default_factory=list)

    def sync(self, *drained: int) -> Synced:
        saying = {*drained, *(self.release if self.drains else ())}
        synced = self.service.sync(self.group, Caller(self.name, self.session, self.capacity, sorted(saying)))
        self.epochs = {held.partition: held.epoch for held in synced.assigned}
        self.release = synced.release
        assert set(self.release) <= self.epochs.keys()
        return synced

    def fence(self, partition: int) -> Fence:
        return Fence(self.group, partition, self.name, self.epochs[partition])

    def commit(self, partition: int, floor: int) -> groups.Position:
        return self.service.commit_position(self.fence(partition), Snapshot(floor, floor))


def made(service: Service, partitions: int, group: str = "g", ttl: float = TTL, release: float = RELEASE) -> None:
    service.put_group(group, partitions, timedelta(seconds=ttl), timedelta(seconds=release))


def owners(service: Service, group: str = "g") -> dict[int, str | None]:
    return {each.partition: each.owner for each in service.get_group(group).positions}


def settle(workers: list[Worker], clock: Clock | None = None) -> None:
    """Sync them in turns until nothing changes any more."""
    for _ in range(2 + 3 * len(workers)):
        before = [dict(worker.epochs) for worker in workers]
        for worker in workers:
            worker.sync()
            if clock is not None:
                clock.go(TTL / 3 / len(workers))
        if before == [worker.epochs for worker in workers] and not any(worker.release for worker in workers):
            return
    raise AssertionError("they never came to rest")


def shared(workers: list[Worker]) -> list[int]:
    """How many partitions each holds; each one is held once."""
    held = [partition for worker in workers for partition in worker.epochs]
    assert len(held) == len(set(held))
    return sorted(len(worker.epochs) for worker in workers)


@pytest.fixture
def clock(database: Database) -> Clock:
    return Clock(database)


@pytest.fixture
def mariadb_service(mariadb_database: Database) -> Iterator[Service]:
    opened = Service(mariadb_database, combiner=Inline)
    yield opened
    opened.stop()


# Any sequence.

NAMES = ["ann", "bob", "cid", "dan"]


class Machine(RuleBasedStateMachine):
    """One example: a group on an emptied database, its processes, and what each of them was ever told."""

    service: Service
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, Worker] = {}
        self.frozen: list[Worker] = []
        """Replaced, or out of contact; they may wake up."""
        self.told: dict[tuple[int, int], Worker] = {}
        """Who was told that a partition is its own at an epoch."""
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
            synced = worker.sync(*drained)
        except errors.SessionReplaced:
            assert worker not in self.alive.values()
            worker.epochs = {}
            return None
        for place in worker.epochs.items():
            assert self.told.setdefault(place, worker) is worker, f"{place} was somebody else's"
        for partition, row in self.look().items():
            assert (row.owner == worker.name) == (partition in worker.epochs)
        assert {held.epoch for held in synced.assigned} <= {row.epoch for row in self.rows.values()}
        return synced

    def look(self) -> dict[int, Any]:
        """All that is in the tables; nothing of it went back."""
        with self.service.database.engine.connect() as tx:
            rows = {row.partition_no: row for row in tx.execute(sa.select(tables.positions))}
            leased = tx.execute(sa.select(tables.consumers)).all()
        for number, row in rows.items():
            before = self.rows.get(number, row)
            assert row.epoch >= before.epoch
            assert row.owner in (before.owner, None) or row.epoch > before.epoch, "an owner without an epoch of its own"
            assert row.owner is None or row.owner in {each.worker for each in leased}
        self.rows = rows
        return rows

    @rule(name=st.sampled_from(NAMES), drains=st.booleans())
    def start(self, name: str, drains: bool) -> None:
        """A new process, whatever became of the one that had the name."""
        if name in self.alive:
            self.frozen.append(self.alive[name])
        self.alive[name] = Worker(self.service, name, drains=drains)
        self.sync(self.alive[name])

    @precondition(lambda self: self.alive)
    @rule(place=st.integers(0, 3), drained=st.sets(st.integers(0, 2)))
    def beat(self, place: int, drained: set[int]) -> None:
        """A sync; it may say of anything that it is drained, as a late message would."""
        worker = list(self.alive.values())[place % len(self.alive)]
        self.sync(worker, *(number for number in drained if number < self.partitions))

    @precondition(lambda self: self.frozen)
    @rule(place=st.integers(0, 3))
    def wake(self, place: int) -> None:
        """One that others have taken for dead syncs."""
        worker = self.frozen[place % len(self.frozen)]
        if self.sync(worker) is not None:  # it was in time, or its successor is gone
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
            self.service.leave_group("g", worker.name, worker.session)
            assert worker.name not in {row.owner for row in self.look().values()}

    @precondition(lambda self: self.alive or self.frozen)
    @rule(place=st.integers(0, 9))
    def write(self, place: int) -> None:
        """Everybody writes under what it was told; only the last who was told anything of a partition may."""
        everybody = [*self.alive.values(), *self.frozen]
        worker = everybody[place % len(everybody)]
        for partition, epoch in worker.epochs.items():
            row = self.rows[partition]
            last = max(each for number, each in self.told if number == partition)
            current = row.owner == worker.name and epoch == row.epoch
            assert not current or epoch == last
            try:
                worker.commit(partition, place)
                assert current
            except errors.StaleEpoch:
                assert not current

    @rule(seconds=st.sampled_from([1, 3, TTL + 1, RELEASE + 1, 100_000, -3, -TTL, -100_000]))
    def time_passes(self, seconds: float) -> None:
        """Or jumps."""
        self.clock.go(seconds)

    @precondition(lambda self: self.alive)
    @rule(name=st.sampled_from(NAMES))
    def comes_to_rest(self, name: str) -> None:
        """Those that are alive sync, as often as they should, and drain what they are to give back, at once or never:
        after a ttl and a release all partitions are shared equally. Another one joins, and takes its share alone."""
        self.come_to_rest()
        if name in self.alive:
            return
        before = owners(self.service)
        self.start(name, drains=True)
        self.come_to_rest()
        after = owners(self.service)
        moved = {partition for partition in after if after[partition] != before[partition]}
        assert {after[partition] for partition in moved} <= {name}
        assert len(moved) <= -(-self.partitions // len(self.alive))

    def come_to_rest(self) -> None:
        """At its end everybody has been told what it holds."""
        workers = list(self.alive.values())
        rounds = 5
        for _ in range(2):  # what is shared too late for the first hand-over to be the last
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


def machine(database: Database, examples: int) -> None:
    settings = hypothesis.settings(
        hypothesis.settings.get_profile("lastbit"), max_examples=examples * SOAK, stateful_step_count=25
    )
    if mutants.VARIABLE in os.environ:  # that it fails is enough then; the smallest example is of no interest
        settings = hypothesis.settings(settings, phases=[hypothesis.Phase.generate])

    class Here(Machine):
        service = Service(database, combiner=Inline)
        clock = Clock(database)

    run_state_machine_as_test(Here, settings=settings)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "examples"), [("sqlite", 30), ("mariadb", 6)])
def test_whatever_happens_a_partition_has_one_owner_and_all_come_to_rest(
    request: pytest.FixtureRequest, kind: str, examples: int
) -> None:
    """Nobody is told what another one was told, a late one can't write, and at rest all is shared equally."""
    from core import schema

    with Database(request.getfixturevalue(f"{kind}_url")) as database:
        schema.migrate(database)
        machine(database, examples)
