"""A Galera cluster of three nodes: a node may not have applied what another one has committed, locks hold on their own
node, and a commit may be refused. All guarantees hold nevertheless.

Decision 0013 lists what protects each transaction; tested here are the transactions that depend on more than the rows
they write.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from core import errors, feed, tallies
from core.acks.call import AckResult
from core.batches import batch as batches
from core.batches.batch import Opening
from core.batches.lifecycle import State
from core.commits.combiner import Inline
from core.consumer_groups import leases, positions
from core.janitor import needed
from core.service import Service
from core.storage import checks, schema, statements, tables
from core.storage.database import Database
from core.storage.numbering import Numbering
from core.tallies import reads
from lastbit.streams.snapshot import Snapshot
from tests.guarantees.drivers.load import Load, check, open_shared
from tests.guarantees.drivers.rounds import GROUP, ack, newly, prepare, race, recount
from tests.mutants import mutant
from tests.support.galera import Cluster, Node, Policy, until
from tests.support.servers import running_service
from tests.support.waits import freeze_before

pytestmark = [
    *(pytest.mark.slow, pytest.mark.mariadb, pytest.mark.galera),
    *(pytest.mark.xdist_group("galera"), pytest.mark.timeout(300)),
]

ROUNDS = 2000 if "LASTBIT_SOAK" in os.environ else 40


@dataclass
class Pair:
    """A database, reached through two nodes."""

    name: str
    nodes: tuple[Node, Node]
    first: Database
    other: Database

    @property
    def urls(self) -> tuple[str, str]:
        return self.nodes[0].url(self.name), self.nodes[1].url(self.name)

    def services(self) -> tuple[Service, Service]:
        return Service(self.first, combiner=Inline), Service(self.other, combiner=Inline)


@pytest.fixture(scope="module")
def name(galera: Cluster) -> Iterator[str]:
    """The name of a database with the current schema."""
    name = galera.new_database()
    with Database(galera.nodes[0].url(name)) as database:
        schema.migrate(database)
    yield name
    galera.drop_database(name)


@pytest.fixture(scope="module")
def pair(galera: Cluster, name: str) -> Iterator[Pair]:
    nodes = galera.nodes[0], galera.nodes[1]
    with Database(nodes[0].url(name)) as first, Database(nodes[1].url(name)) as other:
        yield Pair(name, nodes, first, other)


def head(pair: Pair) -> int:
    return pair.first.read(feed.head)


def events(pair: Pair, after: int) -> list[feed.Event]:
    """The events that the other node has; their positions have no gaps."""
    feed_events = pair.other.snapshot(feed.read, after, 100_000).events
    assert [event.position for event in feed_events] == list(range(after + 1, after + 1 + len(feed_events)))
    return feed_events


@mutant(
    "a-node-gets-a-transaction-in-one-packet",
    "core.storage.dialects.mariadb:MariaDB.run",
    "galera.is_node(tx)",
    "False",
)
def test_an_aborted_transaction_is_not_continued_by_its_next_statements(pair: Pair) -> None:
    """A commit on another node aborts it between any two of its statements: none of them has an effect, also those that
    were sent together with the COMMIT."""
    first, other = pair.services()
    steps = 3000  # enough to last until the other node's commit arrives

    def write(contested: int, own: int) -> None:
        with pair.first.engine.connect() as tx:
            statements.run(tx, f"SELECT id FROM batches WHERE id = {contested} FOR UPDATE")
            is_locked.set()
            step = f"UPDATE batches SET acked = acked + 1 WHERE id = {own}"
            last = f"UPDATE batches SET failed = failed + 1 WHERE id = {contested}"
            statements.finish(tx, *[step] * steps, last)
            tx.commit()

    with ThreadPoolExecutor(1) as pool:
        for _ in range(ROUNDS):
            is_locked = threading.Event()
            contested, own = (first.batches.open(Opening(items=1000)).batch.id for _ in range(2))
            assert other.batches.get(contested).failed == 0  # the other node has it
            writing = pool.submit(write, contested, own)
            assert is_locked.wait(60)
            other.database.write(lambda tx, batch=contested: batches.update(tx, batch, items=1001))
            error = writing.exception(60)
            with pair.other.engine.connect() as tx:
                rows = sa.select(tables.batches.c.acked + tables.batches.c.failed).where(
                    tables.batches.c.id.in_([contested, own])
                )
                assert sorted(tx.scalars(rows)) == ([1, steps] if error is None else [0, 0]), error


@mutant(
    "a-lost-certification-may-have-been-committed",
    "core.storage.database:Database._judge",
    "committing and fault is errors.Fault.CONFLICT",
    "False",
)
def test_a_failed_certification_is_retried_and_costs_no_connection(pair: Pair) -> None:
    """Nothing was committed, so even work that must not be repeated starts again; and the cache in memory stays."""
    first, other = pair.services()
    batch = first.batches.open(Opening(items=10)).batch.id
    connections: list[None] = []
    sa.event.listen(first.database.engine, "connect", lambda *_: connections.append(None))
    first.database.on_doubt(lambda: connections.append(None))
    own_ids: list[int] = []

    def work(tx: sa.Connection) -> None:
        batch_row, _ = batches.lock(tx, batch)
        batches.update(tx, batch, items=batch_row.items + 1)
        own_ids.append(batch_row.items)
        if len(own_ids) == 1:
            assert ack(other, (batch, 0, 0)).applied == 1

    first.database.write(work)
    assert own_ids == [10, 10]
    assert not connections
    batch_ = other.batches.get(batch)
    assert (batch_.items, batch_.acked) == (11, 1)


@mutant(
    "a-node-answers-by-what-it-has-applied",
    "core.storage.dialects.galera:prepare",
    'f"SET SESSION wsrep_sync_wait = {SYNC_WAIT}"',
    'f"SET SESSION wsrep_sync_wait = 0"',
)
def test_an_ack_on_one_node_right_after_the_extend_on_another_is_not_refused(pair: Pair) -> None:
    """The ids are unknown on a node that hasn't applied the extend yet; there the ack waits until it has."""
    first, other = pair.services()
    batch = first.batches.open(Opening()).batch.id
    ack(other, (batch, 0, 0))  # opens a session on its node and uses it
    with ThreadPoolExecutor(1) as pool:
        with pair.nodes[1].lagging():
            extension = first.batches.extend(batch, 5)
            acked = pool.submit(ack, other, (batch, 0, extension.start))
            until(lambda: acked.done() or pair.nodes[1].works_on(pair.name) > 0, 30, lambda: "the ack was not sent")
            assert not acked.done(), acked.result()
        assert (acked.result(30).applied, acked.result().rejected) == (1, [])


