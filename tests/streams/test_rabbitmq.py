"""RabbitMQ itself: queues and streams of a private node, over a connection that is cut."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from lastbit import MissingExtra
from lastbit.streams import AckWindow, SessionEnded, StreamError, run_ordered
from lastbit.streams.sources.rabbitmq import Message, RabbitQueue, RabbitStream
from tests.streams import crash, poison
from tests.support.brokers import RabbitMQ, Wire

pytestmark = pytest.mark.xdist_group("rabbitmq")


@pytest.fixture
def channel(rabbitmq: RabbitMQ) -> Iterator[Any]:
    """A channel to declare, publish and read."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


@pytest.fixture(params=["classic", "quorum"])
def queue(request: pytest.FixtureRequest, channel: Any) -> Iterator[str]:
    """An empty queue of each kind, declared as the documentation requires."""
    yield (name := declared(channel, "orders", request.param))
    channel.queue_delete(name)


@pytest.fixture
def stream(channel: Any) -> Iterator[str]:
    yield (name := declared(channel, "orders", "stream"))
    channel.queue_delete(name)


@pytest.fixture
def wire(rabbitmq: RabbitMQ) -> Iterator[Wire]:
    wire = Wire(rabbitmq.port)
    yield wire
    wire.close()


def declared(channel: Any, name: str, kind: str) -> str:
    arguments: dict[str, Any] = {"x-queue-type": kind}
    if kind != "stream":
        arguments["x-single-active-consumer"] = True
    channel.queue_declare(f"{name}-{kind}", durable=True, arguments=arguments)
    return f"{name}-{kind}"


def publish(channel: Any, queue: str, count: int) -> None:
    for number in range(count):
        channel.basic_publish("", queue, str(number).encode(), pika.BasicProperties(headers={"number": number}))


def take(source: RabbitQueue, count: int) -> dict[int, Message]:
    """The next messages by their tags; they are outstanding."""
    messages = dict(itertools.islice(filter(None, source), count))
    for tag in messages:
        source.window.track(tag)
    return messages


