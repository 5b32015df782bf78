"""The window's behaviour: its start, accepted and refused offsets, and the offset that holds it."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import lastbit.streams
from lastbit.errors import InvalidArgument, LastbitError
from lastbit.streams import (
    AckWindow,
    CommitFailed,
    CorruptSnapshot,
    OffsetOutOfOrder,
    RecordFailed,
    Snapshot,
    UnknownOffset,
    WindowClosed,
    WindowFull,
    partition_of,
)
from lastbit.streams.snapshot import MAX_OFFSET, MAX_OUTSTANDING
from tests.mutants import mutant

KAFKA_METADATA = 4096


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tracked(*offsets: int, capacity: int = MAX_OUTSTANDING) -> AckWindow:
    window = AckWindow(capacity=capacity)
    for offset in offsets:
        assert window.track(offset)
    return window


def test_the_floor_is_before_the_first_outstanding() -> None:
    """Acks come in any order; the floor moves when the first offset is acked."""
    window = AckWindow()
    assert (window.floor, window.high, window.oldest) == (-1, -1, None)
    for offset in (100, 101, 102):
        window.track(offset)
    assert window.floor == 99
    assert window.ack(101)
    assert window.floor == 99
    assert window.ack(100)
    assert (window.floor, window.outstanding) == (101, (102,))
    assert window.ack(102)
    assert (window.floor, window.outstanding, window.positions) == (102, (), 0)


def test_offsets_that_never_existed_do_not_hold_the_floor() -> None:
    """Compacted logs, transaction markers."""
    window = tracked(5, 9, 2**40)
    window.ack(5)
    assert window.floor == 8
    window.ack(9)
    assert window.floor == 2**40 - 1
    assert window.positions == 1
    window.ack(2**40)
    assert window.floor == 2**40


def test_an_ack_is_idempotent_and_an_unknown_offset_is_an_error() -> None:
    """False for a repeat, even much later; an error for an offset that was never tracked: above, below or in a gap."""
    window = tracked(*range(10, 5000), 6000)
    for offset in range(10, 4999):
        assert window.ack(offset) is True
    assert window.ack(10) is window.ack(4998) is False
    for unknown_offset in (9, 0, -1, 5500, 6001, 2**63):
        with pytest.raises(UnknownOffset, match=str(unknown_offset)):
            window.ack(unknown_offset)
    assert window.floor == 4998
    assert window.acks == 4989
    with pytest.raises(UnknownOffset):
        AckWindow().ack(0)


def test_offsets_ascend_and_have_63_bits() -> None:
    """An offset out of order would count as done or as a gap, so it is refused."""
    window = tracked(5)
    for offset in (5, 4, 0):
        with pytest.raises(OffsetOutOfOrder, match=f"offset {offset} was tracked after 5"):
            window.track(offset)
    with pytest.raises(ValueError, match="2\\^63"):
        window.track(MAX_OFFSET + 1)
    assert window.track(MAX_OFFSET)
    with pytest.raises(ValueError, match="2\\^63"):
        AckWindow().track(-1)


def test_a_full_window_names_the_offset_that_holds_it() -> None:
    """Positions count from the first outstanding offset, done or not, so that a restart replays a bounded number."""
    window = tracked(7, 8, 9, capacity=3)
    window.ack(8)
    window.ack(9)
    with pytest.raises(WindowFull) as error_info:
        window.track(10)
    assert error_info.value.oldest == 7
    with pytest.raises(WindowFull):
        window.track(10, timeout=0.001)
    window.ack(7)
    assert window.track(10)
    assert window.floor == 9


def test_the_largest_window_holds_65536_positions() -> None:
    """And is as exact as a small one."""
    window = tracked(*range(MAX_OUTSTANDING))
    with pytest.raises(WindowFull):
        window.track(MAX_OUTSTANDING)
    for offset in range(MAX_OUTSTANDING - 1, 0, -1):
        window.ack(offset)
    assert (window.floor, window.positions) == (-1, MAX_OUTSTANDING)
    window.ack(0)
    assert (window.floor, window.positions) == (MAX_OUTSTANDING - 1, 0)
    for capacity in (0, MAX_OUTSTANDING + 1):
        with pytest.raises(ValueError, match="capacity"):
            AckWindow(capacity=capacity)


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_tracking_waits_for_room(timeout: float | None) -> None:
    """Until an ack from another thread makes room."""
    window = tracked(1, capacity=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(window.track, 2, timeout)
        while not window._waiting:
            assert not waiting.done()
        window.ack(1)
        assert waiting.result(30) is True
    assert window.outstanding == (2,)


def test_closing_the_window_ends_waits_for_room() -> None:
    """Instead of waiting forever."""
    window = tracked(1, capacity=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(window.track, 2, None)
        while not window._waiting:
            assert not waiting.done()
        window.close()
        with pytest.raises(WindowClosed):
            waiting.result(30)


def test_the_oldest_offset_is_named_with_its_age() -> None:
    """By a clock that is passed in; after a restore, from then on and from the redelivery on."""
    clock = Clock()
    window = AckWindow(clock=clock)
    assert (window.oldest, window.oldest_age) == (None, 0.0)
    window.track(3)
    clock.now += 5
    window.track(4)
    clock.now += 2
    assert (window.oldest, window.oldest_age) == (3, 7.0)
    window.ack(3)
    assert window.held_by() == (4, 2.0)
    restored_window = AckWindow.restore(window.snapshot(), clock=clock)
    clock.now += 60
    assert restored_window.held_by() == (4, 60.0)
    restored_window.track(4)
    assert restored_window.held_by() == (4, 0.0)


def test_outstanding_offsets_of_a_snapshot_can_be_acked_without_tracking() -> None:
    """Or tracked again; acked offsets are skipped, and offsets above the snapshot are new."""
    window = tracked(10, 11, 12, 13)
    window.ack(11)
    window.ack(13)
    restored_window = AckWindow.restore(window.snapshot())
    assert (restored_window.floor, restored_window.high, restored_window.outstanding) == (9, 13, (10, 12))
    assert restored_window.ack(10) is True
    assert restored_window.ack(13) is False
    assert [restored_window.track(offset) for offset in (8, 10, 11, 12, 13, 14)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    assert restored_window.outstanding == (12, 14)
    with pytest.raises(UnknownOffset):
        restored_window.ack(15)


@mutant(
    "the-first-record-after-a-restore-is-skipped",
    "lastbit.streams.window:AckWindow.track",
    "offset <= self._restored",
    "offset <= self._restored + 1",
)
@mutant(
    "outstanding-offsets-are-not-handed-out-again",
    "lastbit.streams.window:AckWindow._track_again",
    "return True",
    "return False",
)
def test_parallel_consumer_62_the_first_record_after_a_restore_is_not_skipped() -> None:
    """parallel-consumer #62: on resuming without encoded gaps, the first record was skipped. A floor is done and the
    next offset is not: with nothing tracked, one done, all done, after a gap, and after falling back to a floor."""
    assert AckWindow.restore(AckWindow().snapshot()).track(0) is True
    assert AckWindow.restore(Snapshot(-1, -1)).track(0) is True
    assert AckWindow.restore(tracked(0).snapshot()).track(0) is True
    for last in (0, 1, 7, 2**32):
        window = tracked(last)
        window.ack(last)
        for distance in (1, 2, 100):
            restored_window = AckWindow.restore(window.snapshot())
            assert restored_window.floor == last
            assert restored_window.track(last) is False
            assert restored_window.track(last + distance) is True
            assert restored_window.outstanding == (last + distance,)
    window = tracked(5, 6)
    damaged_bytes = bytearray(window.snapshot())
    damaged_bytes[-1] ^= 1
    assert AckWindow.restore(bytes(damaged_bytes)).track(5) is True


def test_parallel_consumer_647_metadata_over_its_limit_does_not_stop_consumption() -> None:
    """parallel-consumer #647: with too many gaps for the metadata, consumption stopped. Here tracking and acking
    continue, and so does the floor; offsets that don't fit replay after a restart."""
    window = tracked(*range(0, 200_000, 5))
    for offset in range(5, 200_000, 10):
        window.ack(offset)
    restored_window = AckWindow.restore(window.snapshot(KAFKA_METADATA))
    assert restored_window.high < window.high
    assert restored_window.track(restored_window.high + 1) is True
    assert window.track(200_000)
    assert window.ack(0)
    assert window.floor == 9


