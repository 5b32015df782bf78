"""Combining single acks into few calls: the coalescer alone, then both ackers against a gated service."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import Acker, AsyncClient, Client, Completed, Retry, errors
from lastbit._coalescer import Coalescer, Kind
from lastbit.models import AckResult, Rejected
from tests.mutants import mutant
from tests.sdk.children import in_a_child

ACK = Kind("acks", None)
LATE = Kind("failures", "late")
LOST = Kind("failures", "lost")


# -- the pure part


def drained(coalescer: Coalescer[int]) -> list[tuple[Kind, list[str]]]:
    calls = []
    while (call := coalescer.take()) is not None:
        calls.append((call.kind, call.items))
    return calls


def test_waiting_acks_are_sent_in_one_call() -> None:
    """All acks in one call, failures in one for each reason, in the order in which the kinds came."""
    waiting: Coalescer[int] = Coalescer()
    for number, kind in enumerate([ACK, LATE, ACK, LOST, ACK, LATE]):
        waiting.put(f"7:0:{number}", kind, number)
    assert drained(waiting) == [
        (ACK, ["7:0:0", "7:0:2", "7:0:4"]),
        (LATE, ["7:0:1", "7:0:5"]),
        (LOST, ["7:0:3"]),
    ]
    assert not waiting


def test_an_item_acked_twice_is_sent_once() -> None:
    """Both callers that wait for it get the outcome."""
    waiting: Coalescer[int] = Coalescer()
    waiting.put("7:0:1", ACK, 1)
    waiting.put("7:0:1", ACK, 2)
    call = waiting.take()
    assert call is not None
    assert call.items == ["7:0:1"]
    assert call.size == 2
    assert list(call.outcomes(AckResult(applied=1), {})) == [([1, 2], None)]


def test_a_flood_of_acks_does_not_delay_failures() -> None:
    """A kind with more items than fit in a call goes to the end of the queue."""
    waiting: Coalescer[int] = Coalescer(most=2)
    for number in range(5):
        waiting.put(f"7:0:{number}", ACK, number)
    waiting.put("7:0:9", LATE, 9)
    assert [kind for kind, _ in drained(waiting)] == [ACK, LATE, ACK, ACK]


def test_an_item_under_way_delays_nothing() -> None:
    """The queue forgets an item once a call takes it, so a later failure of that item does not wait for all acks."""
    waiting: Coalescer[int] = Coalescer(most=2)
    for item in ("a", "b", "c"):
        waiting.put(item, ACK, 0)
    waiting.take()
    waiting.put("a", LATE, 1)
    waiting.put("d", ACK, 2)
    assert drained(waiting) == [(ACK, ["c", "d"]), (LATE, ["a"])]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([ACK, LATE, LOST])), max_size=60),
    st.integers(1, 4),
    st.data(),
)
def test_nothing_is_lost_and_each_items_order_is_kept(
    given_items: list[tuple[int, Kind]], limit: int, data: st.DataObject
) -> None:
    """For every interleaving of puts and takes: each future is in exactly one call of its kind, no call is too large,
    and reports about one item are sent in the order in which they were made."""
    waiting: Coalescer[int] = Coalescer(limit)
    calls = []
    for future, (number, kind) in enumerate(given_items):
        waiting.put(f"7:0:{number}", kind, future)
        if data.draw(st.booleans()):
            calls.append(waiting.take())
    while waiting:
        calls.append(waiting.take())
    assert waiting.take() is None

    call_number: dict[int, int] = {}
    for place, call in enumerate(calls):
        assert call is not None
        assert 1 <= len(call.waiting) <= limit
        for item, future in call.waiting.futures():
            assert future not in call_number
            call_number[future] = place
            assert (item, call.kind) == (f"7:0:{given_items[future][0]}", given_items[future][1])
    assert len(call_number) == len(given_items)
    for earlier, (item, kind) in enumerate(given_items):
        for second in range(earlier + 1, len(given_items)):
            if given_items[second][0] == item and given_items[second][1] != kind:
                assert call_number[earlier] < call_number[second]


def test_each_future_gets_its_own_outcome() -> None:
    """A rejection, the caller's own error for its batch, the completed batch, or nothing."""
    waiting: Coalescer[str] = Coalescer()
    for item in ("7:0:1", "7:0:2", "8:0:1", "9:0:1"):
        waiting.put(item, ACK, item)
    call = waiting.take()
    assert call is not None
    seven = Completed(7, None, True, True, True)
    eight = Completed(8, None, True, True, True)
    own_error = ValueError("mine")
    result = AckResult(3, 0, (seven, eight), (Rejected("unknown_item", item="7:0:2"),))
    outcomes = {future: outcome for futures, outcome in call.outcomes(result, {8: own_error}) for future in futures}
    rejection = outcomes.pop("7:0:2")
    assert isinstance(rejection, errors.ItemRejected)
    assert rejection.reason == "unknown_item"
    assert outcomes == {"7:0:1": seven, "8:0:1": own_error, "9:0:1": None}


