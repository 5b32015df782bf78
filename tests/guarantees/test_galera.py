"""On a Galera cluster of three nodes: what one node has committed another one may not have applied yet, locks hold on
their own node, and a commit may be refused. All guarantees hold all the same.

Decision 0013 says of each transaction what holds it; here those are tried that rest on more than the rows they write.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from core import batches, definitions, errors, feed, groups, leases, schema, tallies
from core.batches import Opening
from core.calls import Answer
from core.combiner import Inline
from core.db import Database
from core.lifecycle import State
from core.service import Service
from lastbit.streams.snapshot import Snapshot
from tests.galera import Cluster, Node, until
from tests.guarantees.forked import Forked, Nursery
from tests.guarantees.load import Load, check, open_shared
from tests.guarantees.rounds import GROUP, ack, newly, prepare, race, recount

pytestmark = [pytest.mark.mariadb, pytest.mark.xdist_group("galera"), pytest.mark.timeout(300)]

ROUNDS = 120


@dataclass
class Pair:
    """A database, by way of two nodes."""

    name: str
    nodes: tuple[Node, Node]
    one: Database
    other: Database

    @property
    def urls(self) -> tuple[str, str]:
        return self.nodes[0].url(self.name), self.nodes[1].url(self.name)

    def services(self) -> tuple[Service, Service]:
        return Service(self.one, combiner=Inline), Service(self.other, combiner=Inline)


@pytest.fixture
def name(galera: Cluster) -> Iterator[str]:
    """A database with the current schema."""
    name = galera.new_database()
    with Database(galera.nodes[0].url(name)) as database:
        schema.migrate(database)
    yield name
    galera.drop_database(name)


@pytest.fixture
def pair(galera: Cluster, name: str) -> Iterator[Pair]:
    nodes = galera.nodes[0], galera.nodes[1]
    with Database(nodes[0].url(name)) as one, Database(nodes[1].url(name)) as other:
        yield Pair(name, nodes, one, other)


def events(database: Database) -> list[feed.Event]:
    return database.snapshot(lambda tx: feed.read(tx, None, 100_000)).events


def test_a_lost_certification_is_begun_again_and_costs_no_connection(pair: Pair) -> None:
    """Nothing was committed, so even work that must not be done twice is; and what is held in memory stays."""
    one, other = pair.services()
    batch = one.open(Opening(items=10)).batch.id
    connected: list[None] = []
    one.database.on_connect(lambda: connected.append(None))
    mine: list[int] = []

    def work(tx: sa.Connection) -> None:
        found, _ = batches.lock(tx, batch)
        batches.update(tx, batch, items=found.items + 1)
        mine.append(found.items)
        if len(mine) == 1:
            assert ack(other, (batch, 0, 0)).applied == 1

    one.database.write(work)
    assert mine == [10, 10]
    assert not connected
    found = other.get(batch)
    assert (found.items, found.acked) == (11, 1)


def test_an_ack_on_one_node_right_after_the_extend_on_another_is_not_refused(pair: Pair) -> None:
    """The ids are unknown where the extend was not applied yet; the ack waits there until it was."""
    one, other = pair.services()
    batch = one.open(Opening()).batch.id
    ack(other, (batch, 0, 0))  # so that its node has a session that is in use
    with ThreadPoolExecutor(1) as pool:
        with pair.nodes[1].lagging():
            extended = one.extend(batch, 5)
            acked = pool.submit(ack, other, (batch, 0, extended.start))
            until(lambda: acked.done() or pair.nodes[1].works_on(pair.name) > 0, 30, lambda: "it was not sent")
            assert not acked.done(), acked.result()
        assert (acked.result(30).applied, acked.result().rejected) == (1, [])


def test_what_was_answered_on_one_node_is_read_on_another(pair: Pair) -> None:
    """The state after a seal, and the event of it."""
    one, other = pair.services()
    batch = one.open(Opening()).batch.id
    other.get(batch)
    with ThreadPoolExecutor(2) as pool:
        with pair.nodes[1].lagging():
            assert one.seal(batch).newly
            state = pool.submit(lambda: other.get(batch).state)
            head = pool.submit(other.feed_head)
            until(
                lambda: (state.done() and head.done()) or pair.nodes[1].works_on(pair.name) == 2,
                30,
                lambda: "they were not sent",
            )
        assert state.result(30) is State.COMPLETE
        assert head.result(30) == one.feed_head()


def test_of_two_last_acks_on_two_nodes_exactly_one_completes_the_batch(pair: Pair) -> None:
    """In two groups, so that no group's row is written by both; there is one event of it."""
    shapes = [(2 * GROUP, {0: GROUP - 1, 1: GROUP - 1}), (GROUP + 1, {0: GROUP - 1})]
    ids = prepare(pair.one, ROUNDS, lambda number: shapes[number % 2])

    def judge(number: int, one: Answer, other: Answer) -> None:
        batch = ids[number]
        assert [newly(one, batch), newly(other, batch)].count(True) == 1
        assert (one.applied, other.applied) == (1, 1)

    race(
        pair.one,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, GROUP - 1)),
        lambda service, number: ack(service, (ids[number], 1, shapes[number % 2][1].get(1, 0))),
        check=judge,
        urls=pair.urls,
    )
    assert {row.state for row in recount(pair.other).values()} == {State.COMPLETE}
    told = events(pair.other)
    assert sorted(event.id for event in told) == sorted(
        f"batch:{batch}:{happened}" for batch in ids for happened in ("completed", "succeeded")
    )
    assert [event.position for event in told] == list(range(1, len(told) + 1))


