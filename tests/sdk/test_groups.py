"""Consumer groups through the client, its workers and the command line, against a real service."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest

from lastbit import (
    AsyncClient,
    Client,
    ConsumerGroupInUse,
    ConsumerGroupNotFound,
    InvalidArgument,
    InvalidRequest,
    NotFound,
    PartitionsFixed,
    SessionReplaced,
    StaleEpoch,
)
from lastbit._protocol import Answer, Failure, Request
from lastbit.groups import Commit, CommitResult
from lastbit.streams import (
    AckWindow,
    Assignment,
    AsyncAssignment,
    AsyncConsumerGroup,
    ConsumerGroup,
    GroupReplaced,
    RecordFailed,
    Snapshot,
    WindowClosed,
    WindowFull,
)
from tests.mutants import mutant
from tests.support.exposition import eventually, value
from tests.support.servers import ROOT, run_module, running_service, sqlite_file
from tests.support.threads import no_more_threads, no_thread_left

PATIENCE = 30
"""Seconds to wait for an expected event before the test fails."""
TTL = 1.0
RELEASE = 5.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sqlite_file() as database, running_service(database) as running:
        yield running.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def group(client: Client, request: pytest.FixtureRequest) -> str:
    """The name of a group of six partitions, new for each test."""
    name: str = request.node.name
    client.groups.create(name, partitions=6, ttl=TTL, release=RELEASE)
    return name


class Worker:
    """A worker in a thread: the events it received, and how its run ended."""

    def __init__(
        self,
        url: str,
        group: str,
        name: str,
        *,
        on_assigned: Callable[[Assignment], object] = lambda assignment: None,
        on_released: Callable[[Assignment], object] = lambda assignment: None,
        **options: Any,
    ) -> None:
        self.client = Client(url)
        self.group = ConsumerGroup(self.client, group, name, **options)
        self.events: list[tuple[str, Assignment, bool]] = []
        self.on_assigned = on_assigned
        self.on_released = on_released
        self.error: BaseException | None = None
        self.ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> Worker:
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            self.group.run(self._assigned, self._released)
        except BaseException as error:  # noqa: BLE001  # checked by the test
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _assigned(self, assignment: Assignment) -> None:
        self.on_assigned(assignment)
        self._record("assigned", assignment)

    def _released(self, assignment: Assignment) -> None:
        try:
            self.on_released(assignment)
        finally:
            self._record("released", assignment)

    def _record(self, event: str, assignment: Assignment) -> None:
        with self._changed:
            self.events.append((event, assignment, assignment.lost))
            self._changed.notify_all()

    @property
    def working(self) -> dict[int, Assignment]:
        """By partition, the assignments that were not released since."""
        current = {}
        for event, assignment, _ in self.events:
            if event == "assigned":
                current[assignment.partition] = assignment
            else:
                current.pop(assignment.partition, None)
        return current

    @property
    def lost(self) -> list[Assignment]:
        return [assignment for event, assignment, was_lost in self.events if event == "released" and was_lost]

    def until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE), self.events

    def until_it_works_on(self, count: int) -> None:
        self.until(lambda: len(self.working) == count)

    def stop(self) -> None:
        self.group.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.client.close()


@contextmanager
def working(url: str, group: str, *names: str, **options: Any) -> Iterator[list[Worker]]:
    """Workers that run until the context ends."""
    with ExitStack() as stack:
        workers = [Worker(url, group, name, **options) for name in names]
        for worker in workers:
            stack.callback(worker.stop)
            worker.start()
        yield workers


@mutant(
    "a-partition-without-a-thread-is-not-released",
    "lastbit.streams.group:ConsumerGroup._in_thread",
    "    self._fail(error)\n    do()",
    "pass",
)
@pytest.mark.parametrize("started", [0, 1, 4, 8])
def test_a_worker_that_may_start_too_few_threads_releases_its_partitions(
    client: Client, group: str, started: int
) -> None:
    """And ends with an error. Each partition that was assigned is released, within its time."""
    events: list[tuple[int, str]] = []

    def note(event: str, assignment: Assignment) -> None:
        assert not assignment.lost
        events.append((assignment.partition, event))

    worker = ConsumerGroup(client, group, "one")
    with no_thread_left(), pytest.raises(RuntimeError, match="can't start new thread"), no_more_threads(after=started):
        worker.run(partial(note, "assigned"), partial(note, "released"))
    partitions = sorted({partition for partition, _ in events})
    assert sorted(events) == [(number, event) for number in partitions for event in ("assigned", "released")]
    assert partitions == (list(range(6)) if started else [])
    assert {position.owner for position in client.groups.get(group).positions} == {None}


def test_a_group_from_its_creation_to_its_end(client: Client) -> None:
    """Created, updated, read, joined, committed to, left, deleted."""
    group = client.groups.create("orders", partitions=3, ttl=30)
    assert (group.name, group.partitions, group.partition_of, group.ttl, group.release) == (
        "orders",
        3,
        "crc32",
        30,
        30,
    )
    assert client.groups.create("orders", partitions=3, release=60).release == 60
    with pytest.raises(PartitionsFixed, match="3 partitions"):
        client.groups.create("orders", partitions=4)
    answer = client.groups.sync("orders", "w1", "one")
    assert (answer.ttl, answer.release, [partition.partition for partition in answer.assigned]) == (30, (), [0, 1, 2])
    assert (answer.assigned[0].floor, answer.assigned[0].snapshot) == (None, None)
    epoch = answer.assigned[1].epoch
    snapshot = Snapshot(4, 9, (5, 7)).encode()
    for _ in range(2):
        answer_position = client.groups.commit(
            "orders", 1, worker="w1", epoch=epoch, snapshot=snapshot, token="5-0", head=20
        )
        assert (answer_position.floor, answer_position.high, answer_position.outstanding, answer_position.token) == (
            4,
            9,
            2,
            "5-0",
        )
    (assignment,) = [
        partition for partition in client.groups.sync("orders", "w1", "one").assigned if partition.partition == 1
    ]
    assert assignment.snapshot is not None
    assert AckWindow.restore(assignment.snapshot).outstanding == (5, 7)
    assert (assignment.epoch, assignment.floor, assignment.high, assignment.token) == (epoch, 4, 9, "5-0")
    details = client.groups.get("orders")
    assert [(worker.worker, worker.live, worker.partitions) for worker in details.workers] == [("w1", True, 3)]
    position = details.positions[1]
    assert (position.owner, position.floor, position.outstanding, position.lag) == ("w1", 4, 2, 16)
    assert position.since is not None
    with pytest.raises(StaleEpoch):
        client.groups.commit("orders", 1, worker="w1", epoch=epoch - 1, snapshot=snapshot)
    with pytest.raises(ConsumerGroupInUse):
        client.groups.delete("orders")
    client.groups.leave("orders", "w1", session="another")
    assert [
        (partition.workers, partition.owned) for partition in client.groups.list() if partition.name == "orders"
    ] == [(1, 3)]
    client.groups.leave("orders", "w1", session="one")
    assert [
        (partition.workers, partition.owned) for partition in client.groups.list() if partition.name == "orders"
    ] == [(0, 0)]
    client.groups.delete("orders")
    with pytest.raises(ConsumerGroupNotFound):
        client.groups.get("orders")


def test_many_commits_have_a_result_each(client: Client) -> None:
    """In order; a refused one doesn't affect the others."""
    client.groups.create("many", partitions=2, ttl=30)
    first, second = client.groups.sync("many", "w1", "one").assigned
    snapshot = Snapshot(4, 9, (5, 7)).encode()
    results = client.groups.commit_many(
        "many",
        [
            Commit(1, second.epoch, snapshot, "5-0", 20),
            Commit(0, first.epoch - 1, snapshot),
            Commit(1, second.epoch, Snapshot(5, 9, (7,)).encode()),
        ],
        worker="w1",
    )
    assert results == (CommitResult(1, None), CommitResult(0, "stale_epoch"), CommitResult(1, None))
    unowned, position = client.groups.get("many").positions
    assert (position.floor, position.outstanding, position.token, position.head) == (6, 1, "5-0", 20)
    assert unowned.floor is None
    with pytest.raises(InvalidArgument, match="whole number"):
        client.groups.commit_many("many", [Commit(-1, 1, b"")], worker="w1")
    with pytest.raises(InvalidRequest, match=r"positions\[1\]\.snapshot"):
        client.groups.commit_many("many", [Commit(0, 1, snapshot), Commit(1, 1, b"?")], worker="w1")
    with pytest.raises(ConsumerGroupNotFound):
        client.groups.commit_many("absent", [Commit(0, 1, snapshot)], worker="w1")


