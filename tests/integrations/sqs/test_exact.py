"""A whole fan-out, with a producer and consumers that are killed at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from lastbit import Client
from tests.support.aws import Moto
from tests.support.servers import ROOT

ITEMS = 10_000
CONSUMERS = 2
SECONDS = 240


def start(program: str, url: str, *arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"tests.integrations.sqs.{program}", *map(str, arguments)]
    environment = {**os.environ, "LASTBIT_URL": url}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_every_item_is_acked_once(moto: Moto, lastbit: Client) -> None:
    """Nothing is pending in the end, the counts are those of the bits, and the queue is empty."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    lot = random.Random(seed)
    queue = moto.queue(visibility=3, most_receives=100)
    producing = ("producer", lastbit.url, moto.url, queue.url, ITEMS, 500, "exact")
    consuming = ("consumer", lastbit.url, moto.url, queue.url, "no body")
    producer = start(*producing)
    consumers = [start(*consuming) for _ in range(CONSUMERS)]
    kills = 0
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                is_sent = producer.wait(lot.uniform(1, 5)) == 0  # the time between two kills
            except subprocess.TimeoutExpired:
                is_sent = False
            found = list(lastbit.batches(key="exact"))
            if is_sent and found and found[0].ended and queue.count() == 0:
                break
            kills += 1
            if is_sent or lot.random() < 0.7:
                victim = lot.randrange(CONSUMERS)
                consumers[victim].send_signal(signal.SIGKILL)
                consumers[victim].wait(20)
                consumers[victim] = start(*consuming)
            else:
                producer.send_signal(signal.SIGKILL)
                producer.wait(20)
                producer = start(*producing)
            if is_sent:
                time.sleep(lot.uniform(1, 5))  # the time between two kills
        (batch,) = lastbit.batches(key="exact")
        assert (batch.items, batch.acked, batch.pending, batch.state) == (ITEMS, ITEMS, 0, "complete")
        assert lastbit.batch(batch.id).verify().ok
        assert queue.count() == 0
        assert queue.dead_letters() == 0
        assert kills >= 5
    finally:
        for process in (producer, *consumers):
            process.kill()
            process.wait(20)
