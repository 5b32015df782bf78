"""`run_ordered` and its asynchronous counterpart: order, commits, failures, backpressure, and a test for each known
failure of other libraries."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastbit.errors import InvalidArgument
from lastbit.streams import (
    AckWindow,
    CommitFailed,
    OffsetOutOfOrder,
    RecordFailed,
    Snapshot,
    WindowClosed,
    ordered,
    run_ordered,
    run_ordered_async,
)
from lastbit.streams._progress import Options, Progress
from lastbit.streams._schedule import Schedule
from tests.mutants import mutant
from tests.streams.runners import Run, in_tasks, in_threads, log_from, on_both_runners
from tests.support.threads import no_more_threads, no_thread_left

EXAMPLES = 150 * (20 if os.environ.get("LASTBIT_SOAK") == "1" else 1)


class Broken(Exception):
    """Raised by handlers, sources and commits of these tests."""


class Flaky(Exception):
    """Raised by handlers whose record may be tried again."""


def twice_more(error: Exception, tries: int) -> float | None:
    return 0.0 if isinstance(error, Flaky) and tries < 3 else None


def same(record: Any) -> Any:
    return record


def numbered(count: int) -> list[tuple[int, int]]:
    return [(offset, offset) for offset in range(count)]


@mutant(
    "a-record-is-acked-before-it-is-handled",
    "lastbit.streams._steps:Stream.take",
    "entries = self._schedule.take(key)",
    """
        entries = self._schedule.take(key)
        for entry in entries:
            self._window.ack(entry.position)
    """,
)
@on_both_runners
def test_a_record_is_outstanding_while_it_is_handled(run: Run) -> None:
    """A snapshot stored in that time must not count it as done: the handler may still fail."""
    window = AckWindow()
    outstanding: dict[int, bool] = {}

    def handle(record: int) -> None:
        outstanding[record] = record in window.outstanding

    run(numbered(20), handle, key=same, lanes=2, window=window)
    assert outstanding == dict.fromkeys(range(20), True)


@mutant(
    "a-record-that-failed-is-acked",
    "lastbit.streams._steps:Stream.give_up",
    "raise failed(entry.offset, error) from error",
    "self._window.ack(entry.position)\nraise failed(entry.offset, error) from error",
    case="in_threads",
)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
@on_both_runners
def test_after_any_failures_events_are_handled_in_order_and_only_outstanding_ones_again(
    run: Run, data: st.DataObject
) -> None:
    """A life ends through a handler, a commit (before or after it was stored) or the source. Each starts with the
    snapshot that the last one stored, sometimes cut to a limit. The first tries of some events fail, and are tried
    again, or end a life too. No event of a key is handled before an earlier one, and no event is handled again that the
    stored snapshot has as done."""
    keys = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=40), "keys")
    gaps = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 50]), min_size=len(keys), max_size=len(keys)), "gaps")
    log = {offset: (offset, key) for offset, key in zip(itertools.accumulate(gaps, initial=0), keys, strict=False)}
    lanes = data.draw(st.integers(1, 4), "lanes")
    capacity = data.draw(st.sampled_from([1, 3, 10, 1000]), "capacity")
    limit = data.draw(st.sampled_from([None, 13, 20]), "limit")
    deaths = data.draw(
        st.lists(st.tuples(st.sampled_from(["handle", "commit", "stored", "source"]), st.integers(0, 30)), max_size=6)
    )
    failures_left = data.draw(st.dictionaries(st.sampled_from(sorted(log)), st.integers(1, 4), max_size=4), "failures")
    options: dict[str, Any] = {"lanes": lanes, "retry": data.draw(st.sampled_from([None, twice_more]), "retry")}
    batch = data.draw(st.sampled_from([None, 1, 4]), "batch")
    handled: list[int] = []
    stored_snapshot = Snapshot()

    # A life without a death may end through a failure that is not tried again.
    for where, count in [*deaths, *[("nothing", 0)] * (1 + sum(failures_left.values()))]:
        life = Life(where, count)
        window = AckWindow.restore(stored_snapshot, capacity=capacity)
        beginning = stored_snapshot
        floors = [stored_snapshot.floor]
        done_here: list[int] = []

        def handle(
            record: tuple[int, int],
            life: Life = life,
            beginning: Snapshot = beginning,
            done_here: list[int] = done_here,
        ) -> None:
            offset, key = record
            assert all(o in handled for o in log if o < offset and log[o][1] == key), "out of order"
            assert not beginning.done(offset), "handled again though the snapshot had it as done"
            life.passes("handle")
            if failures_left.get(offset):
                failures_left[offset] -= 1
                raise Flaky(offset)
            handled.append(offset)
            done_here.append(offset)

        def handle_batch(
            records: list[tuple[int, int]],
            handle: Callable[..., None] = handle,
            done_here: list[int] = done_here,
        ) -> list[tuple[tuple[int, int], Exception]]:
            offsets: list[int] = []  # if this raises, none of them is done
            failures: list[tuple[tuple[int, int], Exception]] = []
            for place, record in enumerate(records):
                try:
                    handle(record, done_here=offsets)
                except Flaky as error:
                    failures = [(later, error) for later in records[place:]]
                    break
            done_here.extend(offsets)
            return failures

        def commit(floor: int, life: Life = life, window: AckWindow = window, floors: list[int] = floors) -> None:
            nonlocal stored_snapshot
            life.passes("commit")
            assert floor >= floors[-1], "a commit went back"
            floors.append(floor)
            stored_snapshot = stored_snapshot.merge(Snapshot.decode(window.snapshot(limit)))
            life.passes("stored")

        def source(life: Life = life, floor: int = stored_snapshot.floor) -> Iterator[Any]:
            for item in log_from(log, floor):
                life.passes("source")
                yield item

        try:
            options |= {"commit": commit, "window": window}
            if batch is None:
                run(source(), handle, key=lambda r: r[1], every=0.001, **options)
            else:
                run(source(), handle_batch, key=lambda r: r[1], every=0.001, batch=batch, **options)
        except (RecordFailed, Broken) as error:
            expected_error = {"handle": RecordFailed, "source": Broken}.get(where, ())
            if not isinstance(error, expected_error) and not isinstance(error.__cause__, Flaky):
                raise
            if isinstance(error.__cause__, AssertionError):
                raise
            if isinstance(error, RecordFailed) and error.offset not in window.outstanding:
                raise AssertionError("a record that failed was acked") from error
        # A failed commit is retried, so in the end the snapshot has everything that this life handled.
        assert all(offset in handled for offset in log if stored_snapshot.done(offset)), "a record was skipped"
        if limit is None:
            assert all(stored_snapshot.done(offset) for offset in done_here)
    assert set(handled) == set(log)
    if limit is None:
        assert len(handled) == len(log)


class Life:
    """Raises once, at the `count`th pass of a place."""

    def __init__(self, where: str, count: int) -> None:
        self._where = where
        self._left = count
        self._lock = threading.Lock()

    def passes(self, where: str) -> None:
        if where == self._where:
            with self._lock:
                self._left -= 1
                if self._left == -1:
                    raise Broken(where)


@mutant(
    "the-end-is-not-committed",
    "lastbit.streams._steps:Stream.commit_at_the_end",
    "due is None",
    "True",
    case="in_threads",
)
@on_both_runners
def test_the_end_is_committed_and_no_commit_goes_back(run: Run) -> None:
    """Commits are combined, so there are far fewer than records; the last one is the end."""
    commits: list[int] = []
    run(numbered(3000), same, key=same, commit=commits.append, every=0.005)
    assert commits[-1] == 2999
    assert commits == sorted(set(commits))
    assert len(commits) < 1000
    only_the_end: list[int] = []
    run(numbered(100), same, key=same, commit=only_the_end.append, every=60)
    assert only_the_end == [99]


def test_a_stream_ends_whichever_lane_is_the_last_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not always the one that handled the last record: here the other one is still counted, while the caller waits."""
    first_done, goes_on = threading.Event(), threading.Event()
    finish, work = Schedule.finished, ordered._Run.work

    def finished(schedule: Schedule[int], key: Any, count: int) -> bool:
        is_last = finish(schedule, key, count)
        if key == 0:
            first_done.set()
            assert goes_on.wait(60)
        return is_last

    def worked(stream: Any, key: Any) -> None:
        work(stream, key)
        if key == 1:
            while not stream._changed._waiters:
                pass
            goes_on.set()

    monkeypatch.setattr(Schedule, "finished", finished)
    monkeypatch.setattr(ordered._Run, "work", worked)
    run_ordered(numbered(2), lambda record: record == 0 or first_done.wait(60), key=same, lanes=2)


