"""The SDK's workers and the service's leases together: while all clocks run, no two workers believe that they own the
same partition, whatever requests and responses are lost or late, and however long their drains take.

Safety doesn't depend on this, since a worker that was suspended may be wrong, and its writes are refused. But without
such a reason no work should be done twice.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import hypothesis
import pytest
from hypothesis import strategies as st

from core.commits.combiner import Inline
from core.consumer_groups.leases import Caller
from core.errors import SessionReplaced
from core.service import Service
from core.storage.database import Database
from lastbit import errors
from lastbit.groups import Granted, Synced
from lastbit.models import Fence
from lastbit.streams import AckWindow
from lastbit.streams._membership import Call, Held, Lease, Membership, Sync
from tests.mutants import mutant
from tests.support import templates
from tests.support.clocks import Clock

SOAK = 20 if os.environ.get("LASTBIT_SOAK") == "1" else 1
TTL, STEP, WORKERS, PARTITIONS = 6, 0.5, 3, 4
FATES = ["answered", "answered", "answered", "request lost", "request late", "response lost", "response late"]


@dataclass
class Worker:
    """A worker whose clock is the database's. Responses arrive, and drains end, when their time has come."""

    service: Service
    clock: Clock
    group: str
    name: str
    outcomes: list[tuple[float, Sync | Call[Held], Synced | BaseException | None]] = field(default_factory=list)
    late: list[tuple[float, Caller]] = field(default_factory=list)
    """Syncs that the service handles at this time, after the worker has given them up."""

    def __post_init__(self) -> None:
        self.start = self.clock.now
        self.membership: Membership[Held] = Membership(self.make, self.now, lambda: 0.0, self.group)

    def now(self) -> float:
        return (self.clock.now - self.start).total_seconds()

    def make(self, grant: Granted, lease: Lease) -> Held:
        return Held(Fence(self.group, grant.partition, self.name, grant.epoch), grant.token, AckWindow(), lease)

    def go_on(self, data: st.DataObject) -> None:
        for outcome in [each for each in self.outcomes if each[0] <= self.now()]:
            self.outcomes.remove(outcome)
            self.membership.done(*outcome[1:])
        for late in [each for each in self.late if each[0] <= self.now()]:
            self.late.remove(late)
            self.service.consumer_groups.sync(self.group, late[1])
        for step in self.membership.due():
            if isinstance(step, Sync):
                self.sync(step, data.draw(st.sampled_from(FATES), label=f"{self.name} syncs"))
            else:
                takes = 0 if step.assigned else data.draw(st.sampled_from([0, 1, 4, 20]), label=f"{self.name} drains")
                self.outcomes.append((self.now() + takes, step, None))

    def sync(self, step: Sync, fate: str) -> None:
        lost = errors.ServiceUnreachable("", "", "", 1, 0.0)
        caller = Caller(self.name, self.membership.session, step.limit, step.drained)
        if fate in ("request lost", "request late"):
            given_up = self.now() + min(step.timeout, TTL / 2)
            self.outcomes.append((given_up, step, lost))
            if fate == "request late":
                self.late.append((given_up + TTL / 4, caller))
            return
        answer = self.service.consumer_groups.sync(self.group, caller)
        grants = [
            Granted(each.partition, each.epoch, each.floor, each.high, each.outstanding, each.token)
            for each in answer.assigned
        ]
        within = answer.release_within.total_seconds()
        identity = answer.group_partitions, answer.incarnation
        synced = Synced(answer.ttl.total_seconds(), tuple(grants), tuple(answer.release), within, *identity)
        takes = {"answered": 0, "response late": min(step.timeout, TTL / 3)}.get(fate, step.timeout)
        self.outcomes.append((self.now() + takes, step, lost if fate == "response lost" else synced))

    def end(self) -> Worker:
        """Its successor, which has its name."""
        step = self.membership.last_sync()
        if step is None:
            self.service.consumer_groups.leave(self.group, self.name, self.membership.session)
        else:
            caller = Caller(self.name, self.membership.session, step.limit, step.drained)
            with suppress(SessionReplaced):
                self.service.consumer_groups.sync(self.group, caller)
        return Worker(self.service, self.clock, self.group, self.name)

    def owned(self) -> set[int]:
        """What it believes to own."""
        return {assignment.partition for assignment in self.membership.held if not assignment.lost}


@mutant(
    "a-release-ends-before-the-lease-that-the-owner-knows-of",
    "core.consumer_groups.leases:sync",
    "max(now + group.release, min(before.lease_until, now + group.ttl))",
    "now + group.release",
)
@pytest.mark.parametrize("release", [0, 2, 15])
def test_no_two_workers_believe_that_they_own_a_partition(sqlite_url: str, release: float) -> None:
    database = Database(sqlite_url)
    templates.migrate(database)
    service, clock = Service(database, combiner=Inline), Clock(database)
    numbers = itertools.count()

    @hypothesis.settings(max_examples=25 * SOAK)
    @hypothesis.given(data=st.data())
    def example(data: st.DataObject) -> None:
        group = f"g-{next(numbers)}"
        service.consumer_groups.put(group, PARTITIONS, timedelta(seconds=TTL), timedelta(seconds=release))
        workers: list[Worker] = []
        for _ in range(data.draw(st.integers(20, 60), label="steps")):
            if len(workers) < WORKERS and data.draw(st.integers(0, 4), label="another joins") == 0:
                workers.append(Worker(service, clock, group, f"worker-{len(workers)}"))
            for worker in data.draw(st.permutations(workers), label="order"):
                if data.draw(st.integers(0, 19), label=f"{worker.name} stops") == 0:
                    worker.membership.stop(leave=data.draw(st.booleans(), label="for good"))
                worker.go_on(data)
                if worker.membership.over:
                    workers[workers.index(worker)] = worker.end()
                owned = [partition for each in workers for partition in each.owned()]
                assert len(owned) == len(set(owned)), {each.name: each.owned() for each in workers}
            clock.go(STEP)

    example()
    service.stop()
    database.dispose()
