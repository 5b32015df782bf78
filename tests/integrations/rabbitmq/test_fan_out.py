"""The producer: every message is confirmed by the node, or published again."""

from __future__ import annotations

import re
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pika
import pytest

from lastbit import Client, Retry
from lastbit.errors import InvalidArgument, MessagesRefused
from lastbit.integrations import _fan_out
from lastbit.integrations import rabbitmq as adapter
from lastbit.integrations.rabbitmq._publisher import Sender
from tests.integrations.rabbitmq.conftest import Consuming, left, over
from tests.support.brokers import RabbitMQ, Wire
from tests.support.exposition import eventually

pytestmark = pytest.mark.xdist_group("rabbitmq")


def taken(channel: Any, queue: str) -> Iterator[tuple[Any, bytes]]:
    """All messages of a queue: properties and body."""
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return
        yield properties, body


def test_each_body_is_sent_with_an_item(rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str) -> None:
    """As a persistent message; the batch is sealed. Texts, bytes, and messages with properties of their own."""
    own = pika.BasicProperties(content_type="image/png", headers={"team": "search"}, delivery_mode=1)
    bodies = ["Stuhl à 7", b"\x00", adapter.Outgoing(b"2", own)]
    batch = adapter.fan_out(rabbitmq.url, queue, bodies, key="catalog", labels={"team": "search"}, lastbit=client)
    messages = list(taken(channel, queue))
    assert [body for _, body in messages] == ["Stuhl à 7".encode(), b"\x00", b"2"]
    items = [f"{batch.id}:0:{number}" for number in range(3)]
    assert [adapter.item_of(properties) for properties, _ in messages] == items
    assert [properties.delivery_mode for properties, _ in messages] == [2, 2, 1]
    assert messages[2][0].headers["team"] == "search"
    assert messages[2][0].content_type == "image/png"
    assert (own.headers, own.message_id) == ({"team": "search"}, None)
    assert (batch.state, batch.items, batch.key) == ("sealed", 3, "catalog")


@pytest.mark.parametrize(
    "own",
    [
        pika.BasicProperties(message_id="picture-7"),
        pika.BasicProperties(message_id="1:0:0"),
        pika.BasicProperties(headers={adapter.ITEM: "1:0:0"}),
    ],
    ids=["any", "that of an earlier item", "the header of an earlier item"],
)
def test_a_message_keeps_its_own_id(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, own: pika.BasicProperties
) -> None:
    """The item's id is in a header then."""
    before = own.message_id
    batch = adapter.fan_out(rabbitmq.url, queue, [adapter.Outgoing(b"", own)], lastbit=client)
    ((properties, _),) = taken(channel, queue)
    assert adapter.item_of(properties) == f"{batch.id}:0:0"
    assert properties.message_id == own.message_id == before


def test_an_exchange_routes_by_key(rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str) -> None:
    """A message's own routing key replaces the fan-out's."""
    channel.exchange_declare("pictures", "direct")
    channel.queue_bind(queue, "pictures", "large")
    channel.queue_bind("work.dead", "pictures", "small")
    bodies = [b"0", adapter.Outgoing(b"1", routing_key="small")]
    adapter.fan_out(rabbitmq.url, "large", bodies, exchange="pictures", lastbit=client)
    assert [body for _, body in taken(channel, queue)] == [b"0"]
    assert [body for _, body in taken(channel, "work.dead")] == [b"1"]
    channel.exchange_delete("pictures")


