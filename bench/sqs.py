"""The rate of SQS consumers: how much slower they are if Lastbit tracks their messages. The handler does nothing.

The queue is filled first. The clock runs from the start of a consumer until the queue is empty; a tracked batch is
complete then. The base is a loop as most users write it: each of eight threads receives ten messages, handles them, and
deletes them with one call. `sqs.consume` has eight workers and four receive calls at a time; its messages have items or
have none.

The broker is moto's server: one Python process, so all rates are far below those of AWS, and calls to the broker weigh
more than there. The service stores on MariaDB.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from bench import measure
from bench.measure import Scale
from lastbit import Client
from lastbit.integrations import sqs
from tests.support.aws import TestQueue, moto_server

THREADS = 8
RECEIVERS = 4
POLL = 0.02
"""Seconds between two checks whether the queue is empty."""
PATIENCE = 300
"""Seconds after which a run is given up."""
WARM = 50
"""Messages that are consumed before the clock starts."""


def handle(message: Any) -> None: ...


def loop(queue: TestQueue, stop: threading.Event, lastbit: Client) -> None:
    """The hand-written consumer."""

    def work() -> None:
        while not stop.is_set():
            answer = queue.client.receive_message(QueueUrl=queue.url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            messages = answer.get("Messages", [])
            for message in messages:
                handle(message)
            entries = [{"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(messages)]
            if entries:
                queue.client.delete_message_batch(QueueUrl=queue.url, Entries=entries)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def consume(queue: TestQueue, stop: threading.Event, lastbit: Client) -> None:
    sqs.consume(
        queue.client,
        queue.url,
        handle,
        workers=THREADS,
        receivers=RECEIVERS,
        wait_seconds=1,
        stop=stop,
        lastbit=lastbit,
    )


Consumer = Callable[[TestQueue, threading.Event, Client], None]
WAYS: dict[str, tuple[Consumer, bool]] = {
    "a loop by hand": (loop, False),
    "sqs.consume, untracked": (consume, False),
    "sqs.consume, tracked": (consume, True),
}
"""A consumer, and whether its messages have items."""


def fill(queue: TestQueue, count: int) -> None:
    for start in range(0, count, 10):
        entries = [{"Id": str(number), "MessageBody": f"body {number}"} for number in range(start, start + 10)]
        queue.client.send_message_batch(QueueUrl=queue.url, Entries=entries)


def seconds(queue: TestQueue, lastbit: Client, count: int, consumer: Consumer, is_tracked: bool) -> float:
    batch = None
    if is_tracked:
        batch = sqs.fan_out(queue.client, queue.url, (f"body {n}" for n in range(count)), lastbit=lastbit)
    else:
        fill(queue, count)
    stop = threading.Event()
    thread = threading.Thread(target=consumer, args=(queue, stop, lastbit))
    start = time.perf_counter()
    thread.start()
    while left := queue.count():
        if time.perf_counter() - start > PATIENCE:
            raise TimeoutError(f"{left} messages have not been handled")
        time.sleep(POLL)  # SQS has no notification for an empty queue
    elapsed = time.perf_counter() - start
    if batch is not None and not (batch.refresh().succeeded and batch.verify().ok):
        raise RuntimeError(f"the queue is empty, but the batch is {batch}")
    stop.set()
    thread.join()
    return elapsed


def run(scale: Scale) -> None:
    count = max(scale.requests // 10, 100)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        moto_server() as moto,
        Client(service.url) as lastbit,
    ):
        queue = moto.queue(most_receives=10)
        for consumer, is_tracked in WAYS.values():
            seconds(queue, lastbit, WARM, consumer, is_tracked)
        for _ in range(scale.rounds):
            for name, (consumer, is_tracked) in WAYS.items():
                times[name].append(seconds(queue, lastbit, count, consumer, is_tracked))
    base = times["a loop by hand"]
    measure.show(
        f"sqs: {count:,} messages, no-op handler, moto's server, MariaDB (medians of {scale.rounds} rounds)",
        ["", "messages/s", "of the loop's rate"],
        [
            [
                name,
                f"{count / statistics.median(rounds):,.0f}",
                f"{statistics.median(plain / own for plain, own in zip(base, rounds, strict=True)):.2f}",
            ]
            for name, rounds in times.items()
        ],
    )


if __name__ == "__main__":
    measure.alone(run)