@mutant(
    "offsets-beyond-a-limit-count-as-done",
    "lastbit.streams.snapshot:Snapshot.within",
    "self.outstanding[count] - 1",
    "self.high",
)
def test_pulsar_25540_a_truncated_set_of_gaps_is_logged_and_replays(caplog: pytest.LogCaptureFixture) -> None:
    """pulsar #25540: gaps beyond a number were dropped silently. Here it is logged once for as long as it lasts, and
    dropped offsets count as not done."""
    window = tracked(*range(100))
    for offset in range(1, 100, 2):
        window.ack(offset)
    with caplog.at_level(logging.WARNING, "lastbit.streams"):
        data = window.snapshot(22)
        window.snapshot(22)
    assert len(caplog.records) == 1
    restored_window = AckWindow.restore(data)
    high = restored_window.high
    message = caplog.records[0].getMessage()
    assert f"22 bytes hold {len(restored_window.outstanding)} of 50" in message
    assert f"above offset {high} " in message
    assert 0 < high < 99
    replayed = [restored_window.track(offset) for offset in range(100)]
    assert replayed == [offset % 2 == 0 or offset > high for offset in range(100)]
    for offset in range(0, 100, 2):
        window.ack(offset)
    window.snapshot(22)
    window.track(100)
    window.snapshot(22)
    assert len(caplog.records) == 1