@on_both_runners
def test_without_handled_records_nothing_is_committed(run: Run) -> None:
    """No record at all, or the first record fails."""
    commits: list[int] = []
    run([], same, key=same, commit=commits.append)
    run([None, None], same, key=same, commit=commits.append)

    def handle(record: int) -> None:
        raise Broken

    with pytest.raises(RecordFailed):
        run([(100, 0), (101, 1)], handle, key=lambda r: 0, commit=commits.append)
    assert commits == []


@on_both_runners
def test_lanes_work_at_the_same_time(run: Run) -> None:
    """All four handlers must run at the same time, or none would finish."""
    if run is in_threads:
        meeting = threading.Barrier(4, timeout=30)
        run(numbered(8), lambda r: meeting.wait(), key=same, lanes=4)
        return
    under_way, most = 0, 0

    async def handle(record: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        while most < 4:
            await asyncio.sleep(0)
        under_way -= 1

    asyncio.run(run_ordered_async(numbered(8), handle, key=same, lanes=4))


@mutant(
    "a-key-goes-on-behind-the-record-that-failed",
    "lastbit.streams._threaded:ThreadedStream.work",
    "self._fail(error)",
    """
        self._fail(error)
        self._schedule.finished(key, 1)
    """,
    ("if self._stream.failure is not None:\n    return", ""),
    case="in_threads",
)
@on_both_runners
def test_a_failing_handler_stops_the_stream_after_acked_records_are_committed(run: Run) -> None:
    """The error has the record's offset and its cause; no later record of its key is handled."""
    commits: list[int] = []
    handled: list[int] = []

    def handle(record: int) -> None:
        if record == 70:
            raise Broken("seventy")
        handled.append(record)

    with pytest.raises(RecordFailed, match="offset 70 failed") as failed:
        run(numbered(500), handle, key=lambda r: r % 10, commit=commits.append, every=60)
    assert failed.value.offset == 70
    assert isinstance(failed.value.__cause__, Broken)
    assert commits[-1] == min(set(range(500)) - set(handled)) - 1
    assert commits[-1] <= 69
    assert {record for record in handled if record % 10 == 0} == set(range(0, 70, 10))


@on_both_runners
def test_a_failure_is_noticed_without_a_further_record(run: Run) -> None:
    """A source without new records yields None; the acked records are committed by then."""
    commits: list[int] = []

    def source() -> Iterator[Any]:
        yield from numbered(3)
        while True:
            yield None

    def handle(record: int) -> None:
        if record == 2:
            raise Broken

    with pytest.raises(RecordFailed):
        run(source(), handle, key=lambda r: 0, commit=commits.append)
    assert commits == [1]


# An event loop turns Ctrl-C into a cancellation, which has its own test.
@pytest.mark.parametrize(("run", "error"), [(in_threads, Broken), (in_tasks, Broken), (in_threads, KeyboardInterrupt)])
def test_an_error_of_the_source_is_raised_after_the_commit(run: Run, error: type[BaseException]) -> None:
    """Its error, including Ctrl-C, is raised unchanged once the records under way are done and the floor is
    committed."""
    commits: list[int] = []

    def source() -> Iterator[Any]:
        yield from numbered(50)
        while window.floor < 49:
            yield None
        raise error

    window = AckWindow()
    with pytest.raises(error):
        run(source(), same, key=same, commit=commits.append, every=60, window=window)
    assert commits == [49]


def test_one_stuck_key_has_bounded_memory_and_is_named() -> None:
    """Other lanes continue until the window is full, then the source isn't read further; `on_stuck` and the window name
    the offset; once it is free, everything continues."""
    window = AckWindow(capacity=100)
    freed = threading.Event()
    read: list[int] = []
    handled: list[int] = []
    stuck_offsets: list[int] = []

    def source() -> Iterator[Any]:
        for offset in range(1000):
            read.append(offset)
            yield offset, offset

    def handle(record: int) -> None:
        if record % 4 == 3 and not freed.wait(30):
            freed.set()  # records behind it need not wait as long
        handled.append(record)

    def when_full() -> None:
        # All records that aren't behind the stuck one are done, and the reader holds one that doesn't fit. With slow
        # threads, the first one named may be one before it.
        while not finished.is_set() and (3 not in stuck_offsets or len(read) < 104 or len(handled) < 3 + 75):
            wait_a_little()
        at_full.append((len(read), len(handled), window.oldest, window.positions))
        freed.set()

    finished = threading.Event()
    at_full: list[tuple[int, int, int | None, int]] = []
    watcher = threading.Thread(target=when_full)
    watcher.start()
    run_ordered(
        *(source(), handle),
        key=lambda record: 0 if record % 4 == 3 else 1 + record % 4,
        window=window,
        every=0.001,
        stuck_after=0.001,
        on_stuck=lambda offset, seconds: stuck_offsets.append(offset),
    )
    finished.set()
    watcher.join()
    assert at_full == [(104, 78, 3, 100)]
    assert stuck_offsets.count(3) == 1
    assert sorted(handled) == read == list(range(1000))
    assert window.floor == 999


@on_both_runners
def test_waiting_records_are_bounded_by_the_window(run: Run) -> None:
    """If the source is faster than the handlers, at most one record is read beyond the window's capacity."""
    window = AckWindow(capacity=10)
    ahead: list[int] = []

    def source() -> Iterator[Any]:
        for offset in range(200):
            ahead.append(offset - window.floor)
            yield offset, offset

    async def slowly(record: int) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    if run is in_threads:
        run_ordered(source(), lambda record: wait_a_little(), key=same, lanes=2, window=window)
    else:
        asyncio.run(run_ordered_async(source(), slowly, key=same, lanes=2, window=window))
    assert max(ahead) == 11
    assert window.floor == 199


@on_both_runners
def test_an_offset_that_holds_the_floor_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Once, if the caller set no callback."""

    def source() -> Iterator[Any]:
        yield "first-0", "held"
        while "first-0" not in caplog.text:
            yield None
        released.append(True)

    released: list[bool] = []
    if run is in_threads:
        run_ordered(source(), lambda r: wait_for(released), key=same, every=0.001, stuck_after=0.001)
    else:

        async def handle(record: str) -> None:
            while not released:
                await asyncio.sleep(0)

        asyncio.run(run_ordered_async(source(), handle, key=same, every=0.001, stuck_after=0.001))
    (warning,) = [record_ for record_ in caplog.records if record_.levelno == logging.WARNING]
    assert "'first-0' has been outstanding" in warning.getMessage()


def wait_a_little() -> None:
    threading.Event().wait(0.0005)


def wait_for(released: list[bool]) -> None:
    while not released:
        wait_a_little()


@mutant(
    "filtered-records-hold-the-floor",
    "lastbit.streams._steps:Stream.add",
    "self._window.ack(entry.position)",
    "pass",
    case="in_threads",
)
@on_both_runners
def test_eventuous_142_ignored_events_do_not_block_the_floor(run: Run) -> None:
    """eventuous #142: events of an unknown type never reached the consumer, their positions were never committed, and
    the checkpoint stopped at the gap. Here filtered records are acked; so is a stream of only such records."""
    commits: list[int] = []
    handled: list[int] = []
    run(numbered(100), handled.append, key=same, commit=commits.append, wanted=lambda r: r in (3, 50))
    assert sorted(handled) == [3, 50]
    assert commits[-1] == 99
    commits.clear()
    run(numbered(100), handled.append, key=same, commit=commits.append, wanted=lambda r: False)
    assert commits[-1] == 99


@on_both_runners
def test_a_record_is_acked_once_it_is_a_dead_letter(run: Run) -> None:
    """Records that raise, and records whose key can't be computed; a record that the dead-letter handler refuses too
    ends the stream."""
    commits: list[int] = []
    dead_letters: list[tuple[Any, str]] = []

    def key(record: int) -> int:
        return 7 // (record - 5)

    def handle(record: int) -> None:
        if record % 10 == 0:
            raise Broken(str(record))

    def dead_letter(record: int, error: Exception) -> None:
        dead_letters.append((record, type(error).__name__))
        if record == 30:
            raise OSError("the dead letters' queue is away")

    run(numbered(30), handle, key=key, commit=commits.append, dead_letter=dead_letter)
    assert sorted(dead_letters) == [(0, "Broken"), (5, "ZeroDivisionError"), (10, "Broken"), (20, "Broken")]
    assert commits[-1] == 29
    with pytest.raises(RecordFailed) as failed:
        run(numbered(35), handle, key=same, lanes=1, commit=commits.append, dead_letter=dead_letter)
    assert failed.value.offset == 30
    assert isinstance(failed.value.__cause__, OSError)
    assert commits[-1] == 29


@on_both_runners
def test_a_failed_commit_is_retried_with_the_current_floor(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """And the stream continues."""
    attempts: list[int] = []
    commits: list[int] = []

    def commit(floor: int) -> None:
        attempts.append(floor)
        if len(attempts) <= 3:
            raise Broken
        commits.append(floor)

    def source() -> Iterator[Any]:
        for item in numbered(30):
            yield item
            while len(attempts) < min(item[0], 3):
                yield None

    run(source(), same, key=same, commit=commit, every=0.001)
    assert commits[-1] == 29
    assert attempts == sorted(attempts)
    assert "will be retried" in caplog.text


@on_both_runners
def test_a_commit_that_keeps_failing_ends_the_stream(run: Run) -> None:
    """With its cause, while the source still has records; the handled records replay."""
    attempts = 0

    def commit(floor: int) -> None:
        nonlocal attempts
        attempts += 1
        raise Broken("no broker")

    def source() -> Iterator[Any]:
        yield from numbered(5)
        while True:
            yield None

    with pytest.raises(CommitFailed) as failed:
        run(source(), same, key=same, commit=commit, every=0.001)
    assert isinstance(failed.value.__cause__, Broken)
    assert failed.value.floor <= 4
    assert attempts == 5 + 3


@on_both_runners
def test_a_failing_last_commit_is_raised_or_noted(run: Run) -> None:
    """On its own it is the error; next to a failed record it is a note on that error."""

    def commit(floor: int) -> None:
        raise Broken("no broker")

    with pytest.raises(CommitFailed, match="offset 4"):
        run(numbered(5), same, key=same, commit=commit, every=0.01 if run is in_threads else 60)

    def handle(record: int) -> None:
        if record == 3:
            raise Broken

    with pytest.raises(RecordFailed) as failed:
        run(numbered(5), handle, key=lambda r: 0, commit=commit, every=0.01)
    assert any("offset 2 could not be committed" in note for note in failed.value.__notes__)


def test_redpanda_connect_4477_nothing_is_committed_after_the_partition_was_revoked() -> None:
    """redpanda connect #4477: a handler that was running when the partition was revoked acked later, and its offset was
    committed for a partition that another consumer owned. Here the window is closed; the late ack ends the stream, and
    no commit follows."""
    window = AckWindow()
    commits: list[int] = []
    under_way, revoked = threading.Event(), threading.Event()

    def handle(record: int) -> None:
        if record == 1:
            under_way.set()
            revoked.wait(60)

    def revoke() -> None:
        under_way.wait(60)
        window.close()
        revoked.set()

    revoker = threading.Thread(target=revoke)
    revoker.start()
    with pytest.raises(WindowClosed):
        run_ordered(numbered(2), handle, key=lambda r: 0, window=window, commit=commits.append, every=60)
    revoker.join()
    assert commits == []
    assert window.outstanding == (1,)


@on_both_runners
def test_a_commit_refused_by_a_fence_ends_the_stream(run: Run) -> None:
    """A fence refused it: the caller closes the window and raises, and the commit isn't retried."""
    window = AckWindow()
    attempts: list[int] = []

    def commit(floor: int) -> None:
        attempts.append(floor)
        window.close()
        raise Broken("stale epoch")

    def source() -> Iterator[Any]:
        yield 0, 0
        while True:
            yield None

    with pytest.raises(WindowClosed):
        run(source(), same, key=same, window=window, commit=commit, every=0.001)
    assert attempts == [0]


def test_kurrentdb_1301_no_commit_is_ahead_of_an_unhandled_record() -> None:
    """KurrentDB #1301: a checkpoint at a moment when nothing seemed outstanding. Commits happen while records are read,
    routed and handled; none is ever ahead of a record whose handler has not returned."""
    done: set[int] = set()
    ahead: list[int] = []

    def commit(floor: int) -> None:
        ahead.extend(offset for offset in range(floor + 1) if offset not in done)

    run_ordered(numbered(3000), done.add, key=same, lanes=3, commit=commit, every=0.0001)
    assert ahead == []
    assert len(done) == 3000


@pytest.mark.parametrize("started", range(4))
def test_a_stream_that_may_start_too_few_threads_ends(started: int) -> None:
    """At once, without waiting for lanes that were not started. Nothing is read."""
    source = iter(numbered(20))
    with no_thread_left(), pytest.raises(RuntimeError, match="can't start new thread"), no_more_threads(after=started):
        run_ordered(source, same, key=same, lanes=3, grace=3600)
    assert len(list(source)) == 20


def test_a_handler_that_never_ends_does_not_delay_a_failure() -> None:
    """After `grace` seconds it is abandoned; a late ack commits nothing."""
    commits: list[int] = []
    released, stuck, finished = threading.Event(), threading.Event(), threading.Event()
    window = AckWindow()

    def handle(record: int) -> None:
        if record == 0:
            stuck.set()
            released.wait(60)
            finished.set()
        elif record == 1:
            stuck.wait(60)
            raise Broken

    with pytest.raises(RecordFailed) as failed:
        run_ordered(numbered(20), handle, key=same, lanes=2, commit=commits.append, window=window, every=60, grace=0.02)
    assert failed.value.offset == 1
    before = list(commits)
    released.set()
    finished.wait(60)
    while 0 in window.outstanding:
        pass
    assert commits == before
    assert all(floor == -1 for floor in commits)


@on_both_runners
def test_a_restored_window_skips_acked_records_and_replays_outstanding_ones(run: Run) -> None:
    """And handles nothing else a second time."""
    first = AckWindow()
    for offset in range(10, 20):
        first.track(offset)
    for offset in (10, 13, 14, 19):
        first.ack(offset)
    handled: list[int] = []
    commits: list[int] = []
    window = AckWindow.restore(first.snapshot())
    run([(o, o) for o in range(11, 25)], handled.append, key=lambda r: 0, window=window, commit=commits.append)
    assert handled == [11, 12, 15, 16, 17, 18, 20, 21, 22, 23, 24]
    assert commits[-1] == 24


@mutant(
    "records-deleted-from-the-log-hold-the-floor",
    "lastbit.streams._awaited:Awaited.pass_to",
    "vanished < offset and self._window.ack(vanished)",
    "False",
    case="in_threads",
)
@on_both_runners
def test_restored_offsets_missing_from_the_log_do_not_hold_the_floor(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Compaction or retention removed them between two runs (parallel-consumer #409): once the source has passed them,
    they never come. It is logged."""
    commits: list[int] = []
    for capacity in (10, 3):  # the second is full of missing offsets
        caplog.clear()
        window = AckWindow.restore(Snapshot(4, 9, (5, 7, 9)), capacity=capacity)
        run([(7, 7), (30, 30), (31, 31)], same, key=same, window=window, commit=commits.append)
        assert commits[-1] == 31
    assert [word for word in ("offset 5,", "offset 7,", "offset 9,") if word in caplog.text] == [
        "offset 5,",
        "offset 9,",
    ]


@mutant(
    "an-offset-is-committed-with-an-older-floor",
    "lastbit.streams._progress:Progress.due",
    "floor, offset = self._at_floor",
    "offset = self._at_floor[1]",
)
def test_an_ack_while_a_commit_is_computed_does_not_commit_an_opaque_offset_twice() -> None:
    """The floor moves between two reads of it. The commit names the floor to which its offset belongs."""

    class Moving(AckWindow):
        """Acks position 1 after the floor was read for the first time."""

        @property
        def floor(self) -> int:
            before = super().floor
            if before == 0:
                self.ack(1)
            return before

    window = Moving()
    progress: Progress[str] = Progress(None, Options(same))
    progress.window = window
    for offset in ("a", "b"):
        assert progress.track(progress.position_of(offset), offset)
    window.ack(0)
    due_commit = progress.due()
    assert due_commit is not None
    assert (due_commit.floor, due_commit.offset) == (1, "b")
    progress.committed(due_commit)
    assert progress.due() is None


@on_both_runners
def test_opaque_offsets_are_committed_unchanged(run: Run) -> None:
    """Redis ids, tuples of a file and a line: the offset at the floor."""
    commits: list[str] = []
    run(((f"{n}-0", n) for n in range(500)), same, key=same, commit=commits.append, every=0.001)
    assert commits[-1] == "499-0"
    assert [int(id.partition("-")[0]) for id in commits] == sorted({int(id.partition("-")[0]) for id in commits})

    def handle(record: int) -> None:
        if record == 7:
            raise Broken

    commits.clear()
    with pytest.raises(RecordFailed, match="'7-0'") as failed:
        run(((f"{n}-0", n) for n in range(20)), handle, key=lambda r: 0, commit=commits.append, every=60)
    assert failed.value.offset == "7-0"
    assert commits == ["6-0"]
    with pytest.raises(RecordFailed):
        run([(("file", 1), 7)], handle, key=same, commit=commits.append)
    assert commits == ["6-0"]


@on_both_runners
def test_invalid_offsets_are_refused(run: Run) -> None:
    """Out of order, of two kinds, or opaque in a window of numbers."""
    with pytest.raises(OffsetOutOfOrder):
        run([(1, 1), (1, 1)], same, key=same)
    with pytest.raises(InvalidArgument, match="after integers"):
        run([(1, 1), ("2", 2)], same, key=same)
    with pytest.raises(InvalidArgument, match="restored"):
        run([("2", 2)], same, key=same, window=AckWindow.restore(Snapshot(5, 5)))


@on_both_runners
@pytest.mark.parametrize("options", [{"lanes": 0}, {"every": 0}, {"grace": -1}, {"stuck_after": 0}])
def test_invalid_options_are_refused(run: Run, options: dict[str, Any]) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidArgument, match=next(iter(options)).rstrip("s")):
        run(iter([(1, 1)]), same, key=same, **options)


def test_a_given_window_records_acks_above_the_floor() -> None:
    """While one offset holds the floor, acks above it are committed with the snapshot; without a window the same floor
    is not committed twice."""
    stored: list[bytes] = []
    window = AckWindow()
    committed = threading.Event()

    def handle(record: int) -> None:
        if record == 0:
            committed.wait(60)

    def commit(floor: int) -> None:
        stored.append(window.snapshot())
        if Snapshot.decode(stored[-1]) == Snapshot(-1, 5, (0,)):
            committed.set()

    run_ordered(numbered(6), handle, key=lambda r: r > 0, lanes=2, window=window, commit=commit, every=0.001)
    assert committed.is_set()
    assert Snapshot.decode(stored[-1]) == Snapshot(5, 5)


# The asynchronous runner only.


@mutant(
    "a-cancelled-stream-commits-nothing",
    "lastbit.streams.ordered_async:_Run._end",
    "await run_steps_async(self._stream.commit_at_the_end())",
    "",
)
def test_a_cancelled_stream_commits_acked_records() -> None:
    """Handlers are cancelled, their records stay outstanding, and the cancellation is raised."""
    window = AckWindow()
    commits: list[int] = []
    cancelled: list[int] = []

    async def main() -> None:
        reached = asyncio.Event()

        async def source() -> AsyncIterator[Any]:
            for item in numbered(4):
                yield item
            await asyncio.Event().wait()

        async def handle(record: int) -> None:
            if record == 2:
                reached.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(record)
                    raise

        task = asyncio.create_task(
            run_ordered_async(source(), handle, key=lambda r: 0, commit=commits.append, every=60, window=window)
        )
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert (commits, cancelled) == ([1], [2])
    assert window.outstanding == (2, 3)


async def iterations(count: int) -> None:
    """Let the event loop run all its callbacks this many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class FullStream:
    """A stream of two lanes whose window is full: the handlers of 0 and 1 run until they are released, and the reader
    waits for room."""

    def __init__(self) -> None:
        self.released = [asyncio.Event(), asyncio.Event()]
        self.commits: list[int] = []
        self.handled: list[int] = []
        self.task = asyncio.create_task(
            run_ordered_async(
                zip(itertools.count(), itertools.count(), strict=True),
                self._handle,
                key=same,
                lanes=2,
                commit=self.commits.append,
                every=60,
                window=AckWindow(capacity=2),
            )
        )

    async def _handle(self, record: int) -> None:
        if record < 2:
            await self.released[record].wait()
        if record == 1:
            raise Broken
        self.handled.append(record)

    async def ended(self) -> None:
        """Wait a bounded number of iterations, without any time-out."""
        await iterations(100)
        assert self.task.done(), "the stream hangs"
        assert len(asyncio.all_tasks()) == 1


MOMENTS = range(6)
"""Iterations of the event loop after which something happens; each step of the stream takes fewer."""


@pytest.mark.parametrize("failure", MOMENTS)
@pytest.mark.parametrize("ack", MOMENTS)
def test_a_full_stream_ends_when_a_lane_fails_whenever_the_other_one_acks(failure: int, ack: int) -> None:
    """The cancellation of the reader may coincide with the room that it waits for; acked records are committed."""

    async def main() -> None:
        stream = FullStream()
        await iterations(20)
        for moment in MOMENTS:
            if moment == ack:
                stream.released[0].set()
            if moment == failure:
                stream.released[1].set()
            await iterations(1)
        await stream.ended()
        with pytest.raises(RecordFailed, match="1"):
            await stream.task
        assert stream.commits == [0]

    asyncio.run(main())


# Equivalent from Python 3.12 on.
@mutant(
    "a-reader-loses-its-cancellation",
    "lastbit.streams._tasks:set_within",
    "async with asyncio.timeout(seconds):\n    return await event.wait()",
    "return await asyncio.wait_for(event.wait(), seconds)",
)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancellation", MOMENTS)
@pytest.mark.parametrize("ack", MOMENTS)
def test_a_full_stream_ends_when_it_is_cancelled_whenever_a_lane_acks(ack: int, cancellation: int, fails: bool) -> None:
    """The other lane fails together with the ack, or continues."""

    async def main() -> None:
        stream = FullStream()
        await iterations(20)
        for moment in MOMENTS:
            if moment == ack:
                stream.released[0].set()
                if fails:
                    stream.released[1].set()
            if moment == cancellation:
                stream.task.cancel()
            await iterations(1)
        await stream.ended()
        with pytest.raises((asyncio.CancelledError, RecordFailed)):
            await stream.task
        assert stream.commits == stream.handled[:1]

    asyncio.run(main())


def test_a_waiting_source_is_abandoned_when_a_handler_fails() -> None:
    """No further record is needed for it; and a handler that outlasts the grace is cancelled."""
    closed: list[bool] = []

    async def main() -> None:
        waiting = asyncio.Event()

        async def source() -> AsyncIterator[Any]:
            try:
                yield 0, 0
                yield 1, 1
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        async def handle(record: int) -> None:
            if record == 1:
                await waiting.wait()
                raise Broken
            waiting.set()
            await asyncio.Event().wait()

        with pytest.raises(RecordFailed) as failed:
            await run_ordered_async(source(), handle, key=same, lanes=2, grace=0.01)
        assert failed.value.offset == 1
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert closed == [True]


def test_a_cancellation_from_within_is_a_failure_not_an_end() -> None:
    """A handler or a source that raises CancelledError itself must not look like the end of the stream."""

    async def handle(record: int) -> None:
        raise asyncio.CancelledError

    async def source() -> AsyncIterator[Any]:
        yield 0, 0
        raise asyncio.CancelledError

    async def succeed(record: int) -> None:
        pass

    with pytest.raises(RecordFailed):
        asyncio.run(run_ordered_async(numbered(3), handle, key=same))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_ordered_async(source(), succeed, key=same))


def test_a_commit_that_is_cancelled_from_within_is_tried_again() -> None:
    """Such as one that awaits a task of a pool that was closed; it must not end the commits without a word."""
    commits: list[int] = []
    is_done = asyncio.Event()

    async def commit(floor: int) -> None:
        commits.append(floor)
        if len(commits) == 1:
            raise asyncio.CancelledError
        is_done.set()

    async def source() -> AsyncIterator[Any]:
        yield 0, 0
        await is_done.wait()

    async def handle(record: int) -> None:
        pass

    async def main() -> None:
        async with asyncio.timeout(30):
            await run_ordered_async(source(), handle, key=same, commit=commit, every=0.01)

    asyncio.run(main())
    assert commits == [0, 0]


@mutant(
    "an-interrupt-at-the-end-skips-the-last-commit",
    "lastbit.streams.ordered:_Run.run",
    """
        self._fail(error)
        self._wait_for_records()
        self._end(committer)
    """,
    "raise",
)
def test_an_interrupt_at_the_end_waits_for_the_commit_under_way_and_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C comes when all records are handled, while a commit of the first one is under way."""
    commits: list[int] = []
    reached, goes_on = threading.Event(), threading.Event()
    join = threading.Thread.join

    def source() -> Iterator[Any]:
        yield 0, 0
        assert reached.wait(60)
        yield from numbered(10)[1:]

    def commit(floor: int) -> None:
        reached.set()
        assert goes_on.wait(60)
        commits.append(floor)

    def interrupted_once(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "lastbit-commits" and not goes_on.is_set():
            goes_on.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        run_ordered(source(), same, key=same, commit=commit, every=0.001)
    assert commits == [0, 9]


@mutant(
    "a-cancellation-at-the-end-skips-the-last-commit",
    "lastbit.streams.ordered_async:_Run.run",
    "asyncio.shield(end)",
    "end",
)
def test_a_cancellation_at_the_end_waits_for_the_commit_under_way_and_the_last_one() -> None:
    commits: list[int] = []

    async def handle(record: int) -> None:
        pass

    async def main() -> None:
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def source() -> AsyncIterator[Any]:
            yield 0, 0
            await reached.wait()
            for record in numbered(10)[1:]:
                yield record

        async def commit(floor: int) -> None:
            reached.set()
            await goes_on.wait()
            commits.append(floor)

        window = AckWindow()
        task = asyncio.create_task(
            run_ordered_async(source(), handle, key=same, commit=commit, every=0.001, window=window)
        )
        while window.floor < 9:
            await asyncio.sleep(0)
        await iterations(20)
        task.cancel()
        await iterations(1)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert commits == [0, 9]


def test_a_cancellation_waits_for_the_last_commit() -> None:
    """It is interrupted only by a second one."""
    ended: list[int] = []

    async def handle(record: int) -> None:
        pass

    async def main() -> None:
        reached, goes_on = asyncio.Event(), asyncio.Event()

        async def commit(floor: int) -> None:
            reached.set()
            await goes_on.wait()
            ended.append(floor)

        run = run_ordered_async(numbered(3), handle, key=same, commit=commit, every=60)
        task = asyncio.create_task(run)
        await reached.wait()
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert ended == [2]


def test_dead_letter_handlers_may_be_async() -> None:
    """And their failure ends the stream."""
    dead_letters: list[int] = []

    async def handle(record: int) -> None:
        raise Broken

    async def dead_letter(record: int, error: Exception) -> None:
        await asyncio.sleep(0)
        dead_letters.append(record)

    async def refusing(record: int, error: Exception) -> None:
        raise OSError

    commits: list[int] = []
    asyncio.run(run_ordered_async(numbered(3), handle, key=same, dead_letter=dead_letter, commit=commits.append))
    assert (sorted(dead_letters), commits[-1]) == ([0, 1, 2], 2)
    with pytest.raises(RecordFailed):
        asyncio.run(run_ordered_async(numbered(3), handle, key=same, dead_letter=refusing))
