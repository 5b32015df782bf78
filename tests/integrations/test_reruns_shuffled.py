"""A producer that is killed at random, and run again in an interpreter with another hash seed: there, the elements of a
set come in another order."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastbit import Client
from tests.integrations.workers import wait_until
from tests.support.servers import ROOT

PRODUCER = """
import os, signal, sys, time
from lastbit import Client
from lastbit.integrations import fan_out

file, key, count, kind, end = sys.argv[1:]
outbox = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
pages = {f"page-{number}" for number in range(int(count))}
sent = 0

def send(pairs):
    global sent
    for item, message in pairs:
        if sent == int(end):
            signal.pause()  # until it is killed
        sent += 1
        time.sleep(0.0005)  # work, so that kills find some
        os.write(outbox, f"{item} {message if kind == 'set' else message[0]}\\n".encode())
    return ()

# A set; or pages in order, whose messages contain one.
tags = "+".join({"red", "green", "blue", "black", "white"})
messages = pages if kind == "set" else [(page, tags) for page in sorted(pages)]
options = {"identify": lambda message: message[0]} if kind == "identified" else {}
with Client() as client:
    fan_out(client, messages, send, key=key, idempotency_key=key, chunk=100, **options)
"""


class Producer:
    """Its runs, each with another hash seed, whose orders differ."""

    def __init__(self, client: Client, folder: Path, count: int, kind: str) -> None:
        self.outbox = folder / "outbox"
        self.outbox.touch()
        self.key = str(uuid.uuid4())
        self._arguments = [sys.executable, "-c", PRODUCER, str(self.outbox), self.key, str(count), kind]
        self._count = count
        self._environment = {**os.environ, "LASTBIT_URL": client.url, "PYTHONPATH": str(ROOT)}
        self._seed = 0

    @contextlib.contextmanager
    def running(self, end: int) -> Iterator[subprocess.Popen[str]]:
        """It waits when it has sent as many messages as `end` says."""
        self._seed += 1
        environment = {**self._environment, "PYTHONHASHSEED": str(self._seed)}
        with subprocess.Popen(
            [*self._arguments, str(end)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run_until(self, count: int) -> None:
        """Kill it when as many messages were sent, or a few more, but never all."""
        with self.running(end=self._count - 1) as process:
            wait_until(lambda: len(self.sent()) >= count or process.poll() is not None, f"{count} messages are sent")

    def run(self) -> str:
        """To its end; the last line of its errors."""
        with self.running(end=self._count) as process:
            _, errors = process.communicate(timeout=120)
            return (errors.splitlines() or [""])[-1]

    def sent(self) -> list[str]:
        """The items and messages."""
        return self.outbox.read_text().splitlines()


COUNTS = [600, pytest.param(5000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["set", "compared whole"])
def test_messages_in_another_order_are_refused(client: Client, tmp_path: Path, count: int, kind: str) -> None:
    """With advice; nothing more is sent."""
    producer = Producer(client, tmp_path, count, kind)
    producer.run_until(random.randrange(1, count - 100))
    sent = producer.sent()
    for _ in range(2):
        error = producer.run()
        assert "MessagesDiffer" in error
        assert "sort the messages, or pass identify=" in error
        assert producer.sent() == sent
    (batch,) = client.batches(key=producer.key)
    assert batch.state == "open"


@pytest.mark.parametrize("count", COUNTS)
def test_messages_with_identities_are_sent_exactly_once(client: Client, tmp_path: Path, count: int) -> None:
    """But for those of the chunks that kills have cut: each page has one item, and each item one page."""
    producer = Producer(client, tmp_path, count, "identified")
    kills = sorted(random.sample(range(1, count - 100), 3))
    for kill in kills:
        producer.run_until(kill)
    assert producer.run() == ""
    pairs = {tuple(line.split()) for line in producer.sent()}
    assert {page for _, page in pairs} == {f"page-{number}" for number in range(count)}
    assert len({item for item, _ in pairs}) == len(pairs) == count
    assert len(producer.sent()) <= count + len(kills) * 2 * 100
    (batch,) = client.batches(key=producer.key)
    assert (batch.state, batch.items) == ("sealed", count)
    client.ack([item for item, _ in pairs])
    assert client.batch(batch.id).refresh().succeeded
