"""`run_ordered` and its asynchronous twin: order, commits, failures, pushback, and what each known failure asks for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator
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
    run_ordered,
    run_ordered_async,
)
from lastbit.streams._progress import Options, Progress
from tests.streams.runners import Run, both, in_tasks, in_threads, log_from

EXAMPLES = 150 * (20 if os.environ.get("LASTBIT_SOAK") == "1" else 1)


class Broken(Exception):
    """What a handler, a source or a commit of these tests raises."""


def same(record: Any) -> Any:
    return record


def numbered(count: int) -> list[tuple[int, int]]:
    return [(offset, offset) for offset in range(count)]


@both
def test_a_record_is_outstanding_while_it_is_handled(run: Run) -> None:
    """A snapshot that is stored in that time must not count it as done: the handler may still fail."""
    window = AckWindow()
    outstanding: dict[int, bool] = {}

    def handle(record: int) -> None:
        outstanding[record] = record in window.outstanding

    run(numbered(20), handle, key=same, lanes=2, window=window)
    assert outstanding == dict.fromkeys(range(20), True)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
@both
def test_after_any_failures_each_event_was_handled_in_order_and_only_what_was_outstanding_again(
    run: Run, data: st.DataObject
) -> None:
    """Lives end by a handler, a commit before or after it was stored, the source. Each begins with what the last one
    stored, cut to a limit at times. No event of a key is handled before an earlier one was; what is handled again, the
    stored snapshot did not know as done."""
    keys = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=40), "keys")
    gaps = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 50]), min_size=len(keys), max_size=len(keys)), "gaps")
    log = {offset: (offset, key) for offset, key in zip(itertools.accumulate(gaps, initial=0), keys, strict=False)}
    lanes = data.draw(st.integers(1, 4), "lanes")
    capacity = data.draw(st.sampled_from([1, 3, 10, 1000]), "capacity")
    limit = data.draw(st.sampled_from([None, 13, 20]), "limit")
    deaths = data.draw(
        st.lists(st.tuples(st.sampled_from(["handle", "commit", "stored", "source"]), st.integers(0, 30)), max_size=6)
    )
    handled: list[int] = []
    stored = Snapshot()

    for where, count in [*deaths, ("nothing", 0)]:
        life = Life(where, count)
        window = AckWindow.restore(stored, capacity=capacity)
        beginning = stored
        floors = [stored.floor]
        done_here: list[int] = []

        def handle(
            record: tuple[int, int],
            life: Life = life,
            beginning: Snapshot = beginning,
            done_here: list[int] = done_here,
        ) -> None:
            offset, key = record
            assert all(o in handled for o in log if o < offset and log[o][1] == key), "out of order"
            assert not beginning.done(offset), "handled again, though it was known to be done"
            life.passes("handle")
            handled.append(offset)
            done_here.append(offset)

        def commit(floor: int, life: Life = life, window: AckWindow = window, floors: list[int] = floors) -> None:
            nonlocal stored
            life.passes("commit")
            assert floor >= floors[-1], "a commit went back"
            floors.append(floor)
            stored = stored.merge(Snapshot.decode(window.snapshot(limit)))
            life.passes("stored")

        def source(life: Life = life, floor: int = stored.floor) -> Iterator[Any]:
            for item in log_from(log, floor):
                life.passes("source")
                yield item

        try:
            run(source(), handle, key=lambda r: r[1], lanes=lanes, commit=commit, every=0.001, window=window)
        except (RecordFailed, Broken) as error:
            ended_by = {"handle": RecordFailed, "source": Broken}
            if not isinstance(error, ended_by.get(where, ())) or isinstance(error.__cause__, AssertionError):
                raise
            if isinstance(error, RecordFailed) and error.offset not in window.outstanding:
                raise AssertionError("a record that failed was acked") from error
        # A commit is tried again, so in the end it holds all that was handled in this life.
        assert all(offset in handled for offset in log if stored.done(offset)), "a record was skipped"
        if limit is None:
            assert all(stored.done(offset) for offset in done_here)
    assert set(handled) == set(log)
    if limit is None:
        assert len(handled) == len(log)


class Life:
    """Breaks once, at the `count`th pass of a place."""

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


@both
def test_the_end_is_committed_and_no_commit_goes_back(run: Run) -> None:
    """Conflated: far fewer commits than records; the last one is the end."""
    commits: list[int] = []
    run(numbered(3000), same, key=same, commit=commits.append, every=0.005)
    assert commits[-1] == 2999
    assert commits == sorted(set(commits))
    assert len(commits) < 1000


@both
def test_nothing_is_committed_where_nothing_was_done(run: Run) -> None:
    """No record; or records of which the first fails."""
    commits: list[int] = []
    run([], same, key=same, commit=commits.append)
    run([None, None], same, key=same, commit=commits.append)

    def handle(record: int) -> None:
        raise Broken

    with pytest.raises(RecordFailed):
        run([(100, 0), (101, 1)], handle, key=lambda r: 0, commit=commits.append)
    assert commits == []


@both
def test_lanes_work_at_the_same_time(run: Run) -> None:
    """All four handlers are under way at once, or none would come to its end."""
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


@both
def test_a_handler_that_fails_stops_the_stream_after_what_was_safe_is_committed(run: Run) -> None:
    """The error bears the record's offset and its cause; of its key nothing later is handled."""
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


