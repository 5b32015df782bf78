"""A cancel stops work: messages of a batch that has ended are removed without being handled."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from lastbit import AsyncClient, BatchHandle, Client, tokens
from lastbit.integrations import _ended, current_batch_ended, current_item
from lastbit.integrations._ended import MOST, EndedBatches, watch_of
from lastbit.tokens import Role
from tests.integrations.drivers import Driver, Link
from tests.integrations.workers import counted_questions, wait_until
from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file

MESSAGES = 40
PREFETCHED = 30
LINE = "its other messages are removed without being handled"


class Canceller:
    """A handler whose first run cancels its batch. All that run then wait until they know of the end. Those that must
    not run don't wait, so that such a test ends soon."""

    def __init__(self, batch: BatchHandle, driver: Driver) -> None:
        self._batch = batch
        self._driver = driver
        self._lock = threading.Lock()
        self.runs: list[str] = []
        self.cancelled_at = 0.0
        self.delays: list[float] = []
        """Seconds from the cancel until a handler knew of it."""

    def __call__(self, body: str) -> None:
        with self._lock:
            self.runs.append(current_item())
            if len(self.runs) == 1:
                assert not current_batch_ended()
                self._batch.cancel()
                self.cancelled_at = time.monotonic()
            waits = self._driver.follows and len(self.runs) <= self._driver.handlers
        if waits:
            wait_until(current_batch_ended, "the handler knows that its batch has ended", 30)
            self.delays.append(time.monotonic() - self.cancelled_at)