def test_the_handle_works_without_a_client_of_ones_own(
    rabbitmq: RabbitMQ, service_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client that is made from the environment stays open for it."""
    monkeypatch.setenv("LASTBIT_URL", service_url)
    assert adapter.fan_out(rabbitmq.url, queue, [b"0"]).refresh().pending == 1


def test_a_producer_that_is_run_again_repeats_at_most_a_chunk(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str
) -> None:
    """Same batch, same ids; everything that was not sent is sent."""
    run_key = str(uuid.uuid4())

    def bodies(dies_at: int) -> Iterator[str]:
        for number in range(100):
            if number == dies_at:
                raise KeyboardInterrupt
            yield str(number)

    for dies_at in (35, 65):
        with pytest.raises(KeyboardInterrupt):
            adapter.fan_out(rabbitmq.url, queue, bodies(dies_at), idempotency_key=run_key, chunk=10, lastbit=client)
    batch = adapter.fan_out(rabbitmq.url, queue, bodies(-1), idempotency_key=run_key, chunk=10, lastbit=client)
    pairs = Counter((int(body), adapter.item_of(properties)) for properties, body in taken(channel, queue))
    assert sorted(pairs) == [(number, f"{batch.id}:0:{number}") for number in range(100)]
    assert pairs.total() <= 120
    assert batch.items == 100


def test_unroutable_messages_are_published_until_they_are_routed(
    rabbitmq: RabbitMQ, client: Client, channel: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker returns them; without confirms they would be gone. In the end, it is an error."""
    monkeypatch.setattr(_fan_out, "PATIENCE", Retry(attempts=3, base=0.01))
    with pytest.raises(MessagesRefused):
        adapter.fan_out(rabbitmq.url, "late", [b"0", b"1"], lastbit=client)
    assert "NO_ROUTE" in caplog.text
    with Sender(rabbitmq.url, "", "late") as send:
        assert len(send([("1:0:0", b"0"), ("1:0:1", b"1")])) == 2
        channel.queue_declare("late")
        assert send([("1:0:0", b"0"), ("1:0:1", b"1")]) == []
    eventually(lambda: left(channel, "late"), 2)
    channel.queue_delete("late")


def test_messages_that_the_broker_refuses_are_published_again(
    rabbitmq: RabbitMQ, client: Client, channel: Any, consuming: Consuming, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of five places that refuses more; a consumer drains it. Nothing is lost."""
    monkeypatch.setattr(_fan_out, "PATIENCE", Retry(attempts=1000, base=0.01, cap=0.05))
    channel.queue_declare("narrow", arguments={"x-max-length": 5, "x-overflow": "reject-publish"})
    handled: set[bytes] = set()
    with consuming("narrow", lambda message: handled.add(message.body), prefetch=3):
        batch = adapter.fan_out(rabbitmq.url, "narrow", map(str, range(200)), chunk=50, lastbit=client)
        assert batch.wait(30).succeeded
    assert len(handled) == batch.items == 200
    channel.queue_delete("narrow")


def test_messages_without_a_confirmation_are_published_again(
    rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost before a chunk, and in the middle of one: some may be sent twice, none is missing."""
    monkeypatch.setattr(_fan_out, "PATIENCE", Retry(base=0.01))

    def bodies() -> Iterator[str]:
        for number in range(3000):
            if number == 1000:
                wire.cut()
            if number == 2000:
                threading.Timer(0.02, wire.cut).start()
            yield str(number)

    batch = adapter.fan_out(over(wire), queue, bodies(), chunk=500, lastbit=client)
    pairs = {(int(body), adapter.item_of(properties)) for properties, body in taken(channel, queue)}
    assert sorted(pairs) == [(number, f"{batch.id}:0:{number}") for number in range(3000)]


def test_lasting_refusals_are_raised(rabbitmq: RabbitMQ, client: Client, channel: Any, queue: str) -> None:
    """No such exchange, no broker, no body."""
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="no exchange 'nowhere'"):
        adapter.fan_out(rabbitmq.url, "key", [b"0"], exchange="nowhere", lastbit=client)
    with pytest.raises(pika.exceptions.AMQPConnectionError) as away:
        adapter.fan_out("amqp://127.0.0.1:1/", "key", [b"0"], lastbit=client)
    assert re.search(r"RabbitMQ at 127.0.0.1:1: .*Connection refused", "".join(away.value.__notes__))
    with pytest.raises(InvalidArgument, match=r"item \d+:0:1: a body is bytes, a text or an Outgoing, not 7"):
        adapter.fan_out(rabbitmq.url, queue, [b"0", 7], lastbit=client)  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="properties are a pika"):
        adapter.fan_out(rabbitmq.url, queue, [adapter.Outgoing(b"0", {"type": "x"})], lastbit=client)  # type: ignore[arg-type]
