"""SQS for tests and benchmarks: moto's server, and queues on it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config

from tests.support.servers import ROOT, free_port, wait_until_it_prints

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "eu-central-1"}


def sqs_client(url: str, **options: Any) -> Any:
    """boto3's client for the server at `url`."""
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        config=Config(max_pool_connections=50, **options),
    )


@dataclass(frozen=True)
class TestQueue:
    """A queue, and its dead-letter queue if it has one."""

    __test__ = False

    client: Any
    url: str
    dead_letters_url: str | None

    def send(self, *bodies: str, **fields: Any) -> None:
        for body in bodies:
            self.client.send_message(QueueUrl=self.url, MessageBody=body, **fields)

    def count(self, url: str | None = None) -> int:
        """Messages in the queue, hidden ones included."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = self.client.get_queue_attributes(QueueUrl=url or self.url, AttributeNames=names)
        return sum(map(int, answer["Attributes"].values()))

    def dead_letters(self) -> int:
        assert self.dead_letters_url is not None
        return self.count(self.dead_letters_url)

    def drain(self) -> list[dict[str, Any]]:
        """Receive and delete all visible messages."""
        messages_received: list[dict[str, Any]] = []
        while messages := self.client.receive_message(
            QueueUrl=self.url,
            MaxNumberOfMessages=10,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        ).get("Messages"):
            entries = [{"Id": str(n), "ReceiptHandle": message["ReceiptHandle"]} for n, message in enumerate(messages)]
            self.client.delete_message_batch(QueueUrl=self.url, Entries=entries)
            messages_received += messages
        return messages_received


@dataclass
class Moto:
    url: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def client(self, **options: Any) -> Any:
        return sqs_client(self.url, **options)

    def queue(self, *, fifo: bool = False, visibility: int = 30, most_receives: int | None = None) -> TestQueue:
        """A new queue; with `most_receives`, it has a dead-letter queue."""
        client = self.client()
        suffix = ".fifo" if fifo else ""
        name = f"queue-{next(self._numbers)}"
        attributes = {"VisibilityTimeout": str(visibility), **({"FifoQueue": "true"} if fifo else {})}
        dead_letters_url = None
        if most_receives is not None:
            dead_letters_url = client.create_queue(
                QueueName=f"{name}-dead{suffix}", Attributes={"FifoQueue": "true"} if fifo else {}
            )["QueueUrl"]
            arn = client.get_queue_attributes(QueueUrl=dead_letters_url, AttributeNames=["QueueArn"])["Attributes"]
            policy = {"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": most_receives}
            attributes["RedrivePolicy"] = json.dumps(policy)
        url = client.create_queue(QueueName=name + suffix, Attributes=attributes)["QueueUrl"]
        return TestQueue(client, url, dead_letters_url)


@contextlib.contextmanager
def moto_server() -> Iterator[Moto]:
    port = free_port()
    command = [sys.executable, "-m", "tests.support.moto_server", str(port)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **CREDENTIALS}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_until_it_prints(process, "ready")
        yield Moto(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait(60)
