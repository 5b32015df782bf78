"""Retries that hold a key, records without order, and batches, on both runners."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from lastbit.errors import InvalidArgument
from lastbit.streams import AckWindow, Backoff, RecordFailed, Snapshot, run_ordered, run_ordered_async
from tests.mutants import mutant
from tests.streams.runners import Run, in_threads, on_both_runners

LONG = 3600.0


class Broken(Exception):
    """Raised by handlers of these tests."""


class Stopped(Exception):
    """Ends a source."""


def numbered(count: int) -> list[tuple[int, int]]:
    return [(offset, offset) for offset in range(count)]


def at_once(error: Exception, tries: int) -> float:
    return 0.0


class FailsFirst:
    """A handler whose first tries of some records fail."""

    def __init__(self, failures: dict[int, int]) -> None:
        self._left = dict(failures)
        self.tried: list[int] = []
        self.handled: list[int] = []

    def __call__(self, record: int) -> None:
        self.tried.append(record)
        if self._left.get(record, 0):
            self._left[record] -= 1
            raise Broken(record)
        self.handled.append(record)


@mutant(
    "a-key-goes-on-while-a-record-waits-for-its-retry",
    "lastbit.streams._schedule:Schedule.retry",
    "self._left -= finished",
    "self._left -= finished\nif key in self._queues and self._queues[key]:\n    self._ready(key)",
    case="in_threads",
)
@mutant(
    "a-record-is-done-after-its-first-failure",
    "lastbit.streams._steps:Stream._pause",
    "self._options.retry is None",
    "True",
    case="in_threads",
)
@on_both_runners
def test_a_failed_record_is_tried_again_before_later_ones_of_its_key(run: Run) -> None:
    handle = FailsFirst({0: 3, 7: 1, 30: 2})
    commits: list[int] = []
    run(
        *(numbered(50), handle),
        key=lambda record: record % 5,
        retry=Backoff(first=0.001, longest=0.002),
        commit=commits.append,
    )
    assert sorted(handle.handled) == list(range(50))
    assert [record for record in handle.tried if record % 5 == 0][:6] == [0, 0, 0, 0, 5, 10]
    for remainder in range(5):
        of_key = [record for record in handle.handled if record % 5 == remainder]
        assert of_key == sorted(of_key)
    assert commits[-1] == 49


@on_both_runners
def test_after_the_last_try_a_record_is_a_dead_letter_or_ends_the_stream(run: Run) -> None:
    handle = FailsFirst({3: 99})
    dead_letters: list[tuple[int, str]] = []
    run(
        *(numbered(10), handle),
        key=lambda record: record % 3,
        retry=Backoff(first=0, tries=4),
        dead_letter=lambda record, error: dead_letters.append((record, repr(error))),
    )
    assert dead_letters == [(3, "Broken(3)")]
    assert handle.tried.count(3) == 4
    assert sorted(handle.handled) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    with pytest.raises(RecordFailed, match="offset 3 failed") as failed:
        run(numbered(10), FailsFirst({3: 99}), key=lambda record: record % 3, retry=Backoff(first=0, tries=4))
    assert isinstance(failed.value.__cause__, Broken)


@on_both_runners
def test_a_function_decides_about_retries(run: Run) -> None:
    """It sees the error and the number of tries. What it raises, and a pause that is none, ends the stream."""
    questions: list[tuple[str, int]] = []

    def retry(error: Exception, tries: int) -> float | None:
        questions.append((repr(error), tries))
        return 0.0 if tries < 3 else None

    run([(0, 0)], FailsFirst({0: 9}), key=id, retry=retry, dead_letter=lambda record, error: None)
    assert questions == [("Broken(0)", 1), ("Broken(0)", 2), ("Broken(0)", 3)]
    for wrong, cause in ((lambda error, tries: 1 // 0, ZeroDivisionError), (lambda error, tries: -1, InvalidArgument)):
        with pytest.raises(RecordFailed) as failed:
            run([(0, 0)], FailsFirst({0: 9}), key=id, retry=wrong, dead_letter=lambda record, error: None)
        assert isinstance(failed.value.__cause__, cause)


@on_both_runners
def test_a_record_that_waits_for_a_retry_stays_outstanding_when_the_stream_stops(run: Run) -> None:
    """And occupies no lane: all others of other keys are done by then."""
    window = AckWindow()
    failed: list[int] = []

    def source() -> Iterator[Any]:
        yield from numbered(200)
        while window.acks < 199:
            yield None
        raise Stopped

    def handle(record: int) -> None:
        if record == 0:
            failed.append(record)
            raise Broken

    snapshots: list[bytes] = []
    with pytest.raises(Stopped):
        run(
            *(source(), handle),
            key=lambda record: record,
            lanes=1,
            retry=lambda error, tries: LONG,
            window=window,
            commit=lambda floor: snapshots.append(window.snapshot()),
        )
    assert failed == [0]
    assert Snapshot.decode(snapshots[-1]) == Snapshot(-1, 199, (0,))


def test_backoff_grows_to_its_longest_pause() -> None:
    backoff = Backoff(first=2, factor=3, longest=50, tries=6)
    assert [backoff(Broken(), tries) for tries in range(1, 8)] == [2, 6, 18, 50, 50, None, None]
    assert Backoff(first=1, factor=10, tries=10_000)(Broken(), 9_000) == 60
    for wrong in ({"first": -1}, {"factor": 0.5}, {"longest": math.nan}, {"tries": 0}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            Backoff(**wrong)


KEYS = {
    "steps of 1": lambda number: number,
    "steps of 1024": lambda number: number * 1024,
    "Snowflake ids": lambda number: 1_541_815_603_606_036_480 + (number << 22),
    "text": lambda number: f"order-{number}",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_all_lanes_work_whatever_the_keys_are(key: Callable[[int], Any]) -> None:
    """Eight handlers must meet again and again, or none would finish; so each lane handles as many records."""
    meeting = threading.Barrier(8, timeout=60)
    run_ordered(numbered(80), lambda record: meeting.wait(), key=key, lanes=8)


@on_both_runners
@pytest.mark.parametrize("options", [{"ordered": False}, {"key": lambda record: None}], ids=["ordered", "key"])
def test_records_without_order_are_handled_at_once(run: Run, options: dict[str, Any]) -> None:
    """Four handlers of them meet. Those that fail hold no others."""
    if run is in_threads:
        meeting = threading.Barrier(4, timeout=60)
        run_ordered(numbered(8), lambda record: meeting.wait(), lanes=4, **options)
    handle = FailsFirst({0: 2, 1: 1})
    commits: list[int] = []
    run(numbered(30), handle, lanes=1, retry=Backoff(first=0.001), commit=commits.append, **options)
    assert sorted(handle.handled) == list(range(30))
    assert commits[-1] == 29


@on_both_runners
def test_a_batch_has_records_of_one_key_in_order(run: Run) -> None:
    batches: list[list[int]] = []
    run(numbered(100), batches.append, key=lambda record: record % 3, batch=10, linger=LONG)
    assert sorted(itertools.chain(*batches)) == list(range(100))
    for remainder in range(3):
        of_key = [batch for batch in batches if batch[0] % 3 == remainder]
        assert list(itertools.chain(*of_key)) == list(range(remainder, 100, 3))
        # Three are full; the rest of it doesn't wait for more when the source has ended.
        assert [len(batch) for batch in of_key] == [10, 10, 10, 3 + (remainder == 0)]


@on_both_runners
def test_records_linger_for_their_batch_but_not_for_ever(run: Run) -> None:
    """The source waits for the first batch before it sends more."""
    batches: list[list[int]] = []

    def source() -> Iterator[Any]:
        yield from numbered(2)
        while not batches:
            yield None
        yield 2, 2

    run(source(), batches.append, ordered=False, lanes=1, batch=50, linger=0.01)
    assert [record for batch in batches for record in batch] == [0, 1, 2]
    assert batches[-1] == [2]


@mutant(
    "records-that-a-batch-has-handled-are-handled-again",
    "lastbit.streams._steps:Stream.failures_in",
    "return _failures(result, work.live_entries)",
    "return [(entry, error) for entry in work.live_entries for _, error in list(result)[:1]]",
    case="in_threads",
)
@on_both_runners
def test_of_a_batch_only_the_failures_are_tried_again(run: Run) -> None:
    """The handler returns its failures. If it raises, all records of the batch have failed."""
    batches: list[list[str]] = []
    records = ["a", "b", "c", "d"]

    def handle(batch: list[str]) -> list[tuple[str, Exception]] | None:
        batches.append(batch)
        if len(batches) == 1:
            raise Broken
        return [(record, Broken(record)) for record in batch if record in "bd" and len(batches) == 2]

    async def handle_it(batch: list[str]) -> Any:
        return handle(batch)

    options: dict[str, Any] = {"key": lambda record: 0, "batch": 4, "linger": LONG, "retry": at_once}
    if run is in_threads:
        run_ordered(list(enumerate(records)), handle, **options)
    else:
        asyncio.run(run_ordered_async(list(enumerate(records)), handle_it, **options))
    assert batches == [records, records, ["b", "d"]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (True, "not True"),
        (["a"], "not 'a'"),
        ([("a", "broken")], "not .'a', 'broken'."),
        ([("z", Broken())], "whose record is none of these"),
    ],
)
def test_a_batch_must_return_failures(result: Any, message: str) -> None:
    with pytest.raises(RecordFailed) as failed:
        run_ordered([(0, "a")], lambda batch: result, ordered=False, batch=2)
    assert isinstance(failed.value.__cause__, InvalidArgument)
    assert failed.match("offset 0")
    with pytest.raises(InvalidArgument, match=message):
        raise failed.value.__cause__


@on_both_runners
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "order needs a key"),
        ({"ordered": False, "batch": 0}, "batch must be at least 1"),
        ({"ordered": False, "batch": 2, "linger": -1}, "linger must be at least 0"),
        ({"ordered": False, "linger": 1}, "linger needs a batch"),
    ],
)
def test_options_that_make_no_sense_are_refused(run: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        run(numbered(1), lambda record: None, **options)


# Every order in which the handlers of a small stream end.

RECORDS = "ABABBA"
"""The key of each record."""

Ends = tuple[tuple[int, str], ...]
"""Which record's handler ends, and how."""