def test_the_same_items_acked_on_two_nodes_count_once(pair: Pair) -> None:
    """Each process holds the group in memory, and it is the other's change that it doesn't have."""
    ids = prepare(pair.one, 1, lambda number: (GROUP * 4, {}))

    def judge(number: int, one: Answer, other: Answer) -> None:
        assert sorted([(one.applied, one.repeated), (other.applied, other.repeated)]) == [(0, 1), (1, 0)]

    def same(service: Service, number: int) -> Answer:
        return ack(service, (ids[0], *divmod(number, GROUP)))

    race(pair.one, ROUNDS, same, same, check=judge, urls=pair.urls)
    assert recount(pair.other)[ids[0]].acked == ROUNDS


def test_opens_under_one_key_on_two_nodes_open_one_batch(pair: Pair) -> None:
    """One of them is refused by the cluster, begins again, and finds the other's."""

    def judge(number: int, one: Any, other: Any) -> None:
        assert one.batch.id == other.batch.id
        assert sorted([one.replayed, other.replayed]) == [False, True]

    def same(service: Service, number: int) -> batches.Opened:
        return service.open(Opening(key=f"key-{number}", items=3), f"open-{number}")

    race(pair.one, ROUNDS, same, same, check=judge, urls=pair.urls)
    assert len(recount(pair.other)) == ROUNDS


def test_of_the_last_ack_and_the_seal_on_two_nodes_exactly_one_completes_the_batch(pair: Pair) -> None:
    """As on one server."""
    ids = prepare(pair.one, ROUNDS, lambda number: (GROUP + 1, {0: GROUP}), state=State.OPEN)

    def judge(number: int, acked: Answer, sealed: batches.Sealed) -> None:
        assert [newly(acked, ids[number]), sealed.newly].count(True) == 1
        assert sealed.newly == sealed.batch.complete

    race(
        pair.one,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 1, 0)),
        lambda service, number: service.seal(ids[number]),
        check=judge,
        urls=pair.urls,
    )
    assert {row.state for row in recount(pair.other).values()} == {State.COMPLETE}


def test_an_ack_and_a_cancel_on_two_nodes(pair: Pair) -> None:
    """The ack is applied before the end, or rejected."""
    ids = prepare(pair.one, ROUNDS, lambda number: (10, {}), state=State.OPEN)
    applied: dict[int, int] = {}

    def judge(number: int, acked: Answer, cancelled: batches.Batch) -> None:
        assert cancelled.state is State.CANCELLED
        assert acked.applied + len(acked.rejected) == 1
        assert cancelled.acked == acked.applied, "it was answered as applied, after the end"
        applied[ids[number]] = acked.applied

    race(
        pair.one,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, 3)),
        lambda service, number: service.cancel(ids[number]),
        check=judge,
        urls=pair.urls,
    )
    assert {batch: row.acked for batch, row in recount(pair.other).items()} == applied


def test_events_appended_on_two_nodes_have_positions_without_gaps(pair: Pair) -> None:
    """And an event whose id comes twice is there once."""

    def append(service: Service, number: int, who: str) -> list[feed.Appended]:
        return service.append([feed.New(f"own:{number}:{who}", "own"), feed.New(f"both:{number}", "own")])

    def judge(number: int, one: Any, other: Any) -> None:
        assert one[1].position == other[1].position
        assert [one[1].repeated, other[1].repeated].count(False) == 1

    race(
        pair.one,
        ROUNDS,
        lambda service, number: append(service, number, "one"),
        lambda service, number: append(service, number, "other"),
        check=judge,
        urls=pair.urls,
    )
    told = events(pair.other)
    assert [event.position for event in told] == list(range(1, 3 * ROUNDS + 1))
    assert len({event.id for event in told}) == 3 * ROUNDS


