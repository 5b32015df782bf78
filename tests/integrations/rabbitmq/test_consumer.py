"""Every way in which a message can end, on a real node and with a real service."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastbit import BatchHandle, Client, Completed, MissingExtra
from lastbit.errors import InvalidArgument
from lastbit.integrations import Failed
from lastbit.integrations import rabbitmq as adapter
from lastbit.integrations.rabbitmq import Message
from lastbit.integrations.rabbitmq._messages import Tags
from tests.integrations.rabbitmq.conftest import Consuming, left, over, running
from tests.integrations.workers import wait_until
from tests.mutants import mutant
from tests.support.brokers import RabbitMQ, Wire
from tests.support.exposition import eventually

pytestmark = pytest.mark.xdist_group("rabbitmq")


def sent(rabbitmq: RabbitMQ, client: Client, count: int, **options: Any) -> BatchHandle:
    """A sealed batch, with a message for each item in the queue `work`."""
    return adapter.fan_out(rabbitmq.url, "work", [str(number) for number in range(count)], lastbit=client, **options)


def reasons(batch: BatchHandle) -> list[str]:
    return [reason for failed in batch.failed() for reason in failed.reasons.values()]


def test_messages_that_succeed_are_acked(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, consuming: Consuming
) -> None:
    """Their items first. The completion is reported before its message is gone."""
    batch = sent(rabbitmq, client, 50, key="catalog")
    completed = []
    bodies = []
    with consuming(queue, lambda message: bodies.append(message.body), on_completed=completed.append):
        assert batch.wait(30).succeeded
    assert sorted(map(int, bodies)) == list(range(50))
    assert [(completion.key, completion.newly) for completion in completed] == [("catalog", True)]
    assert left(channel, queue) == 0
    assert batch.verify().ok


@pytest.mark.parametrize("reject", [False, True])
def test_a_failed_message_fails_its_item(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, consuming: Consuming, reject: bool
) -> None:
    """With the handler's reason. The message is acked, or rejected for the dead-letter exchange."""
    batch = sent(rabbitmq, client, 1)

    def handle(message: Message) -> None:
        raise Failed("no such picture")

    with consuming(queue, handle, reject_failed=reject):
        assert batch.wait(30).failed == 1
    assert reasons(batch) == ["no such picture"]
    eventually(lambda: (left(channel, queue), left(channel, "work.dead")), (0, int(reject)))


def test_exhausted_deliveries_fail_the_item(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, consuming: Consuming
) -> None:
    """A quorum queue gives up after its x-delivery-limit; the consumer of the dead letters fails the item."""
    batch = sent(rabbitmq, client, 2)
    stored = []
    attempts = Counter[bytes]()

    def handle(message: Message) -> None:
        attempts[message.body] += 1
        if message.body == b"0":
            raise ValueError(message.body)

    with (
        consuming(queue, handle),
        running(adapter.fail_dead_letters, rabbitmq.url, "work.dead", stored.append, lastbit=client),
    ):
        assert batch.wait(30).failed == 1
    assert attempts == {b"0": 3, b"1": 1}
    assert reasons(batch) == ["dead-lettered by queue work: delivery_limit, once"]
    assert [letter.body for letter in stored] == [b"0"]
    assert left(channel, "work.dead") == 0


def test_a_rejected_message_is_pending_until_its_dead_letter_is_consumed(
    rabbitmq: RabbitMQ, client: Client, channel: Any, classic: str, consuming: Consuming
) -> None:
    """`on_error="reject"` is for queues without a delivery limit."""
    batch = sent(rabbitmq, client, 1)
    is_raised = threading.Event()

    def handle(message: Message) -> None:
        is_raised.set()
        raise ValueError

    with consuming(classic, handle, on_error="reject"):
        assert is_raised.wait(30)
    eventually(lambda: left(channel, "work.dead"), 1)
    assert batch.refresh().pending == 1
    completed: list[Completed] = []
    with running(adapter.fail_dead_letters, rabbitmq.url, "work.dead", on_completed=completed.append, lastbit=client):
        batch.wait(30)
    assert reasons(batch) == ["dead-lettered by queue work: rejected, once"]
    assert [completion.batch for completion in completed if completion.newly] == [batch.id]