def test_an_answered_write_on_one_node_can_be_read_on_another(pair: Pair) -> None:
    """The state after a seal, and its event."""
    first, other = pair.services()
    batch = first.batches.open(Opening()).batch.id
    other.batches.get(batch)
    with ThreadPoolExecutor(2) as pool:
        with pair.nodes[1].lagging():
            assert first.batches.seal(batch).newly
            state = pool.submit(lambda: other.batches.get(batch).state)
            position = pool.submit(other.feed.head)
            until(
                lambda: (state.done() and position.done()) or pair.nodes[1].works_on(pair.name) == 2,
                30,
                lambda: "the reads were not sent",
            )
        assert state.result(30) is State.COMPLETE
        assert position.result(30) == first.feed.head()


def test_exactly_one_of_two_last_acks_on_two_nodes_completes_the_batch(pair: Pair) -> None:
    """In two groups, so that no group's row is written by both calls; the batch has one completion event."""
    shapes = [(2 * GROUP, {0: GROUP - 1, 1: GROUP - 1}), (GROUP + 1, {0: GROUP - 1})]
    ids = prepare(pair.first, ROUNDS, lambda number: shapes[number % 2])
    before = head(pair)

    def judge(number: int, first: AckResult, other: AckResult) -> None:
        batch = ids[number]
        assert [newly(first, batch), newly(other, batch)].count(True) == 1
        assert (first.applied, other.applied) == (1, 1)

    race(
        pair.first,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, GROUP - 1)),
        lambda service, number: ack(service, (ids[number], 1, shapes[number % 2][1].get(1, 0))),
        check=judge,
        urls=pair.urls,
    )
    rows = recount(pair.other)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}
    assert sorted(event.id for event in events(pair, before)) == sorted(
        f"batch:{batch}:{kind}" for batch in ids for kind in ("completed", "succeeded")
    )


