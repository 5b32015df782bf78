"""The threads that handle messages for the consumers of RabbitMQ and Kafka."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import count

import pytest

from lastbit import Client
from lastbit.integrations._ended import watch_of
from lastbit.integrations._workers import Outcome, Workers
from tests.integrations.workers import counted_questions
from tests.mutants import mutant
from tests.support.threads import no_more_threads, no_thread_left


@dataclass
class Delivery:
    item: str | None
    message: str = "work"
    outcomes: list[Outcome] = field(default_factory=list)
    settled: threading.Event = field(default_factory=threading.Event)
    is_stale: bool = False
    received: float = field(default_factory=time.monotonic)

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


@pytest.mark.parametrize("started", range(4))
def test_workers_that_may_start_too_few_threads_end(service_url: str, started: int) -> None:
    with (
        Client(service_url) as client,
        no_thread_left(),
        pytest.raises(RuntimeError, match="can't start new thread"),
        no_more_threads(after=started),
    ):
        Workers(client, lambda message: None, 3, None)


@mutant(
    "a-worker-forgets-when-a-message-came",
    "lastbit.integrations._workers:Workers._process",
    "self._resolver.skips(delivery.item, delivery.received)",
    "self._resolver.skips(delivery.item)",
)
def test_messages_of_an_ended_batch_that_came_together_need_one_question(
    service_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(service_url) as client:
        batch = client.open(items=20, sealed=True)
        batch.cancel()
        watch_of(client.driver.service).batches.add(batch.id)
        questions = counted_questions(monkeypatch)
        workers: Workers[Delivery] = Workers(client, lambda message: None, 1, None)
        deliveries = [Delivery(item) for item in batch.ids]
        for delivery in deliveries:
            workers.put(delivery)
        assert deliveries[-1].settled.wait(30)
        workers.close()
    assert questions == [batch.id]
    assert [delivery.outcomes for delivery in deliveries] == [[Outcome.DONE]] * 20


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
