"""The threads that handle messages for the consumers of RabbitMQ and Kafka."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from lastbit import Client, Completed
from lastbit.errors import Forbidden, ItemRejected
from lastbit.integrations._workers import Outcome, Workers


@dataclass
class Delivery:
    item: str | None
    message: str = "work"
    outcomes: list[Outcome] = field(default_factory=list)
    settled: threading.Event = field(default_factory=threading.Event)
    is_stale: bool = False

    def settle(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.settled.set()


def test_a_stop_waits_for_a_handler_however_long_it_runs(service_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the stop gave up, the message would be delivered elsewhere while it is handled here. Each look at the clock
    takes an hour."""
    has_begun, may_end = threading.Event(), threading.Event()

    def handle(message: str) -> None:
        has_begun.set()
        assert may_end.wait(30)

    with Client(service_url) as client:
        batch = client.open(items=1, sealed=True)
        delivery = Delivery(batch.ids[0])
        workers: Workers[Delivery] = Workers(client, handle, 1, None)
        workers.put(delivery)
        assert has_begun.wait(30)
        hours = count()
        monkeypatch.setattr(time, "monotonic", lambda: 3600.0 * next(hours))
        threading.Timer(0.3, may_end.set).start()
        workers.close()
        monkeypatch.undo()
        assert delivery.outcomes == [Outcome.DONE]
        assert batch.refresh().acked == 1


def handle_one(
    client: Client, item: str, on_completed: Callable[[Completed], object] | None = None
) -> tuple[Workers[Delivery], Delivery]:
    """Handle the message of one item until it is settled, and stop."""
    workers: Workers[Delivery] = Workers(client, lambda message: None, 1, on_completed)
    delivery = Delivery(item)
    workers.put(delivery)
    assert delivery.settled.wait(30)
    workers.close()
    return workers, delivery


@pytest.mark.parametrize(
    "error",
    [ItemRejected("1:0:0", "cancelled"), Forbidden(403, "forbidden", "the token may not open batches"), OSError()],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_on_completed_concerns_its_batch_alone(service_url: str, error: Exception) -> None:
    """The item was acked, but the completion of its batch was not processed: the message comes again. The consumer goes
    on, also after an error that would end it if an ack raised it."""

    def on_completed(completed: Completed) -> None:
        raise error

    with Client(service_url) as client:
        batch = client.open(items=1, sealed=True)
        workers, delivery = handle_one(client, batch.ids[0], on_completed)
        assert delivery.outcomes == [Outcome.AGAIN]
        assert workers.failure is None
        assert batch.refresh().acked == 1


def test_a_rejected_item_has_its_message_removed(service_url: str) -> None:
    with Client(service_url) as client:
        batch = client.open(items=1)
        batch.cancel()
        _, delivery = handle_one(client, batch.ids[0])
        assert delivery.outcomes == [Outcome.DONE]
