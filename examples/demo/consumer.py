"""A consumer: takes files from the queue, parses them, and acks them.

The order makes it safe to kill: it works, acks to Lastbit, and confirms the message to the queue only after the
response, that is, after the commit. If it is killed in between, the message is redelivered and acked again, which
changes nothing."""

from __future__ import annotations

import argparse
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from examples.demo.broker import Message, Subscription
from examples.demo.files import fault
from examples.speech import say
from lastbit import Client, Completed

AT_ONCE = 8
"""Unconfirmed messages that this consumer may have."""


def report_completed(batch: Completed) -> None:
    """Called with each complete batch in an ack's response. Here a real consumer would publish the catalog, start the
    next stage or send the mail. Redeliveries report the batch again, so the action must be idempotent."""
    say(completed=batch.batch, newly=batch.newly, succeeded=batch.succeeded)


def confirm(queue: Subscription, message: Message, future: Future[Completed | None]) -> None:
    error = future.exception()
    if error is None:
        queue.done(message)
    else:
        say(error=f"{message.item}: {error}")  # not confirmed, so the queue will redeliver it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    with (
        Client(arguments.url) as client,
        Subscription(arguments.broker, arguments.name, AT_ONCE) as queue,
        client.acker(on_completed=report_completed) as acker,
    ):
        for message in queue:
            reason = fault(Path(message.path))
            future = acker.ack(message.item) if reason is None else acker.fail(message.item, reason)
            future.add_done_callback(partial(confirm, queue, message))


if __name__ == "__main__":
    main()