def test_invalid_arguments_are_refused(client: Client) -> None:
    """By the client if it can detect it, otherwise by the service."""
    for name in ("", "orders/workers/w1"):
        with pytest.raises(InvalidArgument, match="the name of a consumer group is a text without slashes"):
            client.groups.delete(name)
    for worker in ("", "a/b"):
        with pytest.raises(InvalidArgument, match="a worker's name is a text without slashes"):
            client.groups.leave("orders", worker)
    with pytest.raises(InvalidArgument, match="a tally's name is a text without slashes"):
        client.tally("stock/eu").value("chair")
    with pytest.raises(InvalidArgument, match="a process's name is a text without slashes"):
        client.processes.delete("a/b")
    with pytest.raises(InvalidArgument, match="whole number"):
        client.groups.commit("orders", -1, worker="w", epoch=1, snapshot=b"")
    with pytest.raises(InvalidRequest):
        client.groups.create("orders", partitions=0)
    with pytest.raises(InvalidRequest):
        client.groups.create("lastbit.dispatcher", partitions=1)


def test_the_async_client_does_the_same(url: str) -> None:
    """With await."""

    async def run() -> None:
        async with AsyncClient(url) as client:
            await client.groups.create("awaited", partitions=2, ttl=30)
            answer = await client.groups.sync("awaited", "w1", "one", capacity=1)
            (assignment,) = answer.assigned
            snapshot = Snapshot(4, 4).encode()
            await client.groups.commit(
                "awaited", assignment.partition, worker="w1", epoch=assignment.epoch, snapshot=snapshot
            )
            assert (await client.groups.get("awaited")).positions[assignment.partition].floor == 4
            commit = Commit(assignment.partition, assignment.epoch, Snapshot(5, 5).encode())
            assert await client.groups.commit_many("awaited", [commit], worker="w1") == (
                CommitResult(assignment.partition, None),
            )
            assert "awaited" in [summary.name async for summary in client.groups.list(page_size=1)]
            await client.groups.leave("awaited", "w1")
            await client.groups.delete("awaited")

    asyncio.run(run())


