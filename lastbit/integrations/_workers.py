"""Threads that handle messages and pass them to a resolver, which settles them with the broker.

Things that could go wrong, and why they can't:

* Deliveries that can no longer be settled, after a lost connection for example, keep the workers from those that can.
  They are skipped if no handler has begun.
* A stop loses work. It waits for running handlers and for their acks; messages that no handler has begun are left to
  their redelivery.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from lastbit import errors
from lastbit._threads import join_started
from lastbit.acker import GATHERED
from lastbit.client import Client
from lastbit.integrations._current import handling
from lastbit.integrations._failed import Failed
from lastbit.integrations._resolver import Resolver
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._untracked import UntrackedMessages
from lastbit.models import Completed

log = logging.getLogger("lastbit.integrations")

ITEM: Final = "lastbit-item"
"""The name of the header with the item's id."""
LINGER: Final = 0.01
"""Seconds that an ack may wait for others; no handler waits for it."""


class Outcome(Enum):
    """How the handling of a message ended."""

    DONE = "done"
    """Its item is acked or skipped, or there is nothing to resolve: remove the message."""
    FAILED = "failed"
    """Its item has failed."""
    ERROR = "error"
    """The handler has raised; the item is pending."""
    STALE = "stale"
    """It was not begun, as it is delivered elsewhere, or again: forget it."""
    REFUSED = "refused"
    """It was not begun, as it has no item: leave it to the dead letters."""


class Delivery(Protocol):
    """A message that was received and is not settled yet."""

    @property
    def message(self) -> Any: ...

    @property
    def item(self) -> str | None:
        """The id of its item; None if it belongs to no batch."""

    @property
    def received(self) -> float:
        """When it came to this process, by `time.monotonic`."""

    @property
    def is_stale(self) -> bool:
        """Whether it can no longer be settled, as the broker delivers its message elsewhere, or again."""

    def settle(self, outcome: Outcome) -> None:
        """Called once, from any thread; must not block, unless the message is refused."""


D = TypeVar("D", bound=Delivery)


def settle_each(deliveries: Sequence[Delivery], outcome: Outcome) -> None:
    for delivery in deliveries:
        try:
            delivery.settle(outcome)
        except Exception:  # the others must be settled
            log.exception("the message of item %s was not settled", delivery.item)


def checked_workers(count: int, handle: Callable[..., object]) -> None:
    """Raises `InvalidArgument`."""
    if not isinstance(count, int) or count < 1:
        raise errors.InvalidArgument(f"workers is at least 1, not {count!r}")
    if inspect.iscoroutinefunction(handle):
        raise errors.InvalidArgument("handle is called in a thread and can't be a coroutine function")


class Workers(Generic[D]):
    """`count` threads that call `handle` with the messages of the deliveries that are `put`. `failure` is an error that
    makes continuing impossible."""

    def __init__(
        self,
        client: Client,
        handle: Callable[[Any], object],
        count: int,
        on_completed: Callable[[Completed], object] | None,
        *,
        gathered: int = GATHERED,
        skip_ended: bool = True,
        untracked: UntrackedMessages | None = None,
        settle: Callable[[Sequence[D], Outcome], None] = settle_each,
    ) -> None:
        """`untracked`: messages without an item, if they are not simply handled. `settle` gets deliveries whose items
        one call to Lastbit has resolved; it must not block."""
        self._handle = handle
        self._untracked = untracked
        self._settle = settle
        self._resolver: Resolver[D] = Resolver(
            client,
            self._resolved,
            self._end,
            on_completed,
            linger=LINGER,
            gathered=gathered,
            skip_ended=skip_ended,
        )
        self._inbox: SimpleQueue[D | None] = SimpleQueue()
        self._stopping = False
        self.failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"lastbit-worker-{number}", daemon=True) for number in range(count)
        ]
        try:
            self._resolver.start()
            for thread in self._threads:
                thread.start()
        except BaseException:  # such as a thread that can't be started
            self.close()
            raise
        self._resolver.follow()

    def put(self, delivery: D) -> None:
        self._inbox.put(delivery)

    def close(self) -> None:
        """Start no more handlers, and wait until the running ones have ended and their items are resolved or the client
        has given up."""
        self._stopping = True
        for _ in self._threads:
            self._inbox.put(None)
        join_started(self._threads)
        self._resolver.close()

    def _work(self) -> None:
        while (delivery := self._inbox.get()) is not None:
            if self._stopping or self._resolver.refusal is not None:
                continue
            try:
                self._process(delivery)
            except BaseException as error:  # noqa: BLE001  # the consumer raises it; the message returns
                self._end(error)

    def _process(self, delivery: D) -> None:
        if delivery.is_stale:
            delivery.settle(Outcome.STALE)
            return
        if self._untracked is not None and self._untracked.refuses(delivery.item):
            delivery.settle(Outcome.REFUSED)
            return
        if delivery.item is not None and self._resolver.skips(delivery.item, delivery.received):
            delivery.settle(Outcome.DONE)
            return
        try:
            ending = self._handled(delivery)
        except _Raised:
            delivery.settle(Outcome.ERROR)
        else:
            self._resolve(delivery, ending)

    def _handled(self, delivery: D) -> Failed | Skipped | None:
        """Handle the message. Returns with what the handler has ended it for good; raises `_Raised` if the handler has
        raised something else."""
        try:
            with handling(delivery.item, self._resolver.ended):
                self._handle(delivery.message)
        except Failed as failure:
            log.warning("a message has failed for good (item %s): %s", delivery.item, failure.reason)
            return failure
        except Skipped as skip:
            log.info("a message is skipped (item %s): %s", delivery.item, skip.reason)
            return skip
        except LeftToRedelivery as left:
            raise _Raised from left
        except Exception as error:
            log.exception("a message could not be handled (item %s)", delivery.item)
            raise _Raised from error
        return None

    def _resolve(self, delivery: D, ending: Failed | Skipped | None) -> None:
        if delivery.item is None:
            delivery.settle(Outcome.FAILED if isinstance(ending, Failed) else Outcome.DONE)
        else:
            self._resolver.resolve(delivery, ending)

    def _resolved(self, deliveries: Sequence[D], are_failed: bool) -> None:
        self._settle(deliveries, Outcome.FAILED if are_failed else Outcome.DONE)

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error


class LeftToRedelivery(Exception):
    """Raised instead of handling a message, which is delivered again, or elsewhere. It is no error."""


class _Raised(Exception):
    """The handler has raised."""