def test_the_same_items_acked_on_two_nodes_count_once(pair: Pair) -> None:
    """Each process has the group in memory, without the other one's change."""
    ids = prepare(pair.first, 1, lambda number: (GROUP * 4, {}))

    def judge(number: int, first: AckResult, other: AckResult) -> None:
        assert sorted([(first.applied, first.repeated), (other.applied, other.repeated)]) == [(0, 1), (1, 0)]

    def same(service: Service, number: int) -> AckResult:
        return ack(service, (ids[0], *divmod(number, GROUP)))

    race(pair.first, ROUNDS, same, same, check=judge, urls=pair.urls)
    assert recount(pair.other)[ids[0]].acked == ROUNDS


def test_opens_with_one_key_on_two_nodes_open_one_batch(pair: Pair) -> None:
    """The cluster refuses one of them; it starts again and finds the other one's batch."""

    def judge(number: int, first: Any, other: Any) -> None:
        assert first.batch.id == other.batch.id
        assert sorted([first.replayed, other.replayed]) == [False, True]

    def same(service: Service, number: int) -> batches.Opened:
        return service.batches.open(Opening(key=f"key-{number}", items=3), f"open-{number}")

    before = recount(pair.other)
    race(pair.first, ROUNDS, same, same, check=judge, urls=pair.urls)
    assert len(recount(pair.other)) == len(before) + ROUNDS


def test_nodes_share_the_ids_of_one_of_several_lastbits(galera: Cluster) -> None:
    """Each node gives some of them, so opens on two nodes never want the same one."""
    database = galera.new_database()
    numbering = Numbering(3, 16)
    with (
        Database(galera.nodes[0].url(database)) as first,
        Database(galera.nodes[1].url(database)) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        schema.migrate(first, ids=numbering)

        def open_some(node: Database) -> list[int]:
            service = Service(node, combiner=Inline)
            return [service.batches.open(Opening(items=1)).batch.id for _ in range(30)]

        of_first, of_other = pool.map(open_some, (first, other))
    galera.drop_database(database)
    assert {id % 16 for id in of_first + of_other} == {3}
    distance = 16 * len(galera.nodes)
    assert len({id % distance for id in of_first}) == len({id % distance for id in of_other}) == 1
    assert set(of_first).isdisjoint(of_other)


def test_either_the_last_ack_or_the_seal_on_another_node_completes_the_batch(pair: Pair) -> None:
    ids = prepare(pair.first, ROUNDS, lambda number: (GROUP + 1, {0: GROUP}), state=State.OPEN)

    def judge(number: int, acked: AckResult, sealed: batches.Sealed) -> None:
        assert [newly(acked, ids[number]), sealed.newly].count(True) == 1
        assert sealed.newly == sealed.batch.complete

    race(
        pair.first,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 1, 0)),
        lambda service, number: service.batches.seal(ids[number]),
        check=judge,
        urls=pair.urls,
    )
    rows = recount(pair.other)
    assert {rows[batch].state for batch in ids} == {State.COMPLETE}


def test_an_ack_on_one_node_is_applied_before_a_cancel_on_another_or_rejected(pair: Pair) -> None:
    """The ack is applied before the cancel, or rejected."""
    ids = prepare(pair.first, ROUNDS, lambda number: (10, {}), state=State.OPEN)
    applied: dict[int, int] = {}

    def judge(number: int, acked: AckResult, cancelled: batches.Batch) -> None:
        assert cancelled.state is State.CANCELLED
        assert acked.applied + len(acked.rejected) == 1
        assert cancelled.acked == acked.applied, "it was answered as applied after the cancel"
        applied[ids[number]] = acked.applied

    race(
        pair.first,
        ROUNDS,
        lambda service, number: ack(service, (ids[number], 0, 3)),
        lambda service, number: service.batches.cancel(ids[number]),
        check=judge,
        urls=pair.urls,
    )
    rows = recount(pair.other)
    assert {batch: rows[batch].acked for batch in ids} == applied