@mutant(
    "the-feed-tells-a-worker-nothing",
    "lastbit.integrations._ended:Watch._take",
    "self.batches.add",
    "id",
    case="rabbitmq",
)
@mutant(
    "a-worker-handles-messages-of-ended-batches",
    "lastbit.integrations._workers:Workers._process",
    "delivery.item is not None and self._resolver.skips(delivery.item, delivery.received)",
    "False",
    case="kafka",
)
@mutant(
    "a-consumer-of-sqs-handles-messages-of-ended-batches",
    "lastbit.integrations.sqs._consumer:Consumer._handled",
    "item is not None and self._settler.skips(item, run.received)",
    "False",
    case="sqs",
)
@mutant(
    "a-task-of-an-ended-batch-runs",
    "lastbit.integrations.celery.skipping:guard",
    "item is not None and is_ended(item)",
    "False",
    case="celery",
)
@mutant(
    "a-job-of-an-ended-batch-runs",
    "lastbit.integrations.rq._worker:LastbitMixin.execute_job",
    "self._prepare().skips(item)",
    "self._prepare() is None",
    case="rq",
)
@mutant(
    "an-actor-of-an-ended-batch-runs",
    "lastbit.integrations.dramatiq:LastbitMiddleware.before_process_message",
    "settler.skips(item, getattr(message, 'lastbit_received', None))",
    "False",
    case="dramatiq",
)
@mutant(
    "a-taskiq-task-of-an-ended-batch-runs",
    "lastbit.integrations.taskiq:_make_skippable",
    "run is None or not run.is_skipped",
    "True",
    case="taskiq",
)
@mutant(
    "a-record-of-an-ended-batch-is-handled",
    "lastbit.integrations.aws_lambda:_Resolving._skips",
    "watch.is_ended(self._lastbit.driver, item, self._received, self._received)",
    "False",
    case="aws_lambda",
)
def test_after_a_cancel_no_further_message_is_handled(
    driver: Driver, producer: Link, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond those that run already. Handlers know of it within two seconds. All messages are removed, with one line in
    the log, and no item is resolved."""
    caplog.set_level(logging.WARNING, "lastbit.integrations")
    batch = driver.send(producer, [f"message {number}" for number in range(MESSAGES)])
    other = driver.send(producer, ["of another batch"])
    handler = Canceller(batch, driver)

    def handle(body: str) -> None:
        if body != "of another batch":
            handler(body)

    driver.work(link, handle, lambda: handler.runs and other.refresh().complete and driver.left() == 0)
    assert len(handler.runs) <= driver.handlers
    assert not handler.delays or max(handler.delays) < 2
    assert (batch.refresh().state, batch.info.pending) == ("cancelled", MESSAGES)
    assert len([line for line in caplog.messages if LINE in line]) == 1
    assert len([line for line in caplog.messages if f"item {batch.id}:" in line]) <= 1


@mutant(
    "a-message-is-dropped-by-hearsay",
    "lastbit.integrations._ended:Watch._answered",
    "answer.complete or not answer.ended",
    "False",
    case="kafka",
)
def test_a_message_of_a_live_batch_is_never_dropped(driver: Driver, producer: Link, link: Link) -> None:
    """Not even if the worker believes that its batch has ended, as before it has heard that it was reopened."""
    batch = driver.send(producer, ["a", "b", "c"])
    watch_of(link.client.driver.service).batches.add(batch.id)
    runs: list[bool] = []
    driver.work(link, lambda body: runs.append(current_batch_ended()), lambda: batch.refresh().complete)
    assert (batch.info.acked, runs) == (3, [False] * 3)


def test_a_reopened_batch_completes_with_messages_that_are_sent_again(
    driver: Driver, producer: Link, link: Link
) -> None:
    """After a cancel, whose messages were removed. The process believes that it has ended, and handles them."""
    bodies = [f"message {number}" for number in range(MESSAGES)]
    batch = driver.send(producer, bodies)
    canceller = Canceller(batch, driver)
    driver.work(link, canceller, lambda: canceller.runs and driver.left() == 0)
    pending = batch.reopen().pending
    assert MESSAGES - driver.handlers <= pending <= MESSAGES
    position = batch.redrive(pending=True).position
    request = next(iter(producer.client.redrives(after=position - 1, batch=batch.id)))
    assert driver.resend(producer, request, bodies) == pending
    handled: list[str] = []
    driver.work(link, handled.append, lambda: batch.refresh().complete and driver.left() == 0)
    assert len(set(handled)) == pending
    assert (batch.info.acked, batch.info.failed, batch.verify().ok) == (MESSAGES, 0, True)


def test_messages_of_ended_batches_are_handled_on_demand(driver: Driver, producer: Link, link: Link) -> None:
    """With `skip_ended=False`."""
    driver.skip_ended = False
    batch = driver.send(producer, ["a", "b", "c"])
    batch.cancel()
    runs: list[str] = []
    driver.work(link, runs.append, lambda: len(runs) == 3 and driver.left() == 0)
    assert sorted(runs) == ["a", "b", "c"]


CONSUMER = tokens.new()
PRODUCER = tokens.new()


@pytest.fixture(scope="module")
def roles_url() -> Iterator[str]:
    """A service whose tokens have few roles."""
    lines = [
        tokens.known(CONSUMER, "consumer", [Role.CONSUME]).line(),
        tokens.known(PRODUCER, "producer", [Role.PRODUCE]).line(),
    ]
    with sqlite_file() as database, running_service(database, LASTBIT_TOKENS=";".join(lines)) as service:
        yield service.url


@mutant(
    "rejections-tell-a-worker-nothing",
    "lastbit.integrations._ended:Watch.learn",
    "self.batches.add(batch)",
    "True",
    case="rq",
)
def test_a_worker_that_may_not_read_learns_from_rejections(
    driver: Driver, roles_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a batch that has ended before it began, too: it handles few messages, and says once why it doesn't read."""
    caplog.set_level(logging.INFO, "lastbit.integrations")
    with Link(roles_url, PRODUCER) as producer, Link(roles_url, CONSUMER) as link:
        batch = driver.send(producer, [f"message {number}" for number in range(MESSAGES)])
        batch.cancel()
        runs: list[str] = []
        limit = driver.handlers + 1

        def handle(body: str) -> None:
            runs.append(body)
            if 1 < len(runs) <= limit and driver.follows:  # Lambda learns between two invocations
                wait_until(current_batch_ended, "the rejection of the first message is known", 30)

        driver.work(link, handle, lambda: runs and driver.left() == 0)
        assert len(runs) <= limit
        assert len([line for line in caplog.messages if "learn of ended batches from rejections alone" in line]) <= 1


def test_many_batches_are_remembered_for_a_while() -> None:
    """The last ones; one that was reopened is forgotten, and each is new once."""
    batches = EndedBatches()
    assert 7 not in batches
    assert [batches.add(number) for number in (7, 7)] == [True, False]
    batches.discard(7)
    batches.discard(8)
    assert 7 not in batches
    for number in range(1, MOST + 10):
        assert batches.add(number)
    assert [number in batches for number in (1, 9, 10, MOST, MOST + 9)] == [False, False, True, True, True]


def _is_in(batches: EndedBatches, asked: object, answer: object) -> None:
    asked.wait()  # type: ignore[attr-defined]
    answer.put(7 in batches)  # type: ignore[attr-defined]


def test_a_child_process_sees_what_its_parent_learns() -> None:
    """After the fork."""
    batches = EndedBatches()
    context = multiprocessing.get_context("fork")
    asked, answer = context.Event(), context.Queue()
    child = context.Process(target=_is_in, args=(batches, asked, answer))
    child.start()
    batches.add(7)
    asked.set()
    assert answer.get(timeout=30)
    child.join()


@mutant(
    "each-message-asks-the-service",
    "lastbit.integrations._ended:Watch.is_ended",
    "known is not None",
    "False",
)
@mutant(
    "an-answer-is-shared-for-good",
    "lastbit.integrations._ended:Watch._known",
    "max(received, time.monotonic() - FRESH)",
    "received",
)
@mutant(
    "an-outage-speaks-for-messages-that-have-not-waited",
    "lastbit.integrations._ended:Watch._known",
    "moment >= waits_since",
    "moment >= received",
)
def test_messages_that_came_together_need_one_question(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later one needs another, and so does one that has waited for long. If the service stays away, messages are
    handled, and share that only if their worker has waited for it."""
    batch = client.open(items=3, sealed=True)
    batch.cancel()
    watch = _ended.Watch()
    questions = counted_questions(monkeypatch)
    (rejection,) = client.ack(batch.ids[0]).rejected
    assert [watch.learn(rejection) for _ in range(2)] == [False, True]
    received = time.monotonic()
    assert all(watch.is_ended(client.driver, item, received) for item in batch.ids)
    assert len(questions) == 1
    assert watch.is_ended(client.driver, batch.ids[0])
    assert len(questions) == 2
    monkeypatch.setattr(_ended, "FRESH", 0.0)
    assert watch.is_ended(client.driver, batch.ids[0], received)
    assert len(questions) == 3
    with Link(client.url) as away:
        away.is_cut = True
        monkeypatch.setattr(_ended, "PATIENCE", 0.1)
        received = time.monotonic()
        assert not any(watch.is_ended(away.client.driver, item, received, received) for item in batch.ids)
        assert len(questions) == 4
        assert not watch.is_ended(away.client.driver, batch.ids[0], received)
        assert len(questions) == 5
    batch.delete()
    assert watch.is_ended(client.driver, batch.ids[0])


class Restarting(Link):
    """The way to a service that refuses three connections while it restarts."""

    def check(self) -> None:
        self.refusals = getattr(self, "refusals", 0) + 1
        if self.refusals <= 3:
            raise httpx.ConnectError("refused")


@mutant(
    "a-service-that-restarts-after-a-cancel-is-asked-once",
    "lastbit.integrations._ended:_state",
    "Retry(attempts=100, deadline=PATIENCE, cap=0.5)",
    "Retry(attempts=1)",
)
def test_a_question_waits_for_a_service_that_restarts(client: Client) -> None:
    """Otherwise the workers that know of a cancel handle all that they hold, as its acks wait too."""
    batch = client.open(items=1, sealed=True)
    batch.cancel()
    watch = _ended.Watch()
    watch.batches.add(batch.id)
    with Restarting(client.url) as restarting:
        assert watch.is_ended(restarting.client.driver, batch.ids[0])

        async def ask() -> bool:
            restarting.refusals = 0
            async with restarting.async_client() as awaited:
                return await watch.is_ended_async(awaited.driver, batch.ids[0], asyncio.Lock())

        assert asyncio.run(ask())
        assert restarting.refusals == 4


@mutant(
    "each-run-asks-the-service",
    "lastbit.integrations._ended:Watch.is_ended_async",
    "known is not None",
    "False",
)
def test_runs_of_one_event_loop_share_an_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one asks; all that began meanwhile need one question more."""
    batch = client.open(items=20, sealed=True)
    batch.cancel()
    watch = _ended.Watch()
    watch.batches.add(batch.id)
    questions = counted_questions(monkeypatch)

    async def run_all() -> list[bool]:
        asking = asyncio.Lock()
        async with AsyncClient(client.url) as own:
            return await asyncio.gather(*(watch.is_ended_async(own.driver, item, asking) for item in batch.ids))

    assert asyncio.run(run_all()) == [True] * 20
    assert len(questions) == 2


@mutant(
    "a-worker-of-dramatiq-forgets-when-a-message-came",
    "lastbit.integrations.dramatiq:LastbitMiddleware.before_process_message",
    "getattr(message, 'lastbit_received', None)",
    "None",
    case="dramatiq",
)
def test_messages_of_one_prefetch_need_few_questions(
    driver: Driver, producer: Link, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the adapter knows when they came. Celery's and RQ's processes take them one by one, and so does Kafka's
    mock cluster send them."""
    batch = driver.send(producer, [str(number) for number in range(PREFETCHED)])
    batch.cancel()
    watch_of(link.client.driver.service).batches.add(batch.id)
    questions = counted_questions(monkeypatch)
    driver.work(link, lambda body: None, lambda: driver.left() == 0)
    assert len(questions) <= driver.questions
    assert batch.refresh().pending == PREFETCHED
