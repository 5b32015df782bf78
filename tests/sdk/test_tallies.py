"""The client of tallies with a real service; its buffers, from threads and tasks."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from lastbit import (
    AsyncClient,
    BufferClosed,
    Client,
    Fence,
    InvalidArgument,
    InvalidRequest,
    NotFound,
    OutOfOrder,
    Retry,
    ServiceUnreachable,
    Source,
    SourceChain,
    SubCounter,
    TallyApplied,
    TallyEntry,
    TallyTotal,
    TallyValue,
)
from lastbit.streams import AckWindow
from lastbit.tallies.buffer import Gatherer, Message
from tests.mutants import mutant
from tests.sdk.children import in_a_child
from tests.sdk.conftest import Way


def read(offset: int, partition: int = 0) -> SourceChain:
    return SourceChain().hop("screws", partition, offset)


class Window:
    """A stand-in for an `AckWindow`."""

    def __init__(self) -> None:
        self.acked: list[int] = []

    def ack(self, offset: int) -> bool:
        self.acked.append(offset)
        return True


def test_a_tally_counts_each_message_once(client: Client) -> None:
    """Entries as tuples, with a chain or with the source itself; totals by key and by prefix."""
    tally = client.tally("once")
    entries = [("r/1", 3, read(5)), TallyEntry("r/2", 4, Source("screws", 1, 0)), ("s", -1, read(6))]
    assert tally.apply(entries) == TallyApplied(3, 0)
    assert tally.apply([*entries, ("r/1", 10, read(5).hop("u", 0, 0, 1))]) == TallyApplied(1, 3)
    assert tally.value("r/1") == 13
    assert tally.get("r/2") == TallyValue("r/2", 4, (SubCounter("screws", 1, 0, 0, 0, 4),))
    assert tally.get("?/#") == TallyValue("?/#", 0, ())
    assert list(tally.totals(prefix="r/", page_size=1)) == [TallyTotal("r/1", 13), TallyTotal("r/2", 4)]
    tally.delete()
    assert list(tally.totals()) == []


def test_refusals_are_raised(way: Way, client: Client) -> None:
    """By the service or before anything is sent."""
    tally = client.tally(f"refused-{way.name}")
    with pytest.raises(OutOfOrder, match="offset 1, child 0"):
        tally.apply([("k", 1, read(2)), ("k", 1, read(1))])
    with pytest.raises(InvalidRequest, match="delta"):
        tally.apply([("k", 2**60, read(2))])
    window = Window()
    with tally.buffer(window) as buffer:
        for wrong in ({"k": 1.5}, {"k": True}, {"k": None}, {"\ud800": 1}, {5: 1}):
            with pytest.raises(InvalidArgument, match=r"a delta is a whole number|a key is a text"):
                buffer.add(wrong, read(2))  # type: ignore[arg-type]
        # None of these calls closes it.
        buffer.add({"k": 0}, read(3))
    assert window.acked == [3]
    for call in (
        lambda: tally.apply([("k", 1, ("screws", 0, 5))]),  # type: ignore[list-item]
        lambda: tally.apply([("k", 1, SourceChain())]),
        lambda: tally.get(""),
        lambda: client.tally("").value("k"),
        lambda: tally.buffer(every=-1),
        lambda: tally.buffer(most=0),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert tally.value("k") == 0


def test_a_buffer_joins_calls_and_acks_applied_messages(client: Client) -> None:
    """Messages with several keys, one or none, from several threads with a partition each."""
    tally, window = client.tally("buffered"), Window()
    with tally.buffer(window, every=0.01, most=50) as buffer:

        def consume(partition: int) -> None:
            for offset in range(300):
                buffer.add({"all": 1, f"p{partition}": offset} if offset % 3 else {}, read(offset, partition))

        threads = [threading.Thread(target=consume, args=(partition,)) for partition in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        buffer.flush()
        assert tally.value("all") == 800
    assert sorted(window.acked) == sorted([*range(300)] * 4)
    assert tally.value("p3") == sum(offset for offset in range(300) if offset % 3)
    with pytest.raises(BufferClosed, match="accepts no more"):
        buffer.add({"all": 1}, read(300))


def test_a_buffer_sends_after_its_interval_without_further_messages(client: Client) -> None:
    """A message is acked by this consumer's offset, not by its root's."""
    sent_event = threading.Event()

    class RecordingWindow:
        def ack(self, offset: int) -> None:
            assert offset == 4711
            sent_event.set()

    with client.tally("interval").buffer(every=0.01) as buffer:
        buffer.add({"k": 2}, read(5).hop("by-robot", 0, 4711), window=RecordingWindow())
        assert sent_event.wait(30)
    assert client.tally("interval").get("k").sources[0].offset == 5


def test_a_gatherer_never_splits_a_message_or_joins_deltas() -> None:
    """Only a single message that is larger than a call makes a larger one."""
    gatherer = Gatherer(3)
    assert gatherer.take() is None
    sizes = [2, 2, 0, 1, 5, 1, 1, 1, 0]
    for number, size in enumerate(sizes):
        gatherer.put(Message([{"key": "k", "delta": number}] * size, None))
    assert gatherer.entries == 13
    calls = []
    while (call := gatherer.take()) is not None:
        calls.append(([entry["delta"] for entry in call.entries], call.messages))
    assert calls == [([0, 0], 1), ([1, 1, 3], 3), ([4] * 5, 1), ([5, 6, 7], 4)]
    assert not gatherer
    assert gatherer.entries == 0


def test_an_ack_that_fails_ends_the_buffer(client: Client) -> None:
    """No caller continues as if the ack had succeeded."""

    class Broken:
        def ack(self, offset: int) -> None:
            raise KeyError(offset)

    buffer = client.tally("broken").buffer(Broken(), every=60)
    buffer.add({"k": 1}, read(7))
    for call in (buffer.flush, lambda: buffer.add({"k": 1}, read(8)), buffer.close):
        with pytest.raises(KeyError, match="7"):
            call()
    assert client.tally("broken").value("k") == 1


def test_a_buffer_acks_a_real_window_and_ignores_a_late_ack(client: Client) -> None:
    """The floor moves after the service's answer; a window that was closed meanwhile stays unchanged."""
    window = AckWindow()
    with client.tally("window").buffer(window, every=60) as buffer:
        for offset in range(10, 20):
            window.track(offset)
            buffer.add({"k": 1}, read(offset))
        assert window.floor == 9
        buffer.flush()
        assert window.floor == 19
        window.track(20)
        buffer.add({"k": 1}, read(20))
        window.close()
    assert window.floor == 19
    assert client.tally("window").value("k") == 11


