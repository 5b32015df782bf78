"""Consumer processes that are killed, or end by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lastbit import Client
from lastbit.integrations import sqs
from tests.integrations.sqs.conftest import Consume
from tests.support.aws import Moto, TestQueue
from tests.support.servers import ROOT


@contextlib.contextmanager
def consumer(moto: Moto, queue: TestQueue, url: str, word: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.integrations.sqs.consumer", moto.url, queue.url, word]
    environment = {**os.environ, "LASTBIT_URL": url}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def wait_for(process: subprocess.Popen[str], body: str) -> None:
    assert process.stdout is not None
    assert any(line.strip() == body for line in process.stdout)


def consume_one(queue: TestQueue, consume: Consume) -> list[tuple[str, str]]:
    """Bodies and counts of receives, until the first message was handled."""
    handled: list[tuple[str, str]] = []
    stop = threading.Event()

    def handle(message: Any) -> None:
        handled.append((message["Body"], message["Attributes"]["ApproximateReceiveCount"]))
        stop.set()

    consume(queue, handle, wait_seconds=1, until_empty=False, stop=stop)
    return handled


def test_a_consumer_killed_in_its_work_leaves_the_message(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """It is delivered again after its visibility timeout, and counts once."""
    queue = moto.queue(visibility=1, most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["slow"], lastbit=lastbit)
    with consumer(moto, queue, lastbit.url, "slow") as process:
        wait_for(process, "slow")
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert batch.refresh().pending == 1
    assert [count for _, count in consume_one(queue, consume)] == ["2"]
    assert batch.refresh().succeeded
    assert queue.count() == 0


def test_a_consumer_killed_before_a_deletion_has_acked(moto: Moto, lastbit: Client, consume: Consume) -> None:
    """So the message is handled again, and its ack is a repeat. The other order would lose the item."""
    queue = moto.queue(visibility=1, most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a"], lastbit=lastbit)
    with consumer(moto, queue, lastbit.url, "before-deletion") as process:
        assert process.wait(30) == -signal.SIGKILL
    assert batch.refresh().succeeded
    assert queue.count() == 1
    assert [body for body, _ in consume_one(queue, consume)] == ["a"]
    assert queue.count() == 0
    assert batch.verify().ok


@pytest.mark.slow
def test_sigterm_ends_a_consumer_in_order(moto: Moto, lastbit: Client) -> None:
    """After the first signal it finishes its messages; the exit code is 0."""
    queue = moto.queue(most_receives=5)
    batch = sqs.fan_out(queue.client, queue.url, ["a", "b"], lastbit=lastbit)
    with consumer(moto, queue, lastbit.url, "slow") as process:
        wait_for(process, "b")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert batch.refresh().acked + queue.count() == 2