def assert_empty(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """A message published now is the first one delivered."""
    publish(channel, queue, 1)
    with RabbitQueue(rabbitmq.url, queue) as source:
        ((_, message),) = itertools.islice(filter(None, source), 1)
        assert not message.redelivered
        source.commit(1)


def numbers(messages: dict[int, Message]) -> list[int]:
    return [int(message.body) for message in messages.values()]


def over(wire: Wire) -> str:
    return f"amqp://guest:guest@127.0.0.1:{wire.port}/%2F"


def test_acked_messages_are_not_redelivered(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """Acked one by one above the floor, all at once below it; outstanding messages are redelivered, in order."""
    publish(channel, queue, 20)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        assert numbers(take(orders, 20)) == list(range(20))
        for acked_numbers in ((5, 2, 9), (1,), (4, 3, 12)):
            for tag in acked_numbers:
                orders.window.ack(tag)
            orders.commit(orders.window.floor)
            orders.commit(orders.window.floor)
        assert orders.window.floor == 5
    with RabbitQueue(rabbitmq.url, queue) as orders:
        redelivered = take(orders, 13)
        assert numbers(redelivered) == [number for number in range(20) if number + 1 not in (1, 2, 3, 4, 5, 9, 12)]
        assert all(message.redelivered for message in redelivered.values())
        assert list(redelivered) == list(range(1, 14))
        for tag in redelivered:
            orders.window.ack(tag)
        orders.commit(13)
    assert_empty(rabbitmq, channel, queue)


def test_a_floor_can_be_committed_without_a_window(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """If the reader has its own window."""
    publish(channel, queue, 5)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        assert [tag for tag, _ in itertools.islice(filter(None, orders), 5)] == [1, 2, 3, 4, 5]
        orders.commit(0)
        orders.commit(3)
        orders.commit(3)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        assert numbers(take(orders, 2)) == [3, 4]


def test_no_more_than_the_prefetch_is_outstanding(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """The broker keeps the rest until something is acked."""
    publish(channel, queue, 5)
    with RabbitQueue(rabbitmq.url, queue, prefetch=3) as orders:
        take(orders, 3)
        assert channel.queue_declare(queue, passive=True).method.message_count == 2
        orders.window.ack(2)
        orders.commit(0)
        assert numbers(take(orders, 1)) == [3]
        assert channel.queue_declare(queue, passive=True).method.message_count == 1


def test_a_poison_record_becomes_a_dead_letter_while_others_go_on(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """And it is acked: the queue is empty in the end."""
    publish(channel, queue, 20)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        poison.check_dead_letter(
            orders, 20, key=lambda message: int(message.body) % 5, is_poison=lambda message: message.body == b"3"
        )
    assert_empty(rabbitmq, channel, queue)


def test_redelivered_messages_keep_their_place(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """Before messages that were never delivered."""
    publish(channel, queue, 10)
    with RabbitQueue(rabbitmq.url, queue, prefetch=5) as orders:
        take(orders, 5)
        orders.window.ack(2)
        orders.commit(0)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        assert numbers(take(orders, 9)) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_late_ack_of_a_lost_channel_is_refused(rabbitmq: RabbitMQ, channel: Any, queue: str, wire: Wire) -> None:
    """The same tag is another message by now; nothing is sent, and the new session's messages stay outstanding."""
    publish(channel, queue, 4)
    with RabbitQueue(over(wire), queue) as lost_queue:
        take(lost_queue, 2)
        wire.cut()
        with pytest.raises(SessionEnded, match=f"RabbitMQ queue {queue} has ended"):
            list(lost_queue)
        with RabbitQueue(over(wire), queue) as orders:
            assert numbers(take(orders, 4)) == [0, 1, 2, 3]
            lost_queue.window.ack(1)
            lost_queue.window.ack(2)
            with pytest.raises(SessionEnded):
                lost_queue.commit(2)
            orders.window.ack(3)
            orders.commit(0)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        assert numbers(take(orders, 3)) == [0, 1, 3]


def test_a_queue_that_is_deleted_ends_the_session(rabbitmq: RabbitMQ, channel: Any) -> None:
    """The broker cancels the consumer; otherwise it would wait forever."""
    channel.queue_declare("short-lived")
    with RabbitQueue(rabbitmq.url, "short-lived") as orders:
        channel.queue_delete("short-lived")
        with pytest.raises(SessionEnded, match="was the queue deleted"):
            list(orders)


def test_a_closed_source_refuses_commits(rabbitmq: RabbitMQ, channel: Any, queue: str) -> None:
    """And uncommitted messages are left for the next reader."""
    publish(channel, queue, 2)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        take(orders, 2)
        orders.stop()
        assert list(orders) == []
        orders.window.ack(1)
        orders.commit(1)
    orders.window.ack(2)
    with pytest.raises(SessionEnded, match="it was closed"):
        orders.commit(2)
    with RabbitQueue(rabbitmq.url, queue) as orders:
        assert numbers(take(orders, 1)) == [1]


def test_a_missing_queue_is_an_error_at_once(rabbitmq: RabbitMQ) -> None:
    """By the client's own error."""
    with pytest.raises(pika.exceptions.ChannelClosedByBroker):
        RabbitQueue(rabbitmq.url, "nowhere")


def test_a_stream_is_read_after_any_offset(rabbitmq: RabbitMQ, channel: Any, stream: str) -> None:
    """Its offsets are the log's; reading removes nothing from it, and more than the prefetch is delivered."""
    publish(channel, stream, 50)
    for after in (-1, 0, 17, 48):
        with RabbitStream(rabbitmq.url, stream, after=after, prefetch=8) as log:
            records = dict(itertools.islice(filter(None, log), 49 - after))
        assert list(records) == numbers(records) == list(range(after + 1, 50))


def test_a_stream_continues_at_its_windows_floor(rabbitmq: RabbitMQ, channel: Any, stream: str, wire: Wire) -> None:
    """After a cut, offsets stay valid, acked records are skipped, and outstanding ones replay."""
    publish(channel, stream, 30)
    window = AckWindow()
    with RabbitStream(over(wire), stream) as log:
        for offset, _ in itertools.islice(filter(None, log), 20):
            window.track(offset)
            if offset not in (7, 11):
                window.ack(offset)
        wire.cut()
        with pytest.raises(SessionEnded):
            list(log)
    window = AckWindow.restore(window.snapshot())
    with RabbitStream(over(wire), stream, after=window.floor) as log:
        replayed = [offset for offset, _ in itertools.islice(filter(None, log), 23) if window.track(offset)]
    assert replayed == [7, 11, *range(20, 30)]


@pytest.mark.parametrize("source", ["queue", "stream"])
def test_another_consumer_resumes_after_a_killed_one(
    rabbitmq: RabbitMQ, channel: Any, source: str, tmp_path: Path
) -> None:
    """SIGKILL in the middle of handling. A quorum queue may replay more: it delays acks while it is busy."""
    name = declared(channel, "killed", {"queue": "classic"}.get(source, source))
    published = crash.records()
    for key, number in published:
        channel.basic_publish("", name, str(number).encode(), pika.BasicProperties(headers={"key": key}))
    crash.check_kill_and_resume(source, rabbitmq.url, name, tmp_path, published)


def test_order_is_kept_across_cut_connections(rabbitmq: RabbitMQ, channel: Any, queue: str, wire: Wire) -> None:
    """Several cuts during the work: no record is skipped, and none of a key is handled before an earlier one."""
    published = crash.records()
    for key, number in published:
        channel.basic_publish("", queue, str(number).encode(), pika.BasicProperties(headers={"key": key}))
    handled: list[int] = []
    cuts = iter((10, 35, 60))
    cut_at = next(cuts)

    def handle(message: Message) -> None:
        nonlocal cut_at
        handled.append(int(message.body))
        if len(set(handled)) == len(published):
            orders.stop()
        elif len(set(handled)) >= cut_at:
            cut_at = next(cuts, len(published))
            wire.cut()

    lost_sessions = 0
    while len(set(handled)) < len(published):
        with RabbitQueue(over(wire), queue, prefetch=20) as orders:
            try:
                run_ordered(
                    orders,
                    handle,
                    key=lambda message: message.headers["key"],
                    every=0.01,
                    window=orders.window,
                    commit=orders.commit,
                )
            except StreamError:
                lost_sessions += 1
    assert lost_sessions >= 2
    for key in crash.KEYS:
        first = list(dict.fromkeys(number for number in handled if published[number][0] == key))
        assert first == [number for at, number in published if at == key]
    assert_empty(rabbitmq, channel, queue)


def test_without_pika_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other extras do."""
    monkeypatch.setitem(sys.modules, "pika", None)
    with pytest.raises(MissingExtra, match=r"lastbit\[rabbitmq\]"):
        RabbitQueue("amqp://127.0.0.1:9", "orders")
