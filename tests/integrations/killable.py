"""A producer and consumers for tests to kill, and the test that kills them.

`python -m tests.integrations.killable BROKER produce|consume ADDRESS NAME FILE`: the producer fans out COUNT messages;
a consumer appends a line to FILE for each message that it has handled. LASTBIT_URL is the service.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lastbit import Client
from tests.support.servers import ROOT

COUNT = 10_000
RUN = "run-1"
"""The producer's idempotency key."""
CONSUMERS = 3


def rabbitmq(role: str, url: str, queue: str, bodies: Iterator[str], handle: Callable[[Any], None]) -> None:
    from lastbit.integrations import rabbitmq

    if role == "produce":
        rabbitmq.fan_out(url, queue, bodies, idempotency_key=RUN, chunk=500)
    else:
        rabbitmq.consume(url, queue, lambda message: handle(message.body), prefetch=200)


def kafka(role: str, address: str, topic: str, values: Iterator[str], handle: Callable[[Any], None]) -> None:
    import confluent_kafka

    from lastbit.integrations import kafka

    if role == "produce":
        producer = confluent_kafka.Producer({"bootstrap.servers": address})
        kafka.fan_out(producer, topic, values, idempotency_key=RUN, chunk=500)
        return
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "workers",
            "session.timeout.ms": 2000,
            "heartbeat.interval.ms": 300,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    kafka.consume(kafka.Confluent(consumer), [topic], lambda record: handle(record.value()), every=0.1, capacity=500)


def main() -> None:
    broker, role, address, name, file = sys.argv[1:]
    notes = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(body: bytes) -> None:
        time.sleep(0.004)  # work, so that kills find some
        os.write(notes, body + b"\n")

    globals()[broker](role, address, name, bodies(), handle)


def bodies() -> Iterator[str]:
    for number in range(COUNT):
        if number % 50 == 0:
            time.sleep(0.03)  # work of six seconds, so that kills find some
        yield str(number)


def check_exact(
    broker: str, address: str, name: str, service_url: str, folder: Path, *, pause: float = 1.0, seconds: float = 1700
) -> None:
    """Producer and consumers are killed at random, and started again: in the end every item is acked, once. `pause`:
    maximum seconds between two kills."""
    environment = {**os.environ, "LASTBIT_URL": service_url, "PYTHONPATH": str(ROOT)}
    notes = folder / "notes"

    def start(role: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.integrations.killable", broker, role, address, name, str(notes)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)

    deadline = time.monotonic() + seconds
    kills: Counter[str] = Counter()
    with Client(service_url) as client:
        producer = start("produce")
        consumers = [start("consume") for _ in range(CONSUMERS)]
        try:
            while True:
                assert time.monotonic() < deadline, (kills, list(client.batches()))
                time.sleep(random.uniform(0.2, pause))  # the moment of a kill
                if producer.poll() is None and kills["producer"] < 6:
                    producer.kill()
                    producer.wait()
                    kills["producer"] += 1
                    producer = start("produce")
                batches = list(client.batches())
                if producer.poll() == 0 and batches and batches[0].complete:
                    break
                assert producer.poll() in (None, 0)
                if kills["consumer"] < 25:
                    victim = random.randrange(CONSUMERS)
                    consumers[victim].kill()
                    consumers[victim].wait()
                    kills["consumer"] += 1
                    consumers[victim] = start("consume")
        finally:
            for process in (producer, *consumers):
                process.kill()
                process.wait()
        (batch,) = client.batches()
        assert (batch.items, batch.acked, batch.failed, batch.pending) == (COUNT, COUNT, 0, 0)
        assert client.batch(batch.id).verify().ok
    handled = Counter(map(int, notes.read_text().split()))
    assert set(handled) == set(range(COUNT))
    assert min(kills["producer"], kills["consumer"]) >= 2, kills
    print(f"{dict(kills)} killed, {handled.total() - COUNT:,} messages handled again")


if __name__ == "__main__":
    main()
