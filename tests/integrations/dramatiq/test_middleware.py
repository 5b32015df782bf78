"""The middleware in the test's own process, with Dramatiq's broker for tests, as users test their actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import dramatiq
import pytest
from dramatiq import Worker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import GroupCallbacks, Middleware, MiddlewareError, SkipMessage
from dramatiq.rate_limits.backends import StubBackend as RateLimits

from lastbit import Client, Completed, errors
from lastbit.integrations import Skipped
from lastbit.integrations.dramatiq import LastbitMiddleware, fan_out
from tests.mutants import mutant
from tests.support.threads import no_more_threads

Make = Callable[..., StubBroker]


@pytest.fixture
def broker() -> Iterator[Make]:
    """Makes a broker; `start` runs a worker on it, once the actors are declared."""
    dramatiq.set_broker(StubBroker(fail_fast_default=False))

    def make(middleware: LastbitMiddleware, *others: Middleware) -> StubBroker:
        broker = dramatiq.get_broker()
        assert isinstance(broker, StubBroker)
        for each in (*others, middleware):
            broker.add_middleware(each)
        return broker

    yield make
    dramatiq.set_broker(None)  # type: ignore[arg-type]


@pytest.fixture
def start() -> Iterator[Callable[[], Worker]]:
    """Starts workers in this process."""
    workers = []

    def start() -> Worker:
        workers.append(Worker(dramatiq.get_broker(), worker_timeout=50, worker_threads=2))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


@dramatiq.actor(broker=StubBroker(), max_retries=0)
def double(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


def declared(broker: StubBroker, **options: Any) -> Any:
    """The actor `double` of this broker."""
    return dramatiq.actor(double.fn, broker=broker, actor_name="double", **{"max_retries": 0, **options})


def test_messages_on_the_stub_broker_resolve_their_items(
    broker: Make, start: Callable[[], Worker], client: Client
) -> None:
    """`broker.join` returns after the items were resolved. The completion is reported."""
    completed: list[Completed] = []
    stub = broker(LastbitMiddleware(client=client, on_completed=completed.append))
    actor = declared(stub)
    start()
    batch = fan_out((actor.message(number) for number in (3, -1, 4)), key="stub")
    stub.join("default")
    info = batch.refresh()
    assert (info.acked, info.failed, info.complete) == (2, 1, True)
    assert next(batch.failed()).reasons == {f"{batch.id}:0:1": "ValueError: -1 is negative"}
    assert [message.message_id for message in stub.dead_letters] == [f"{batch.id}:0:1"]
    assert [completion.batch for completion in completed if completion.newly] == [batch.id]


@pytest.mark.parametrize(("skipped", "counts"), [("ack", (1, 0, 0)), ("fail", (0, 1, 0)), ("skip", (0, 0, 1))])
def test_a_skipped_message_acks_fails_or_skips_its_item(
    broker: Make, start: Callable[[], Worker], client: Client, skipped: Any, counts: tuple[int, int, int]
) -> None:
    """As `skipped` says, also if the middleware that skips it keeps ours from seeing its begin."""

    class Skips(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            raise SkipMessage

    stub = broker(LastbitMiddleware(client=client, skipped=skipped), Skips())
    actor = declared(stub)
    start()
    info = fan_out([actor.message(1)]).wait(30)
    assert (info.acked, info.failed, info.skipped) == counts


@mutant(
    "a-skip-that-dramatiq-takes-for-an-error-fails",
    "lastbit.integrations.dramatiq:LastbitMiddleware._resolution",
    "isinstance(error, _skipped.Skipped)",
    "isinstance(error, Skipped)",
)
def test_an_actor_that_raises_the_skip_of_all_adapters_skips_its_item(
    broker: Make, start: Callable[[], Worker], client: Client
) -> None:
    """Dramatiq takes it for an error, and retries it."""
    runs: list[int] = []
    stub = broker(LastbitMiddleware(client=client))

    def skip() -> None:
        runs.append(1)
        raise Skipped("not in the catalog any more")

    actor: Any = dramatiq.actor(skip, broker=stub, max_retries=1, min_backoff=1)
    start()
    batch = fan_out([actor.message()])
    assert batch.wait(30).skipped == 1
    assert [span.reasons for span in batch.skipped()] == [{f"{batch.id}:0:0": "not in the catalog any more"}]
    assert len(runs) == 2


@mutant(
    "a-worker-removes-messages-whose-items-it-cannot-resolve",
    "lastbit.integrations.dramatiq:LastbitMiddleware.before_worker_boot",
    'MiddlewareError(f"the worker can\'t resolve items: {error}")',
    'RuntimeError(f"the worker can\'t resolve items: {error}")',
)
def test_a_worker_that_can_resolve_no_items_does_not_start(
    broker: Make, start: Callable[[], Worker], client: Client
) -> None:
    """It would remove the messages and leave their items pending. Here no thread can be started while it boots."""

    class Exhausts(Middleware):
        def before_worker_boot(self, broker: Any, worker: Any) -> None:
            exhausted.enter_context(no_more_threads(after=1))

    class Recovers(Middleware):
        def before_worker_boot(self, broker: Any, worker: Any) -> None:
            exhausted.close()

    stub = broker(LastbitMiddleware(client=client), Exhausts())
    stub.add_middleware(Recovers())
    batch = fan_out([declared(stub).message(1)])
    with ExitStack() as exhausted, pytest.raises(MiddlewareError, match="can't start new thread"):
        start()
    assert stub.queues["default"].qsize() == 1
    assert batch.refresh().pending == 1


def test_without_retries_an_exception_fails_the_item(broker: Make, start: Callable[[], Worker], client: Client) -> None:
    """Dramatiq acks such messages as done."""
    dramatiq.set_broker(StubBroker(middleware=[], fail_fast_default=False))
    stub = broker(LastbitMiddleware(client=client))
    actor = dramatiq.actor(double.fn, broker=stub, actor_name="double")
    start()
    assert fan_out([actor.message(-1)]).wait(30).failed == 1
    assert stub.dead_letters == []


def test_an_exception_that_has_no_text_fails_the_item_and_ends_no_thread(
    broker: Make, start: Callable[[], Worker], client: Client
) -> None:
    """As one that lost an attribute when it was unpickled."""

    class Wordless(Exception):
        def __str__(self) -> str:
            raise AttributeError("message")

    def fail(number: int) -> None:
        raise Wordless

    stub = broker(LastbitMiddleware(client=client))
    actor = dramatiq.actor(fail, broker=stub, max_retries=0)
    start()
    batch = fan_out(actor.message(number) for number in range(20))
    assert batch.wait(30).failed == 20
    assert next(batch.failed()).reasons[f"{batch.id}:0:0"] == "Wordless"


def test_a_retry_that_is_lost_fails_the_item(broker: Make, start: Callable[[], Worker], client: Client) -> None:
    """The broker is unreachable when `Retries` enqueues the message, which Dramatiq logs and forgets."""

    class Unreachable(StubBroker):
        def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
            if delay is not None:
                raise dramatiq.ConnectionClosed(OSError("connection refused"))
            return super().enqueue(message)

    dramatiq.set_broker(Unreachable(fail_fast_default=False))
    stub = broker(LastbitMiddleware(client=client))
    actor = declared(stub, max_retries=5)
    start()
    batch = fan_out([actor.message(-1)])
    assert batch.wait(30).failed == 1
    assert next(batch.failed()).reasons == {f"{batch.id}:0:0": "ValueError: -1 is negative"}


def test_a_pipeline_whose_next_message_is_lost_fails_the_item(
    broker: Make, start: Callable[[], Worker], client: Client
) -> None:
    """Otherwise no message would be left that could resolve it."""
    stub = broker(LastbitMiddleware(client=client))
    actor = declared(stub)
    start()
    lost = dramatiq.Message("no_such_queue", "double", (), {}, {})
    batch = fan_out([actor.message(1) | lost])
    assert batch.wait(30).failed == 1
    assert next(batch.failed()).reasons == {f"{batch.id}:0:0": "the next message of its pipeline was not sent"}


def test_the_messages_of_a_group_are_items_and_its_callback_is_not(
    broker: Make, start: Callable[[], Worker], client: Client
) -> None:
    """The callback's message has an id of its own."""
    stub = broker(LastbitMiddleware(client=client), GroupCallbacks(RateLimits()))
    actor = declared(stub)
    called: list[bool] = []

    @dramatiq.actor(broker=stub)
    def call() -> None:
        called.append(True)

    start()
    children = [actor.message(number) for number in range(3)]
    batch = client.open(items=3, sealed=True)
    group = dramatiq.group([each.copy(message_id=item) for each, item in zip(children, batch.ids, strict=True)])
    group.add_completion_callback(call.message())
    group.run()
    assert batch.wait(30).acked == 3
    stub.join("default")
    assert called == [True]