# -- against a service


class Gate:
    """Holds each request until the test releases it, and records the requests."""

    def __init__(self, scripted_service: Any) -> None:
        self.arrived: Any = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.sent: list[tuple[str, list[str]]] = []
        self.completes: set[int] = set()
        self.refuses: set[str] = set()
        self.rejects: set[str] = set()
        scripted_service.reply = self.reply

    def reply(self, request: Any) -> Any:
        items = request.body["items"]
        self.sent.append((request.path, items))
        self.arrived.release()
        self.open.acquire()
        if self.refuses & set(items):
            return 403, {}, {"code": "forbidden", "detail": "not with this token", "status": 403}
        batches = sorted({int(item.split(":")[0]) for item in items} & self.completes)
        rejected = [item for item in items if item in self.rejects]
        return (
            200,
            {},
            {
                "applied": len(items) - len(rejected),
                "repeated": 0,
                "completed": [
                    {"batch": batch, "key": None, "newly": True, "succeeded": True, "newly_succeeded": True}
                    for batch in batches
                ],
                "rejected": [{"item": item, "reason": "unknown_item"} for item in rejected],
            },
        )


@pytest.fixture
def gate(scripted_service: Any) -> Gate:
    return Gate(scripted_service)


def test_an_idle_acker_sends_at_once_and_a_busy_one_gathers(scripted_service: Any, gate: Gate) -> None:
    """There is no timer: acks made during a call go into the next one."""
    with Client(scripted_service.url) as client, client.acker() as acker:
        first = acker.ack("7:0:0")
        gate.arrived.acquire()
        rest = [acker.ack(f"7:0:{number}") for number in range(1, 500)]
        assert not first.done()
        gate.open.release()
        assert first.result() is None
        gate.arrived.acquire()
        assert not any(future.done() for future in rest)
        gate.open.release()
        assert [future.result() for future in rest] == [None] * 499
    assert [len(items) for _, items in gate.sent] == [1, 499]


def test_a_lingering_acker_gathers_before_it_sends(scripted_service: Any, gate: Gate) -> None:
    """It sends when a hundred items wait, or when it is closed; a minute is far from over."""
    gate.open.release(3)
    with Client(scripted_service.url) as client, client.acker(linger=60) as acker:
        futures = [acker.ack(f"7:0:{number}") for number in range(99)]
        assert not gate.arrived.acquire(timeout=0.05)
        futures.append(acker.ack("7:0:99"))
        assert [future.result() for future in futures] == [None] * 100
        last = acker.ack("7:0:100")
    assert last.result() is None
    assert [len(items) for _, items in gate.sent] == [100, 1]


