"""The threads that handle messages for the consumers of RabbitMQ and Kafka."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from lastbit import Client, Completed, Retry
from lastbit.errors import Forbidden, ItemRejected
from lastbit.integrations import _workers
from lastbit.integrations._workers import Outcome, Workers
from tests.integrations.workers import wait_until
from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file
from tests.support.threads import no_more_threads, no_thread_left


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


def test_a_held_item_has_its_message_removed(service_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The nested batch resolves it, so nobody is warned."""
    with Client(service_url) as client:
        batch = client.open(items=1, sealed=True)
        child = client.open(items=1, sealed=True, parent=batch.ids[0])
        _, delivery = handle_one(client, batch.ids[0])
        assert delivery.outcomes == [Outcome.DONE]
        assert (batch.refresh().pending, caplog.messages) == (1, [])
        client.ack(child.ids)
        assert batch.refresh().succeeded


@mutant("an-outage-needs-a-new-thread", "lastbit.integrations._workers:Workers.__init__", "self._again.start()", "pass")
def test_acks_are_sent_again_though_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In each of two outages. No thread is left in the end."""
    monkeypatch.setattr(_workers, "PAUSE", 0.05)
    with (
        sqlite_file() as url,
        running_service(url) as service,
        Client(service.url, retry=Retry(attempts=1)) as client,
    ):
        before = set(threading.enumerate())
        batch = client.open(items=7, sealed=True)
        first, *deliveries = map(Delivery, batch.ids)
        workers: Workers[Delivery] = Workers(client, lambda message: None, 1, None)
        workers.put(first)
        assert first.settled.wait(30)
        for outage in (deliveries[:3], deliveries[3:]):
            service.stop(9)
            caplog.clear()
            with no_more_threads():
                for delivery in outage:
                    workers.put(delivery)
                wait_until(lambda: "acks are sent again" in caplog.text, "a call has failed")
            service.start()
            for delivery in outage:
                assert delivery.settled.wait(30)
        workers.close()
        assert batch.refresh().acked == 7
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("lastbit-")]


@pytest.mark.parametrize("started", range(4))
def test_workers_that_may_start_too_few_threads_end(service_url: str, started: int) -> None:
    with (
        Client(service_url) as client,
        no_thread_left(),
        pytest.raises(RuntimeError, match="can't start new thread"),
        no_more_threads(after=started),
    ):
        Workers(client, lambda message: None, 3, None)


def test_a_stop_does_not_wait_for_an_outage_to_end(caplog: pytest.LogCaptureFixture) -> None:
    """Messages whose acks wait to be sent again return to the broker."""
    with Client("http://127.0.0.1:1", retry=Retry(attempts=1)) as client:
        delivery = Delivery("1:0:0")
        workers: Workers[Delivery] = Workers(client, lambda message: None, 1, None)
        workers.put(delivery)
        wait_until(lambda: "acks are sent again" in caplog.text, "a call has failed")
        workers.close()
    assert not delivery.outcomes
    assert "1 acks are not sent again" in caplog.text


@mutant("a-worker-ends-without-a-word", "lastbit.integrations._workers:Workers._work", "BaseException", "_Raised")
def test_an_error_of_the_end_of_a_message_ends_the_consumer() -> None:
    """Also if its handler has raised. The worker goes on until then."""

    class Unsettleable(Delivery):
        def settle(self, outcome: Outcome) -> None:
            super().settle(outcome)
            raise OSError(outcome)

    def handle(message: str) -> None:
        raise ValueError

    with Client("http://127.0.0.1:1") as client:
        workers: Workers[Delivery] = Workers(client, handle, 1, None)
        deliveries = [Unsettleable(None), Delivery(None)]
        for delivery in deliveries:
            workers.put(delivery)
        assert deliveries[1].settled.wait(10)
        workers.close()
    assert [delivery.outcomes for delivery in deliveries] == [[Outcome.ERROR]] * 2
    assert isinstance(workers.failure, OSError)
