"""The contract of all adapters: what each outcome of a handler, of the service and of `on_completed` means for the item
and for its message.

An adapter takes part by a module in `tests.integrations.drivers`. Endings that only one library has are tests of that
adapter.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest

from lastbit import Completed, Forbidden, ItemRejected
from lastbit.integrations import Failed, _verdicts
from tests.integrations.conftest import TOKEN
from tests.integrations.drivers import Driver, Link
from tests.integrations.workers import reasons
from tests.mutants import mutant

REFUSED = "the service refuses calls for good"


class Handler:
    """A handler that counts its runs by body, and ends as the body says."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.has_run = threading.Event()

    def __call__(self, body: str) -> None:
        self.runs[body] += 1
        self.has_run.set()
        if body == "is retried" and self.runs[body] == 1:
            raise ConnectionError("not yet")
        if body == "fails":
            raise Failed("no such picture")
        if body == "fails at length":
            raise Failed("x" * 5000)


@mutant(
    "an-unhandled-message-is-acked",
    "lastbit.integrations._workers:Workers._process",
    "delivery.settle(Outcome.ERROR)",
    "delivery.settle(Outcome.DONE)",
    case="rabbitmq",
)
@mutant(
    "a-rejected-item-ends-the-consumer",
    "lastbit.integrations._verdicts:verdict_of",
    "error is None or isinstance(error, ItemRejected)",
    "error is None",
    case="sqs",
)
@mutant(
    "a-held-item-alarms-people",
    "lastbit.integrations._verdicts:log_rejection",
    "rejection.reason == HELD",
    "False",
    case="sqs",
)
def test_each_ending_resolves_the_item_and_removes_the_message(
    driver: Driver, producer: Link, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler returns, raises and is tried again, and gives up, with a reason that is cut. The item is rejected, as
    its batch was cancelled, or held by a live child, of which nobody is warned."""
    caplog.set_level(logging.WARNING)
    driver.skip_ended = False
    handler = Handler()
    batch = driver.send(producer, ["returns", "is retried", "fails", "fails at length", "is held"])
    child = producer.client.open(items=1, sealed=True, parent=f"{batch.id}:0:4")
    cancelled = driver.send(producer, ["is rejected"], seal=False)
    cancelled.cancel()
    ended = driver.work(
        link,
        handler,
        lambda: batch.refresh().pending == 1 and "was rejected" in caplog.text and handler.runs["is held"],
    )
    assert ended is None
    assert driver.left() == 0
    assert (batch.refresh().acked, batch.info.failed, batch.info.pending) == (2, 2, 1)
    found = reasons(batch)
    assert "no such picture" in found[f"{batch.id}:0:2"]
    assert len(found[f"{batch.id}:0:3"]) == 4000
    assert [handler.runs[body] for body in ("returns", "is retried", "is held", "is rejected")] == [1, 2, 1, 1]
    (rejection,) = [line for line in caplog.messages if "was rejected" in line]
    assert f"item {cancelled.id}:0:0 was rejected: its batch was cancelled" in rejection
    producer.client.ack(child.ids)
    assert batch.refresh().pending == 0
    assert batch.verify().ok


@mutant(
    "a-task-ends-before-its-item",
    "lastbit.integrations.taskiq:LastbitMiddleware._resolve",
    "await asyncio.sleep(PAUSE)",
    "return",
    case="taskiq",
)
def test_messages_are_held_while_the_service_is_away(driver: Driver, producer: Link, link: Link) -> None:
    """And removed when it is back. No handler runs again, unless nothing can hold a message."""
    handler = Handler()
    batch = driver.send(producer, ["a", "b", "c"])
    link.is_cut = True

    def is_over() -> bool:
        if handler.runs.total() >= 3:
            link.is_cut = False
        return batch.refresh().complete

    assert driver.work(link, handler, is_over) is None
    assert (batch.info.acked, driver.left()) == (3, 0)
    assert set(handler.runs.values()) == {1} or not driver.holds


@mutant(
    "a-message-is-acked-before-its-item",
    "lastbit.integrations._workers:Workers._resolve",
    "self._resolver.resolve(delivery, ending)",
    "delivery.settle(Outcome.DONE)",
    case="rabbitmq",
)
@mutant(
    "an-offset-passes-an-item-that-is-pending",
    "lastbit.integrations._workers:Workers._resolve",
    "self._resolver.resolve(delivery, ending)",
    "delivery.settle(Outcome.DONE)",
    case="kafka",
)
@mutant(
    "a-finished-job-is-saved-without-a-note",
    "lastbit.integrations.rq._worker:LastbitMixin.handle_job_success",
    "_unacked.note(self.connection, job.origin, item)",
    "pass",
    case="rq",
)
def test_a_stop_returns_messages_while_the_service_is_away(driver: Driver, producer: Link, link: Link) -> None:
    """It doesn't wait for the service. The next worker resolves the items."""
    handler = Handler()
    batch = driver.send(producer, ["a"])
    link.is_cut = True
    assert driver.work(link, handler, handler.has_run.is_set) is None
    assert (driver.left(), batch.refresh().pending) == (1, 1)
    link.is_cut = False
    driver.work(link, handler, lambda: batch.refresh().complete)
    assert (driver.left(), batch.info.acked) == (0, 1)


@mutant(
    "a-refused-token-is-tried-again-forever",
    "lastbit.integrations._verdicts:verdict_of",
    "isinstance(error, LastbitError) and not error.is_temporary",
    "False",
    case="dramatiq",
)
def test_a_token_that_is_refused_ends_the_worker(
    driver: Driver, tokens_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With an error that names the cause; or it pauses, if nothing can end it. All messages return."""
    handler = Handler()
    with Link(tokens_url, TOKEN) as right, Link(tokens_url, "wrong") as wrong:
        batch = driver.send(right, ["a", "b", "c"])
        error = driver.work(wrong, handler, lambda: REFUSED in caplog.text)
        assert (error is None) == driver.pauses
        assert "(401 unauthorized)" in f"{error} {caplog.text}"
        assert (driver.left(), batch.refresh().pending) == (3, 3)
        driver.work(right, handler, lambda: batch.refresh().complete)
        assert (driver.left(), batch.info.acked) == (0, 3)


@mutant(
    "an-error-of-a-callback-is-taken-for-one-of-an-ack",
    "lastbit.integrations._verdicts:marking_errors",
    "CallbackError(completion.batch)",
    "error",
    case="celery",
)
def test_a_callback_that_raises_is_called_again(driver: Driver, producer: Link, link: Link) -> None:
    """And never the handler, whatever the callback raises: not even an error that would end the worker, or remove the
    message, if an ack raised it."""
    if not driver.reports:
        return
    handler = Handler()
    reports: list[tuple[int, bool]] = []
    batch = driver.send(producer, ["a"])
    found: list[Exception] = [
        ConnectionError("the catalog is away"),
        Forbidden(403, "forbidden", "the token may not open batches"),
        ItemRejected(f"{batch.id}:0:0", "cancelled"),
    ]

    def publish(completion: Completed) -> None:
        reports.append((completion.batch, completion.newly))
        if found:
            raise found.pop()

    assert driver.work(link, handler, lambda: len(reports) == 4, publish) is None
    assert {number for number, _ in reports} == {batch.id}
    assert (handler.runs["a"], driver.left()) == (1, 0)


@mutant(
    "a-callback-that-raises-blocks-its-queue",
    "lastbit.integrations._resolver:Resolver._call_again",
    "moment - since >= _verdicts.PATIENCE",
    "False",
    case="rabbitmq",
)
def test_a_callback_that_always_raises_blocks_no_queue(
    driver: Driver,
    producer: Link,
    link: Link,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its message is removed in the end, and it is called all the same. Its handler runs once."""
    if not driver.reports or not driver.holds:
        return
    monkeypatch.setattr(_verdicts, "PATIENCE", 0.2)
    handler = Handler()
    broken, other = (driver.send(producer, [body]) for body in ("a", "b"))
    reports: Counter[int] = Counter()
    removed_after: list[int] = []

    def publish(completion: Completed) -> None:
        reports[completion.batch] += 1
        if completion.batch == broken.id:
            raise ConnectionError("the catalog is away")

    def is_over() -> bool:
        if "its message is removed" in caplog.text and not removed_after:
            removed_after.append(reports[broken.id])
        return bool(removed_after) and reports[broken.id] > removed_after[0] and other.refresh().complete

    assert driver.work(link, handler, is_over, publish) is None
    assert (handler.runs, driver.left()) == ({"a": 1, "b": 1}, 0)
    assert reports[other.id] == 1
