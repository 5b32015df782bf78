"""Passes outcomes to a resolver, then deletes the messages.

Things that could go wrong, and why they can't:

*Messages whose work is done become dead letters because Lastbit is away.* If each of them were left to its redelivery,
it would be handled again each time, until it was received too often. So the message stays held while the resolver
sends its ack again. Consumers receive no more than a limited number of messages meanwhile.

*A FIFO queue's order is broken.* A message is deleted only after its predecessors in its run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from lastbit._threads import join_started
from lastbit.client import Client
from lastbit.integrations._failed import Failed
from lastbit.integrations._resolver import Resolver
from lastbit.integrations._skipped import Skipped
from lastbit.integrations.sqs._inbox import Run
from lastbit.integrations.sqs._leases import Leases
from lastbit.integrations.sqs._queue import MOST_ENTRIES, Message, Queue, item_of
from lastbit.models import Completed
from lastbit.retry import Retry

log = logging.getLogger("lastbit.sqs")

LINGER: Final = 0.05
"""Seconds that an ack may wait for others. No handler waits for it."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """The message at a position of a run, which has ended for good."""

    run: Run
    position: int
    item: str | None


class Settler:
    """`deleters`: the number of delete calls in parallel. `on_error` is called with errors that make continuing
    impossible."""

    def __init__(
        self,
        queue: Queue,
        lastbit: Client,
        leases: Leases,
        deleters: int,
        on_completed: Callable[[Completed], object] | None,
        on_error: Callable[[BaseException], None],
        skip_ended: bool,
    ) -> None:
        self._queue = queue
        self._leases = leases
        self._on_error = on_error
        self._resolver: Resolver[_Ended] = Resolver(
            lastbit, self._resolved, on_error, on_completed, linger=LINGER, skip_ended=skip_ended
        )
        self.follow = self._resolver.follow
        self.skips = self._resolver.skips
        self.ended = self._resolver.ended
        self._deletions: SimpleQueue[Message | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._delete, name="lastbit-sqs-delete", daemon=True) for _ in range(deleters)
        ]

    def start(self) -> None:
        """Start the threads. Raises `RuntimeError` if there can be no more; `close` ends those that were started."""
        self._resolver.start()
        for thread in self._threads:
            thread.start()

    def settle(self, run: Run, position: int, ending: Failed | Skipped | None) -> None:
        """The message at this position of a run has ended, for good: resolve its item, and delete it."""
        ended = _Ended(run, position, item_of(run.messages[position]))
        if ended.item is None:
            self._resolved([ended], isinstance(ending, Failed))
        else:
            self._resolver.resolve(ended, ending)

    def drop(self, run: Run, position: int) -> None:
        """Delete the message at this position of a run, which was not handled."""
        self._resolved([_Ended(run, position, None)], False)

    def close(self) -> None:
        """Send all waiting acks, delete the messages, and return. If Lastbit is away, messages are left to their
        redelivery."""
        self._resolver.close()
        for _ in self._threads:
            self._deletions.put(None)
        join_started(self._threads)

    def _resolved(self, messages: Sequence[_Ended], are_failed: bool) -> None:
        for ended in messages:
            for message in ended.run.end(ended.position):
                self._deletions.put(message)

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