@both
def test_a_failure_is_noticed_though_no_record_comes(run: Run) -> None:
    """A source that has nothing yields None; what was safe is committed by then."""
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


# Of Ctrl-C an event loop makes a cancellation, which has a test of its own.
@pytest.mark.parametrize(("run", "error"), [(in_threads, Broken), (in_tasks, Broken), (in_threads, KeyboardInterrupt)])
def test_whatever_ends_the_source_comes_after_the_commit(run: Run, error: type[BaseException]) -> None:
    """Its error is raised as it is, Ctrl-C too, when the records in hand are done and the floor is committed."""
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


def test_one_stuck_key_does_not_take_all_memory_and_is_named() -> None:
    """Other lanes go on until the window is full, then the source is not read any more; `on_stuck` and the window name
    the offset; when it comes free, all goes on."""
    window = AckWindow(capacity=100)
    free = threading.Event()
    read: list[int] = []
    handled: list[int] = []
    named: list[int] = []

    def source() -> Iterator[Any]:
        for offset in range(1000):
            read.append(offset)
            yield offset, offset

    def handle(record: int) -> None:
        if record % 4 == 3 and not free.wait(30):
            free.set()  # Those behind it need not wait as long.
        handled.append(record)

    def when_full() -> None:
        # All that are not behind the stuck one are done, and the reader holds one that doesn't fit. Where threads are
        # slow, the first that is named may be one before it.
        while not over.is_set() and (3 not in named or len(read) < 104 or len(handled) < 3 + 75):
            wait_a_little()
        at_full.append((len(read), len(handled), window.oldest, window.positions))
        free.set()

    over = threading.Event()
    at_full: list[tuple[int, int, int | None, int]] = []
    watcher = threading.Thread(target=when_full)
    watcher.start()
    run_ordered(
        *(source(), handle),
        key=lambda record: 0 if record % 4 == 3 else 1 + record % 4,
        window=window,
        every=0.001,
        stuck_after=0.001,
        on_stuck=lambda offset, seconds: named.append(offset),
    )
    over.set()
    watcher.join()
    assert at_full == [(104, 78, 3, 100)]
    assert named.count(3) == 1
    assert sorted(handled) == read == list(range(1000))
    assert window.floor == 999


@both
def test_what_waits_is_bounded_by_the_window(run: Run) -> None:
    """Of a source that is faster than its handlers, no more is read than the window holds and one."""
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


