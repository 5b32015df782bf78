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
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lastbit import (
    AsyncClient,
    Client,
    ConsumerGroupInUse,
    ConsumerGroupNotFound,
    InvalidArgument,
    InvalidRequest,
    PartitionsFixed,
    SessionReplaced,
    StaleEpoch,
)
from lastbit.streams import (
    AckWindow,
    Assignment,
    AsyncAssignment,
    AsyncConsumerGroup,
    ConsumerGroup,
    RecordFailed,
    Snapshot,
    WindowClosed,
    WindowFull,
)
from tests.support.servers import ROOT, run_module, running_service, sqlite_file

PATIENCE = 30
"""Seconds until what should happen is missed."""
TTL = 1.0
RELEASE = 5.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sqlite_file() as database, running_service(database) as running:
        yield running.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as opened:
        yield opened


@pytest.fixture
def group(client: Client, request: pytest.FixtureRequest) -> str:
    """The name of a group of six partitions, new for each test."""
    name: str = request.node.name
    client.groups.create(name, partitions=6, ttl=TTL, release=RELEASE)
    return name


class Worker:
    """A worker in a thread: what it was told, and how its run ended."""

    def __init__(self, url: str, group: str, name: str, **options: Any) -> None:
        self.client = Client(url)
        self.group = ConsumerGroup(self.client, group, name, **options)
        self.told: list[tuple[str, Assignment, bool]] = []
        self.on_assigned: Callable[[Assignment], object] = lambda assignment: None
        self.on_released: Callable[[Assignment], object] = lambda assignment: None
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
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _assigned(self, assignment: Assignment) -> None:
        self.on_assigned(assignment)
        self._tell("assigned", assignment)

    def _released(self, assignment: Assignment) -> None:
        try:
            self.on_released(assignment)
        finally:
            self._tell("released", assignment)

    def _tell(self, what: str, assignment: Assignment) -> None:
        with self._changed:
            self.told.append((what, assignment, assignment.lost))
            self._changed.notify_all()

    @property
    def working(self) -> dict[int, Assignment]:
        """By partition, what was assigned and not released since."""
        found = {}
        for what, assignment, _ in self.told:
            if what == "assigned":
                found[assignment.partition] = assignment
            else:
                found.pop(assignment.partition, None)
        return found

    @property
    def lost(self) -> list[Assignment]:
        return [assignment for what, assignment, lost in self.told if what == "released" and lost]

    def until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE), self.told

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


def test_a_group_from_its_creation_to_its_end(client: Client) -> None:
    """Made, made again, looked at, joined, committed to, left, deleted."""
    made = client.groups.create("orders", partitions=3, ttl=30)
    assert (made.name, made.partitions, made.partition_of, made.ttl, made.release) == ("orders", 3, "crc32", 30, 30)
    assert client.groups.create("orders", partitions=3, release=60).release == 60
    with pytest.raises(PartitionsFixed, match="3 partitions"):
        client.groups.create("orders", partitions=4)
    synced = client.groups.sync("orders", "w1", "one")
    assert (synced.ttl, synced.release, [each.partition for each in synced.assigned]) == (30, (), [0, 1, 2])
    assert (synced.assigned[0].floor, synced.assigned[0].snapshot) == (None, None)
    epoch = synced.assigned[1].epoch
    snapshot = Snapshot(4, 9, (5, 7)).encode()
    for _ in range(2):
        committed = client.groups.commit("orders", 1, worker="w1", epoch=epoch, snapshot=snapshot, token="5-0", head=20)
        assert (committed.floor, committed.high, committed.outstanding, committed.token) == (4, 9, 2, "5-0")
    (again,) = [each for each in client.groups.sync("orders", "w1", "one").assigned if each.partition == 1]
    assert again.snapshot is not None
    assert AckWindow.restore(again.snapshot).outstanding == (5, 7)
    assert (again.epoch, again.floor, again.high, again.token) == (epoch, 4, 9, "5-0")
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
    assert [(each.workers, each.owned) for each in client.groups.list() if each.name == "orders"] == [(1, 3)]
    client.groups.leave("orders", "w1", session="one")
    assert [(each.workers, each.owned) for each in client.groups.list() if each.name == "orders"] == [(0, 0)]
    client.groups.delete("orders")
    with pytest.raises(ConsumerGroupNotFound):
        client.groups.get("orders")