def test_events_appended_on_two_nodes_have_positions_without_gaps(pair: Pair) -> None:
    """And an event whose id is appended twice is stored once."""

    def append(service: Service, number: int, writer: str) -> list[feed.Appended]:
        return service.feed.append(
            [feed.NewEvent(f"own:{number}:{writer}", "own"), feed.NewEvent(f"both:{number}", "own")]
        )

    def judge(number: int, first: Any, other: Any) -> None:
        assert first[1].position == other[1].position
        assert [first[1].repeated, other[1].repeated].count(False) == 1

    before = head(pair)
    race(
        pair.first,
        ROUNDS,
        lambda service, number: append(service, number, "one"),
        lambda service, number: append(service, number, "other"),
        check=judge,
        urls=pair.urls,
    )
    feed_events = events(pair, before)
    assert len(feed_events) == len({event.id for event in feed_events}) == 3 * ROUNDS


def test_a_fenced_write_is_visible_to_the_partitions_next_owner_on_another_node(pair: Pair) -> None:
    """The fence only reads the partition's row. The next owner must see what was written under it, or the write was
    refused."""
    first, _ = pair.services()
    first.consumer_groups.put("g", 1)
    fences: list[positions.Fence] = []
    losses = 0

    def take(number: int) -> None:
        answer = first.consumer_groups.sync("g", leases.Caller("w", f"session-{number}"))
        fences.append(positions.Fence("g", 0, "w", answer.assigned[0].epoch))

    def write(service: Service, number: int) -> tallies.Applied:
        return service.tallies.apply("t", [tallies.Entry(f"{number}", 1, "topic", 0, 0, 1, 0)], fences[number])

    def hand_over(service: Service, number: int) -> int:
        def work(tx: sa.Connection) -> int:
            leases.leave(tx, "g", "w")
            return reads.get(tx, "t", f"{number}").value

        return service.database.write(work)

    def judge(number: int, commit: Any, position: int) -> None:
        nonlocal losses
        assert position == (0 if isinstance(commit, errors.StaleEpoch) else 1), "written after the partition had moved"
        losses += position == 0
        if number + 1 < ROUNDS:
            take(number + 1)

    take(0)
    race(pair.first, ROUNDS, write, hand_over, check=judge, urls=pair.urls)
    assert 0 < losses < ROUNDS, "the same call always came first"


@mutant("a-fence-is-locked-on-its-node-alone", "core.storage.dialects.galera:guard", "not is_node(tx)", "True")
def test_a_partition_that_moves_on_one_node_takes_along_what_was_written_on_another(pair: Pair) -> None:
    """The move has read its tally before the write, and commits last. It is refused, and reads again."""
    first, other = pair.services()
    first.consumer_groups.put("fenced", 1)
    [lease] = first.consumer_groups.sync("fenced", leases.Caller("w", "session")).assigned
    fence = positions.Fence("fenced", 0, "w", lease.epoch)
    has_read, wake = threading.Event(), threading.Event()

    def move(tx: Connection) -> int:
        leases.leave(tx, "fenced", "w")
        total = reads.get(tx, "fenced", "k").value
        has_read.set()
        wake.wait(60)
        return total

    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(first.database.write, move)
        try:
            assert has_read.wait(60)
            other.tallies.apply("fenced", [tallies.Entry("k", 1, "topic", 0, 0, 1, 0)], fence)
        finally:
            wake.set()
        assert moved.result(60) == 1


def test_workers_that_join_on_two_nodes_share_no_partition(pair: Pair) -> None:
    """Each worker gets its own partitions, and reads the same assignment."""
    first, other = pair.services()
    first.consumer_groups.put("eight", 8)

    def join(service: Service, number: int, worker: str) -> leases.Synced:
        return service.consumer_groups.sync("eight", leases.Caller(worker, f"{worker}-{number}"))

    def judge(number: int, first_sync: Any, other_sync: Any) -> None:
        assert not {lease.partition for lease in first_sync.assigned} & {
            lease.partition for lease in other_sync.assigned
        }
        for service, worker, answer in ((first, "one", first_sync), (other, "other", other_sync)):
            for lease in answer.assigned:
                service.consumer_groups.commit(
                    positions.Fence("eight", lease.partition, worker, lease.epoch), Snapshot(1, 1)
                )
            service.consumer_groups.leave("eight", worker)

    race(
        pair.first,
        ROUNDS,
        lambda service, number: join(service, number, "one"),
        lambda service, number: join(service, number, "other"),
        check=judge,
        urls=pair.urls,
    )