@mutant("a-closed-window-takes-acks", "lastbit.streams.window:AckWindow.ack", "self._closed", "False")
def test_redpanda_connect_4477_a_late_ack_after_the_partition_was_revoked_is_refused() -> None:
    """redpanda connect #4477: an ack after the revocation was committed for a partition that another consumer owned. A
    closed window accepts no acks, and its snapshot stays as it was when it was closed."""
    window = tracked(1, 2, 3)
    window.ack(2)
    assert not window.closed
    before = window.snapshot()
    window.close()
    window.close()
    assert window.closed
    for offset in (1, 2, 99):
        with pytest.raises(WindowClosed):
            window.ack(offset)
    with pytest.raises(WindowClosed):
        window.track(4)
    assert (window.floor, window.snapshot(), window.acks) == (0, before, 1)


def test_redpanda_connect_4477_acks_racing_with_the_revocation_come_before_it_or_are_refused() -> None:
    """Every ack that returned True before the close is in the snapshot taken after it, and no other one is."""
    for _ in range(50):
        window = tracked(*range(64))
        begin = threading.Barrier(3)
        acked_offsets: list[int] = []

        def work(
            offsets: range,
            window: AckWindow = window,
            begin: threading.Barrier = begin,
            acked_offsets: list[int] = acked_offsets,
        ) -> None:
            begin.wait()
            try:
                for offset in offsets:
                    window.ack(offset)
                    acked_offsets.append(offset)
            except WindowClosed:
                pass

        workers = [threading.Thread(target=work, args=(range(start, 64, 2),)) for start in (0, 1)]
        for worker in workers:
            worker.start()
        begin.wait()
        window.close()
        snapshot = Snapshot.decode(window.snapshot())
        for worker in workers:
            worker.join()
        assert set(snapshot.outstanding) == set(range(64)) - set(acked_offsets)


def test_kurrentdb_1301_a_checkpoint_with_nothing_outstanding_is_not_ahead_of_tracked_offsets() -> None:
    """KurrentDB #1301: a checkpoint taken while the outstanding set was briefly empty (all events were queued for a
    retry) was placed at the last event sent, and those to be retried were lost. Here an offset is outstanding until it
    is acked, wherever it is, and with nothing outstanding the floor is the last offset tracked, not the last one
    read."""
    window = AckWindow()
    read = [10, 11, 12, 13]
    for offset in read[:2]:
        window.track(offset)
        window.ack(offset)
    assert (window.outstanding, window.floor) == ((), 11)
    assert AckWindow.restore(window.snapshot()).track(12) is True
    window.track(12)
    window.track(13)
    window.ack(13)
    for _ in range(2):  # given back for a retry: it is still outstanding
        assert Snapshot.decode(window.snapshot()).outstanding == (12,)
        assert window.floor == 11