def test_what_is_written_under_a_fence_is_there_for_whoever_takes_the_partition_on_another_node(pair: Pair) -> None:
    """The fence only looks at the partition's row. The next owner must see what was written, or it was refused."""
    one, _ = pair.services()
    one.put_group("g", 1)
    held: list[groups.Fence] = []
    lost = 0

    def take(number: int) -> None:
        synced = one.sync("g", leases.Caller("w", f"session-{number}"))
        held.append(groups.Fence("g", 0, "w", synced.assigned[0].epoch))

    def write(service: Service, number: int) -> tallies.Applied:
        return service.apply_tally("t", [tallies.Entry(f"{number}", 1, "topic", 0, 0, 1, 0)], held[number])

    def hand_over(service: Service, number: int) -> int:
        def work(tx: sa.Connection) -> int:
            leases.leave(tx, "g", "w")
            return tallies.get(tx, "t", f"{number}").value

        return service.database.write(work)

    def judge(number: int, written: Any, seen: int) -> None:
        nonlocal lost
        assert seen == (0 if isinstance(written, errors.StaleEpoch) else 1), "written after the partition was gone"
        lost += seen == 0
        if number + 1 < ROUNDS:
            take(number + 1)

    take(0)
    race(pair.one, ROUNDS, write, hand_over, check=judge, urls=pair.urls)
    assert 0 < lost < ROUNDS, "the two hardly met"


def test_workers_that_join_on_two_nodes_hold_no_partition_together(pair: Pair) -> None:
    """Each of them is told what is its own, and finds it so."""
    one, other = pair.services()
    one.put_group("g", 8)

    def join(service: Service, number: int, worker: str) -> leases.Synced:
        return service.sync("g", leases.Caller(worker, f"{worker}-{number}"))

    def judge(number: int, mine: Any, theirs: Any) -> None:
        assert not {held.partition for held in mine.assigned} & {held.partition for held in theirs.assigned}
        for service, worker, synced in ((one, "one", mine), (other, "other", theirs)):
            for held in synced.assigned:
                service.commit_position(groups.Fence("g", held.partition, worker, held.epoch), Snapshot(1, 1))
            service.leave_group("g", worker)

    race(
        pair.one,
        ROUNDS // 4,
        lambda service, number: join(service, number, "one"),
        lambda service, number: join(service, number, "other"),
        check=judge,
        urls=pair.urls,
    )


def test_no_event_is_trimmed_on_one_node_that_a_process_on_another_begins_with(pair: Pair) -> None:
    """The process is defined with the position that it begins after; what comes next is there, or it is refused."""
    one, _ = pair.services()
    rounds = ROUNDS // 2
    after: list[int] = []

    def begin(number: int) -> None:
        after.append(one.append([feed.New(f"{number}:{each}", "own") for each in range(3)])[0].position)

    def trim(service: Service, number: int) -> int:
        return feed.trim(service.database, timedelta(0), needed=definitions.needed)

    def judge(number: int, defined: Any, trimmed: int) -> None:
        try:
            one.events(after[number], 1)
        except errors.PositionTrimmed:
            assert isinstance(defined, errors.PositionTrimmed), "what it begins with is gone"
        else:
            assert isinstance(defined, tuple)
        if isinstance(defined, tuple):
            one.delete_process(f"p{number}")
        begin(number + 1)

    begin(0)
    race(
        pair.one,
        rounds,
        lambda service, number: service.define_process(f"p{number}", partitions=1, after=after[number]),
        trim,
        check=judge,
        urls=pair.urls,
    )


def unavailable(load: Load, more: int = 5) -> None:
    wanted = load.statuses[503] + more
    load.hears(lambda: load.statuses[503] >= wanted)


def test_nodes_that_are_killed_and_rejoin_under_load(galera: Cluster, name: str) -> None:
    """All writes go to one node. It is killed, and rejoins with what it has missed; the next one rejoins with all."""
    galera.front.policy = "one"
    url = galera.url(name)
    with Database(url) as database:
        shared = open_shared(database)
        nursery = Nursery()
        try:
            with Forked(nursery, url) as running, Load(running.url, shared) as load:
                load.reaches(40)
                for whole in (False, True):
                    writer = galera.front.current
                    assert writer is not None
                    writer.kill()
                    load.reaches(40)
                    writer.start(whole=whole)
                    galera.wait_until_whole()
                    load.reaches(40)
        finally:
            nursery.close()
        check(load, database)