@mutant(
    "the-head-is-locked-on-its-node-alone",
    "core.storage.dialects.galera:guard",
    "not is_node(tx)",
    "column.name == 'trimmed'",
)
def test_a_trim_that_has_judged_keeps_the_events_of_a_process_defined_on_another_node(pair: Pair) -> None:
    """The trim has read that no process needs them, and commits last. It is refused, and judges again."""
    first, _ = pair.services()
    after = first.feed.append([feed.NewEvent(f"judged:{suffix}", "own") for suffix in range(3)])[0].position
    with Database(pair.urls[1]) as database, ThreadPoolExecutor(1) as pool:
        has_judged, wake = freeze_before(database, "UPDATE feed_head")
        trim = pool.submit(feed.trim, database, timedelta(0), needed=needed)
        try:
            assert has_judged.wait(60)
            first.processes.define("judged", partitions=1, after=after)
        finally:
            wake.set()
        trim.result(60)
    assert [event.position for event in first.feed.read(after, 1).events] == [after + 1]
    first.processes.delete("judged")


@mutant(
    "a-group-is-locked-on-its-node-alone",
    "core.storage.dialects.galera:guard",
    "not is_node(tx)",
    "column.name == 'first_epoch'",
)
def test_a_worker_that_has_judged_gets_no_partition_of_one_that_joined_on_another_node(pair: Pair) -> None:
    """It has read that all partitions are free, and commits last. It is refused, and judges again."""
    first, _ = pair.services()
    first.consumer_groups.put("judged", 8)
    with Database(pair.urls[1]) as database, ThreadPoolExecutor(1) as pool:
        has_judged, wake = freeze_before(database, "UPDATE positions")
        other = Service(database, combiner=Inline)
        late = pool.submit(other.consumer_groups.sync, "judged", leases.Caller("late", "session"))
        try:
            assert has_judged.wait(60)
            early = first.consumer_groups.sync("judged", leases.Caller("early", "session"))
        finally:
            wake.set()
        assert (len(early.assigned), late.result(60).assigned) == (8, [])


def test_no_event_is_trimmed_on_one_node_that_a_process_on_another_starts_with(pair: Pair) -> None:
    """The process is defined with the position that it starts after; either the next events are there, or the
    definition is refused."""
    first, _ = pair.services()
    after: list[int] = []

    def begin(number: int) -> None:
        after.append(first.feed.append([feed.NewEvent(f"{number}:{suffix}", "own") for suffix in range(3)])[0].position)

    def trim(service: Service, number: int) -> int:
        return feed.trim(service.database, timedelta(0), needed=needed)

    def judge(number: int, definition: Any, trimmed: int) -> None:
        try:
            first.feed.read(after[number], 1)
        except errors.PositionTrimmed:
            assert isinstance(definition, errors.PositionTrimmed), "its first events are gone"
        else:
            assert isinstance(definition, tuple)
        if isinstance(definition, tuple):
            first.processes.delete(f"p{number}")
        begin(number + 1)

    begin(0)
    race(
        pair.first,
        ROUNDS,
        lambda service, number: service.processes.define(f"p{number}", partitions=1, after=after[number]),
        trim,
        check=judge,
        urls=pair.urls,
    )