def test_what_can_not_be_meant_is_refused(client: Client) -> None:
    """By the client where it can tell, else by the service."""
    with pytest.raises(InvalidArgument, match="has a name"):
        client.groups.get("")
    with pytest.raises(InvalidArgument, match="whole number"):
        client.groups.commit("orders", -1, worker="w", epoch=1, snapshot=b"")
    with pytest.raises(InvalidRequest):
        client.groups.create("orders", partitions=0)
    with pytest.raises(InvalidRequest):
        client.groups.create("lastbit.dispatcher", partitions=1)


def test_the_async_client_does_the_same(url: str) -> None:
    """Awaited."""

    async def run() -> None:
        async with AsyncClient(url) as client:
            await client.groups.create("awaited", partitions=2, ttl=30)
            synced = await client.groups.sync("awaited", "w1", "one", capacity=1)
            (held,) = synced.assigned
            snapshot = Snapshot(4, 4).encode()
            await client.groups.commit("awaited", held.partition, worker="w1", epoch=held.epoch, snapshot=snapshot)
            assert (await client.groups.get("awaited")).positions[held.partition].floor == 4
            assert "awaited" in [each.name async for each in client.groups.list(page_size=1)]
            await client.groups.leave("awaited", "w1")
            await client.groups.delete("awaited")

    asyncio.run(run())


def test_a_hand_over_brings_the_window_along(url: str, client: Client, group: str) -> None:
    """What was outstanding where the first left off is outstanding where the second begins; the release drained it."""
    with working(url, group, "one") as (one,):

        def begin(assignment: Assignment) -> None:
            for offset in range(10):
                assignment.window.track(offset)
            for offset in (0, 1, 2, 5):
                assignment.window.ack(offset)

        def drain(assignment: Assignment) -> None:
            assert not assignment.active
            assignment.window.ack(7)  # one that was under way
            # And the commit of what it knows now is the group's to do.

        one.on_assigned, one.on_released = begin, drain
        one.until_it_works_on(6)
        kept = dict(one.working)
        with working(url, group, "two") as (two,):
            one.until_it_works_on(3)
            two.until_it_works_on(3)
            assert sorted([*one.working, *two.working]) == list(range(6))
            assert one.lost == two.lost == []
            for partition, assignment in two.working.items():
                assert assignment.epoch > kept[partition].epoch
                assert assignment.window.outstanding == (3, 4, 6, 8, 9)
                assert assignment.floor == 2
                assert kept[partition].window.closed
                with pytest.raises(StaleEpoch):
                    kept[partition].commit()
        one.until_it_works_on(6)
    assert client.groups.get(group).workers == ()


def test_a_stopped_worker_leaves_when_all_is_drained(url: str, client: Client, group: str) -> None:
    """Its callbacks have returned, its positions are kept, and what it held is free, not only after a lease."""
    client.groups.create(group, partitions=6, ttl=600)
    with working(url, group, "one") as (one,):

        def begin(assignment: Assignment) -> None:
            assignment.window.track(5)
            assignment.commit(token="4-0", head=9)

        one.on_assigned, one.on_released = begin, lambda assignment: assignment.window.ack(5)
        one.until_it_works_on(6)
    assert one.error is None
    assert one.working == {}
    found = client.groups.get(group)
    assert found.workers == ()
    assert [(each.owner, each.floor, each.lag) for each in found.positions] == [(None, 5, 4)] * 6
    with working(url, group, "two", window_capacity=1) as (two,):
        two.until_it_works_on(6)
        assignment = two.working[3]
        assert (assignment.token, assignment.floor, assignment.window.outstanding) == ("4-0", 5, ())
        assignment.window.track(6)
        with pytest.raises(WindowFull):
            assignment.window.track(7)


@pytest.fixture
def sleeper(url: str, group: str) -> Iterator[subprocess.Popen[str]]:
    """A worker that can be frozen, in a process of its own."""
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