@both
def test_an_offset_that_holds_the_floor_is_told_in_the_log(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Where nobody asked to be called; once."""

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
    (told,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "'first-0' has been outstanding" in told.getMessage()


def wait_a_little() -> None:
    threading.Event().wait(0.0005)


def wait_for(released: list[bool]) -> None:
    while not released:
        wait_a_little()


@both
def test_eventuous_142_ignored_events_do_not_block_the_floor(run: Run) -> None:
    """eventuous #142: events of an unknown type never reached the consumer, their positions were never committed, and
    the checkpoint stood still behind the gap. What is filtered out is acked; so is a stream of nothing else."""
    commits: list[int] = []
    handled: list[int] = []
    run(numbered(100), handled.append, key=same, commit=commits.append, wanted=lambda r: r in (3, 50))
    assert sorted(handled) == [3, 50]
    assert commits[-1] == 99
    commits.clear()
    run(numbered(100), handled.append, key=same, commit=commits.append, wanted=lambda r: False)
    assert commits[-1] == 99


@both
def test_a_dead_letter_is_acked_when_it_is_taken(run: Run) -> None:
    """Records that raise, and those of which not even the key can be told; one that the dead letters refuse too ends
    the stream."""
    commits: list[int] = []
    dead: list[tuple[Any, str]] = []

    def key(record: int) -> int:
        return 7 // (record - 5)

    def handle(record: int) -> None:
        if record % 10 == 0:
            raise Broken(str(record))

    def dead_letter(record: int, error: Exception) -> None:
        dead.append((record, type(error).__name__))
        if record == 30:
            raise OSError("the dead letters' queue is away")

    run(numbered(30), handle, key=key, commit=commits.append, dead_letter=dead_letter)
    assert sorted(dead) == [(0, "Broken"), (5, "ZeroDivisionError"), (10, "Broken"), (20, "Broken")]
    assert commits[-1] == 29
    with pytest.raises(RecordFailed) as failed:
        run(numbered(35), handle, key=same, lanes=1, commit=commits.append, dead_letter=dead_letter)
    assert failed.value.offset == 30
    assert isinstance(failed.value.__cause__, OSError)
    assert commits[-1] == 29


@both
def test_a_commit_that_fails_is_tried_again_with_the_floor_of_then(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """And the stream goes on."""
    tried: list[int] = []
    commits: list[int] = []

    def commit(floor: int) -> None:
        tried.append(floor)
        if len(tried) <= 3:
            raise Broken
        commits.append(floor)

    def source() -> Iterator[Any]:
        for item in numbered(30):
            yield item
            while len(tried) < min(item[0], 3):
                yield None

    run(source(), same, key=same, commit=commit, every=0.001)
    assert commits[-1] == 29
    assert tried == sorted(tried)
    assert "tried again" in caplog.text


@both
def test_a_commit_that_keeps_failing_ends_the_stream(run: Run) -> None:
    """With its cause, while the source still has records; the records that were handled replay."""
    tried = 0

    def commit(floor: int) -> None:
        nonlocal tried
        tried += 1
        raise Broken("no broker")

    def source() -> Iterator[Any]:
        yield from numbered(5)
        while True:
            yield None

    with pytest.raises(CommitFailed) as failed:
        run(source(), same, key=same, commit=commit, every=0.001)
    assert isinstance(failed.value.__cause__, Broken)
    assert failed.value.floor <= 4
    assert tried == 5 + 3


@both
def test_a_last_commit_that_fails_is_raised_or_noted(run: Run) -> None:
    """Alone it is the error; beside a failed record it is said with that."""

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


def test_redpanda_connect_4477_nothing_is_committed_once_the_partition_was_taken_away() -> None:
    """redpanda connect #4477: a handler that was under way when the partition was revoked acked later, and its offset
    was committed for a partition of somebody else's. The window is closed; the late ack ends the stream, and no commit
    follows."""
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


@both
def test_a_commit_that_finds_the_stream_taken_away_ends_it(run: Run) -> None:
    """A fence refused it: the caller closes the window and raises, and it is not tried again."""
    window = AckWindow()
    tried: list[int] = []

    def commit(floor: int) -> None:
        tried.append(floor)
        window.close()
        raise Broken("stale epoch")

    def source() -> Iterator[Any]:
        yield 0, 0
        while True:
            yield None

    with pytest.raises(WindowClosed):
        run(source(), same, key=same, window=window, commit=commit, every=0.001)
    assert tried == [0]


def test_kurrentdb_1301_no_commit_is_ahead_of_a_record_on_its_way() -> None:
    """KurrentDB #1301: a checkpoint while nothing seemed outstanding. Commits go on while records are read, routed and
    handled; none is ever ahead of one whose handler has not returned."""
    done: set[int] = set()
    ahead: list[int] = []

    def commit(floor: int) -> None:
        ahead.extend(offset for offset in range(floor + 1) if offset not in done)

    run_ordered(numbered(3000), done.add, key=same, lanes=3, commit=commit, every=0.0001)
    assert ahead == []
    assert len(done) == 3000


def test_a_handler_that_never_ends_does_not_keep_a_failure_back() -> None:
    """After `grace` seconds it is left behind; its ack, when it comes, commits nothing."""
    commits: list[int] = []
    never, stuck, left = threading.Event(), threading.Event(), threading.Event()
    window = AckWindow()

    def handle(record: int) -> None:
        if record == 0:
            stuck.set()
            never.wait(60)
            left.set()
        elif record == 1:
            stuck.wait(60)
            raise Broken

    with pytest.raises(RecordFailed) as failed:
        run_ordered(numbered(20), handle, key=same, lanes=2, commit=commits.append, window=window, every=60, grace=0.02)
    assert failed.value.offset == 1
    before = list(commits)
    never.set()
    left.wait(60)
    while 0 in window.outstanding:
        pass
    assert commits == before
    assert all(floor == -1 for floor in commits)


@both
def test_a_restored_window_skips_what_is_done_and_replays_what_was_outstanding(run: Run) -> None:
    """And nothing else is handled a second time."""
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


@both
def test_restored_offsets_that_are_gone_from_the_log_do_not_hold_the_floor(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Compaction or retention took them between two runs (parallel-consumer #409): once the source has passed them,
    they never come. It is said."""
    commits: list[int] = []
    for capacity in (10, 3):  # the second is full with those that are gone
        caplog.clear()
        window = AckWindow.restore(Snapshot(4, 9, (5, 7, 9)), capacity=capacity)
        run([(7, 7), (30, 30), (31, 31)], same, key=same, window=window, commit=commits.append)
        assert commits[-1] == 31
    assert [word for word in ("offset 5,", "offset 7,", "offset 9,") if word in caplog.text] == [
        "offset 5,",
        "offset 9,",
    ]


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
    progress: Progress[str] = Progress(None, Options(same, 1, 1.0, None, 1.0, None, 1.0))
    progress.window = window
    for offset in ("a", "b"):
        assert progress.track(progress.position_of(offset), offset)
    window.ack(0)
    due = progress.due()
    assert due is not None
    assert (due.floor, due.offset) == (1, "b")
    progress.committed(due)
    assert progress.due() is None


@both
def test_opaque_offsets_are_committed_as_the_source_gave_them(run: Run) -> None:
    """Redis ids, tuples of a file and a line: the one that stands at the floor."""
    commits: list[str] = []
    run(((f"{n}-0", n) for n in range(500)), same, key=same, commit=commits.append, every=0.001)
    assert commits[-1] == "499-0"
    assert [int(each.partition("-")[0]) for each in commits] == sorted(
        {int(each.partition("-")[0]) for each in commits}
    )

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


@both
def test_offsets_that_are_no_stream_are_refused(run: Run) -> None:
    """Out of order, of two kinds, or opaque in a window that knows numbers."""
    with pytest.raises(OffsetOutOfOrder):
        run([(1, 1), (1, 1)], same, key=same)
    with pytest.raises(InvalidArgument, match="after integers"):
        run([(1, 1), ("2", 2)], same, key=same)
    with pytest.raises(InvalidArgument, match="restored"):
        run([("2", 2)], same, key=same, window=AckWindow.restore(Snapshot(5, 5)))


@both
@pytest.mark.parametrize("wrong", [{"lanes": 0}, {"every": 0}, {"grace": -1}, {"stuck_after": 0}])
def test_options_that_make_no_sense_are_refused(run: Run, wrong: dict[str, Any]) -> None:
    """Before anything is read."""
    with pytest.raises(InvalidArgument, match=next(iter(wrong)).rstrip("s")):
        run(iter([(1, 1)]), same, key=same, **wrong)


def test_a_window_of_ones_own_hears_of_acks_above_the_floor() -> None:
    """While one offset holds the floor, what is done above it is committed with the snapshot; without a window the
    same floor is not committed twice."""
    stored: list[bytes] = []
    window = AckWindow()
    seen = threading.Event()

    def handle(record: int) -> None:
        if record == 0:
            seen.wait(60)

    def commit(floor: int) -> None:
        stored.append(window.snapshot())
        if Snapshot.decode(stored[-1]) == Snapshot(-1, 5, (0,)):
            seen.set()

    run_ordered(numbered(6), handle, key=lambda r: r > 0, lanes=2, window=window, commit=commit, every=0.001)
    assert seen.is_set()
    assert Snapshot.decode(stored[-1]) == Snapshot(5, 5)


# The asynchronous one alone.


def test_a_cancelled_stream_commits_what_is_safe() -> None:
    """Handlers are cancelled, their records stay outstanding, and the cancellation goes on."""
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
        """Within a bounded number of iterations, none of which waits for a time-out."""
        await iterations(100)
        assert self.task.done(), "the stream hangs"
        assert len(asyncio.all_tasks()) == 1


MOMENTS = range(6)
"""Iterations of the event loop after which something happens; each step of the stream takes fewer."""


@pytest.mark.parametrize("failure", MOMENTS)
@pytest.mark.parametrize("ack", MOMENTS)
def test_a_full_stream_ends_when_a_lane_fails_whenever_the_other_one_acks(failure: int, ack: int) -> None:
    """The cancellation of the reader may come together with the room that it waits for; what is safe is committed."""

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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancellation", MOMENTS)
@pytest.mark.parametrize("ack", MOMENTS)
def test_a_full_stream_ends_when_it_is_cancelled_whenever_a_lane_acks(ack: int, cancellation: int, fails: bool) -> None:
    """The other lane fails together with the ack, or goes on."""

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


def test_a_waiting_source_is_given_up_when_a_handler_fails() -> None:
    """No record has to come for it; and a handler that outlasts the grace is cancelled."""
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


def test_a_cancellation_from_within_is_a_failure_and_no_end() -> None:
    """A handler or a source that raises CancelledError by itself must not look like a stream that has ended."""

    async def handle(record: int) -> None:
        raise asyncio.CancelledError

    async def source() -> AsyncIterator[Any]:
        yield 0, 0
        raise asyncio.CancelledError

    async def fine(record: int) -> None:
        pass

    with pytest.raises(RecordFailed):
        asyncio.run(run_ordered_async(numbered(3), handle, key=same))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run_ordered_async(source(), fine, key=same))


def test_dead_letters_may_be_awaited() -> None:
    """And their failure ends the stream."""
    dead: list[int] = []

    async def handle(record: int) -> None:
        raise Broken

    async def dead_letter(record: int, error: Exception) -> None:
        await asyncio.sleep(0)
        dead.append(record)

    async def refusing(record: int, error: Exception) -> None:
        raise OSError

    commits: list[int] = []
    asyncio.run(run_ordered_async(numbered(3), handle, key=same, dead_letter=dead_letter, commit=commits.append))
    assert (sorted(dead), commits[-1]) == ([0, 1, 2], 2)
    with pytest.raises(RecordFailed):
        asyncio.run(run_ordered_async(numbered(3), handle, key=same, dead_letter=refusing))
