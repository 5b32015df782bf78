"""Stores outcomes with Lastbit, then deletes the messages.

Things that could go wrong, and why they can't:

*A message is deleted and its item stays pending.* A message is deleted only after its ack was committed. If the process
dies in between, the message is delivered again, and its ack is a repeat.

*Messages whose work is done become dead letters because Lastbit is away.* If each of them were left to its redelivery,
it would be handled again each time, until it was received too often. So the message stays held, and the ack is sent
again until there is an answer. Consumers receive no more than a limited number of messages meanwhile.

*A message comes back forever because its batch was cancelled.* A rejection is final: the message is deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from lastbit import errors
from lastbit._threads import join_started
from lastbit.acker import Acker, ItemResult
from lastbit.integrations._delayed import DelayedCalls
from lastbit.integrations._failed import Failed
from lastbit.integrations._resolving import is_rejection, level_of, reason_of
from lastbit.integrations.sqs._inbox import Run
from lastbit.integrations.sqs._leases import Leases
from lastbit.integrations.sqs._queue import MOST_ENTRIES, Message, Queue, item_of
from lastbit.retry import Retry

log = logging.getLogger("lastbit.sqs")

PAUSE: Final = 1.0
"""Seconds before acks are sent again whose calls have failed, in addition to the client's own retries."""


class Settler:
    """`deleters`: the number of delete calls in parallel. `on_error` is called with errors that make continuing
    impossible."""

    def __init__(
        self, queue: Queue, acker: Acker, leases: Leases, deleters: int, on_error: Callable[[BaseException], None]
    ) -> None:
        self._queue = queue
        self._acker = acker
        self._leases = leases
        self._on_error = on_error
        self._closing = False
        self._again = DelayedCalls("lastbit-sqs-again", PAUSE)
        """Acks that must be sent again."""
        self._deletions: SimpleQueue[Message | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._delete, name="lastbit-sqs-delete", daemon=True) for _ in range(deleters)
        ]

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` if there can be no more; `close` ends those that were started."""
        self._again.start()
        for thread in self._threads:
            thread.start()

    def settle(self, run: Run, position: int, failure: Failed | None) -> None:
        """The message at this position of a run has ended, for good: ack or fail its item, and delete it."""
        message = run.messages[position]
        item = item_of(message)
        if item is None:
            self._end(run, position, is_stored=True)
            return
        try:
            if failure is None:
                future = self._acker.ack(item)
            else:
                future = self._acker.fail(item, reason_of(failure))
        except errors.MalformedItem as error:
            log.error(
                "message %s of %s is deleted, no item was acked: %s", message["MessageId"], self._queue.name, error
            )
            self._end(run, position, is_stored=True)
        except errors.AckerClosed:
            self._end(run, position, is_stored=False)
        else:
            future.add_done_callback(partial(self._answered, run, position, failure))

    def close(self) -> None:
        """Send all waiting acks, delete the messages, and return. If Lastbit is away, messages are left to their
        redelivery."""
        self._closing = True
        if count := self._again.close():
            log.warning("%d messages of %s will be delivered again: they are not acked yet", count, self._queue.name)
        self._acker.close()
        for _ in self._threads:
            self._deletions.put(None)
        join_started(self._threads)

    def _answered(self, run: Run, position: int, failure: Failed | None, future: Future[ItemResult]) -> None:
        """Called in the acker's thread."""
        message = run.messages[position]
        error = future.exception()
        is_temporary = isinstance(error, errors.LastbitError) and error.is_temporary
        if error is None:
            self._end(run, position, is_stored=True)
        elif is_rejection(error, item_of(message) or ""):
            text = "message %s of %s is deleted: %s"
            log.log(level_of(error), text, message["MessageId"], self._queue.name, error)
            self._end(run, position, is_stored=True)
        elif is_temporary and not self._closing:
            if self._again.add(partial(self.settle, run, position, failure)):
                log.warning("acks are sent again, and messages of %s are held until then: %s", self._queue.name, error)
        else:
            self._end(run, position, is_stored=False)
            log.warning("message %s of %s will be delivered again: %s", message["MessageId"], self._queue.name, error)
            if isinstance(error, errors.LastbitError) and not is_temporary:
                self._on_error(error)

    def _end(self, run: Run, position: int, *, is_stored: bool) -> None:
        deletable, undeletable = run.end(position, is_stored)
        for message in deletable:
            self._deletions.put(message)
        for message in undeletable:
            self._leases.release(message)

    def _delete(self) -> None:
        """Delete messages, ten at a time if as many wait, until there is a None."""
        is_open = True
        while is_open:
            calls = [self._deletions.get()]
            with suppress(Empty):
                while len(calls) < MOST_ENTRIES and calls[-1] is not None:
                    calls.append(self._deletions.get_nowait())
            is_open = calls[-1] is not None
            messages = [message for message in calls if message is not None]
            if messages:
                self._delete_all(messages)

    def _delete_all(self, messages: list[Message]) -> None:
        self._leases.deleting(messages)
        try:
            for message, fault in self._queue.delete(messages, Retry()):
                log.warning(
                    "message %s of %s could not be deleted, and will be delivered again: %s",
                    message["MessageId"],
                    self._queue.name,
                    fault,
                )
        except Exception as error:  # noqa: BLE001  # `consume` raises it
            self._on_error(error)
        for message in messages:
            self._leases.release(message)