def heard(process: subprocess.Popen[str], count: int, what: str) -> list[Any]:
    """The next so many lines of this kind."""
    assert process.stdout is not None
    found: list[Any] = []
    for line in process.stdout:
        said = json.loads(line)
        if what in said:
            found.append(said)
            if len(found) == count:
                return found
    raise AssertionError(f"it ended after {found}")


def test_a_worker_frozen_past_its_lease_wakes_and_is_refused(
    url: str, client: Client, group: str, sleeper: subprocess.Popen[str]
) -> None:
    """StaleEpoch from the service, and its windows take no acks; then it takes part again, at new epochs."""
    before = {said["assigned"]: said["epoch"] for said in heard(sleeper, 6, "assigned")}
    with working(url, group, "other") as (other,):
        told = [said["released"] for said in heard(sleeper, 3, "released")]
        other.until_it_works_on(3)
        assert set(told) == set(other.working)
        sleeper.send_signal(signal.SIGSTOP)
        other.until_it_works_on(6)
        assert other.lost == []
        assert sleeper.stdin is not None
        sleeper.stdin.write("try\n")
        sleeper.stdin.flush()
        sleeper.send_signal(signal.SIGCONT)
        (tried,) = heard(sleeper, 1, "tried")
        assert tried["tried"] == {"raw": "StaleEpoch", "commit": "StaleEpoch", "ack": "WindowClosed"}
        for said in heard(sleeper, 3, "assigned"):
            assert said["epoch"] > before[said["assigned"]]
        floors = [position.floor for position in client.groups.get(group).positions]
        assert floors == [None] * 6
        sleeper.stdin.close()
        assert sleeper.wait(PATIENCE) == 0
        other.until_it_works_on(6)


def test_without_the_service_a_worker_fences_itself() -> None:
    """When its lease is over, before the service could give anything away; when it is back, the work goes on."""
    with sqlite_file() as database, running_service(database) as service, Client(service.url) as client:
        client.groups.create("alone", partitions=2, ttl=TTL, release=RELEASE)
        with working(service.url, "alone", "one") as (one,):
            one.until_it_works_on(2)
            held = list(one.working.values())
            held[0].window.track(0)
            service.stop(signal.SIGKILL)
            one.until(lambda: len(one.lost) == 2)
            assert one.group.assignments == ()
            with pytest.raises(WindowClosed):
                held[0].window.ack(0)
            with pytest.raises(StaleEpoch):
                held[0].commit()
            service.start()
            one.until_it_works_on(2)
            assert {each.epoch for each in one.working.values()} >= {each.epoch for each in held}
            one.working[0].window.track(0)
            one.working[0].window.ack(0)
            one.working[0].commit()
            assert client.groups.get("alone").positions[0].floor == 0


def test_a_second_process_under_the_same_name_takes_over(url: str, client: Client, group: str) -> None:
    """At new epochs, and at once; the first one is told, ends, and does not take the name away from the second."""
    with working(url, group, "one") as (first,):
        first.until_it_works_on(6)
        before = {partition: each.epoch for partition, each in first.working.items()}
        with working(url, group, "one") as (second,):
            second.until_it_works_on(6)
            first.until(lambda: first.ended)
            assert isinstance(first.error, SessionReplaced)
            assert len(first.lost) == 6
            assert all(each.epoch > before[partition] for partition, each in second.working.items())
            assert client.groups.get(group).workers[0].partitions == 6
            assert second.lost == []


def test_an_epoch_that_is_stale_loses_the_partition_alone(url: str, client: Client, group: str) -> None:
    """A commit that is refused closes that window, and the worker learns what it holds from its next sync."""
    with working(url, group, "one") as (one,):
        one.until_it_works_on(6)
        before = dict(one.working)
        event = {"id": group, "type": "order.shipped"}
        assert not client.append([event], fence=before[0].fence)[0].repeated
        client.groups.leave(group, "one")  # kicked
        with pytest.raises(StaleEpoch):
            client.append_event(id=f"{group}:late", type="order.shipped", fence=before[0].fence)
        with pytest.raises(StaleEpoch):
            before[0].commit()
        assert before[0].lost
        with pytest.raises(WindowClosed):
            before[0].window.track(0)
        one.until(lambda: len(one.lost) == 6)
        one.until_it_works_on(6)
        assert all(one.working[partition].epoch > each.epoch for partition, each in before.items())


