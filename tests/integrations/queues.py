"""The adapters' queues on real brokers, for producers and workers that are processes of their own: `QUEUES` has them by
name. Messages of a killed worker come back after seconds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import celery
import confluent_kafka
import dramatiq
import redis
import rq
import taskiq.api
from aws_lambda_powertools.utilities.batch import EventType, process_partial_response
from dramatiq.brokers.redis import RedisBroker
from rq.job import Job
from taskiq_redis import RedisStreamBroker

from lastbit.integrations import aws_lambda, kafka, rabbitmq, sqs
from lastbit.integrations import celery as celery_adapter
from lastbit.integrations import dramatiq as dramatiq_adapter
from lastbit.integrations import rq as rq_adapter
from lastbit.integrations import taskiq as taskiq_adapter
from tests.integrations.aws_lambda.poller import poll
from tests.support.aws import TestQueue, sqs_client

Handle = Callable[[str], object]


class Queue(Protocol):
    def __init__(self, address: str, name: str) -> None:
        """`address`: the broker's."""

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        """Send a message for each body. A handler may call it too."""

    def work(self, handle: Handle) -> None:
        """Handle messages until the process is killed."""


class RabbitMQ:
    def __init__(self, address: str, name: str) -> None:
        self._url, self._queue = address, name

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        return rabbitmq.fan_out(self._url, self._queue, bodies, **options)

    def work(self, handle: Handle) -> None:
        rabbitmq.consume(self._url, self._queue, lambda message: handle(message.body.decode()), prefetch=200)


class Kafka:
    def __init__(self, address: str, name: str) -> None:
        self._address, self._topic = address, name
        self._producer = confluent_kafka.Producer({"bootstrap.servers": address})
        self._producer.list_topics(name, timeout=30)  # creates the topic, without which a consumer ends

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        return kafka.fan_out(self._producer, self._topic, bodies, **options)

    def work(self, handle: Handle) -> None:
        settings: dict[str, Any] = {
            "bootstrap.servers": self._address,
            "group.id": "workers",
            "session.timeout.ms": 2000,
            "heartbeat.interval.ms": 300,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
        consumer = kafka.Confluent(confluent_kafka.Consumer(settings))
        kafka.consume(consumer, [self._topic], lambda record: handle(record.value().decode()), every=0.1, capacity=500)


class SQS:
    """The name is the queue's URL."""

    def __init__(self, address: str, name: str) -> None:
        self._client, self._url = sqs_client(address), name

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        return sqs.fan_out(self._client, self._url, bodies, **options)

    def work(self, handle: Handle) -> None:
        sqs.consume(self._client, self._url, lambda message: handle(message["Body"]), wait_seconds=1)


class Lambda(SQS):
    def work(self, handle: Handle) -> None:
        queue = TestQueue(self._client, self._url, None)
        processor = aws_lambda.LastbitBatchProcessor(EventType.SQS, raise_on_entire_batch_failure=False)

        def function(event: dict[str, Any], context: Any) -> Any:
            return process_partial_response(event, lambda record: handle(record.body), processor, context)

        while True:
            poll(queue, function)


class Celery:
    def __init__(self, address: str, name: str) -> None:
        self._app = celery.Celery("tests", broker=address)
        self._app.conf.update(
            task_acks_late=True,
            task_default_queue=name,
            task_ignore_result=True,
            worker_prefetch_multiplier=32,
            broker_connection_retry_on_startup=True,
        )
        self._lastbit = celery_adapter.Lastbit(self._app)
        self._handle: Handle = print

        def task(body: str) -> None:
            self._handle(body)

        self._task = self._app.task(task, name="task")

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        return self._lastbit.fan_out(map(self._task.s, bodies), **options)

    def work(self, handle: Handle) -> None:
        self._handle = handle
        self._app.worker_main(
            ["worker", "--concurrency=2", "--without-mingle", "--without-gossip", "--without-heartbeat"]
        )


class RQ:
    handle: Handle = print

    def __init__(self, address: str, name: str) -> None:
        self._queue = rq.Queue(name, connection=redis.Redis.from_url(address))

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        retries = {"retry": rq.Retry(max=9)}
        return rq_adapter.fan_out(self._queue, run_job, ((body,) for body in bodies), options=retries, **options)

    def work(self, handle: Handle) -> None:
        RQ.handle = staticmethod(handle)
        _Quick([self._queue], connection=self._queue.connection, maintenance_interval=1, worker_ttl=20).work()


def run_job(body: str) -> None:
    RQ.handle(body)


class _Quick(rq_adapter.LastbitSimpleWorker):
    """Without forks."""

    def get_heartbeat_ttl(self, job: Job) -> int:
        return 2


class Dramatiq:
    def __init__(self, address: str, name: str) -> None:
        self._broker = RedisBroker(url=address, namespace=name, heartbeat_timeout=1000, maintenance_chance=1_000_000)
        self._broker.add_middleware(dramatiq_adapter.LastbitMiddleware())
        self._handle: Handle = print
        self._actor = dramatiq.actor(self._run, broker=self._broker, actor_name="task", max_retries=0)

    def _run(self, body: str) -> None:
        self._handle(body)

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        return dramatiq_adapter.fan_out(map(self._actor.message, bodies), broker=self._broker, **options)

    def work(self, handle: Handle) -> None:
        self._handle = handle
        dramatiq.Worker(self._broker, worker_threads=4).start()
        threading.Event().wait()


class Taskiq:
    def __init__(self, address: str, name: str) -> None:
        self._broker = RedisStreamBroker(
            address, queue_name=name, consumer_id="0", idle_timeout=2000, xread_block=100, unacknowledged_lock_timeout=1
        )
        self._broker.add_middlewares(taskiq_adapter.LastbitMiddleware())
        self._handle: Handle = print
        self._loop: asyncio.AbstractEventLoop | None = None
        """The worker's."""

        async def task(body: str) -> None:
            await asyncio.to_thread(self._handle, body)

        self._task = self._broker.register_task(task, "task")

    def fan_out(self, bodies: Iterable[str], **options: Any) -> object:
        sending = taskiq_adapter.fan_out(self._task, ((body,) for body in bodies), **options)
        if self._loop is not None:
            return asyncio.run_coroutine_threadsafe(sending, self._loop).result()
        return asyncio.run(self._between_startup_and_shutdown(sending))

    async def _between_startup_and_shutdown(self, sending: Any) -> object:
        await self._broker.startup()
        try:
            return await sending
        finally:
            await self._broker.shutdown()

    def work(self, handle: Handle) -> None:
        self._handle = handle
        asyncio.run(self._receive())

    async def _receive(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._broker.is_worker_process = True
        await taskiq.api.run_receiver_task(self._broker, max_async_tasks=10, run_startup=True)


QUEUES: dict[str, type[Queue]] = {
    "aws_lambda": Lambda,
    "celery": Celery,
    "dramatiq": Dramatiq,
    "kafka": Kafka,
    "rabbitmq": RabbitMQ,
    "rq": RQ,
    "sqs": SQS,
    "taskiq": Taskiq,
}