def test_a_hand_over_includes_the_window(url: str, client: Client, group: str) -> None:
    """The second worker starts with the first one's outstanding records; the release drained the window."""

    def begin(assignment: Assignment) -> None:
        for offset in range(10):
            assignment.window.track(offset)
        for offset in (0, 1, 2, 5):
            assignment.window.ack(offset)

    def drain(assignment: Assignment) -> None:
        assert not assignment.active
        assignment.window.ack(7)  # this one was under way
        # The consumer group commits the final state itself.

    with working(url, group, "one", on_assigned=begin, on_released=drain) as (first,):
        first.until_it_works_on(6)
        assignments = dict(first.working)
        with working(url, group, "two") as (second,):
            first.until_it_works_on(3)
            second.until_it_works_on(3)
            assert sorted([*first.working, *second.working]) == list(range(6))
            assert first.lost == second.lost == []
            for partition, assignment in second.working.items():
                assert assignment.epoch > assignments[partition].epoch
                assert assignment.window.outstanding == (3, 4, 6, 8, 9)
                assert assignment.floor == 2
                assert assignments[partition].window.closed
                with pytest.raises(StaleEpoch):
                    assignments[partition].commit()
        first.until_it_works_on(6)
    assert client.groups.get(group).workers == ()


def test_a_stopped_worker_leaves_once_it_is_drained(url: str, client: Client, group: str) -> None:
    """Its callbacks have returned, its positions are kept, and its partitions are free before its lease expires."""
    client.groups.create(group, partitions=6, ttl=600)

    def begin(assignment: Assignment) -> None:
        assignment.window.track(5)
        assignment.commit(token="4-0", head=9)

    def drain(assignment: Assignment) -> None:
        assignment.window.ack(5)

    with working(url, group, "one", on_assigned=begin, on_released=drain) as (first,):
        first.until_it_works_on(6)
    assert first.error is None
    assert first.working == {}
    details = client.groups.get(group)
    assert details.workers == ()
    assert [(position.owner, position.floor, position.lag) for position in details.positions] == [(None, 5, 4)] * 6
    with working(url, group, "two", window_capacity=1) as (second,):
        second.until_it_works_on(6)
        assignment = second.working[3]
        assert (assignment.token, assignment.floor, assignment.window.outstanding) == ("4-0", 5, ())
        assignment.window.track(6)
        with pytest.raises(WindowFull):
            assignment.window.track(7)


