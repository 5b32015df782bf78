"""Workers as processes, and an app that publishes their tasks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis
from celery import Celery
from celery.canvas import Signature

from lastbit import BatchHandle, Client, ItemIds
from lastbit.integrations.celery import Lastbit
from tests.support.aws import CREDENTIALS, TestQueue, sqs_client
from tests.support.servers import ROOT, wait_until_it_prints

PATIENCE = 60


@dataclass
class Worker:
    process: subprocess.Popen[str]
    output: str
    """Standard error until the worker was ready."""

    def stop(self, number: int = signal.SIGTERM) -> int:
        """SIGKILL ends its child processes too."""
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@dataclass
class Place:
    """A queue on a broker, a service, and the notes of the tasks."""

    broker_url: str
    notes_url: str
    service_url: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Lastbit`."""

    def __post_init__(self) -> None:
        self.queue = f"queue-{uuid.uuid4()}"
        # The tests run on one Redis, but each has messages and results of its own.
        transport: dict[str, Any] = {}
        if self.on_redis:
            transport = {"global_keyprefix": f"{self.queue}-"}
        elif self.on_sqs:
            transport = {"is_secure": False, "region": CREDENTIALS["AWS_DEFAULT_REGION"], "wait_time_seconds": 1}
        transport |= self.settings.get("broker_transport_options", {})
        self.settings = {
            "task_acks_late": True,
            **self.settings,
            "task_default_queue": self.queue,
            "broker_transport_options": transport,
            "result_backend_transport_options": {"global_keyprefix": f"{self.queue}-"},
        }
        self.app = Celery("publisher", broker=self.broker_url, backend=self.notes_url, set_as_current=False)
        self.app.conf.update(self.settings)
        database = self.options.get("database")
        url = self.service_url if database is None else None
        self.lastbit = Lastbit(self.app, url, database=database, app_name=self.options.get("app_name"))
        self.client: Client = self.lastbit.client
        self.notes = redis.Redis.from_url(self.notes_url)

    @property
    def on_redis(self) -> bool:
        return self.broker_url.startswith("redis:")

    @property
    def on_sqs(self) -> bool:
        return self.broker_url.startswith("sqs:")

    @contextlib.contextmanager
    def worker(
        self, pool: str = "prefork", concurrency: int = 2, url: str | None = None, **environment: str
    ) -> Iterator[Worker]:
        """Run a worker. `url`: the address of the service, if another one."""
        command = [sys.executable, "-m", "celery", "-A", "tests.integrations.celery.tasks", "worker"]
        command += ["--pool", pool, "--concurrency", str(concurrency), "--loglevel", "INFO"]
        command += ["--without-mingle", "--without-gossip", "--hostname", f"{uuid.uuid4()}@here"]
        values = {
            "TEST_BROKER": self.broker_url,
            "TEST_BACKEND": self.notes_url,
            "TEST_NOTES": self.notes_url,
            "TEST_SETTINGS": json.dumps(self.settings),
            "TEST_OPTIONS": json.dumps(self.options),
            "LASTBIT_URL": url or self.service_url,
            "PYTHONWARNINGS": "ignore::UserWarning",  # run by root, as in a container
        }
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **values, **environment},
            stdout=subprocess.DEVNULL,  # a banner
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        worker = None
        try:
            worker = Worker(process, wait_until_it_prints(process, " ready."))
            yield worker
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)

    def task(self, name: str, *args: Any, **options: Any) -> Signature:
        return self.app.signature(name, args=args, options=options)

    def open(self, items: int = 1) -> tuple[BatchHandle, ItemIds]:
        """A sealed batch and its items."""
        batch = self.client.open(items=items, sealed=True)
        assert batch.ids is not None
        return batch, batch.ids

    def publish(self, name: str, *args: Any, **options: Any) -> BatchHandle:
        """Publish one task as the only item of a batch."""
        batch, ids = self.open()
        self.task(name, *args).apply_async(task_id=ids[0], **options)
        return batch

    def wait_until_started(self, item: str) -> int:
        """The process in which the next run of the task has started."""
        return int(self.read_note("started", item))

    def read_note(self, kind: str, name: object) -> str:
        """Wait for the next note of a task."""
        note = self.notes.blpop([f"{self.queue}:{kind}:{name}"], timeout=PATIENCE)
        assert note is not None, f"no note {kind} of {name}"
        text: bytes = note[1]
        return text.decode()

    def let_go(self, item: str, runs: int = 1) -> None:
        """End this many runs of the task `wait`."""
        self.notes.rpush(f"{self.queue}:go:{item}", *range(runs))

    def runs(self, item: str) -> int:
        return int(self.notes.get(f"{self.queue}:runs:{item}") or 0)

    def messages(self) -> int:
        """Messages on the broker. Those that a live worker has don't count on RabbitMQ."""
        if self.on_redis:
            waiting: int = self.notes.llen(f"{self.queue}-{self.queue}")
            unacked: int = self.notes.hlen(f"{self.queue}-unacked")
            return waiting + unacked
        if self.on_sqs:
            client = sqs_client(self.broker_url.replace("sqs://test:test@", "http://"))
            return TestQueue(client, client.get_queue_url(QueueName=self.queue)["QueueUrl"], None).count()
        with self.app.connection_for_read() as connection:
            count: int = connection.default_channel.queue_declare(self.queue, passive=True).message_count
            return count


def outcomes(batch: BatchHandle, patience: float = PATIENCE) -> dict[str, str]:
    """Wait until the batch is complete; the reason of each failed or skipped item."""
    batch.wait(patience)
    verification = batch.verify()
    assert verification.ok, verification
    ranges = (*batch.failed(), *batch.skipped())
    return {item: reason for span in ranges for item, reason in span.reasons.items()}