def test_a_well_configured_cluster_passes_the_checks(galera: Cluster, pair: Pair) -> None:
    """And a cluster that would answer without its majority is reported."""
    verdicts = {check.about: check.verdict for check in checks.check(pair.first)}
    assert set(verdicts.values()) == {checks.Verdict.FINE}
    assert {"cluster", "cluster_size", "cluster_reads", "cluster_majority", "cluster_format", "cluster_keys"} <= set(
        verdicts
    )
    with contextlib.closing(pair.nodes[0].connect()) as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL wsrep_dirty_reads = 1, GLOBAL innodb_flush_log_at_trx_commit = 2")
        try:
            unfit = {check.about: check.verdict for check in checks.check(pair.first) if check.do}
        finally:
            cursor.execute("SET GLOBAL wsrep_dirty_reads = 0, GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert unfit == {"cluster_reads": checks.Verdict.BROKEN, "durability": checks.Verdict.UNSAFE}


def _session(tx: sa.Connection) -> int:
    return int(tx.exec_driver_sql("SELECT CONNECTION_ID()").scalar_one())


def _give_up(tx: Connection) -> None:
    """Raise PyMySQL's error for a lock wait that timed out."""
    cause = pymysql.err.OperationalError(1205, "Lock wait timeout exceeded; try restarting transaction")
    raise DBAPIError.instance("SELECT 1", None, cause, pymysql.MySQLError, dialect=tx.dialect)


def test_a_node_without_a_majority_answers_nothing_and_loses_its_connections(galera: Cluster, pair: Pair) -> None:
    """Neither stored data nor a lock timeout is answered; when the other nodes are back, it goes on."""
    first, other = pair.services()
    batch = first.batches.open(Opening(items=3)).batch.id
    ack(first, (batch, 0, 0))
    session = first.database.read(_session)
    spare = Database(pair.urls[0])
    spare.read(_session)  # opens a connection, which stays in the pool
    for node in galera.nodes[1:]:
        node.freeze()
    try:
        # Until the first node finds the others gone, they may have answered. While it is finding out, it gives up
        # waiting for them with the error of a lock wait.
        def look() -> None:
            while True:
                with contextlib.suppress(errors.LockTimeout):
                    first.database.write(batches.get, batch, lock_waits=0)

        calls: dict[str, Callable[[], object]] = {
            "read": look,
            "ack": lambda: ack(first, (batch, 0, 1)),
            "seal": lambda: first.batches.seal(batch),
            # A statement that gave up waiting for the other nodes has the error of a lock wait; but its ROLLBACK is
            # refused.
            "rollback": lambda: spare.write(_give_up, lock_waits=0),
        }
        for name, call in calls.items():
            with pytest.raises(errors.Unavailable) as exception:
                call()
            assert not isinstance(exception.value, errors.LockTimeout), name
    finally:
        for node in galera.nodes[1:]:
            node.thaw()
        spare.dispose()
        galera.wait_until_whole()
    assert first.database.read(_session) != session
    batch_ = other.batches.get(batch)
    assert batch_.state is State.OPEN
    acked = ack(first, (batch, 0, 1))
    assert (acked.applied, acked.repeated) == ((1, 0) if batch_.acked == 1 else (0, 1))


@pytest.mark.parametrize("policy", ["one", "all"])
def test_killed_nodes_rejoin_under_load_and_nothing_is_lost(galera: Cluster, policy: Policy) -> None:
    """Two services, on one node at a time or on all at once. A node is killed and rejoins, by an incremental or a full
    state transfer; the remaining nodes lose their majority for a while."""
    galera.front.policy = policy
    name = galera.new_database()
    url = galera.url(name)
    with Database(url) as database, contextlib.ExitStack() as stack:
        schema.migrate(database)
        shared_batch = open_shared(database)
        services = [stack.enter_context(running_service(url)) for _ in range(2)]
        with (
            Load(services[0].url, shared_batch, threads=2) as load,
            Load(services[1].url, shared_batch, threads=2) as second,
        ):
            loads = (load, second)

            def go_on() -> None:
                for load in loads:
                    load.reaches(15)

            go_on()
            victim = galera.front.current if policy == "one" else galera.nodes[2]
            assert victim is not None
            victim.kill()
            go_on()
            victim.start(full_transfer=policy == "all")
            galera.wait_until_whole()
            go_on()
            if policy == "all":
                for node in galera.nodes[:2]:
                    node.freeze()
                for load in loads:
                    unavailable(load)
                for node in galera.nodes[:2]:
                    node.thaw()
                galera.wait_until_whole()
                go_on()
        for load in loads:
            check(load, database)
        feed_events = database.snapshot(feed.read, 0, 100_000).events
    assert [event.position for event in feed_events] == list(range(1, len(feed_events) + 1))
    completed = Counter(event.batch for event in feed_events if event.type == "batch.completed")
    assert {completed[batch] for load in loads for batch in load.finished} == {1}
    galera.drop_database(name)


def unavailable(load: Load) -> None:
    """Wait until some more calls get a 503."""
    goal = load.statuses[503] + 3
    load.wait_until(lambda: load.statuses[503] >= goal)