def test_a_drain_that_takes_too_long_loses_the_partition(url: str, client: Client, group: str) -> None:
    """The other has it after the release time, and the one that still drains sees that it lost."""
    client.groups.create(group, partitions=6, release=0.5)
    with working(url, group, "one") as (one,):
        gate = threading.Event()
        one.on_released = lambda assignment: gate.wait(PATIENCE)
        one.until_it_works_on(6)
        held = list(one.group.assignments)
        try:
            with working(url, group, "two") as (two,):
                two.until_it_works_on(3)
                taken = [each for each in held if each.partition in two.working]
                assert all(each.lost and each.window.closed for each in taken)
                assert len([each for each in held if each.active]) == 3
                gate.set()
                one.until(lambda: len(one.lost) == 3)
        finally:
            gate.set()


@pytest.mark.parametrize("which", ["on_assigned", "on_released"])
def test_a_callback_that_raises_ends_the_run(url: str, client: Client, group: str, which: str) -> None:
    """With its error, after the others were given back."""

    def broken(assignment: Assignment) -> None:
        if assignment.partition == 3:
            raise ValueError("no such table")

    with working(url, group, "one") as (one,):
        setattr(one, which, broken)
        if which == "on_released":
            one.until_it_works_on(6)
            one.group.stop()
        one.until(lambda: one.ended)
        assert isinstance(one.error, ValueError)
        assert set(one.working) <= {3}
        assert client.groups.get(group).workers == ()


def test_a_group_that_is_not_there_ends_the_run(client: Client) -> None:
    """At once, and it can't be run again."""
    group = ConsumerGroup(client, "nobody", "one")
    with pytest.raises(ConsumerGroupNotFound):
        group.run(print, print)
    with pytest.raises(InvalidArgument, match="runs once"):
        group.run(print, print)


def test_a_capacity_is_kept(url: str, client: Client, group: str) -> None:
    """What nobody has room for has no owner."""
    with working(url, group, "one", "two", capacity=2) as (one, two):
        one.until_it_works_on(2)
        two.until_it_works_on(2)
        assert sum(position.owner is None for position in client.groups.get(group).positions) == 2


def test_tasks_do_what_threads_do(url: str, group: str) -> None:
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
            one = Task(client, "one")
            await one.until(6)
            two = Task(client, "two")
            await two.until(3)
            await one.until(3)
            assert {each.floor for each in two.working.values()} == {1}
            assert len(two.group.assignments) == 3
            two.task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await two.task
            assert two.working == {}
            await one.until(6)
            one.group.stop()
            await one.task
            assert (one.working, one.lost, two.lost) == ({}, 0, 0)
            assert (await client.groups.get(group)).workers == ()

    asyncio.run(run())


RECORDS = 40
"""Of each partition."""
Record = tuple[int, int]


class Log:
    """Six partitions of records (partition, offset), and who handled which, in order."""

    def __init__(self) -> None:
        self.handled: list[tuple[str, Record]] = []
        self.closed = 0
        self._changed = threading.Condition()
        self._pause = threading.Event()

    def read(self, assignment: Assignment | AsyncAssignment) -> Iterator[tuple[int, Record] | None]:
        try:
            for offset in range(assignment.floor + 1, RECORDS):
                yield offset, (assignment.partition, offset)
            while True:  # as from a source that waits a little for more
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


def test_streams_go_on_where_the_last_owner_left_them(url: str, client: Client, group: str) -> None:
    """Two workers and an orderly hand-over, with records in hand and others that wait in the lanes: each record once,
    those of a key in order, all of it committed."""
    log, half, pause = Log(), threading.Event(), threading.Event()

    def consume(worker: ConsumerGroup) -> None:
        def handle(record: Record) -> None:
            if worker.worker == "one" and record[1] >= RECORDS // 2:
                half.wait(PATIENCE)
                pause.wait(0.02)  # so slowly that the other has its part of them
            log.handle(worker.worker, record)

        worker.consume(log.read, handle, key=lambda record: record[1] % 3, lanes=3, every=0.05)

    with Client(url) as another:
        workers = [ConsumerGroup(each, group, name) for each, name in ((client, "one"), (another, "two"))]
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
            offsets = [offset for where, offset in records if where == partition and offset % 3 == key]
            assert offsets == sorted(offsets)
    assert [position.floor for position in client.groups.get(group).positions] == [RECORDS - 1] * 6