def test_a_fence_is_sent_with_the_entries(way: Way, client: Client) -> None:
    """With a missing group nothing is applied; the same with await."""
    fence = Fence("nowhere", 0, "one", 1)
    entries = [("k", 1, read(0))]

    async def awaited() -> None:
        async with way.async_client() as other:
            await other.tally("fenced").apply(entries, fence=fence)

    for apply in (lambda: client.tally("fenced").apply(entries, fence=fence), lambda: asyncio.run(awaited())):
        with pytest.raises(NotFound):
            apply()
    assert client.tally("fenced").value("k") == 0


@pytest.mark.parametrize("deltas", [{"k": 1}, {}], ids=["an entry", "no entry"])
def test_a_full_buffer_blocks_its_callers_until_a_failure_wakes_them(scripted_service: Any, deltas: Any) -> None:
    """The entries of ten calls wait, and no more. A message without an entry counts as one: a filtered stream must not
    fill the memory, or the window of its offsets, while a call is under way."""
    gate, request_arrived = threading.Event(), threading.Event()

    def reply(_: Any) -> Any:
        request_arrived.set()
        gate.wait(30)
        return None

    scripted_service.reply = reply
    with Client(scripted_service.url, retry=Retry(attempts=1)) as client:
        buffer = client.tally("t").buffer(every=0, most=1)
        count = 0
        stopping = threading.Event()

        def add() -> None:
            nonlocal count
            try:
                for offset in range(1, 100):
                    buffer.add(deltas, read(offset))
                    count += 1
            except ServiceUnreachable:
                stopping.set()

        buffer.add({"k": 1}, read(0))
        assert request_arrived.wait(30)  # or messages without an entry might join the first call
        thread = threading.Thread(target=add)
        thread.start()
        gate.set()
        assert stopping.wait(30)
        thread.join()
        assert count <= 10
        with pytest.raises(ServiceUnreachable):
            buffer.close()


def test_the_async_client_counts_the_same(way: Way, scripted_service: Any) -> None:
    """Same names, with await; a buffer's failure is raised by each of its calls."""

    async def run() -> None:
        window = Window()
        async with way.async_client() as client:
            tally = client.tally("async")
            assert await tally.apply([("k", 3, read(5))]) == TallyApplied(1, 0)
            async with tally.buffer(window, every=0.005, most=20) as buffer:
                for offset in range(200):
                    await buffer.add({"k": 1} if offset % 2 else {}, read(offset))
                    if offset == 100:
                        await buffer.flush()
                        assert window.acked == [*range(101)]
            assert window.acked == [*range(200)]
            assert await tally.value("k") == 3 + sum(1 for offset in range(6, 200) if offset % 2)
            assert (await tally.get("k")).sources[0].offset == 199
            assert [total async for total in tally.totals()] == [TallyTotal("k", await tally.value("k"))]
            with pytest.raises(BufferClosed):
                await buffer.add({"k": 1}, read(200))
            await tally.delete()
        scripted_service.replies(None)
        async with AsyncClient(scripted_service.url, retry=Retry(attempts=1)) as client:
            failing = client.tally("t").buffer(Window(), every=60, most=2)
            await failing.add({"k": 1}, read(0))
            for call in (failing.flush(), failing.add({"k": 1}, read(1)), failing.close()):
                with pytest.raises(ServiceUnreachable):
                    await call

    asyncio.run(run())