@pytest.fixture
def sleeper(url: str, group: str) -> Iterator[subprocess.Popen[str]]:
    """A worker in a separate process that can be frozen."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sdk.sleepy_worker", url, group, "sleeper"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def next_messages(process: subprocess.Popen[str], count: int, kind: str) -> list[Any]:
    """The next `count` messages of this kind."""
    assert process.stdout is not None
    messages: list[Any] = []
    for line in process.stdout:
        message = json.loads(line)
        if kind in message:
            messages.append(message)
            if len(messages) == count:
                return messages
    raise AssertionError(f"it ended after {messages}")


def test_a_worker_frozen_past_its_lease_wakes_and_is_refused(
    url: str, client: Client, group: str, sleeper: subprocess.Popen[str]
) -> None:
    """The service answers with StaleEpoch, and its windows accept no acks; then it takes part again, with new
    epochs."""
    before = {message["assigned"]: message["epoch"] for message in next_messages(sleeper, 6, "assigned")}
    with working(url, group, "other") as (other,):
        released_partitions = [message["released"] for message in next_messages(sleeper, 3, "released")]
        other.until_it_works_on(3)
        assert set(released_partitions) == set(other.working)
        sleeper.send_signal(signal.SIGSTOP)
        other.until_it_works_on(6)
        assert other.lost == []
        assert sleeper.stdin is not None
        sleeper.stdin.write("try\n")
        sleeper.stdin.flush()
        sleeper.send_signal(signal.SIGCONT)
        (attempt,) = next_messages(sleeper, 1, "tried")
        assert attempt["tried"] == {"raw": "StaleEpoch", "commit": "StaleEpoch", "ack": "WindowClosed"}
        for message in next_messages(sleeper, 3, "assigned"):
            assert message["epoch"] > before[message["assigned"]]
        floors = [position.floor for position in client.groups.get(group).positions]
        assert floors == [None] * 6
        sleeper.stdin.close()
        assert sleeper.wait(PATIENCE) == 0
        other.until_it_works_on(6)


def test_a_worker_frozen_while_its_group_is_created_again_ends(
    url: str, client: Client, group: str, sleeper: subprocess.Popen[str]
) -> None:
    """It gets no partition of the new group, and none of its writes reach it."""
    next_messages(sleeper, 6, "assigned")
    sleeper.send_signal(signal.SIGSTOP)

    def is_deleted() -> bool:
        with suppress(ConsumerGroupInUse):  # until its lease ends
            client.groups.delete(group)
            return True
        return False

    eventually(is_deleted, True)
    client.groups.create(group, partitions=3, ttl=TTL)
    assert sleeper.stdin is not None
    assert sleeper.stdout is not None
    sleeper.stdin.write("try\n")
    sleeper.stdin.flush()
    sleeper.send_signal(signal.SIGCONT)
    messages: list[dict[str, Any]] = []
    for line in sleeper.stdout:
        messages.append(json.loads(line))
        assert "assigned" not in messages[-1]
    assert messages[-1] == {"ended": "GroupReplaced"}
    assert [message["tried"] for message in messages if "tried" in message] == [
        {"raw": "StaleEpoch", "commit": "StaleEpoch", "ack": "WindowClosed"}
    ]
    assert [message["lost"] for message in messages if "released" in message] == [True] * 6
    details = client.groups.get(group)
    assert (details.workers, [each.floor for each in details.positions]) == ((), [None] * 3)


def created_again(client: Client, group: str) -> None:
    """With the same number of partitions. Its worker must not sync meanwhile."""
    client.groups.leave(group, "one")
    client.groups.delete(group)
    client.groups.create(group, partitions=6)


@mutant(
    "a-worker-works-in-another-group-of-the-name",
    "lastbit.streams._membership:Membership._identified",
    "self._incarnation not in {None, answer.incarnation}",
    "False",
)
def test_a_group_that_is_created_again_ends_its_workers(url: str, client: Client, group: str) -> None:
    """And they leave the new group at once, which others need not wait for."""
    client.groups.create(group, partitions=6, ttl=600)
    with working(url, group, "one") as (worker,):
        worker.until_it_works_on(6)
        (assignment, *_) = worker.group.assignments
        created_again(client, group)
        with pytest.raises(StaleEpoch):
            assignment.commit()
        worker.until(lambda: worker.ended)
        assert isinstance(worker.error, GroupReplaced)
        assert (worker.error.group, worker.error.partitions) == (group, 6)
        assert [event for event, _, _ in worker.events].count("assigned") == 6
        assert len(worker.lost) == 6
        assert client.groups.get(group).workers == ()


def test_a_group_that_is_created_again_ends_the_tasks_of_its_workers(url: str, client: Client, group: str) -> None:
    """As it ends those with threads."""
    client.groups.create(group, partitions=6, ttl=600)
    assigned: list[AsyncAssignment] = []

    async def run() -> None:
        async with AsyncClient(url) as async_client:
            worker = AsyncConsumerGroup(async_client, group, "one")
            joined = asyncio.Event()

            def on_assigned(assignment: AsyncAssignment) -> None:
                assigned.append(assignment)
                if len(assigned) == 6:
                    joined.set()

            async with asyncio.timeout(PATIENCE):
                task = asyncio.create_task(worker.run(on_assigned, lambda assignment: None))
                await joined.wait()
                await asyncio.to_thread(created_again, client, group)
                with pytest.raises(StaleEpoch):
                    await assigned[0].commit()
                with pytest.raises(GroupReplaced):
                    await task

    asyncio.run(run())
    assert len(assigned) == 6
    assert client.groups.get(group).workers == ()


@mutant(
    "a-worker-joins-a-group-that-is-divided-otherwise",
    "lastbit.streams._membership:Membership._identified",
    "self._partitions not in {None, answer.partitions}",
    "False",
)
def test_a_worker_does_not_join_a_group_that_is_divided_otherwise(url: str, client: Client, group: str) -> None:
    """It says by how many partitions its code divides."""

    async def run() -> None:
        async with AsyncClient(url) as async_client:
            async with asyncio.timeout(PATIENCE):
                await AsyncConsumerGroup(async_client, group, "one", partitions=5).run(print, print)

    with pytest.raises(PartitionsFixed, match="has 6 partitions, not 5"):
        asyncio.run(run())
    with working(url, group, "one", partitions=5) as (worker,):
        worker.until(lambda: worker.ended)
        assert isinstance(worker.error, PartitionsFixed)
        assert worker.events == []
    assert client.groups.get(group).workers == ()
    with working(url, group, "one", partitions=6) as (worker,):
        worker.until_it_works_on(6)


def test_without_the_service_a_worker_fences_itself() -> None:
    """It does so when its lease ends, before the service could reassign a partition, and resumes with the service."""
    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:
        client.groups.create("alone", partitions=2, ttl=TTL, release=RELEASE)
        with working(service.url, "alone", "one") as (worker,):
            worker.until_it_works_on(2)
            assignments = list(worker.working.values())
            assignments[0].window.track(0)
            service.stop(signal.SIGKILL)
            worker.until(lambda: len(worker.lost) == 2)
            assert worker.group.assignments == ()
            with pytest.raises(WindowClosed):
                assignments[0].window.ack(0)
            with pytest.raises(StaleEpoch):
                assignments[0].commit()
            service.start()
            worker.until_it_works_on(2)
            assert {assignment.epoch for assignment in worker.working.values()} >= {
                assignment.epoch for assignment in assignments
            }
            worker.working[0].window.track(0)
            worker.working[0].window.ack(0)
            worker.working[0].commit()
            assert client.groups.get("alone").positions[0].floor == 0


def test_a_second_process_under_the_same_name_takes_over(url: str, client: Client, group: str) -> None:
    """With new epochs, and at once; the first process gets an error, ends, and does not take the name back."""
    with working(url, group, "one") as (first,):
        first.until_it_works_on(6)
        before = {partition: assignment.epoch for partition, assignment in first.working.items()}
        with working(url, group, "one") as (second,):
            second.until_it_works_on(6)
            first.until(lambda: first.ended)
            assert isinstance(first.error, SessionReplaced)
            assert len(first.lost) == 6
            assert all(assignment.epoch > before[partition] for partition, assignment in second.working.items())
            assert client.groups.get(group).workers[0].partitions == 6
            assert second.lost == []


def test_a_stale_epoch_loses_only_its_partition(url: str, client: Client, group: str) -> None:
    """A refused commit closes that window, and the worker gets its current partitions from its next sync."""
    with working(url, group, "one") as (worker,):
        worker.until_it_works_on(6)
        before = dict(worker.working)
        event = {"id": group, "type": "order.shipped"}
        assert not client.append([event], fence=before[0].fence)[0].repeated
        client.groups.leave(group, "one")  # removed from the group
        with pytest.raises(StaleEpoch):
            client.append_event(id=f"{group}:late", type="order.shipped", fence=before[0].fence)
        with pytest.raises(StaleEpoch):
            before[0].commit()
        assert before[0].lost
        with pytest.raises(WindowClosed):
            before[0].window.track(0)
        worker.until(lambda: len(worker.lost) == 6)
        worker.until_it_works_on(6)
        assert all(worker.working[partition].epoch > assignment.epoch for partition, assignment in before.items())


@mutant(
    "a-stale-one-of-many-commits-is-taken-for-committed",
    "lastbit.streams._membership:Membership.committed",
    "each.assignment in stale",
    "False",
)
@pytest.mark.parametrize("count", [6, 1])
def test_of_many_commits_a_stale_one_loses_only_its_partition(url: str, client: Client, group: str, count: int) -> None:
    """The windows of all others are committed."""
    client.groups.create(group, partitions=6, ttl=600)  # the worker learns of its loss by the commit, not by a sync

    def begin(assignment: Assignment) -> None:
        assignment.window.track(5)
        assignment.window.ack(5)

    with working(url, group, "one", on_assigned=begin) as (worker,):
        worker.until_it_works_on(6)
        assignments = [worker.working[partition] for partition in range(6 - count, 6)]
        *others, stale = assignments
        session = worker.group._membership.session
        [moved] = client.groups.sync(group, "one", session, capacity=5).release
        assert moved == stale.partition == 5
        client.groups.sync(group, "one", session, capacity=5, drained=[(5, stale.epoch)])
        [taken] = client.groups.sync(group, "two", "s").assigned
        assert (taken.partition, taken.epoch) == (5, stale.epoch + 1)

        worker.group.commit(assignments, head=9)
        assert (stale.lost, stale.uncommitted) == (True, True)
        assert not any(assignment.lost or assignment.uncommitted for assignment in others)
        positions = client.groups.get(group).positions
        assert [(position.floor, position.head) for position in positions] == [
            (5, 9) if position.partition in range(6 - count, 5) else (None, None) for position in positions
        ]
        worker.until(lambda: worker.lost == [stale])


@mutant(
    "a-refused-commit-is-taken-as-stored",
    "lastbit.streams._commits:commit_many",
    "alone += [each for each, code in codes if code != STALE]",
    "pass",
)
@pytest.mark.parametrize("count", [2, 1])
def test_a_commit_that_is_refused_for_another_reason_loses_no_partition(url: str, client: Client, count: int) -> None:
    """Here for positions of a process that are beyond the end of the feed, as after a failover that lost its last
    events. Alone or among many, the commit raises."""
    group = client.processes.define(f"refused{count}", partitions=2, ttl=600).group

    def begin(assignment: Assignment) -> None:
        assignment.window.track(1_000_000)
        assignment.window.ack(1_000_000)

    with working(url, group, "one", on_assigned=begin) as (worker,):
        worker.until_it_works_on(2)
        assignments = [worker.working[partition] for partition in range(count)]
        with pytest.raises(InvalidRequest, match="the feed, which ends at"):
            worker.group.commit(assignments)
        assert not any(assignment.lost for assignment in assignments)
        assert all(assignment.uncommitted for assignment in assignments)


def test_a_drain_that_takes_too_long_loses_the_partition(url: str, client: Client, group: str) -> None:
    """Another worker gets the partition after the release time; the draining one sees that it lost it."""
    client.groups.create(group, partitions=6, release=0.5)
    gate = threading.Event()
    with working(url, group, "one", on_released=lambda assignment: gate.wait(PATIENCE)) as (first,):
        first.until_it_works_on(6)
        assignments = list(first.group.assignments)
        try:
            with working(url, group, "two") as (second,):
                second.until_it_works_on(3)
                lost_assignments = [item for item in assignments if item.partition in second.working]
                assert all(item.lost and item.window.closed for item in lost_assignments)
                assert len([item for item in assignments if item.active]) == 3
                gate.set()
                first.until(lambda: len(first.lost) == 3)
        finally:
            gate.set()


@pytest.mark.parametrize("callback", ["on_assigned", "on_released"])
def test_a_callback_that_raises_ends_the_run(url: str, client: Client, group: str, callback: str) -> None:
    """With its error, after the other partitions were released."""

    def broken(assignment: Assignment) -> None:
        if assignment.partition == 3:
            raise ValueError("no such table")

    with working(url, group, "one", **{callback: broken}) as (worker,):
        if callback == "on_released":
            worker.until_it_works_on(6)
            worker.group.stop()
        worker.until(lambda: worker.ended)
        assert isinstance(worker.error, ValueError)
        assert set(worker.working) <= {3}
        assert client.groups.get(group).workers == ()


def test_a_missing_group_ends_the_run(client: Client) -> None:
    """At once, and the group can't be run again."""
    group = ConsumerGroup(client, "nobody", "one")
    with pytest.raises(ConsumerGroupNotFound):
        group.run(print, print)
    with pytest.raises(InvalidArgument, match="can run only once"):
        group.run(print, print)


