"""`consume`: the streams of a worker's partitions share handlers and readers. Against a real service."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lastbit import Client, InvalidArgument
from lastbit.streams import Backoff
from lastbit.streams._turns import Turns
from tests.mutants import mutant
from tests.streams.group_workers import PATIENCE, Records, Worker, on_both_workers
from tests.support.exposition import eventually
from tests.support.servers import running_service, sqlite_file

HANDLERS = 8


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with sqlite_file() as database, running_service(database) as running:
        yield running.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def create(client: Client, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Create a group of this test, and return its name."""

    def create(partitions: int, ttl: float = 3, release: float = 600) -> str:
        client.groups.create(request.node.name, partitions=partitions, ttl=ttl, release=release)
        name: str = request.node.name
        return name

    return create


def offset_of(record: tuple[int, int]) -> int:
    return record[1]


def floors(client: Client, group: str) -> list[int | None]:
    return [position.floor for position in client.groups.get(group).positions]


def owners(client: Client, group: str) -> list[tuple[str | None, int]]:
    """The owner and the epoch of each partition."""
    return [(position.owner, position.epoch) for position in client.groups.get(group).positions]


class Crowd:
    """Handlers that wait until so many of them run."""

    def __init__(self, count: int, records: Records) -> None:
        self.running = 0
        self.most = 0
        self.most_threads = 0
        self._records = records
        self._full = threading.Barrier(count)
        self._lock = threading.Lock()

    def handle(self, record: tuple[int, int]) -> None:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.most_threads = max(self.most_threads, threading.active_count())
        self._full.wait(PATIENCE)
        with self._lock:
            self.running -= 1
        self._records.done(record)