@mutant("a-cancelled-buffer-hangs", "lastbit.tallies.buffer:AsyncTallyBuffer._work", "BaseException", "Exception")
@pytest.mark.parametrize("moment", range(6))
def test_a_buffer_whose_task_is_cancelled_never_hangs(scripted_service: Any, moment: int) -> None:
    """At any moment while an entry arrives. Added entries stay outstanding, and callers get the cause."""

    async def run() -> None:
        async with AsyncClient(scripted_service.url) as client:
            buffer = client.tally("t").buffer(Window(), every=60)
            await buffer.add({"k": 1}, read(0))
            await iterations(20)
            (task,) = (candidate for candidate in asyncio.all_tasks() if candidate.get_name() == "lastbit-tally-buffer")
            await buffer.add({"k": 1}, read(1))
            await iterations(moment)
            task.cancel()
            await iterations(100)
            assert task.cancelled()
            for call in (buffer.add({"k": 1}, read(2)), buffer.flush(), buffer.close()):
                with pytest.raises(RuntimeError, match="was cancelled"):
                    await call

    async def iterations(count: int) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    asyncio.run(run())


@pytest.mark.parametrize("error", [OSError, SystemExit, asyncio.CancelledError])
def test_an_awaited_buffers_window_may_raise_anything(
    scripted_service: Any, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """It ends the buffer, and `flush` raises the same error, except for a cancellation that nobody requested. Nothing
    is left for asyncio to log."""
    scripted_service.replies((200, {}, {"applied": 1, "repeated": 0}))

    class Broken:
        def ack(self, offset: int) -> None:
            raise error

    async def run() -> None:
        async with AsyncClient(scripted_service.url) as client:
            buffer = client.tally("t").buffer(Broken(), every=60)
            await buffer.add({"k": 1}, read(0))
            with pytest.raises(RuntimeError if error is asyncio.CancelledError else error):
                await buffer.flush()

    if error is SystemExit:
        # As in any task, it ends the event loop.
        with pytest.raises(SystemExit):
            asyncio.run(run())
    else:
        asyncio.run(run())
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_buffer_of_the_parent_process_raises_in_the_child(scripted_service: Any) -> None:
    """Its thread does not exist in the child."""
    scripted_service.replies((200, {}, {"applied": 1, "repeated": 0}))
    with Client(scripted_service.url) as client, client.tally("t").buffer() as buffer:
        buffer.add({"k": 1}, read(0))
        for use in (lambda: buffer.add({"k": 1}, read(1)), buffer.flush, buffer.close):
            assert in_a_child(use) == "UsedAfterFork"
        buffer.flush()


@pytest.mark.parametrize("interval", [-1, float("nan"), float("inf"), 1e300])
def test_an_interval_too_long_to_wait_for_is_refused(scripted_service: Any, interval: float) -> None:
    """At once: it would end the buffer's thread."""
    with Client(scripted_service.url) as client, pytest.raises(InvalidArgument, match="every"):
        client.tally("t").buffer(every=interval)


def test_a_service_that_is_briefly_unavailable_counts_nothing_twice(scripted_service: Any) -> None:
    """The client sends the same call again, with the same entries."""
    scripted_service.replies(None, (503, {}, {"code": "unavailable"}), (200, {}, {"applied": 0, "repeated": 1}))
    with Client(scripted_service.url, retry=Retry(base=0.001)) as client:
        assert client.tally("t").apply([("k", 1, read(5, 2).hop("u", 0, 0, 1))]) == TallyApplied(0, 1)
    bodies = [request.body for request in scripted_service.seen]
    source = {"topic": "screws", "partition": 2, "offset": 5, "child": 1 << 34}
    assert bodies == [{"entries": [{"key": "k", "delta": 1, "source": source}]}] * 3


def test_a_thread_that_cannot_start_can_start_later(scripted_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads: the call fails, nothing waits for a thread that never was, and the next call works."""
    scripted_service.reply = lambda seen: (
        (200, {}, {"applied": len(seen.body["entries"]), "repeated": 0})
        if seen.path.startswith("/v1/tallies")
        else (200, {}, {"applied": 1, "repeated": 0, "rejected": [], "completed": []})
    )
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    with Client(scripted_service.url) as client, client.tally("t").buffer() as buffer, client.acker() as acker:
        for call in (lambda: buffer.add({"k": 1}, read(0)), lambda: acker.ack("7:0:0")):
            monkeypatch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                call()
            call()