def test_rocketmq_11180_offsets_near_2_to_the_63_stay_exact() -> None:
    """rocketmq #11180: narrowing of a 64-bit offset."""
    for base in (2**31 - 2, 2**32 - 2, 2**53 - 2, MAX_OFFSET - 3):
        window = tracked(base, base + 1, base + 2, base + 3)
        window.ack(base)
        window.ack(base + 2)
        restored_window = AckWindow.restore(window.snapshot())
        assert (restored_window.floor, restored_window.outstanding) == (base, (base + 1, base + 3))
        assert restored_window.ack(base + 1)
        assert restored_window.floor == base + 2
        assert restored_window.ack(base + 3)
        assert restored_window.floor == base + 3


def test_threads_that_ack_at_once_lose_nothing() -> None:
    """Each offset is acked by two threads; exactly one of them gets True, and the floor reaches the end."""
    window = AckWindow(capacity=500)
    queue: list[int] = []
    given = [threading.Semaphore(0), threading.Semaphore(0)]

    def work(given: threading.Semaphore) -> int:
        count = 0
        for place in range(4000):
            given.acquire()
            count += window.ack(queue[place])
        return count

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, item) for item in given]
        for offset in range(0, 12_000, 3):
            window.track(offset, timeout=None)
            queue.append(offset)
            for item in given:
                item.release()
        assert sum(item.result(60) for item in futures) == 4000
    assert (window.floor, window.outstanding, window.positions) == (11_997, (), 0)


def test_an_unreadable_snapshot_is_refused() -> None:
    """So that its owner starts with the position that the source itself has stored."""
    with pytest.raises(CorruptSnapshot):
        AckWindow.restore(b"")
    with pytest.raises(CorruptSnapshot):
        AckWindow.restore(bytes(13))


@pytest.mark.parametrize(("key", "partition"), [("", 0), ("order-1", 39), (b"order-1", 39), ("zu groß", 28), ("a", 27)])
def test_a_key_has_the_same_partition_everywhere(key: str | bytes, partition: int) -> None:
    """These are recorded: a change would route a key's events past its earlier ones."""
    assert partition_of(key, 40) == partition
    assert partition_of(key, 1) == 0
    with pytest.raises(ValueError, match="partition"):
        partition_of(key, 0)


def test_the_partition_of_a_number_is_refused() -> None:
    """A number has no bytes; the error shows the text that is meant."""
    with pytest.raises(InvalidArgument, match="a text or bytes, like '42', not 42"):
        partition_of(42, 64)  # type: ignore[arg-type]


def test_errors_can_be_pickled_with_their_data() -> None:
    """Each is a LastbitError with its data."""
    for error in (
        *(
            UnknownOffset(3),
            OffsetOutOfOrder(3, 5),
            WindowFull(2),
            WindowClosed(),
            RecordFailed("5-0"),
            CommitFailed(9),
        ),
        CorruptSnapshot("no"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
        assert isinstance(copy, LastbitError)
        assert str(error)


def test_the_public_names_need_only_the_standard_library() -> None:
    """`from lastbit.streams import *`, without importing an HTTP client."""
    code = (
        "import sys; sys.modules['httpx'] = None\n"
        "from lastbit.streams import *\n"
        "import lastbit.streams\n"
        "AckWindow(); partition_of('a', 3)\n"
        "assert not hasattr(lastbit.streams, 'AckWindwo')\n"
        "assert set(lastbit.streams.__all__) <= set(dir(lastbit.streams))\n"
        "print(*sorted(n.partition('.')[0] for n in sys.modules if n.partition('.')[0] in ('lastbit', 'httpx')))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert set(process.stdout.split()) == {"lastbit", "httpx"}
    errors = {
        name
        for name, value in vars(lastbit.streams.errors).items()
        if isinstance(value, type) and issubclass(value, LastbitError)
    }
    assert errors - {"LastbitError"} <= set(lastbit.streams.__all__)
