"""A producer and consumers for tests to kill, and the test that kills them.

`python -m tests.integrations.killable BROKER produce|consume ADDRESS NAME FILE`: the producer fans out ROOTS pages of a
crawl; a consumer appends a line to FILE for each page that it handles, and adds the pages that it finds there.
LASTBIT_URL is the service.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lastbit import Client
from lastbit.integrations import current_item
from tests.integrations import crawling
from tests.support.servers import ROOT

ROOTS = int(os.environ.get("TESTS_ROOTS", "4000"))
"""Of 4,000 pages about 10,000 are found."""
RUN = "run-1"
"""The producer's idempotency key."""
CONSUMERS = 3


Publish = Callable[[Iterable[str]], object]
Handle = Callable[[str, Publish], None]
"""Handles a page. It publishes those that it finds on behalf of the page's item."""


def rabbitmq(role: str, url: str, queue: str, pages: Iterator[str], handle: Handle) -> None:
    from lastbit.integrations import rabbitmq

    def publish(links: Iterable[str]) -> None:
        rabbitmq.fan_out(url, queue, links, by=current_item())

    if role == "produce":
        rabbitmq.fan_out(url, queue, pages, idempotency_key=RUN, chunk=500)
    else:
        rabbitmq.consume(url, queue, lambda message: handle(message.body.decode(), publish), prefetch=200)


def kafka(role: str, address: str, topic: str, pages: Iterator[str], handle: Handle) -> None:
    import confluent_kafka

    from lastbit.integrations import kafka

    producer = confluent_kafka.Producer({"bootstrap.servers": address})

    def publish(links: Iterable[str]) -> None:
        kafka.fan_out(producer, topic, links, by=current_item())

    if role == "produce":
        kafka.fan_out(producer, topic, pages, idempotency_key=RUN, chunk=500)
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
    kafka.consume(
        kafka.Confluent(consumer),
        [topic],
        lambda record: handle(record.value().decode(), publish),
        every=0.1,
        capacity=500,
    )


def main() -> None:
    broker, role, address, name, file = sys.argv[1:]
    notes = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def handle(page: str, publish: Publish) -> None:
        time.sleep(0.002)  # work, so that kills find some
        os.write(notes, f"{page}\n".encode())
        if links := crawling.links(page):
            publish(links)

    globals()[broker](role, address, name, slow_roots(), handle)


def slow_roots() -> Iterator[str]:
    for number, page in enumerate(crawling.roots(ROOTS)):
        if number % 50 == 0:
            time.sleep(0.03)  # work of six seconds, so that kills find some
        yield page


def check_exact(
    broker: str, address: str, name: str, service_url: str, folder: Path, *, pause: float = 1.0, seconds: float = 1700
) -> None:
    """Producer and consumers of a crawl are killed at random, and started again: in the end every page is handled, and
    its item acked, once. `pause`: maximum seconds between two kills."""
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
        handled = notes.read_text().split()
        (batch,) = client.batches()
        crawling.check(client.batch(batch.id), ROOTS, handled)
    assert min(kills["producer"], kills["consumer"]) >= 2, kills
    print(f"{dict(kills)} killed, {len(handled) - len(set(handled)):,} messages handled again")


if __name__ == "__main__":
    main()