def test_a_message_that_ends_late_in_a_stop_is_settled_too(broker: Make, client: Client) -> None:
    """The time for the service begins when the work ends, and not when the worker is asked to stop."""
    stub = broker(LastbitMiddleware(client=client, shutdown_timeout=1, linger=0.3))
    has_begun, work = threading.Event(), threading.Event()

    @dramatiq.actor(broker=stub)
    def works_for_longer_than_the_timeout() -> None:
        has_begun.set()
        work.wait(1.2)

    batch = fan_out([works_for_longer_than_the_timeout.message()])
    worker = Worker(stub, worker_timeout=50, worker_threads=2)
    worker.start()
    has_begun.wait(30)
    worker.stop()
    assert stub.queues["default"].unfinished_tasks == 0
    assert batch.refresh().acked == 1


def test_a_broker_without_the_middleware_is_refused() -> None:
    """Nothing would resolve the items."""
    with pytest.raises(errors.InvalidArgument, match="add_middleware"):
        fan_out([], broker=StubBroker())


def test_what_is_no_message_is_refused_before_its_chunk_is_issued(broker: Make, client: Client) -> None:
    """The error names the position."""
    stub = broker(LastbitMiddleware(client=client))
    actor = declared(stub)
    batch = client.open()
    with pytest.raises(errors.InvalidArgument, match="position 1: expected a message"):
        fan_out([actor.message(1), actor], batch=batch)  # type: ignore[list-item]
    assert batch.refresh().items == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skipped": "drop"}, "one of ack, fail, skip"),
        ({"client": object(), "url": "http://x"}, "either these or client"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    """When the middleware is made."""
    with pytest.raises(errors.InvalidArgument, match=message):
        LastbitMiddleware(**options)
