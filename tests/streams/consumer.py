"""A consumer for tests to kill: `python -m tests.streams.consumer SOURCE URL NAME FILE [HELD]`.

It writes to FILE when it begins a record and when it has handled it. With HELD, it never finishes the record of that
number. On standard output it prints the number of handled and committed records. SIGTERM stops it in order.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastbit.streams import AckWindow, run_ordered
from lastbit.streams.sources.kafka import Confluent, KafkaTopics
from lastbit.streams.sources.rabbitmq import RabbitQueue, RabbitStream
from lastbit.streams.sources.redis_streams import RedisStream

Commit = Callable[[int], None]
Record = Callable[[Any], tuple[str, int]]
"""(key, number) of a record."""


def open_source(source: str, url: str, name: str, file: Path) -> tuple[Any, AckWindow, Commit, Record]:
    if source == "queue":
        queue = RabbitQueue(url, name)
        return queue, queue.window, queue.commit, lambda message: (message.headers["key"], int(message.body))
    if source == "redis":
        stream = RedisStream(url, name, "group")
        return stream, stream.window, stream.commit, lambda entry: (entry.fields["key"], int(entry.fields["number"]))
    if source == "stream":
        position = file.with_suffix(".position")
        window = AckWindow.restore(position.read_bytes()) if position.exists() else AckWindow()

        def commit(floor: int) -> None:
            new_file = file.with_suffix(".new")
            new_file.write_bytes(window.snapshot())
            new_file.replace(position)

        log = RabbitStream(url, name, after=window.floor)
        return log, window, commit, lambda message: (message.headers["key"], int(message.body))
    from confluent_kafka import Consumer

    consumer = Consumer(
        {
            "bootstrap.servers": url,
            "group.id": "group",
            # The group gives up the killed consumer after this time; the mock cluster takes three seconds to start.
            "session.timeout.ms": 4000,
            "heartbeat.interval.ms": 500,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    topics = KafkaTopics(Confluent(consumer), [name])
    return topics, topics.window, topics.commit, lambda record: (record.key().decode(), int(record.value()))


def main() -> None:
    source, url, name, file = *sys.argv[1:4], Path(sys.argv[4])
    held_number = int(sys.argv[5]) if len(sys.argv) > 5 else None
    notes = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    records, window, settle, read = open_source(source, url, name, file)
    signal.signal(signal.SIGTERM, lambda *_: records.stop())

    def handle(record: Any) -> None:
        _, number = read(record)
        os.write(notes, f"begun {number}\n".encode())
        if number == held_number:
            threading.Event().wait()
        os.write(notes, f"done {number}\n".encode())

    def commit(floor: int) -> None:
        acks = window.acks
        settle(floor)
        print(acks, flush=True)

    def lane(record: Any) -> int:
        return ord(read(record)[0])  # each of the tests' keys has its own lane

    with records:
        run_ordered(records, handle, key=lane, commit=commit, every=0.05, window=window)


if __name__ == "__main__":
    main()