def test_a_capacity_is_respected(url: str, client: Client, group: str) -> None:
    """Partitions beyond every worker's capacity have no owner."""
    with working(url, group, "one", "two", capacity=2) as (first, second):
        first.until_it_works_on(2)
        second.until_it_works_on(2)
        assert sum(position.owner is None for position in client.groups.get(group).positions) == 2


def test_tasks_behave_like_threads(url: str, group: str) -> None:
    """Joining, handing over, committing, stopping and being cancelled, in one event loop."""

    class Task:
        def __init__(self, client: AsyncClient, name: str) -> None:
            self.group = AsyncConsumerGroup(client, group, name)
            self.working: dict[int, AsyncAssignment] = {}
            self.lost = 0
            self.changed = asyncio.Event()
            self.task = asyncio.create_task(self.group.run(self.assigned, self.released))

        async def assigned(self, assignment: AsyncAssignment) -> None:
            assignment.window.track(assignment.floor + 1)
            assignment.window.ack(assignment.floor + 1)
            await assignment.commit()
            self.working[assignment.partition] = assignment
            self.changed.set()

        def released(self, assignment: AsyncAssignment) -> None:
            del self.working[assignment.partition]
            self.lost += assignment.lost
            self.changed.set()

        async def until(self, count: int) -> None:
            async with asyncio.timeout(PATIENCE):
                while len(self.working) != count:
                    self.changed.clear()
                    await self.changed.wait()

    async def run() -> None:
        async with AsyncClient(url) as client:
            first = Task(client, "one")
            await first.until(6)
            second = Task(client, "two")
            await second.until(3)
            await first.until(3)
            assert {assignment.floor for assignment in second.working.values()} == {1}
            assert len(second.group.assignments) == 3
            second.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second.task
            assert second.working == {}
            await first.until(6)
            first.group.stop()
            await first.task
            assert (first.working, first.lost, second.lost) == ({}, 0, 0)
            assert (await client.groups.get(group)).workers == ()

    asyncio.run(run())