def orders(ends: Ends = (), failures: int = 1) -> Iterator[tuple[Ends, bool]]:
    """Every order, with at most one failure. Each may be cut short by a stop, which is the second element."""
    finished = {record for record, end in ends if end == "succeeds"}
    heads = running(finished)
    yield ends, bool(heads)
    for record in sorted(heads):
        yield from orders((*ends, (record, "succeeds")), failures)
        if failures:
            yield from orders((*ends, (record, "fails")), failures - 1)


def running(finished: set[int]) -> set[int]:
    """With a free lane for each key: the first record of each that isn't done."""
    records = [record for record in range(len(RECORDS)) if record not in finished]
    return {
        next(record for record in records if RECORDS[record] == key) for key in {RECORDS[record] for record in records}
    }


class Director:
    """Ends the handlers of a stream in a given order, from a thread of its own; after a stop, as soon as they run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[int, Callable[[str], None]] = {}
        self._over = False
        self.started: list[int] = []
        self.finished: set[int] = set()
        self.stop = threading.Event()

    def began(self, record: int, end: Callable[[str], None]) -> None:
        with self._changed:
            self._running[record] = end
            self.started.append(record)
            self._changed.notify_all()

    def is_over(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def direct(self, ends: Ends) -> None:
        with self._changed:
            for record, outcome in ends:
                self._wait_for_heads()
                self._end(record, outcome)
            self._wait_for_heads()
            self.stop.set()
            while self._changed.wait_for(lambda: self._running or self._over, 60) and self._running:
                self._end(next(iter(self._running)), "succeeds")

    def _wait_for_heads(self) -> None:
        expected = running(self.finished)
        assert self._changed.wait_for(lambda: set(self._running) == expected, 60), (self._running, expected)

    def _end(self, record: int, outcome: str) -> None:
        if outcome == "succeeds":
            self.finished.add(record)
        self._running.pop(record)(outcome)


def directed(run: Run, director: Director, stops: bool, window: AckWindow, commit: Callable[[int], None]) -> None:
    def source() -> Iterator[Any]:
        yield from numbered(len(RECORDS))
        while stops:
            if director.stop.wait(0.01 if run is in_threads else 0):
                raise Stopped
            yield None

    def handle(record: int) -> None:
        ends: SimpleQueue[str] = SimpleQueue()
        director.began(record, ends.put)
        if ends.get() == "fails":
            raise Broken

    async def handle_it(record: int) -> None:
        loop = asyncio.get_running_loop()
        end: asyncio.Future[str] = loop.create_future()
        director.began(record, lambda outcome: loop.call_soon_threadsafe(end.set_result, outcome))
        if await end == "fails":
            raise Broken

    options: dict[str, Any] = {"key": RECORDS.__getitem__, "lanes": 2, "retry": at_once, "window": window}
    if run is in_threads:
        run_ordered(source(), handle, commit=commit, **options)
    else:
        asyncio.run(run_ordered_async(source(), handle_it, commit=commit, **options))


@mutant(
    "a-stopped-stream-begins-further-records",
    "lastbit.streams._threaded:ThreadedStream.work",
    "if self._stream.failure is not None:\n    return",
    "",
    case="in_threads",
)
@on_both_runners
def test_whichever_handler_ends_first_fails_or_is_stopped_nothing_is_lost(run: Run) -> None:
    """Two keys, six records, two lanes, a failure, a stop: a record runs if it is the first of its key that isn't done.
    After a stop those that run end, and what was done is committed."""
    missing_records = 0
    for ends, stops in orders():
        director, window, snapshots = Director(), AckWindow(), [Snapshot().encode()]

        def commit(floor: int, window: AckWindow = window, snapshots: list[bytes] = snapshots) -> None:
            snapshots.append(window.snapshot())

        direction = threading.Thread(target=director.direct, args=[ends])
        direction.start()
        try:
            directed(run, director, stops, window, commit)
        except Stopped:
            assert stops
        else:
            assert not stops
        director.is_over()
        direction.join()
        snapshot = Snapshot.decode(snapshots[-1])
        assert {record for record in range(len(RECORDS)) if snapshot.done(record)} == director.finished
        failures = [record for record, outcome in ends if outcome == "fails"]
        assert sorted(director.started) == sorted([*director.finished, *failures])
        for key in "AB":
            of_key = [record for record in director.started if RECORDS[record] == key]
            assert of_key == sorted(of_key)
        missing_records += len(RECORDS) - len(director.finished)
    assert missing_records, "no stop was noticed before all was done"
