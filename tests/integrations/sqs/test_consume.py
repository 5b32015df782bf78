"""Each outcome of a message, and the state of its item after it."""

from __future__ import annotations

import logging
import threading
from queue import Queue
from typing import Any

import pytest
from botocore.exceptions import ClientError

from lastbit import Client, InvalidArgument, NotFound
from lastbit.integrations import Failed, sqs
from lastbit.integrations._ended import watch_of
from tests.integrations.sqs.conftest import Consume
from tests.integrations.workers import counted_questions
from tests.mutants import mutant
from tests.support.aws import Moto, sqs_client
from tests.support.brokers import Wire
from tests.support.threads import no_more_threads, no_thread_left


def receives(message: Any) -> int:
    return int(message["Attributes"]["ApproximateReceiveCount"])


def ignore(message: Any) -> None: ...


def test_a_message_that_was_handled_is_acked_and_deleted(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """With the bodies and attributes that the producer sent."""
    queue = moto.queue(most_receives=5)
    own = {"MessageBody": "the last", "MessageAttributes": {"size": {"DataType": "Number", "StringValue": "7"}}}
    batch = sqs.fan_out(queue.client, queue.url, [*map(str, range(24)), own], lastbit=lastbit)
    handled: dict[str, Any] = {}
    completed: list[int] = []
    consume(
        queue,
        lambda message: handled.update({message["Body"]: message}),
        on_completed=lambda completion: completed.append(completion.batch),
    )
    assert handled.keys() == {*map(str, range(24)), "the last"}
    assert handled["the last"]["MessageAttributes"]["size"]["StringValue"] == "7"
    assert {sqs.item_of(message) for message in handled.values()} == {f"{batch.id}:0:{n}" for n in range(25)}
    assert batch.refresh().succeeded
    assert batch.verify().ok
    assert completed == [batch.id]
    assert queue.count() == 0


@mutant(
    "a-consumer-of-sqs-forgets-when-a-message-came",
    "lastbit.integrations.sqs._consumer:Consumer._handled",
    "self._settler.skips(item, run.received)",
    "self._settler.skips(item)",
)
def test_messages_of_an_ended_batch_that_came_together_need_one_question(
    moto: Moto, lastbit: Client, consume: Consume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten messages come with one receive, or with few."""
    queue = moto.queue()
    batch = sqs.fan_out(queue.client, queue.url, map(str, range(10)), lastbit=lastbit)
    batch.cancel()
    watch_of(lastbit.driver.service).batches.add(batch.id)
    questions = counted_questions(monkeypatch)
    consume(queue, ignore, workers=1)
    assert 1 <= len(questions) < 5
    assert queue.count() == 0


def test_a_message_whose_handler_raised_stays_for_its_redelivery(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """Until its visibility timeout, its item is pending."""
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["good", "bad"], lastbit=lastbit)

    def handle(message: Any) -> None:
        if message["Body"] == "bad":
            raise ValueError("not yet")

    consume(queue, handle)
    assert (batch.refresh().acked, batch.info.pending, queue.count()) == (1, 1, 1)


def test_messages_without_an_item_are_handled_and_deleted(
    moto: Moto, consume: Consume, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those whose attribute is no item id, which is an error in the log; and those that failed."""
    queue = moto.queue(most_receives=5)
    queue.send("untracked", "failed")
    queue.send("malformed", MessageAttributes={sqs.ITEM: {"DataType": "String", "StringValue": "7:0"}})
    bodies: list[str] = []

    def handle(message: Any) -> None:
        bodies.append(message["Body"])
        if message["Body"] == "failed":
            raise Failed("no item to fail")

    consume(queue, handle)
    assert sorted(bodies) == ["failed", "malformed", "untracked"]
    assert queue.count() == 0
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "'7:0' is not an item id" in error.getMessage()


def test_a_deletion_that_sqs_refuses_is_sent_again(moto: Moto, lastbit: Client, consume: Consume) -> None:
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a", "refuse 2 deletes", "b"], lastbit=lastbit)
    consume(queue, ignore)
    assert queue.count() == 0
    assert batch.refresh().succeeded


@pytest.mark.parametrize(("options", "most", "receives"), [({}, 10, 20), ({"prefetch": 0, "workers": 2}, 2, 100)])
def test_receives_ask_for_as_many_as_workers_need(
    moto: Moto, lastbit: Client, consume: Consume, options: dict[str, int], most: int, receives: int
) -> None:
    """For ten at a time, not for one whenever there is room for one; without prefetch, for one for each idle worker."""
    queue = moto.queue(most_receives=5)
    sqs.fan_out(queue.client, queue.url, map(str, range(80)), lastbit=lastbit)
    counts: list[int] = []

    def note(params: Any, **_: Any) -> None:
        counts.append(params["MaxNumberOfMessages"])

    queue.client.meta.events.register("before-parameter-build.sqs.ReceiveMessage", note)
    consume(queue, ignore, **options)
    assert queue.count() == 0
    assert max(counts) == most
    assert len(counts) <= receives


def test_a_message_stays_hidden_while_its_handler_runs(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """Also longer than its visibility timeout; and so do messages that wait for a worker."""
    queue = moto.queue(visibility=1, most_receives=1)
    batch = sqs.fan_out(queue.client, queue.url, ["a", "b"], lastbit=lastbit)
    counts: list[int] = []

    def handle(message: Any) -> None:
        counts.append(receives(message))
        if len(counts) == 1:  # another consumer finds nothing
            assert "Messages" not in queue.client.receive_message(QueueUrl=queue.url, WaitTimeSeconds=2)

    consume(queue, handle, workers=1)
    assert counts == [1, 1]
    assert batch.refresh().succeeded
    assert queue.dead_letters() == 0


def test_a_stop_gives_back_what_no_handler_has_begun(moto: Moto, lastbit: Client) -> None:
    """And finishes what runs."""
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, map(str, range(30)), lastbit=lastbit)
    stop = threading.Event()
    bodies: list[str] = []

    def handle(message: Any) -> None:
        bodies.append(message["Body"])
        stop.set()

    sqs.consume(queue.client, queue.url, handle, workers=1, stop=stop, lastbit=lastbit)
    assert batch.refresh().acked == len(bodies) < 11
    assert len(queue.drain()) == 30 - len(bodies), "they are visible at once"


@mutant(
    "a-consumer-goes-on-with-some-of-its-threads", "lastbit._threads:join_started", "thread.ident is not None", "True"
)
@pytest.mark.parametrize("started", range(7))
def test_a_consumer_that_may_start_too_few_threads_ends(moto: Moto, lastbit: Client, started: int) -> None:
    """With an error. Those that were started handle nothing more."""
    queue = moto.queue()
    with no_thread_left(), pytest.raises(RuntimeError, match="can't start new thread"), no_more_threads(after=started):
        sqs.consume(queue.client, queue.url, ignore, workers=3, wait_seconds=1, lastbit=lastbit)


def test_what_no_retry_can_mend_is_raised(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """An address that is no Lastbit service's, a queue that doesn't exist, an exit in a handler."""
    queue = moto.queue(most_receives=5)
    sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    with Client(f"{lastbit.url}/elsewhere") as elsewhere, pytest.raises(NotFound):
        consume(queue, ignore, lastbit=elsewhere)
    assert queue.count() == 1

    def leave(message: Any) -> None:
        raise SystemExit(3)

    queue.send("b")
    with pytest.raises(SystemExit):
        consume(queue, leave)
    with pytest.raises(ClientError, match="NonExistentQueue"):
        sqs.consume(queue.client, f"{queue.url}-gone", ignore, visibility_timeout=30, lastbit=lastbit)


def test_arguments_are_checked_at_once(moto: Moto, lastbit: Client, caplog: pytest.LogCaptureFixture) -> None:
    """With the name of the argument; and the queue's settings."""
    queue = moto.queue(visibility=0)

    async def handle_later(message: Any) -> None: ...

    for handle, options, message in (
        (ignore, {}, "visibility timeout of queue-.* is 0"),
        (ignore, {"workers": 0}, "workers is a whole number from 1"),
        (ignore, {"wait_seconds": 21}, "wait_seconds is a whole number from 1 to 20"),
        (ignore, {"wait_seconds": 0}, "wait_seconds"),
        (ignore, {"visibility_timeout": 43_201}, "visibility_timeout"),
        (handle_later, {"visibility_timeout": 1}, "coroutine function"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            sqs.consume(queue.client, queue.url, handle, lastbit=lastbit, **options)
    assert "has no dead-letter queue" in caplog.text
    with pytest.raises(InvalidArgument, match="is a queue's URL"):
        sqs.consume(queue.client, "orders", ignore, lastbit=lastbit)


@pytest.mark.slow
def test_an_outage_of_sqs_passes(moto: Moto, lastbit: Client) -> None:
    """Receiving is tried again until it works."""
    was_tried_again = threading.Event()
    listener = logging.Handler()
    listener.addFilter(lambda record: "is tried again" in record.getMessage() and was_tried_again.set())
    logging.getLogger("lastbit.sqs").addHandler(listener)
    queue = moto.queue(most_receives=5)
    wire = Wire(int(moto.url.rpartition(":")[2]))
    try:
        client = sqs_client(f"http://127.0.0.1:{wire.port}", retries={"max_attempts": 0})
        batch = sqs.fan_out(queue.client, queue.url, ["before"], seal=False, lastbit=lastbit)
        bodies: Queue[str] = Queue()
        stop = threading.Event()
        consumer = threading.Thread(
            target=sqs.consume,
            args=(client, queue.url, lambda message: bodies.put(message["Body"])),
            kwargs={"wait_seconds": 1, "stop": stop, "lastbit": lastbit},
        )
        consumer.start()
        assert bodies.get(timeout=20) == "before"
        wire.cut_at_the_next_answer()
        assert was_tried_again.wait(20)
        wire.cut()
        sqs.fan_out(queue.client, queue.url, ["after"], batch=batch, lastbit=lastbit)
        assert bodies.get(timeout=20) == "after"
        stop.set()
        consumer.join(20)
        assert not consumer.is_alive()
        assert batch.refresh().succeeded
    finally:
        wire.close()
        logging.getLogger("lastbit.sqs").removeHandler(listener)