def test_an_acker_lingers_no_longer_than_it_may(scripted_service: Any, gate: Gate) -> None:
    """Nor until more items wait than may be open at a time."""
    gate.open.release(3)
    with Client(scripted_service.url) as client:
        with client.acker(linger=0.02) as acker:
            assert acker.ack("7:0:0").result() is None
        with client.acker(linger=60, max_pending=2) as acker:
            assert [acker.ack(item).result for item in ("7:0:1", "7:0:2")][1]() is None
    assert [len(items) for _, items in gate.sent] == [1, 2]


@pytest.mark.parametrize("linger", [-0.1, 61, float("nan")])
def test_a_wrong_linger_is_refused(scripted_service: Any, linger: float) -> None:
    """The message says what was expected."""
    with (
        Client(scripted_service.url) as client,
        pytest.raises(errors.InvalidArgument, match="linger is 0 to 60 seconds"),
    ):
        client.acker(linger=linger)


def test_a_lingering_asynchronous_acker_gathers_before_it_sends(scripted_service: Any, gate: Gate) -> None:
    """It sends when a hundred items wait, when the time is over, or when it is closed."""
    gate.open.release(4)

    async def run() -> None:
        async with AsyncClient(scripted_service.url) as client:
            async with client.acker(linger=60) as acker:
                futures = [await acker.ack(f"7:0:{number}") for number in range(99)]
                await asyncio.sleep(0)
                assert gate.sent == []
                futures.append(await acker.ack("7:0:99"))
                assert await asyncio.gather(*futures) == [None] * 100
                last = await acker.ack("7:0:100")
            assert await last is None
            async with client.acker(linger=0.02) as acker:
                assert await (await acker.ack("7:0:101")) is None

    asyncio.run(run())
    assert [len(items) for _, items in gate.sent] == [100, 1, 1]


def test_the_futures_of_a_lingering_acker_end_with_the_event_loop(scripted_service: Any, gate: Gate) -> None:
    """They are cancelled, and nothing is sent."""
    futures: list[asyncio.Future[Any]] = []

    async def run() -> None:
        acker = AsyncClient(scripted_service.url).acker(linger=60)
        futures.append(await acker.ack("7:0:0"))
        await asyncio.sleep(0)

    asyncio.run(run())
    assert futures[0].cancelled()
    assert gate.sent == []


def test_on_completed_runs_before_the_futures_are_done(scripted_service: Any, gate: Gate) -> None:
    """The callback runs once for each batch and answer. The message may be removed only after it."""
    gate.completes = {7}
    gate.open.release()
    completions: list[tuple[Completed, bool]] = []
    future: Future[Completed | None]
    future_set = threading.Event()

    def publish(completed: Completed) -> None:
        future_set.wait()
        completions.append((completed, future.done()))

    with Client(scripted_service.url) as client, client.acker(on_completed=publish) as acker:
        future = acker.ack("7:0:0")
        future_set.set()
        assert future.result() == completions[0][0]
    assert [(completed.batch, was_done) for completed, was_done in completions] == [(7, False)]


def test_an_error_of_on_completed_reaches_the_futures_of_its_batch(scripted_service: Any, gate: Gate) -> None:
    """Other futures don't get the error. The message stays, and its redelivery reports the completion again."""
    gate.completes = {7, 8}

    def publish(completed: Completed) -> None:
        if completed.batch == 7:
            raise OSError("disk full")

    with Client(scripted_service.url) as client, client.acker(on_completed=publish) as acker:
        acker.ack("9:0:0")
        gate.arrived.acquire()
        seven, also_seven, eight, nine = (acker.ack(item) for item in ("7:0:0", "7:0:1", "8:0:0", "9:0:1"))
        gate.open.release(2)
        for future in (seven, also_seven):
            with pytest.raises(OSError, match="disk full"):
                future.result()
        completed = eight.result()
        assert completed is not None
        assert completed.batch == 8
        assert nine.result() is None


