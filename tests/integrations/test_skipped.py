"""A handler skips its item: the message is removed like one that was handled, in each adapter and in any order."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest

from lastbit import BatchHandle
from lastbit.integrations import Failed
from tests.integrations.drivers import Driver, Link
from tests.integrations.redrives import redriven
from tests.mutants import mutant

ORDERS = {
    "is skipped, then acked": "acked",
    "is acked, then skipped": "acked",
    "fails, then is acked": "acked",
    "is acked, then fails": "acked",
    "fails, then is skipped": "skipped",
    "is skipped, then fails": "skipped",
}
"""What two deliveries of a message lead to."""


class Handler:
    """It ends a message as its body says of this delivery."""

    def __init__(self, driver: Driver) -> None:
        self._skipped = driver.skipped
        self.delivery = 0
        self.runs: Counter[str] = Counter()

    def __call__(self, body: str) -> None:
        self.runs[body] += 1
        ending = body.split(", then ")[self.delivery]
        if ending == "is skipped":
            raise self._skipped("not in the catalog any more")
        if ending == "is skipped without a reason":
            raise self._skipped
        if ending == "fails":
            raise Failed("no such picture")


def states(batch: BatchHandle) -> dict[str, str]:
    """The state of each resolved item that is not acked."""
    failed = {item: "failed" for span in batch.failed() for item in span.ids}
    return failed | {item: "skipped" for span in batch.skipped() for item in span.ids}


@mutant(
    "a-worker-takes-a-skip-for-an-error",
    "lastbit.integrations._workers:Workers._handled",
    "return skip",
    "raise _Raised from skip",
    case="rabbitmq",
)
@mutant(
    "a-skip-is-tried-again-until-it-fails",
    "lastbit.integrations.kafka._consumer:Attempts.__call__",
    "Skipped",
    "ZeroDivisionError",
    case="kafka",
)
@mutant(
    "a-skip-fails-its-item",
    "lastbit.integrations._resolver:Resolver.resolve",
    "isinstance(ending, Skipped)",
    "False",
    case="sqs",
)
@mutant(
    "a-record-that-skips-itself-fails",
    "lastbit.integrations.aws_lambda:_Raising.__init__",
    "isinstance(error, Skipped)",
    "False",
    case="aws_lambda",
)
@mutant(
    "a-task-of-celery-that-skips-itself-is-acked",
    "lastbit.integrations.celery.requests:ItemRequest._skipped",
    "Resolution(self.id, 'skip', reason)",
    "Resolution(self.id)",
    case="celery",
)
@mutant(
    "dramatiq-hides-what-was-raised",
    "lastbit.integrations.dramatiq:LastbitMiddleware.after_skip_message",
    "self._notes.error = sys.exception()",
    "pass",
    case="dramatiq",
)
@mutant(
    "a-task-of-taskiq-that-skips-itself-stays-pending",
    "lastbit.integrations.taskiq:LastbitMiddleware.post_execute",
    "isinstance(error, NoResultError) and (not isinstance(error, Skipped))",
    "isinstance(error, NoResultError)",
    case="taskiq",
)
@mutant(
    "a-job-that-skips-itself-is-acked",
    "lastbit.integrations.rq._worker:LastbitMixin._resolve_now",
    "isinstance(request, Skip)",
    "False",
    case="rq",
)
def test_a_handler_skips_its_item(driver: Driver, producer: Link, link: Link, caplog: pytest.LogCaptureFixture) -> None:
    """With its reason. The message is handled once and removed, it is no dead letter, and nobody is alarmed."""
    handler = Handler(driver)
    batch = driver.send(producer, ["is acked", "is skipped", "is skipped without a reason"])
    with caplog.at_level(logging.ERROR):
        assert driver.work(link, handler, lambda: handler.runs.total() >= 3 and driver.left() == 0) is None
    assert caplog.records == []
    assert (batch.refresh().acked, batch.info.skipped, batch.info.succeeded) == (1, 2, True)
    assert [span.reasons for span in batch.skipped()] == [{f"{batch.id}:0:1": "not in the catalog any more"}]
    assert (set(handler.runs.values()), driver.left()) == ({1}, 0)
    assert batch.verify().ok


def test_two_deliveries_in_any_order_end_in_the_same_state(driver: Driver, producer: Link, link: Link) -> None:
    """An item only moves from failed to skipped to acked."""
    handler = Handler(driver)
    bodies = list(ORDERS)
    batch = driver.send(producer, bodies)
    assert driver.work(link, handler, lambda: batch.refresh().pending == 0) is None
    handler.delivery = 1
    runs = handler.runs.copy()
    redrive = replace(redriven(producer.client, batch), count=len(bodies), spans=((0, len(bodies)),))
    assert driver.resend(producer, redrive, bodies) == len(bodies)
    assert driver.work(link, handler, lambda: driver.left() == 0 and not batch.refresh().failed) is None
    assert all(handler.runs[body] > runs[body] for body in bodies)
    ends = [states(batch).get(f"{batch.id}:0:{number}", "acked") for number in range(len(bodies))]
    assert dict(zip(bodies, ends, strict=True)) == ORDERS