@mutant(
    "each-partition-has-handlers-of-its-own",
    "lastbit.streams._consuming:Partition.__init__",
    "consumer.turns.put",
    "lambda stream, key: threading.Thread(target=stream.work, args=(key,)).start()",
)
@on_both_workers
def test_64_partitions_share_the_handlers(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """Eight run at once, no more; and in 20 threads at most, from the beginning to the end."""
    group, records = create(64), Records(64, HANDLERS)
    crowd, before = Crowd(HANDLERS, records), threading.active_count()

    def read(assignment: Any) -> Iterator[Any]:
        crowd.most_threads = max(crowd.most_threads, threading.active_count())
        try:
            yield from records.read(assignment)
        finally:
            crowd.most_threads = max(crowd.most_threads, threading.active_count())

    with kind(url, group, "one", read, crowd.handle, key=offset_of, handlers=HANDLERS) as worker:
        records.until_all_are_handled()
    assert worker.error is None
    assert crowd.most == HANDLERS
    assert sorted(records.handled) == [(partition, offset) for partition in range(64) for offset in range(HANDLERS)]
    if kind is Worker:
        assert crowd.most_threads - before - 1 <= 20
    assert floors(client, group) == [HANDLERS - 1] * 64


class Ticking(Records):
    """Partitions that always have a record, and when each of them was last handled."""

    def __init__(self, partitions: int) -> None:
        super().__init__(partitions, 0)
        self.moments: dict[int, list[float]] = defaultdict(list)
        self.poisoned = threading.Event()
        self.tries: list[float] = []
        self.dead_letters: list[tuple[int, int]] = []
        self._pause = threading.Event()
        self._poison: tuple[int, int] | None = None

    def read(self, assignment: Any) -> Iterator[Any]:
        offset = assignment.floor
        while True:
            offset += 1
            yield offset, (assignment.partition, offset)

    def handle(self, record: tuple[int, int]) -> None:
        with self._changed:
            if record[0] == 5 and self.poisoned.is_set() and self._poison is None:
                self._poison = record
        if record == self._poison:
            self.tries.append(time.monotonic())
            raise ValueError("no such order")
        self._pause.wait(0.005)
        self.moments[record[0]].append(time.monotonic())

    def bury(self, record: tuple[int, int], error: Exception) -> None:
        self.dead_letters.append(record)


@on_both_workers
def test_beside_a_poison_record_the_other_partitions_are_never_idle(
    url: str, create: Callable[..., str], kind: type[Worker]
) -> None:
    """Three workers, twelve partitions: the record is a dead letter after its tries, and no worker ends. Between two
    tries each other partition goes on, however slow the machine is."""
    group, topic = create(12), Ticking(12)
    options: dict[str, Any] = {
        "key": lambda record: record[1] % 10,
        "retry": Backoff(first=0.2, factor=2, tries=4),
        "dead_letter": topic.bury,
        "handlers": 4,
    }
    with ExitStack() as stack:
        workers = [stack.enter_context(kind(url, group, name, topic.read, topic.handle, **options)) for name in "abc"]
        eventually(lambda: [worker.partitions() for worker in workers], [4, 4, 4])
        eventually(lambda: len(topic.moments), 12)
        topic.poisoned.set()
        eventually(lambda: len(topic.dead_letters), 1)
        assert all(worker.is_running for worker in workers)
    assert [worker.error for worker in workers] == [None] * 3
    assert len(topic.tries) == 4
    for partition in sorted(set(range(12)) - {5}):
        for earlier, later in itertools.pairwise(topic.tries[1:]):
            assert any(earlier < moment < later for moment in topic.moments[partition]), partition


@mutant(
    "a-source-that-blocks-keeps-its-thread-from-the-others",
    "lastbit.streams._readers:Readers._needed",
    "return READERS + sum(since < overdue for since in self._reading.values())",
    "return READERS",
)
def test_sources_that_block_do_not_stop_the_others(url: str, client: Client, create: Callable[..., str]) -> None:
    """However many they are."""
    group, records, gate = create(12), Records(12, 50), threading.Event()

    def read(assignment: Any) -> Iterator[Any]:
        if assignment.partition < 8:
            gate.wait(PATIENCE)
        yield from records.read(assignment)

    with Worker(url, group, "one", read, records.done, key=offset_of):
        try:
            records.until(lambda: len(records.handled) == 4 * 50)
            eventually(lambda: floors(client, group), [None] * 8 + [49] * 4)
        finally:
            gate.set()
        records.until_all_are_handled()


@mutant(
    "a-busy-stream-delays-the-others",
    "lastbit.streams._turns:Turns.work",
    "self._ready[stream] = keys",
    "self._ready[stream] = keys; self._ready.move_to_end(stream, last=False)",
)
def test_streams_with_ready_keys_take_turns() -> None:
    taken: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def work(self, key: Any) -> None:
            taken.append(f"{self.name}{key}")

    tasks: list[None] = []
    turns = Turns(lambda turns, key: tasks.append(key))
    busy, calm = Stream("busy"), Stream("calm")
    for number in range(4):
        turns.put(busy, number)
    turns.put(calm, 0)
    turns.work(None)
    turns.put(busy, 4)
    turns.put(calm, 1)
    for _ in range(6):
        turns.work(None)
    assert len(tasks) == len(taken) == 7
    assert taken == ["busy0", "calm0", "busy1", "calm1", "busy2", "busy3", "busy4"]


@on_both_workers
def test_batches_retries_and_dead_letters_work_in_groups(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """And records without order. A batch has records of one partition."""
    group, records = create(3), Records(3, 30)
    tries: dict[tuple[int, int], int] = defaultdict(int)
    dead: list[tuple[int, int]] = []

    def write(rows: list[tuple[int, int]]) -> list[tuple[Any, Exception]]:
        assert len({partition for partition, _ in rows}) == 1
        assert len(rows) <= 10
        failures: list[tuple[Any, Exception]] = []
        for row in rows:
            tries[row] += 1
            if row[1] == 7 or (row[1] == 8 and tries[row] == 1):
                failures.append((row, ValueError("no such order")))
            else:
                records.done(row)
        return failures

    options: dict[str, Any] = {"ordered": False, "batch": 10, "linger": 0.05}
    options |= {"retry": Backoff(first=0.01, tries=3), "dead_letter": lambda record, error: dead.append(record)}
    with kind(url, group, "one", records.read, write, **options) as worker:
        records.until(lambda: len(records.handled) == 3 * 29)
        eventually(lambda: floors(client, group), [29] * 3)
    assert worker.error is None
    assert {count for row, count in tries.items() if row[1] not in (7, 8)} == {1}
    assert [tries[partition, 8] for partition in range(3)] == [2] * 3
    assert [tries[partition, 7] for partition in range(3)] == [3] * 3
    assert sorted(dead) == [(0, 7), (1, 7), (2, 7)]


@on_both_workers
def test_a_record_that_waits_for_its_retry_is_left_to_the_next_owner(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """It stays outstanding, and holds up nothing: the release takes no longer than what runs."""
    group, records = create(1), Records(1, 5)
    failed = threading.Event()

    def refuse(record: tuple[int, int]) -> None:
        if record[1] == 2:
            failed.set()
            raise ValueError("no such order")
        records.done(record)

    with kind(url, group, "one", records.read, refuse, key=offset_of, retry=Backoff(first=600)):
        assert failed.wait(PATIENCE)
        records.until(lambda: len(records.handled) == 4)
    (position,) = client.groups.get(group).positions
    assert (position.floor, position.high, position.outstanding) == (1, 4, 1)
    with kind(url, group, "two", records.read, records.done, key=offset_of):
        records.until_all_are_handled()
    assert records.handled[4:] == [(0, 2)]


@mutant(
    "a-release-waits-for-no-handler",
    "lastbit.streams._consuming:Partition.is_drained",
    "not self._working",
    "True",
)
@mutant(
    "a-partition-of-tasks-that-rests-is-not-noticed",
    "lastbit.streams.group_async:AsyncPartition._rested",
    "self._drained.set()",
    "pass",
)
@on_both_workers
def test_a_release_waits_for_the_handlers_that_run_and_for_nothing_else(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """Its time of ten minutes isn't used up."""
    group, records = create(1), Records(1, 50)
    running, goes_on = threading.Semaphore(0), threading.Event()

    def handle(record: tuple[int, int]) -> None:
        running.release()
        assert goes_on.wait(PATIENCE)
        records.done(record)

    with kind(url, group, "one", records.read, handle, key=offset_of, handlers=3) as worker:
        for _ in range(3):
            assert running.acquire(timeout=PATIENCE)
        stopper = threading.Thread(target=worker.stop)
        stopper.start()
        eventually(lambda: {each.capacity for each in client.groups.get(group).workers}, {0})
        assert {position.owner for position in client.groups.get(group).positions} == {"one"}
        assert records.handled == []
        goes_on.set()
        stopper.join(PATIENCE)
    assert worker.error is None
    assert len(records.handled) == 3
    positions = client.groups.get(group).positions
    assert {position.owner for position in positions} == {None}
    assert sum(position.floor + 1 for position in positions if position.floor is not None) == 3


@on_both_workers
def test_a_handler_that_is_stuck_loses_its_partition_and_the_worker_goes_on(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """After the time to release it. Its window is closed, and another worker handles the record."""
    group, records = create(2, ttl=1, release=1), Records(2, 20)
    stuck, gate = threading.Event(), threading.Event()

    def handle(record: tuple[int, int]) -> None:
        if record == (1, 3) and not stuck.is_set():
            stuck.set()
            gate.wait(PATIENCE)
        else:
            records.done(record)

    try:
        with kind(url, group, "one", records.read, handle, key=offset_of, handlers=2) as one:
            assert stuck.wait(PATIENCE)
            with kind(url, group, "two", records.read, handle, key=offset_of, handlers=2) as two:
                eventually(lambda: [one.partitions(), two.partitions()], [1, 1])
                records.until(lambda: {(0, 19), (1, 3), (1, 19)} <= set(records.handled))
                gate.set()
                assert (one.is_running, two.is_running) == (True, True)
    finally:
        gate.set()
    assert (one.error, two.error) == (None, None)


@pytest.mark.parametrize("is_broken", [False, True])
@on_both_workers
def test_a_stuck_record_is_reported(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker], is_broken: bool
) -> None:
    """Once. If the function for that fails, the worker ends."""
    group, records, gate = create(2), Records(2, 5), threading.Event()
    told: list[int] = []

    def on_stuck(offset: int, seconds: float) -> None:
        told.append(offset)
        gate.set()
        if is_broken:
            raise LookupError

    def handle(record: tuple[int, int]) -> None:
        if record == (1, 3):
            gate.wait(PATIENCE)
        records.done(record)

    with kind(url, group, "one", records.read, handle, key=offset_of, stuck_after=0.3, on_stuck=on_stuck) as worker:
        assert gate.wait(PATIENCE)
        if is_broken:
            eventually(lambda: worker.is_running, False)
        else:
            records.until_all_are_handled()
    assert told == [3]
    assert isinstance(worker.error, LookupError) == is_broken


@on_both_workers
def test_a_source_that_ends_or_fails(url: str, client: Client, create: Callable[..., str], kind: type[Worker]) -> None:
    """One that ends is finished, also a batch that waits for more; one that fails ends the worker."""
    group, records = create(2), Records(2, 5)
    goes_on = threading.Event()

    def read(assignment: Any) -> Iterator[Any]:
        yield from ((offset, (assignment.partition, offset)) for offset in range(5))
        if assignment.partition == 1:
            while not goes_on.is_set():
                yield None
            raise LookupError

    def handle(rows: list[tuple[int, int]]) -> None:
        for row in rows:
            records.done(row)

    with kind(url, group, "one", read, handle, ordered=False, batch=5, linger=600) as worker:
        eventually(lambda: floors(client, group), [4, 4])
        assert worker.is_running
        goes_on.set()
        eventually(lambda: worker.is_running, False)
    assert isinstance(worker.error, LookupError)


@on_both_workers
def test_options_are_checked(url: str, create: Callable[..., str], kind: type[Worker]) -> None:
    """Before the worker joins."""
    group, records = create(1), Records(1, 1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"key": offset_of, "handlers": 0}, "handlers must be at least 1"),
        ({}, "order needs a key"),
        ({"key": offset_of, "every": 0}, "every must be more than 0"),
    ]
    for options, text in cases:
        with kind(url, group, "one", records.read, records.done, **options) as worker:
            eventually(lambda: worker.is_running, False)
        assert isinstance(worker.error, InvalidArgument)
        assert text in str(worker.error)


@mutant(
    "a-worker-that-stops-for-a-restart-leaves",
    "lastbit.streams._membership:Membership.stop",
    "0 if leave else sum(assignment.active for assignment in self.held)",
    "0",
)
@on_both_workers
def test_a_rolling_restart_moves_no_partition_and_repeats_no_record(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """Five workers, forty partitions. Each partition gets one more epoch, that of its own worker's successor."""
    group, records, pause = create(40, ttl=20), Records(40, 100), threading.Event()

    def handle(record: tuple[int, int]) -> None:
        pause.wait(0.002)
        records.done(record)

    def start(name: str) -> Worker:
        return stack.enter_context(kind(url, group, name, records.read, handle, key=lambda record: record[1] % 7))

    names = "abcde"
    with ExitStack() as stack:
        workers = {name: start(name) for name in names}
        eventually(lambda: [worker.partitions() for worker in workers.values()], [8] * 5)
        before = owners(client, group)
        for name in names:
            workers[name].stop(leave=False)
            assert [owner for owner, _ in owners(client, group)] == [owner for owner, _ in before]
            workers[name] = start(name)
            eventually(workers[name].partitions, 8)
        assert owners(client, group) == [(owner, epoch + 1) for owner, epoch in before]
        records.until_all_are_handled()
    assert [worker.error for worker in workers.values()] == [None] * 5
    assert sorted(records.handled) == [(partition, offset) for partition in range(40) for offset in range(100)]


@on_both_workers
def test_the_partitions_of_a_worker_that_does_not_come_back_are_taken_over(
    url: str, client: Client, create: Callable[..., str], kind: type[Worker]
) -> None:
    """When its lease ends; nothing is repeated."""
    group, records = create(4, ttl=1), Records(4, 30)
    with kind(url, group, "one", records.read, records.done, key=offset_of) as one:
        records.until(lambda: len(records.handled) > 10)
        one.stop(leave=False)
    assert {owner for owner, _ in owners(client, group)} == {"one"}
    with kind(url, group, "two", records.read, records.done, key=offset_of):
        records.until_all_are_handled()
    assert len(records.handled) == len(set(records.handled)) == 4 * 30