def test_a_rejected_item_fails_only_its_own_future(scripted_service: Any, gate: Gate) -> None:
    """The error has the service's reason."""
    gate.rejects = {"7:0:1"}
    gate.open.release(9)
    with Client(scripted_service.url) as client, client.acker() as acker:
        accepted, rejected = acker.ack("7:0:0"), acker.ack("7:0:1")
        assert accepted.result() is None
        with pytest.raises(errors.ItemRejected, match="unknown_item") as excinfo:
            rejected.result()
        assert excinfo.value.item == "7:0:1"


class Inbox:
    """A receiver that notes what it gets, and in which thread."""

    def __init__(self) -> None:
        self.outcome: object = None
        self.thread = ""

    def set_result(self, outcome: object) -> None:
        self.outcome, self.thread = outcome, threading.current_thread().name

    set_exception = set_result


def test_a_receiver_gets_what_a_future_would_get(scripted_service: Any, gate: Gate) -> None:
    """In the acker's thread, and before `close` returns. An error of a receiver is its own."""
    gate.completes = {8}
    gate.rejects = {"7:0:2"}
    gate.open.release(9)
    inboxes = [Inbox() for _ in range(3)]
    with Client(scripted_service.url) as client, client.acker() as acker:
        acker.ack_for(object(), "7:0:3")  # type: ignore[arg-type]
        acker.ack_for(inboxes[0], "7:0:0")
        acker.ack_for(inboxes[1], "8:0:0")
        acker.fail_for(inboxes[2], "7:0:2", "torn")
        with pytest.raises(errors.MalformedItem):
            acker.ack_for(Inbox(), "7:0")
    assert [inbox.thread for inbox in inboxes] == ["lastbit-acker"] * 3
    assert [type(inbox.outcome) for inbox in inboxes] == [type(None), Completed, errors.ItemRejected]
    with pytest.raises(errors.AckerClosed):
        acker.ack_for(Inbox(), "7:0:4")


def test_a_refused_call_fails_only_its_own_futures(scripted_service: Any, gate: Gate) -> None:
    """The acker continues."""
    gate.refuses = {"7:0:0"}
    gate.open.release(9)
    with Client(scripted_service.url) as client, client.acker() as acker:
        with pytest.raises(errors.Forbidden):
            acker.ack("7:0:0").result()
        assert acker.ack("7:0:1").result() is None


def test_a_malformed_id_is_refused_at_once(scripted_service: Any, gate: Gate) -> None:
    """It never shares a call with valid ids."""
    with Client(scripted_service.url) as client, client.acker() as acker, pytest.raises(errors.MalformedItem):
        acker.ack("7:0")
    assert gate.sent == []


@pytest.mark.parametrize("reason", [["moved"], b"moved", "\ud800"], ids=repr)
def test_a_reason_that_is_not_a_text_is_refused_at_once(scripted_service: Any, gate: Gate, reason: Any) -> None:
    """The acker continues."""
    gate.open.release()
    with Client(scripted_service.url) as client, client.acker() as acker:
        with pytest.raises(errors.InvalidArgument, match="a reason is a text"):
            acker.fail("7:0:0", reason)
        assert acker.fail("7:0:1", "moved").result(20) is None


def test_closing_sends_waiting_acks_and_then_nothing_more(scripted_service: Any, gate: Gate) -> None:
    """Pending acks are sent even if the block ends with an error, because their items were processed."""
    futures = []

    def consume(acker: Acker) -> None:
        with acker:
            futures.append(acker.ack("7:0:0"))
            gate.arrived.acquire()
            futures.extend([acker.ack("7:0:1"), acker.fail("7:0:2", "late")])
            gate.open.release(3)
            raise KeyError("mine")

    with Client(scripted_service.url) as client:
        acker = client.acker()
        with pytest.raises(KeyError, match="mine"):
            consume(acker)
    assert all(future.done() for future in futures)
    assert [path for path, _ in gate.sent] == ["/v1/acks", "/v1/acks", "/v1/failures"]
    with pytest.raises(errors.AckerClosed):
        acker.ack("7:0:3")