RECORDS = 40
"""The floor of each partition."""
Record = tuple[int, int]


class Log:
    """Six partitions of records (partition, offset), and the worker that handled each, in order."""

    def __init__(self) -> None:
        self.handled: list[tuple[str, Record]] = []
        self.closed = 0
        self._changed = threading.Condition()
        self._pause = threading.Event()

    def read(self, assignment: Assignment | AsyncAssignment) -> Iterator[tuple[int, Record] | None]:
        try:
            for offset in range(assignment.floor + 1, RECORDS):
                yield offset, (assignment.partition, offset)
            while True:  # like a source that waits a little for more
                self._pause.wait(0.01)
                yield None
        finally:
            with self._changed:
                self.closed += 1
                self._changed.notify_all()

    def handle(self, worker: str, record: Record) -> None:
        with self._changed:
            self.handled.append((worker, record))
            self._changed.notify_all()

    def until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE), (len(self.handled), self.closed)


async def records(assignment: AsyncAssignment) -> AsyncIterator[tuple[int, Record] | None]:
    """The same records, for the tasks of an event loop."""
    for offset in range(assignment.floor + 1, RECORDS):
        yield offset, (assignment.partition, offset)
    while True:
        await asyncio.sleep(0.01)
        yield None


def test_streams_continue_where_the_last_owner_stopped(url: str, client: Client, group: str) -> None:
    """Two workers and an orderly hand-over, with records in progress and others waiting in the lanes: each record once,
    those of a key in order, all of them committed."""
    log, half, pause = Log(), threading.Event(), threading.Event()

    def consume(worker: ConsumerGroup) -> None:
        def handle(record: Record) -> None:
            if worker.worker == "one" and record[1] >= RECORDS // 2:
                half.wait(PATIENCE)
                pause.wait(0.02)  # slow enough for both workers to handle records
            log.handle(worker.worker, record)

        worker.consume(log.read, handle, key=lambda record: record[1] % 3, handlers=18, every=0.05)

    with Client(url) as second_client:
        workers = [ConsumerGroup(owner, group, name) for owner, name in ((client, "one"), (second_client, "two"))]
        threads = [threading.Thread(target=consume, args=(worker,)) for worker in workers]
        try:
            threads[0].start()
            log.until(lambda: len(log.handled) == 6 * RECORDS // 2)
            threads[1].start()
            log.until(lambda: log.closed == 3)
            half.set()
            log.until(lambda: len(log.handled) == 6 * RECORDS)
        finally:
            half.set()
            for worker, thread in zip(workers, threads, strict=True):
                worker.stop()
                thread.join(PATIENCE)
    assert {name for name, _ in log.handled} == {"one", "two"}
    records = [record for _, record in log.handled]
    assert len(records) == len(set(records)) == 6 * RECORDS
    for partition in range(6):
        for key in range(3):
            offsets = [offset for place, offset in records if place == partition and offset % 3 == key]
            assert offsets == sorted(offsets)
    assert [position.floor for position in client.groups.get(group).positions] == [RECORDS - 1] * 6


MANY = "/v1/consumer-groups/{group}/positions"
SINGLE = "/v1/consumer-groups/{group}/partitions/{partition}/position"


def test_one_call_commits_the_partitions_of_all_streams(url: str, client: Client, group: str) -> None:
    """Regularly, while the streams go on."""
    log, worker = Log(), ConsumerGroup(client, group, "one")

    def consume() -> None:
        worker.consume(log.read, lambda record: log.handle("one", record), key=lambda record: record[1], every=0.2)

    with httpx.Client(base_url=url) as http, ThreadPoolExecutor(1) as pool:

        def calls(route: str) -> float:
            return value(http, "lastbit_http_request_seconds_count", method="PUT", route=route, status="200")

        before = calls(MANY), calls(SINGLE)
        outcome = pool.submit(consume)
        try:
            eventually(lambda: [position.floor for position in client.groups.get(group).positions], [RECORDS - 1] * 6)
            assert 1 <= calls(MANY) - before[0] < 6
            assert calls(SINGLE) - before[1] <= 1  # if only one partition had begun when the first interval ended
        finally:
            worker.stop()
        outcome.result(PATIENCE)


def test_a_commit_that_is_refused_for_good_ends_the_run(url: str, client: Client, group: str) -> None:
    """As by a service of an earlier release, which has no such call. The other calls reach the real service."""
    refusal = Answer(404, {}, b'{"code": "not_found", "detail": "no such path"}')
    log = Log()

    async def run() -> None:
        async with AsyncClient(url) as async_client:
            send = async_client.driver._send

            async def sent(request: Request) -> Answer | Failure:
                return refusal if request.url.endswith("/positions") else await send(request)

            async_client.driver._send = sent
            consumer = AsyncConsumerGroup(async_client, group, "one")

            async def handle(record: Record) -> None:
                log.handle("one", record)

            await consumer.consume(records, handle, key=lambda record: record[1], every=0.2)

    with pytest.raises(NotFound, match="no such path"):
        asyncio.run(run())
    send = client.driver._send
    client.driver._send = lambda request: refusal if request.url.endswith("/positions") else send(request)
    client.groups.create(f"{group}-2", partitions=6)
    consumer = ConsumerGroup(client, f"{group}-2", "one")
    with pytest.raises(NotFound, match="no such path"):
        consumer.consume(log.read, lambda record: log.handle("one", record), key=lambda record: record[1], every=0.2)
    assert client.groups.get(f"{group}-2").workers == ()


def test_a_record_that_fails_ends_the_run(url: str, client: Client, group: str) -> None:
    """With the stream's error; finished records are committed, and the failed one is left for the next run."""

    def handle(record: Record) -> None:
        if record == (4, 7):
            raise ValueError("no such order")

    with pytest.raises(RecordFailed) as failed:
        ConsumerGroup(client, group, "one").consume(Log().read, handle, key=lambda record: 0)
    assert failed.value.offset == 7
    details = client.groups.get(group)
    assert (details.positions[4].floor, details.workers) == (6, ())


def test_streams_of_tasks_continue_too(url: str, client: Client, group: str) -> None:
    """With await, until they are cancelled."""
    log = Log()

    async def run() -> None:
        async with AsyncClient(url) as async_client:
            worker = AsyncConsumerGroup(async_client, group, "one")
            all_handled = asyncio.Event()

            async def handle(record: Record) -> None:
                log.handle("one", record)
                if len(log.handled) == 6 * RECORDS:
                    all_handled.set()

            task = asyncio.create_task(worker.consume(records, handle, key=lambda record: record[1] % 3))
            async with asyncio.timeout(PATIENCE):
                await all_handled.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert [position.floor for position in client.groups.get(group).positions] == [RECORDS - 1] * 6


def test_an_idling_source_without_await_leaves_the_loop_to_others(url: str, client: Client, group: str) -> None:
    """It yields None when it has nothing; heartbeats and handlers go on meanwhile."""
    handled: list[int] = []

    def idling(assignment: Any) -> Iterator[Any]:
        yield from ((number, number) for number in range(RECORDS))
        while True:
            yield None

    async def run() -> None:
        async with AsyncClient(url) as async_client:
            worker = AsyncConsumerGroup(async_client, group, "one")

            async def handle(record: int) -> None:
                handled.append(record)
                if len(handled) == 6 * RECORDS:
                    worker.stop()

            async with asyncio.timeout(PATIENCE):
                await worker.consume(idling, handle, key=lambda record: record % 3)

    asyncio.run(run())
    assert [position.floor for position in client.groups.get(group).positions] == [RECORDS - 1] * 6


def test_the_command_line(url: str, client: Client) -> None:
    """As text and as JSON."""

    def lastbit(*arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "LASTBIT_URL": url, "COLUMNS": "120", "NO_PROXY": "*", "PYTHONPATH": str(ROOT)}
        result = run_module("lastbit", "groups", *arguments, environment=environment)
        assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
        return result.stdout

    assert "5 partitions" in lastbit("create", "cli", "--partitions", "5", "--ttl", "30", "--release", "7")
    assert json.loads(lastbit("create", "cli", "--partitions", "5", "--json"))["release"] == 7
    lastbit("create", "cli", "--partitions", "6", code=1)
    assert "nobody" in lastbit("show", "cli")
    answer = client.groups.sync("cli", "w1", "one", capacity=3)
    snapshot = Snapshot(4, 9, (5, 7)).encode()
    client.groups.commit("cli", 1, worker="w1", epoch=answer.assigned[1].epoch, snapshot=snapshot, head=20)
    table = {row[0]: row[1:] for row in map(str.split, lastbit("show", "cli").splitlines()) if row}
    assert table["w1"][:3] == ["3", "0-2", "16"]
    assert table["nobody"] == ["2", "3-4"]
    table = {row[0]: row[1:] for row in map(str.split, lastbit("show", "cli", "--partitions").splitlines()) if row}
    assert table["1"][:2] == ["w1", str(answer.assigned[1].epoch)]
    assert table["1"][-3:] == ["4", "2", "16"]
    assert table["3"] == ["nobody", "0"]
    assert json.loads(lastbit("show", "cli", "--json"))["positions"][1]["lag"] == 16
    assert "cli  1 worker, 5 partitions, 2 without an owner" in lastbit("list")
    assert "cli" in [summary["name"] for summary in json.loads(lastbit("list", "--json"))["groups"]]
    lastbit("delete", "cli", code=1)
    assert "owns no partitions" in lastbit("kick", "cli", "w1")
    assert json.loads(lastbit("kick", "cli", "w1", "--json")) == {"kicked": "w1"}
    assert json.loads(lastbit("delete", "cli", "--json")) == {"deleted": "cli"}
    lastbit("show", "cli", code=1)