def test_a_record_that_fails_ends_the_run(url: str, client: Client, group: str) -> None:
    """With the stream's error; what was done is committed, and the record is there for the next."""

    def handle(record: Record) -> None:
        if record == (4, 7):
            raise ValueError("no such order")

    with pytest.raises(RecordFailed) as failed:
        ConsumerGroup(client, group, "one").consume(Log().read, handle, key=lambda record: 0)
    assert failed.value.offset == 7
    found = client.groups.get(group)
    assert (found.positions[4].floor, found.workers) == (6, ())


def test_streams_of_tasks_go_on_too(url: str, client: Client, group: str) -> None:
    """Awaited, until they are cancelled."""
    log = Log()

    async def run() -> None:
        async with AsyncClient(url) as another:
            worker = AsyncConsumerGroup(another, group, "one")
            enough = asyncio.Event()

            async def source(assignment: AsyncAssignment) -> AsyncIterator[tuple[int, Record] | None]:
                for offset in range(assignment.floor + 1, RECORDS):
                    yield offset, (assignment.partition, offset)
                while True:
                    await asyncio.sleep(0.01)
                    yield None

            async def handle(record: Record) -> None:
                log.handle("one", record)
                if len(log.handled) == 6 * RECORDS:
                    enough.set()

            task = asyncio.create_task(worker.consume(source, handle, key=lambda record: record[1] % 3))
            async with asyncio.timeout(PATIENCE):
                await enough.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert [position.floor for position in client.groups.get(group).positions] == [RECORDS - 1] * 6


def test_the_command_line(url: str, client: Client) -> None:
    """In words and as JSON."""

    def lastbit(*arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "LASTBIT_URL": url, "COLUMNS": "120", "NO_PROXY": "*", "PYTHONPATH": str(ROOT)}
        done = run_module("lastbit", "groups", *arguments, environment=environment)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        return done.stdout

    assert "5 partitions" in lastbit("create", "cli", "--partitions", "5", "--ttl", "30", "--release", "7")
    assert json.loads(lastbit("create", "cli", "--partitions", "5", "--json"))["release"] == 7
    lastbit("create", "cli", "--partitions", "6", code=1)
    assert "nobody" in lastbit("show", "cli")
    synced = client.groups.sync("cli", "w1", "one", capacity=3)
    snapshot = Snapshot(4, 9, (5, 7)).encode()
    client.groups.commit("cli", 1, worker="w1", epoch=synced.assigned[1].epoch, snapshot=snapshot, head=20)
    shown = {row[0]: row[1:] for row in map(str.split, lastbit("show", "cli").splitlines()) if row}
    assert shown["w1"][:3] == ["3", "0-2", "16"]
    assert shown["nobody"] == ["2", "3-4"]
    shown = {row[0]: row[1:] for row in map(str.split, lastbit("show", "cli", "--partitions").splitlines()) if row}
    assert shown["1"][:2] == ["w1", str(synced.assigned[1].epoch)]
    assert shown["1"][-3:] == ["4", "2", "16"]
    assert shown["3"] == ["nobody", "0"]
    assert json.loads(lastbit("show", "cli", "--json"))["positions"][1]["lag"] == 16
    assert "cli  1 worker, 5 partitions, 2 without an owner" in lastbit("list")
    assert "cli" in [each["name"] for each in json.loads(lastbit("list", "--json"))["groups"]]
    lastbit("delete", "cli", code=1)
    assert "holds nothing" in lastbit("kick", "cli", "w1")
    assert json.loads(lastbit("kick", "cli", "w1", "--json")) == {"kicked": "w1"}
    assert json.loads(lastbit("delete", "cli", "--json")) == {"deleted": "cli"}
    lastbit("show", "cli", code=1)
