"""The producer's side: entries, calls, refusals, reruns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from lastbit import Client, InvalidArgument
from lastbit.integrations import sqs
from tests.support.aws import Moto, TestQueue
from tests.support.servers import ROOT


def items_of(messages: list[Any]) -> list[str | None]:
    return [sqs.item_of(message) for message in messages]


def test_every_body_becomes_a_message_with_its_item(moto: Moto, lastbit: Client) -> None:
    """In a new batch, and then in the same one while it is open."""
    queue = moto.queue()
    batch = sqs.fan_out(queue.client, queue.url, (f"{n}" for n in range(25)), key="k", seal=False, lastbit=lastbit)
    sqs.fan_out(queue.client, queue.url, ["25"], batch=batch, lastbit=lastbit)
    messages = queue.drain()
    assert {message["Body"]: sqs.item_of(message) for message in messages} == {
        str(n): f"{batch.id}:0:{n}" for n in range(26)
    }
    assert (batch.refresh().state, batch.info.key, batch.info.items) == ("sealed", "k", 26)


def test_calls_are_at_most_a_mebibyte(moto: Moto, lastbit: Client) -> None:
    """A message that is larger is refused at once, and named."""
    queue = moto.queue()
    bodies = ["x" * 400_000] * 5 + ["x" * 1_000_000, "x"]
    batch = sqs.fan_out(queue.client, queue.url, bodies, lastbit=lastbit)
    assert sorted(items_of(queue.drain())) == sorted(f"{batch.id}:0:{n}" for n in range(7))
    with pytest.raises(InvalidArgument, match=r"item \d+:0:0: a message has at most 1,048,576 bytes, not 1,048,5"):
        sqs.fan_out(queue.client, queue.url, ["é" * 524_288], lastbit=lastbit)


def test_a_message_that_sqs_refuses_is_sent_again(moto: Moto, lastbit: Client) -> None:
    """Each is in the queue once in the end."""
    queue = moto.queue()
    bodies = [f"{n}, refuse 2 sends" if n % 7 == 0 else str(n) for n in range(40)]
    batch = sqs.fan_out(queue.client, queue.url, bodies, lastbit=lastbit)
    assert Counter(items_of(queue.drain())) == Counter(f"{batch.id}:0:{n}" for n in range(40))


def test_a_message_that_sqs_never_accepts_ends_the_fan_out(moto: Moto, lastbit: Client) -> None:
    """Its batch stays open, and the error names the item."""
    queue = moto.queue()
    late = {"MessageBody": "x", "DelaySeconds": 901}
    batch = lastbit.open()
    with pytest.raises(InvalidArgument, match=rf"item {batch.id}:0:0: SQS refuses its message: Value 901"):
        sqs.fan_out(queue.client, queue.url, [late], batch=batch, lastbit=lastbit)
    assert batch.refresh().state == "open"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"bytes", "a body is a text"),
        ({"Body": "x"}, "MessageBody"),
        (
            {"MessageBody": "x", "MessageAttributes": {str(n): {"DataType": "String"} for n in range(10)}},
            "at most 10 attributes",
        ),
    ],
)
def test_bodies_are_checked(moto: Moto, lastbit: Client, body: Any, message: str) -> None:
    queue = moto.queue()
    with pytest.raises(InvalidArgument, match=message):
        sqs.fan_out(queue.client, queue.url, [body], lastbit=lastbit)


def producer(moto: Moto, queue: TestQueue, url: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.integrations.sqs.producer", moto.url, queue.url, *map(str, arguments)]
    environment = {**os.environ, "LASTBIT_URL": url}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_producer_that_was_killed_is_run_again(moto: Moto, lastbit: Client) -> None:
    """It sends what it had not sent, with the same ids, and repeats at most one chunk."""
    queue = moto.queue()
    first = producer(moto, queue, lastbit.url, 50, 300, "killed")
    assert first.stdout is not None
    for line in first.stdout:
        if int(line) == 150:
            first.send_signal(signal.SIGKILL)
            break
    first.wait(20)
    second = producer(moto, queue, lastbit.url, 50, 300, "killed")
    output, _ = second.communicate(timeout=60)
    batch = int(output.split()[-1])
    messages = queue.drain()
    bodies = {sqs.item_of(message): message["Body"] for message in messages}
    assert bodies == {f"{batch}:0:{n}": f"body {n}" for n in range(300)}
    assert len(messages) <= 350
    assert [batch_found.key for batch_found in lastbit.batches(key="killed")] == ["killed"]
    assert lastbit.batch(batch).refresh().state == "sealed"
