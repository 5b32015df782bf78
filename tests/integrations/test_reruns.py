"""The reruns of a producer, the same for each adapter: with the real library, and a broker that keeps the messages."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import celery
import confluent_kafka
import dramatiq
import pika
import pytest
import redis as redis_py
import rq
import taskiq
from celery.signals import before_task_publish
from dramatiq.brokers.stub import StubBroker

from lastbit import AsyncClient, Client, errors, integrations
from lastbit.integrations import kafka, rabbitmq, sqs
from lastbit.integrations import rq as rq_adapter
from lastbit.integrations import taskiq as taskiq_adapter
from lastbit.integrations.celery import Lastbit
from lastbit.integrations.dramatiq import LastbitMiddleware
from lastbit.integrations.dramatiq import fan_out as dramatiq_fan_out
from tests.integrations.kafka.conftest import records
from tests.mutants import mutant


class Died(BaseException):
    """The producer was killed."""


@dataclass
class Adapter:
    """An adapter for these tests. The messages are made of numbers, and of something that may change with each run."""

    message: Callable[[int, Any], Any]
    number_of: Callable[[Any], int]
    """The number in a message."""
    fan_out: Callable[..., Any]
    """Takes the messages and options."""
    collect: Callable[[], list[tuple[str | None, int]]]
    """The item and the number of each message that was sent since the last call."""
    sent: list[tuple[str | None, int]] = field(default_factory=list)
    close: Callable[[], object] = lambda: None

    def run(self, numbers: Iterable[int], extra: Callable[[], Any] = lambda: "same", **options: Any) -> Any:
        """Returns the handle."""
        try:
            return self.fan_out((self.message(number, extra()) for number in numbers), chunk=10, **options)
        finally:
            self.sent += self.collect()


def generic(request: pytest.FixtureRequest, url: str) -> Adapter:
    client, sent = Client(url), []

    def send(pairs: Any) -> Any:
        sent.extend((item, message[0]) for item, message in pairs)
        return []

    def collect() -> Any:
        return [sent.pop(0) for _ in range(len(sent))]

    return Adapter(
        message=lambda number, extra: (number, extra),
        number_of=lambda message: message[0],
        fan_out=lambda messages, **options: integrations.fan_out(client, messages, send, **options),
        collect=collect,
        close=client.close,
    )


def asynchronous(request: pytest.FixtureRequest, url: str) -> Adapter:
    sent: list[Any] = []

    async def send(pairs: Any) -> Any:
        sent.extend((item, message[0]) for item, message in pairs)
        return []

    async def fan_out(messages: Any, **options: Any) -> Any:
        async with AsyncClient(url) as client:
            return await integrations.fan_out_async(client, messages, send, **options)

    return Adapter(
        message=lambda number, extra: (number, extra),
        number_of=lambda message: message[0],
        fan_out=lambda messages, **options: asyncio.run(fan_out(messages, **options)),
        collect=lambda: [sent.pop(0) for _ in range(len(sent))],
    )


def of_celery(request: pytest.FixtureRequest, url: str) -> Adapter:
    """In each third message, the task is one of a chain. Options change with each run."""
    app = celery.Celery("reruns", broker="memory://", set_as_current=False)
    lastbit = Lastbit(app, url)
    published: list[tuple[str, int]] = []

    def note(body: Any, headers: Any, **_: object) -> None:
        chain = body[2]["chain"]
        item = chain[0]["options"]["task_id"] if chain else headers["id"]
        published.append((item, body[0][0]))

    before_task_publish.connect(note, weak=False)

    def message(number: int, extra: Any) -> Any:
        task = app.signature("render", args=(number, extra), kwargs={"size": {"x": 1, "y": 2}})
        task = task.set(countdown=time.time(), headers={"at": uuid.uuid4().hex})
        return celery.chain(task, app.signature("store"), app=app) if number % 3 == 0 else task

    def number_of(task: Any) -> int:
        number: int = (task.tasks[0] if isinstance(task, celery.chain) else task).args[0]
        return number

    return Adapter(
        message=message,
        number_of=number_of,
        fan_out=lastbit.fan_out,
        collect=lambda: [published.pop(0) for _ in range(len(published))],
        close=lambda: before_task_publish.disconnect(note),
    )


def of_dramatiq(request: pytest.FixtureRequest, url: str) -> Adapter:
    """Each message has an id of its own. Each third one is a pipeline."""
    broker = StubBroker()
    client = Client(url)
    broker.add_middleware(LastbitMiddleware(client=client))
    actor = dramatiq.actor(lambda number, extra: None, broker=broker, actor_name="render")

    def message(number: int, extra: Any) -> Any:
        one = actor.message(number, extra)
        return dramatiq.pipeline([one, actor.message(number, extra)], broker=broker) if number % 3 == 0 else one

    def number_of(message: Any) -> int:
        number: int = (message.messages[0] if isinstance(message, dramatiq.pipeline) else message).args[0]
        return number

    def collect() -> Any:
        queue = broker.queues["default"].queue
        messages = [dramatiq.Message.decode(queue.popleft()) for _ in range(len(queue))]
        return [(message.options.get("lastbit-item", message.message_id), message.args[0]) for message in messages]

    return Adapter(message, number_of, partial(dramatiq_fan_out, broker=broker), collect, close=client.close)


def of_rq(request: pytest.FixtureRequest, url: str) -> Adapter:
    connection = redis_py.Redis.from_url(request.getfixturevalue("redis").url(0))
    connection.flushall()
    queue = rq.Queue(connection=connection)
    client = Client(url)

    def collect() -> Any:
        jobs = [(rq_adapter.item_of_job(job_id), queue.fetch_job(job_id)) for job_id in queue.job_ids]
        queue.empty()
        return [(item, job.args[0]) for item, job in jobs]

    return Adapter(
        message=lambda number, extra: (number, extra),
        number_of=lambda call: call[0],
        fan_out=lambda messages, **options: rq_adapter.fan_out(queue, render, messages, client=client, **options),
        collect=collect,
        close=client.close,
    )


def render(number: int, extra: Any) -> None:
    """A task."""


def of_taskiq(request: pytest.FixtureRequest, url: str) -> Adapter:
    sent: list[Any] = []

    class Noting(taskiq.TaskiqMiddleware):
        async def post_send(self, message: Any) -> None:
            sent.append((message.task_id, message.kwargs["number"]))

    async def fan_out(messages: Any, **options: Any) -> Any:
        broker = taskiq.InMemoryBroker(await_inplace=True)
        lastbit = taskiq_adapter.LastbitMiddleware(url)
        broker.add_middlewares(Noting(), lastbit)
        try:
            return await taskiq_adapter.fan_out(broker.register_task(render, "render"), messages, **options)
        finally:
            await lastbit.shutdown()

    return Adapter(
        message=lambda number, extra: {"number": number, "extra": extra},
        number_of=lambda call: call["number"],
        fan_out=lambda messages, **options: asyncio.run(fan_out(messages, **options)),
        collect=lambda: [sent.pop(0) for _ in range(len(sent))],
    )


def of_sqs(request: pytest.FixtureRequest, url: str) -> Adapter:
    """The bodies are all the same; what tells messages apart is an attribute."""
    queue = request.getfixturevalue("moto").queue()
    client = Client(url)

    def message(number: int, extra: Any) -> Any:
        attribute = {"DataType": "String", "StringValue": str(number)}
        return {
            "MessageBody": "render",
            "MessageAttributes": {"n": attribute, "extra": {"DataType": "String", "StringValue": extra}},
        }

    def collect() -> Any:
        messages = queue.drain()
        return [(sqs.item_of(message), int(message["MessageAttributes"]["n"]["StringValue"])) for message in messages]

    return Adapter(
        message=message,
        number_of=lambda body: int(body["MessageAttributes"]["n"]["StringValue"]),
        fan_out=lambda messages, **options: sqs.fan_out(queue.client, queue.url, messages, lastbit=client, **options),
        collect=collect,
        close=client.close,
    )


def of_rabbitmq(request: pytest.FixtureRequest, url: str) -> Adapter:
    """Each message has an id and a time of its own."""
    broker = request.getfixturevalue("rabbitmq")
    client = Client(url)
    connection = pika.BlockingConnection(pika.URLParameters(broker.url))
    channel = connection.channel()
    channel.queue_declare("reruns")

    def message(number: int, extra: Any) -> Any:
        own: dict[str, Any] = {"message_id": uuid.uuid4().hex, "timestamp": time.time_ns() // 10**6}
        return rabbitmq.Outgoing(str(number), pika.BasicProperties(headers={"extra": extra}, **own))

    def collect() -> Any:
        found = []
        while (taken := channel.basic_get("reruns", auto_ack=True))[0] is not None:
            found.append((rabbitmq.item_of(taken[1]), int(taken[2])))
        return found

    def close() -> None:
        channel.queue_delete("reruns")
        connection.close()
        client.close()

    return Adapter(
        message=message,
        number_of=lambda outgoing: int(outgoing.body),
        fan_out=lambda messages, **options: rabbitmq.fan_out(broker.url, "reruns", messages, lastbit=client, **options),
        collect=collect,
        close=close,
    )


def of_kafka(request: pytest.FixtureRequest, url: str) -> Adapter:
    producer = confluent_kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = producer.list_topics(timeout=30).brokers.values()
    address = ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    client = Client(url)
    topic = "reruns"
    seen = 0

    def collect() -> Any:
        nonlocal seen
        reader = confluent_kafka.Consumer({"bootstrap.servers": address, "group.id": "ends"})
        partitions = reader.list_topics(topic, timeout=30).topics[topic].partitions
        places = [confluent_kafka.TopicPartition(topic, number) for number in partitions]
        end = sum(reader.get_watermark_offsets(place)[1] for place in places)
        reader.close()
        new = records(address, topic, end)[seen:] if end > seen else []
        seen = end
        return [(kafka.item_of(record), int(record.key())) for record in new]

    return Adapter(
        # One partition, so that the records come in order.
        message=lambda number, extra: kafka.Outgoing("x", key=str(number), headers={"extra": extra}, partition=0),
        number_of=lambda outgoing: int(outgoing.key),
        fan_out=lambda messages, **options: kafka.fan_out(producer, topic, messages, lastbit=client, **options),
        collect=collect,
        close=client.close,
    )


ADAPTERS = {
    "generic": generic,
    "asynchronous": asynchronous,
    "celery": of_celery,
    "dramatiq": of_dramatiq,
    "rq": of_rq,
    "taskiq": of_taskiq,
    "sqs": of_sqs,
    "rabbitmq": of_rabbitmq,
    "kafka": of_kafka,
}
IN_GROUPS = [
    pytest.param(name, marks=pytest.mark.xdist_group("rabbitmq")) if name == "rabbitmq" else name for name in ADAPTERS
]


@pytest.fixture(params=IN_GROUPS)
def adapter(request: pytest.FixtureRequest, service_url: str) -> Iterator[Adapter]:
    adapter = ADAPTERS[request.param](request, service_url)
    yield adapter
    adapter.close()


@pytest.fixture
def run_key() -> str:
    return str(uuid.uuid4())


def dying(numbers: Iterable[int], count: int) -> Iterator[int]:
    """The first `count` numbers; then the producer dies."""
    for position, number in enumerate(numbers):
        if position == count:
            raise Died
        yield number


@mutant(
    "what-a-library-makes-for-each-message-is-compared",
    "lastbit.integrations.dramatiq:_identity",
    "message.queue_name, message.actor_name, message.args, message.kwargs",
    "message.message_id, message.actor_name, message.args, message.kwargs",
)
def test_a_rerun_sends_what_was_not_sent(adapter: Adapter, run_key: str) -> None:
    """The messages are made again. Each has one item, which the handle has in their order, and the last issued chunk is
    sent twice."""
    with pytest.raises(Died):
        adapter.run(dying(range(45), 25), idempotency_key=run_key)
    assert sorted(number for _, number in adapter.sent) == list(range(20))
    batch = adapter.run(range(45), idempotency_key=run_key)
    assert sorted(number for _, number in adapter.sent) == sorted([*range(45), *range(10, 20)])
    items = {number: item for item, number in adapter.sent}
    assert len(set(adapter.sent)) == 45
    assert list(batch.item_ids()) == [items[number] for number in range(45)]
    assert [(items[number] or "").split(":")[2] for number in range(45)] == [str(number) for number in range(45)]


def test_a_rerun_in_another_order_sends_nothing(adapter: Adapter, run_key: str) -> None:
    """Whether the first chunk is another one, or the last one that was issued."""
    with pytest.raises(Died):
        adapter.run(dying(range(45), 35), idempotency_key=run_key)
    sent = adapter.sent.copy()
    for order in (range(44, -1, -1), [*range(29), 40, *range(30, 40), 29, *range(41, 45)]):
        with pytest.raises(errors.MessagesDiffer, match="sort the messages, or pass identify="):
            adapter.run(order, idempotency_key=run_key)
    assert adapter.sent == sent


def test_what_changes_with_each_run_is_refused_without_identify(adapter: Adapter, run_key: str) -> None:
    with pytest.raises(Died):
        adapter.run(dying(range(45), 25), lambda: uuid.uuid4().hex, idempotency_key=run_key)
    with pytest.raises(errors.MessagesDiffer):
        adapter.run(range(45), lambda: uuid.uuid4().hex, idempotency_key=run_key)
    assert len(adapter.sent) == 20


def test_identify_says_what_stands_for_a_message(adapter: Adapter, run_key: str) -> None:
    """It gets the message as it was passed, and leaves out what changes with each run."""
    options: dict[str, Any] = {"idempotency_key": run_key, "identify": adapter.number_of}
    with pytest.raises(Died):
        adapter.run(dying(range(45), 25), lambda: uuid.uuid4().hex, **options)
    with pytest.raises(errors.MessagesDiffer):
        adapter.run(range(44, -1, -1), lambda: uuid.uuid4().hex, **options)
    assert len(adapter.sent) == 20
    adapter.run(range(45), lambda: uuid.uuid4().hex, **options)
    assert {number for _, number in adapter.sent} == set(range(45))


def test_what_cannot_be_compared_needs_identify(adapter: Adapter, run_key: str) -> None:
    """Nothing is sent. The error says what to pass."""
    with pytest.raises(
        errors.InvalidArgument, match=r"message 0 can't be compared .* an object of object: pass identify="
    ):
        adapter.run(range(45), object, idempotency_key=run_key)
    assert adapter.sent == []