def test_a_full_acker_blocks_until_there_is_room(scripted_service: Any, gate: Gate) -> None:
    """This bounds memory: the consumer slows down to the service's pace."""
    with Client(scripted_service.url) as client, client.acker(max_pending=2) as acker:
        futures = [acker.ack("7:0:0"), acker.ack("7:0:1")]
        filling = threading.Event()

        def third() -> None:
            filling.set()
            futures.append(acker.ack("7:0:2"))

        thread = threading.Thread(target=third)
        thread.start()
        filling.wait()
        gate.arrived.acquire()
        assert len(futures) == 2
        gate.open.release(3)
        thread.join()
        assert futures[2].result() is None


def test_on_completed_may_ack_more_even_when_the_acker_is_full(scripted_service: Any, gate: Gate) -> None:
    """A batch that completes another batch's item must not wait for itself."""
    gate.completes = {7}
    gate.open.release(9)
    parents = []
    with Client(scripted_service.url) as client:
        with client.acker(on_completed=lambda completed: parents.append(acker.ack("6:0:0")), max_pending=1) as acker:
            acker.ack("7:0:0").result()
        assert parents[0].result() is None


def test_on_completed_may_close_the_acker(scripted_service: Any, gate: Gate) -> None:
    """A consumer of a single batch ends that way. What waits is still sent."""
    gate.completes = {7}
    with Client(scripted_service.url) as client, client.acker(on_completed=lambda completed: acker.close()) as acker:
        first = acker.ack("7:0:0")
        gate.arrived.acquire()
        second = acker.ack("8:0:0")
        gate.open.release(2)
        assert first.result(30) is not None
        assert second.result(30) is None

    async def consume() -> None:
        async def close(completed: Completed) -> None:
            await acker.close()

        async with AsyncClient(scripted_service.url) as client, client.acker(on_completed=close) as acker:
            first = await acker.ack("7:0:0")
            await asyncio.to_thread(gate.arrived.acquire)
            second = await acker.ack("8:0:0")
            gate.open.release(2)
            assert await first is not None
            assert await second is None

    gate.arrived.acquire()
    asyncio.run(asyncio.wait_for(consume(), 30))


def test_an_unreachable_service_fails_the_futures(scripted_service: Any) -> None:
    """They get the error of the call; nothing hangs."""
    scripted_service.replies(None)
    with Client(scripted_service.url, retry=Retry(attempts=2, base=0)) as client, client.acker() as acker:
        future = acker.ack("7:0:0")
        with pytest.raises(errors.ServiceUnreachable):
            future.result()


