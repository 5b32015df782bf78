"""A consumer: takes files from the queue, parses them, and acks them.

The order is what makes it safe to kill: work, ack to Lastbit, and only when that was answered (so: committed) is the
message removed from the queue. Killed in between, the message comes back and is acked again, which changes nothing.
"""

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
"""Messages that the queue hands out before the first of them is done."""


def told(done: Completed) -> None:
    """A complete batch that an ack's answer named: here a real consumer would publish the catalog, start the next
    stage, send the mail. Every redelivery is told again, so what it does is idempotent."""
    say(completed=done.batch, newly=done.newly, succeeded=done.succeeded)


def settled(queue: Subscription, message: Message, future: Future[Completed | None]) -> None:
    error = future.exception()
    if error is None:
        queue.done(message)
    else:
        say(error=f"{message.item}: {error}")  # not done, so the queue will hand it out again


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--name", required=True)
    given = parser.parse_args()
    with (
        Client(given.url) as client,
        Subscription(given.broker, given.name, AT_ONCE) as queue,
        client.acker(on_completed=told) as acker,
    ):
        for message in queue:
            reason = fault(Path(message.path))
            future = acker.ack(message.item) if reason is None else acker.fail(message.item, reason)
            future.add_done_callback(partial(settled, queue, message))


if __name__ == "__main__":
    main()
