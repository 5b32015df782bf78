"""Keeps received messages hidden from other consumers for as long as this process works on them.

SQS hides a received message for its visibility timeout. If the work takes longer, it delivers the message again, so two
consumers handle it at a time, and each delivery counts towards the dead-letter queue. So a thread extends the
visibility of each held message, long before it ends. If the process dies, nothing extends it, and the message is
delivered again: the timeout can be short although handlers are slow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from itertools import islice
from typing import Final

from lastbit.integrations.sqs._queue import MOST_ENTRIES, Message, Queue

log = logging.getLogger("lastbit.sqs")

CHECKS: Final = 6
"""The number of times in a visibility timeout that the messages are checked. Visibilities of which a third is over are
extended, so an extension that fails is tried again three times before it is too late."""


class Leases:
    """The messages that this process holds."""

    def __init__(self, queue: Queue, seconds: int) -> None:
        self._queue = queue
        self.seconds = seconds
        self._held: dict[str, tuple[Message, float]] = {}
        """By receipt handle: the message, and the time from which it is hidden."""
        self._deleting: set[str] = set()
        """Receipt handles of messages that are being deleted. They are extended too, as that may take several calls."""
        self._closed = threading.Event()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, messages: Iterable[Message]) -> None:
        now = time.monotonic()
        with self._changed:
            self._held.update((message["ReceiptHandle"], (message, now)) for message in messages)

    def deleting(self, messages: Iterable[Message]) -> None:
        """From now on, that a message is gone is no reason for a warning."""
        self._deleting.update(message["ReceiptHandle"] for message in messages)

    def release(self, message: Message) -> None:
        """Stop extending it: it was deleted, or is left to its redelivery."""
        with self._changed:
            self._held.pop(message["ReceiptHandle"], None)
            self._deleting.discard(message["ReceiptHandle"])
            self._changed.notify_all()

    def wait_until_fewer(self, count: int, seconds: float) -> None:
        """Wait until fewer than `count` messages are held, for at most `seconds`. Returns at once if `count` is 0."""
        with self._changed:
            self._changed.wait_for(lambda: not count or len(self._held) < count, seconds)

    def run(self) -> None:
        """Extend visibilities until `close` is called. Raises boto3's errors that don't pass."""
        while not self._closed.wait(self.seconds / CHECKS):
            self.extend()

    def close(self) -> None:
        self._closed.set()

    def extend(self) -> None:
        """Extend the visibilities of which a third is over."""
        now = time.monotonic()
        with self._changed:
            messages = iter([message for message, since in self._held.values() if now - since >= self.seconds / 3])
        while call := list(islice(messages, MOST_ENTRIES)):
            now = time.monotonic()
            faults = {message["ReceiptHandle"]: fault for message, fault in self._queue.hide(call, self.seconds)}
            for message in call:
                fault = faults.get(message["ReceiptHandle"])
                if fault is None:
                    self._renew(message, now)
                elif not fault.is_lasting:
                    log.warning("the visibility of message %s was not extended yet: %s", message["MessageId"], fault)
                elif message["ReceiptHandle"] in self._held and message["ReceiptHandle"] not in self._deleting:
                    self.release(message)
                    log.warning("message %s may be delivered again before its end: %s", message["MessageId"], fault)

    def _renew(self, message: Message, now: float) -> None:
        with self._changed:
            if message["ReceiptHandle"] in self._held:
                self._held[message["ReceiptHandle"]] = (message, now)
