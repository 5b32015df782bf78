"""Consumes a queue: threads that receive, handle, extend visibilities, and settle.

Things that could go wrong, and why they can't:

*A message is lost in a stop.* A stop ends the receives, gives messages that no worker has begun back to SQS, and waits
for the handlers that run, for their acks and deletions. Messages of a process that is killed are delivered again.

*A FIFO queue's order is broken.* Messages of a group that were received together are one worker's run. If a handler
raises, the rest of the run is given back unhandled. SQS delivers none of them before the first one is visible again.

*A broken configuration looks like an idle queue.* Errors that no retry can mend, of SQS or of Lastbit, end the consumer
and are raised by `consume`.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from lastbit import errors
from lastbit._threads import join_started
from lastbit.client import Client
from lastbit.integrations._current import handling
from lastbit.integrations._failed import Failed
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._untracked import UntrackedMessages, WhenUntracked
from lastbit.integrations.sqs._inbox import Inbox, Run, runs
from lastbit.integrations.sqs._leases import Leases
from lastbit.integrations.sqs._queue import (
    LONGEST_POLL,
    LONGEST_VISIBILITY,
    MOST_ENTRIES,
    Message,
    Queue,
    item_of,
    passes,
)
from lastbit.integrations.sqs._settler import Settler
from lastbit.models import Completed

log = logging.getLogger("lastbit.sqs")

MOST_HELD: Final = 1000
"""Received messages that are not deleted, beyond which nothing is received. They wait for their acks."""
PAUSE: Final = 1.0
"""Seconds after a receive that failed."""

Handler = Callable[[Message], object]


@dataclass(frozen=True, slots=True)
class Options:
    """See `consume`."""

    workers: int
    prefetch: int
    receivers: int
    visibility_timeout: int | None
    wait_seconds: int
    retry_delay: int | None
    until_empty: bool
    skip_ended: bool
    untracked: WhenUntracked
    on_completed: Callable[[Completed], object] | None

    def __post_init__(self) -> None:
        ranges: list[tuple[str, int | None, int, int]] = [
            ("workers", self.workers, 1, 10_000),
            ("prefetch", self.prefetch, 0, 10_000),
            ("receivers", self.receivers, 1, 1000),
            ("visibility_timeout", self.visibility_timeout, 1, LONGEST_VISIBILITY),
            # SQS bills receives, so a consumer that goes on may not ask again at once.
            ("wait_seconds", self.wait_seconds, 0 if self.until_empty else 1, LONGEST_POLL),
            ("retry_delay", self.retry_delay, 0, LONGEST_VISIBILITY),
        ]
        for name, value, minimum, maximum in ranges:
            if value is not None and (not isinstance(value, int) or not minimum <= value <= maximum):
                raise errors.InvalidArgument(f"{name} is a whole number from {minimum} to {maximum:,}, not {value!r}")


class Consumer:
    """`stop`: the event that ends it."""

    def __init__(self, queue: Queue, lastbit: Client, handle: Handler, options: Options, stop: threading.Event) -> None:
        if inspect.iscoroutinefunction(handle):
            raise errors.InvalidArgument("handle is called in a thread and can't be a coroutine function")
        self._queue = queue
        self._handle = handle
        self._options = options
        self._untracked = UntrackedMessages(options.untracked, queue.name)
        self._leases = Leases(queue, queue.visibility(options.visibility_timeout))
        self._inbox = Inbox(options.prefetch)
        self._stopping = stop
        self._error: BaseException | None = None
        # One receive at a time on FIFO queues keeps deletions in order, and shows reliably that a queue is empty.
        parallel = 1 if queue.is_fifo or options.until_empty else options.receivers
        self._settler = Settler(
            queue, lastbit, self._leases, parallel, options.on_completed, self._end, options.skip_ended
        )
        self._receivers = [self._thread(self._receive, "receive") for _ in range(parallel)]
        self._workers = [self._thread(self._work, "work") for _ in range(options.workers)]
        self._extender = self._thread(self._leases.run, "extend")

    def run(self) -> None:
        """Consume until the event is set; then return once the running handlers have ended and their outcomes are
        stored. Raises errors that make continuing impossible, such as a thread that can't be started."""
        try:
            self._settler.start()
            for thread in (self._extender, *self._receivers, *self._workers):
                thread.start()
            self._settler.follow()
            self._stopping.wait()
        finally:
            self._stopping.set()
            for run in self._inbox.close():
                self._give_back(run.messages)
            join_started((*self._receivers, *self._workers))
            self._settler.close()
            self._leases.close()
            join_started([self._extender])
        if self._error is not None:
            raise self._error

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # `run` raises it
                self._end(error)

        return threading.Thread(target=guarded, name=f"lastbit-sqs-{name}", daemon=True)

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stopping.set()

    def _receive(self) -> None:
        while (count := self._inbox.request()) and not self._stopping.is_set():
            held = len(self._leases)
            is_quiet = not held and self._inbox.idle_workers() == self._options.workers
            messages = self._received(count)
            self._leases.hold(messages)
            if not self._inbox.put(count, runs(messages, self._queue.is_fifo)):
                self._give_back(messages)
            if self._options.until_empty and not messages:
                if is_quiet:  # nothing can return to the queue any more
                    self._stopping.set()
                self._leases.wait_until_fewer(held, PAUSE)
            while len(self._leases) >= MOST_HELD and not self._stopping.is_set():
                self._leases.wait_until_fewer(MOST_HELD, PAUSE)

    def _received(self, count: int) -> list[Message]:
        while not self._stopping.is_set():
            try:
                return self._queue.receive(count, self._options.wait_seconds, self._leases.seconds)
            except Exception as error:
                if not passes(error):
                    raise
                log.warning("receiving from %s failed, and is tried again: %s", self._queue.name, error)
                self._stopping.wait(PAUSE)
        return []

    def _work(self) -> None:
        while (run := self._inbox.take()) is not None:
            for position in range(len(run.messages)):
                if self._stopping.is_set():
                    self._give_back(run.messages[position:])
                    break
                if not self._handled(run, position):
                    # On a FIFO queue, later messages of the group must wait for this one.
                    self._give_back(run.messages[position + 1 :])
                    break

    def _handled(self, run: Run, position: int) -> bool:
        """Call the handler. Returns whether the message has ended, and is not left to a redelivery."""
        message = run.messages[position]
        item = item_of(message)
        if self._untracked.refuses(item):
            self._leave(message)
            return False
        if item is not None and self._settler.skips(item, run.received):
            self._settler.drop(run, position)
            return True
        ending: Failed | Skipped | None = None
        try:
            with handling(item, self._settler.ended):
                self._handle(message)
        except Failed as error:
            ending = error
            log.warning("message %s of %s has failed: %s", message["MessageId"], self._queue.name, error.reason)
        except Skipped as error:
            ending = error
            log.info("message %s of %s is skipped: %s", message["MessageId"], self._queue.name, error.reason)
        except Exception:
            log.exception("message %s of %s will be delivered again", message["MessageId"], self._queue.name)
            self._leave(message)
            return False
        self._settler.settle(run, position, ending)
        return True

    def _leave(self, message: Message) -> None:
        """Leave a message to its redelivery, or to the dead-letter queue."""
        self._leases.release(message)
        if self._options.retry_delay is not None:
            self._hide([message], self._options.retry_delay)

    def _give_back(self, messages: list[Message]) -> None:
        """Let SQS deliver messages again that no handler has begun."""
        for message in messages:
            self._leases.release(message)
        for start in range(0, len(messages), MOST_ENTRIES):
            self._hide(messages[start : start + MOST_ENTRIES], 0)

    def _hide(self, messages: list[Message], seconds: int) -> None:
        """If it is not possible, the messages stay hidden until their visibility timeout."""
        with suppress(Exception):
            self._queue.hide(messages, seconds)