@mutant(
    "a-dead-letter-without-an-item-disappears-in-silence",
    "lastbit.integrations.rabbitmq:fail_dead_letters",
    "'warn'",
    "'handle'",
)
def test_a_dead_letter_without_an_item_is_told_of(
    rabbitmq: RabbitMQ, client: Client, channel: Any, classic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is acked, as a process that only fails items has nothing to do for it."""
    channel.basic_publish("", "work.dead", b"moved")
    batch = adapter.fan_out(rabbitmq.url, "work.dead", [b"0"], lastbit=client)
    with running(adapter.fail_dead_letters, rabbitmq.url, "work.dead", lastbit=client):
        batch.wait(30)
    assert left(channel, "work.dead") == 0
    assert [line for line in caplog.messages if "messages of work.dead carry no item's id" in line]


def test_an_expired_message_fails_its_item(rabbitmq: RabbitMQ, client: Client, channel: Any, classic: str) -> None:
    """Nobody has handled it."""
    message = adapter.Outgoing(b"0", pika.BasicProperties(expiration="1"))
    batch = adapter.fan_out(rabbitmq.url, classic, [message], lastbit=client)
    with running(adapter.fail_dead_letters, rabbitmq.url, "work.dead", lastbit=client):
        batch.wait(30)
    assert reasons(batch) == ["dead-lettered by queue work: expired, once"]


def test_an_exception_can_fail_the_item_at_once(
    rabbitmq: RabbitMQ, client: Client, channel: Any, classic: str, consuming: Consuming
) -> None:
    """`on_error="fail"`; the exception is the reason."""
    batch = sent(rabbitmq, client, 1)

    def handle(message: Message) -> None:
        raise ValueError("7 is no picture")

    with consuming(classic, handle, on_error="fail"):
        batch.wait(30)
    assert reasons(batch) == ["ValueError: 7 is no picture"]
    assert left(channel, "work.dead") == 0


@mutant(
    "a-skip-fails-its-item-at-once",
    "lastbit.integrations.rabbitmq:consume",
    "(Failed, Skipped)",
    "Failed",
)
def test_a_skip_is_no_exception_that_fails_the_item(
    rabbitmq: RabbitMQ, client: Client, classic: str, consuming: Consuming
) -> None:
    batch = sent(rabbitmq, client, 1)

    def handle(message: Message) -> None:
        raise adapter.Skipped

    with consuming(classic, handle, on_error="fail"):
        assert batch.wait(30).skipped == 1


@pytest.mark.parametrize(
    ("properties", "is_logged"),
    [
        (pika.BasicProperties(), False),
        (pika.BasicProperties(message_id="picture-7"), False),
        (pika.BasicProperties(headers={adapter.ITEM: "picture-7"}), True),
    ],
    ids=["none", "a message_id of its own", "malformed"],
)
def test_messages_without_an_item_are_handled_too(
    channel: Any,
    queue: str,
    consuming: Consuming,
    properties: pika.BasicProperties,
    is_logged: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A queue may carry both kinds, for example while producers change. A header that is no item's id is logged."""
    is_handled = threading.Event()
    channel.basic_publish("", queue, b"", properties)
    with consuming(queue, lambda message: is_handled.set()):
        assert is_handled.wait(30)
    assert left(channel, queue) == 0
    assert ("picture-7" in caplog.text) == is_logged


def test_the_header_comes_before_the_message_id(client: Client, channel: Any, queue: str, consuming: Consuming) -> None:
    """As in a message that keeps the id of an earlier item, or comes from a producer in another language."""
    batch = client.open(items=2, sealed=True)
    for properties in (
        pika.BasicProperties(message_id="1:0:0", headers={adapter.ITEM: batch.ids[0]}),
        pika.BasicProperties(headers={adapter.ITEM: batch.ids[1]}),
    ):
        channel.basic_publish("", queue, b"", properties)
    with consuming(queue, lambda message: None):
        assert batch.wait(30).succeeded


def test_redelivered_messages_count_once(
    rabbitmq: RabbitMQ, client: Client, channel: Any, classic: str, consuming: Consuming, wire: Wire
) -> None:
    """The connection is lost while messages are handled; the consumer connects again."""
    batch = sent(rabbitmq, client, 40)
    begun = threading.Semaphore(0)
    is_cut = threading.Event()
    handled: Counter[bytes] = Counter()

    def handle(message: Message) -> None:
        begun.release()
        assert is_cut.wait(30)
        handled[message.body] += 1

    with consuming(classic, handle, broker=over(wire), prefetch=10):
        for _ in range(8):
            assert begun.acquire(timeout=30)
        wire.cut()
        is_cut.set()
        assert batch.wait(30).succeeded
        # The messages that were handled during the cut come again.
        while handled.total() < 48:
            assert begun.acquire(timeout=30)
    assert len(handled) == 40
    assert (batch.refresh().acked, batch.verify().ok, left(channel, classic)) == (40, True, 0)


def test_deliveries_of_a_lost_connection_are_not_begun(
    rabbitmq: RabbitMQ,
    client: Client,
    channel: Any,
    classic: str,
    consuming: Consuming,
    wire: Wire,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They can't be acked to the broker any more. Handling them first would delay those of the next connection, and
    with short connections nothing would ever leave the queue."""
    batch = sent(rabbitmq, client, 10)
    has_begun, goes_on = threading.Event(), threading.Event()
    first_deliveries: list[bytes] = []

    def handle(message: Message) -> None:
        if not message.redelivered:
            first_deliveries.append(message.body)
        has_begun.set()
        assert goes_on.wait(30)

    with consuming(classic, handle, broker=over(wire), workers=1, prefetch=10):
        assert has_begun.wait(30)
        eventually(lambda: left(channel, classic), 0)
        wire.cut()
        wait_until(lambda: "connecting again" in caplog.text, "the consumer has noticed it")
        goes_on.set()
        assert batch.wait(30).succeeded
    assert first_deliveries == [b"0"]


def test_a_stop_finishes_what_has_begun_and_returns_the_rest(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, consuming: Consuming
) -> None:
    """The running handler's item is acked; messages that were only prefetched are ready again."""
    batch = sent(rabbitmq, client, 10)
    has_begun, may_end = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        has_begun.set()
        assert may_end.wait(30)

    with consuming(queue, handle, workers=1) as stop:
        assert has_begun.wait(30)
        stop.set()
        threading.Timer(0.3, may_end.set).start()
    assert batch.refresh().acked == 1
    eventually(lambda: left(channel, queue), 9)


def test_wrong_arguments_are_reported_at_once(rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is handled."""

    async def handle_async(message: Message) -> None: ...

    def handle(message: Message) -> None: ...

    for options, word in (
        ({"workers": 0}, "workers is at least 1, not 0"),
        ({"prefetch": 0}, "prefetch is 1 to 65,535, not 0"),
        ({"on_error": "ignore"}, "'requeue', 'reject' or 'fail', not 'ignore'"),
        ({"retry_delay": -1}, "retry_delay is 0 to 3600 seconds, not -1"),
    ):
        with pytest.raises(InvalidArgument, match=word):
            adapter.consume(rabbitmq.url, "work", handle, **options)
    with pytest.raises(InvalidArgument, match="coroutine function"):
        adapter.consume(rabbitmq.url, "work", handle_async, on_error="fail")
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="no queue 'nowhere'"):
        adapter.consume(rabbitmq.url, "nowhere", handle)
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        adapter.consume("amqp://guest:wrong@127.0.0.1:1/", "work", handle)
    monkeypatch.setitem(sys.modules, "pika", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lastbit\[rabbitmq\]'"):
        adapter.consume(rabbitmq.url, "work", handle)


@mutant("an-ack-names-a-settled-tag", "lastbit.integrations.rabbitmq._messages:Tags.acks", "tag > self._floor", "True")
@given(st.permutations(range(1, 30)), st.data())
def test_acks_name_no_tag_twice(order: list[int], data: st.DataObject) -> None:
    """The broker closes the channel for a tag that is settled already. All tags are settled in the end, whether acked
    or returned."""
    unsettled = set(order)
    tags = Tags()
    while order:
        count = data.draw(st.integers(1, len(order)))
        chunk, order = order[:count], order[count:]
        for tag in chunk[: count // 4]:
            unsettled.remove(tag)
            tags.add(tag)
        acked_tags = set(chunk[count // 4 :])
        for tag, multiple in tags.acks(chunk[count // 4 :]):
            assert tag in unsettled
            acked = {number for number in unsettled if number <= tag} if multiple else {tag}
            assert acked <= acked_tags
            unsettled -= acked
            acked_tags -= acked
        assert not acked_tags
    assert not unsettled


def test_one_ack_settles_the_next_tags_in_any_order() -> None:
    tags = Tags()
    assert list(tags.acks([3, 1, 2])) == [(3, True)]
    assert list(tags.acks([5, 6])) == [(5, False), (6, False)]
    assert list(tags.acks([7, 4])) == [(7, True)]
    assert list(tags.acks([9, 8])) == [(9, True)]
    tags.add(10)
    assert list(tags.acks([11])) == [(11, True)]
    assert list(tags.acks([14, 12])) == [(12, True), (14, False)]