def test_many_threads_share_one_acker(scripted_service: Any, gate: Gate) -> None:
    """Every future is done and every id is sent, once."""
    gate.open.release(10_000)
    with Client(scripted_service.url) as client, client.acker(max_pending=50) as acker:
        futures: list[Future[Any]] = []

        def consume(worker: int) -> None:
            futures.extend([acker.ack(f"{worker}:0:{number}") for number in range(200)])

        threads = [threading.Thread(target=consume, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(futures) == 1600
    assert all(future.result() is None for future in futures)
    sent_items = [item for _, items in gate.sent for item in items]
    assert len(sent_items) == len(set(sent_items)) == 1600


# Exceptions of any kind in the caller's code.

ANYTHING = [OSError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopIteration]


class Falsy(Exception):
    def __bool__(self) -> bool:
        return False


@mutant(
    "an-exit-in-a-callback-ends-the-acker",
    "lastbit.acker:_report_to_each",
    """
        try:
            if isinstance(outcome, BaseException):
                receiver.set_exception(outcome)
            else:
                receiver.set_result(outcome)
        except BaseException:
            log.exception("a callback of an acker's future ended with an exception")
    """,
    """
        try:
            if isinstance(outcome, BaseException):
                receiver.set_exception(outcome)
            else:
                receiver.set_result(outcome)
        except Exception:
            log.exception("a callback of an acker's future ended with an exception")
    """,
)
@pytest.mark.parametrize("error", ANYTHING)
def test_whatever_a_callback_raises_the_other_futures_finish(
    scripted_service: Any, gate: Gate, error: type[BaseException]
) -> None:
    """This holds for futures of the same call and for those in the queue."""

    def callback(_: object) -> None:
        raise error

    with Client(scripted_service.url) as client, client.acker() as acker:
        first = acker.ack("7:0:0")
        gate.arrived.acquire()
        with_callback, neighbour = acker.ack("7:0:1"), acker.ack("7:0:2")
        with_callback.add_done_callback(callback)
        gate.open.release()
        assert first.result(20) is None
        gate.arrived.acquire()
        follower = acker.ack("7:0:3")
        gate.open.release(2)
        assert [future.result(20) for future in (with_callback, neighbour, follower)] == [None] * 3


@pytest.mark.parametrize("error", [*ANYTHING, Falsy])
def test_whatever_on_completed_raises_reaches_the_futures_and_the_acker_continues(
    scripted_service: Any, gate: Gate, error: type[BaseException]
) -> None:
    """This holds for every exception class."""
    gate.completes = {7}
    gate.open.release(9)

    def publish(_: Completed) -> None:
        raise error

    with Client(scripted_service.url) as client, client.acker(on_completed=publish) as acker:
        assert isinstance(acker.ack("7:0:0").exception(60), error)
        assert acker.ack("8:0:0").result(20) is None


@mutant(
    "a-cancelled-future-ends-the-acker",
    "lastbit.acker:AsyncAcker._notify",
    """
        try:
            awaitable = self._on_completed(completion)
            if inspect.isawaitable(awaitable):
                await awaitable
        except BaseException as error:
            if self._is_ended():
                raise
            errors_by_batch[completion.batch] = error
    """,
    """
        try:
            awaitable = self._on_completed(completion)
            if inspect.isawaitable(awaitable):
                await awaitable
        except Exception as error:
            if self._is_ended():
                raise
            errors_by_batch[completion.batch] = error
    """,
)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("exception", [*ANYTHING, Falsy])
def test_whatever_an_awaited_on_completed_raises_reaches_the_futures_and_the_acker_continues(
    scripted_service: Any, gate: Gate, exception: type[BaseException], asynchronous: bool
) -> None:
    """A future cannot carry `StopIteration`, and `CancelledError` would look like a cancellation of its reader: they
    are raised as a `RuntimeError`."""
    gate.completes = {7}

    async def wait_and_raise() -> None:
        await asyncio.sleep(0)
        raise exception

    def publish(_: Completed) -> Any:
        if asynchronous and exception is not StopIteration:
            return wait_and_raise()
        raise exception

    async def consume() -> None:
        async with AsyncClient(scripted_service.url) as client, client.acker(on_completed=publish) as acker:
            first = await acker.ack("6:0:0")
            await asyncio.to_thread(gate.arrived.acquire)
            failed = await acker.ack("7:0:0")
            gate.open.release()
            assert await first is None
            await asyncio.to_thread(gate.arrived.acquire)
            waiting = await acker.ack("8:0:0")
            gate.open.release(2)
            assert await waiting is None
            error = failed.exception()
            if exception in (StopIteration, asyncio.CancelledError):
                assert isinstance(error, RuntimeError)
                error = error.__cause__
            assert isinstance(error, exception)

    asyncio.run(consume())


@mutant("a-thread-is-expected-after-a-fork", "lastbit._forks:is_forked", "process != _process", "False")
def test_an_acker_of_the_parent_process_raises_in_the_child(scripted_service: Any, gate: Gate) -> None:
    """Its thread does not exist in the child, where futures would never finish. An exception that leaves the block
    there is not replaced."""
    gate.open.release(9)

    def leave(acker: Acker) -> None:
        with acker:
            raise SystemExit(3)

    with Client(scripted_service.url) as client, client.acker() as acker:
        acker.ack("7:0:0").result(20)
        for use in (lambda: acker.ack("7:0:1"), lambda: acker.fail("7:0:1"), acker.close):
            assert in_a_child(use) == "UsedAfterFork"
        assert in_a_child(lambda: leave(acker)) == "SystemExit"
        assert acker.ack("7:0:1").result(20) is None


# awaited


def test_the_async_acker_has_the_same_guarantees(scripted_service: Any, gate: Gate) -> None:
    """The guarantees are the same: one call at a time, completions first, errors only where they belong."""
    gate.completes = {7, 8}
    gate.rejects = {"9:0:1"}
    batches = []

    async def publish(completed: Completed) -> None:
        await asyncio.sleep(0)
        batches.append(completed.batch)
        if completed.batch == 8:
            raise OSError("disk full")

    async def consume() -> None:
        async with AsyncClient(scripted_service.url) as client, client.acker(on_completed=publish) as acker:
            first = await acker.ack("9:0:0")
            await asyncio.to_thread(gate.arrived.acquire)
            seven, eight, nine = [await acker.ack(item) for item in ("7:0:0", "8:0:0", "9:0:1")]
            late = await acker.fail("9:0:0", "late")
            gate.open.release(3)
            assert await first is None
            completed = await seven
            assert completed is not None
            assert completed.batch == 7
            with pytest.raises(OSError, match="disk full"):
                await eight
            with pytest.raises(errors.ItemRejected):
                await nine
            assert await late is None
        with pytest.raises(errors.AckerClosed):
            await acker.ack("7:0:1")

    asyncio.run(consume())
    assert batches == [7, 8]
    assert gate.sent == [
        ("/v1/acks", ["9:0:0"]),
        ("/v1/acks", ["7:0:0", "8:0:0", "9:0:1"]),
        ("/v1/failures", ["9:0:0"]),
    ]


def test_a_full_async_acker_makes_its_task_wait(scripted_service: Any, gate: Gate) -> None:
    """Tasks continue in the order of the service's answers; on_completed itself never waits for room."""
    gate.open.release(1000)
    gate.completes = {6}

    async def consume() -> None:
        own_acks = []

        async def publish(completed: Completed) -> None:
            own_acks.append(await acker.ack("5:0:0"))

        async with AsyncClient(scripted_service.url) as client:
            async with client.acker(on_completed=publish, max_pending=3) as acker:
                futures = [await acker.ack(f"6:0:{number}") for number in range(20)]
            results = await asyncio.gather(*futures)
            assert all(completed is not None and completed.batch == 6 for completed in results)
            assert await own_acks[0] is None

    asyncio.run(consume())


def test_cancelling_a_task_does_not_cancel_its_ack(scripted_service: Any, gate: Gate) -> None:
    """The ack that the task awaited continues, and so does the acker."""

    async def consume() -> None:
        async with AsyncClient(scripted_service.url) as client, client.acker() as acker:
            first = await acker.ack("7:0:0")
            await asyncio.to_thread(gate.arrived.acquire)
            first.cancel()
            second = await acker.ack("7:0:1")
            gate.open.release(2)
            assert await second is None

    asyncio.run(consume())
    assert [items for _, items in gate.sent] == [["7:0:0"], ["7:0:1"]]


@mutant(
    "the-end-of-the-loop-is-taken-for-an-exception-of-on-completed",
    "lastbit.acker:AsyncAcker._is_ended",
    "task.cancelling() > 0",
    "False",
)
def test_the_end_of_the_event_loop_leaves_no_future_waiting(scripted_service: Any, gate: Gate) -> None:
    """The futures of a call in flight are cancelled."""
    futures = []

    async def consume() -> None:
        client = AsyncClient(scripted_service.url)
        acker = client.acker()
        futures.append(await acker.ack("7:0:0"))
        await asyncio.to_thread(gate.arrived.acquire)
        futures.append(await acker.ack("7:0:1"))

    asyncio.run(consume())
    gate.open.release(2)
    assert [future.cancelled() for future in futures] == [True, True]
