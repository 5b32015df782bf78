"""Threads that handle messages, and resolve each item before its message is settled with the broker.

A handler's thread does not wait for its ack. It passes the item to an acker, which gathers, and takes the next message;
the message is settled when the service has answered. Things that could go wrong, and why they can't:

* A message is removed and its item stays pending. Only an answer of the service settles a message as done. If the
  process dies before that, the broker delivers the message again, and its item counts once.
* Lastbit is away. Acks are sent again until there is an answer. Messages stay unacked meanwhile, and the broker's
  limit of unacked messages bounds them.
* A message comes back forever because its batch was cancelled. A rejection is final: it is logged, and the message is
  settled.
* A broken configuration looks like an idle queue. Errors of Lastbit that no repetition can mend, such as a wrong token,
  end the consumer, which raises them.
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
from dataclasses import dataclass
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from lastbit import errors
from lastbit._threads import join_started
from lastbit.acker import Acker, ItemResult
from lastbit.client import Client
from lastbit.integrations._delayed import DelayedCalls
from lastbit.integrations._failed import Failed
from lastbit.integrations._resolving import is_rejection, level_of, marking_errors, reason_of
from lastbit.models import Completed

log = logging.getLogger("lastbit.integrations")

ITEM: Final = "lastbit-item"
"""The name of the header with the item's id."""
LINGER: Final = 0.01
"""Seconds that an ack may wait for others; no handler waits for it."""
GATHERED: Final = 100
"""The number of waiting acks that are sent at once."""
PAUSE: Final = 1.0
"""Seconds before acks are sent again that failed, in addition to the client's own retries."""


class Outcome(Enum):
    """How the handling of a message ended."""

    DONE = "done"
    """Its item is acked, or there is nothing to resolve: remove the message."""
    FAILED = "failed"
    """Its item has failed."""
    ERROR = "error"
    """The handler has raised; the item is pending."""
    AGAIN = "again"
    """The completion could not be processed: deliver the message again."""
    STALE = "stale"
    """It was not begun, as it is delivered elsewhere, or again: forget it."""


class Delivery(Protocol):
    """A message that was received and is not settled yet."""

    @property
    def message(self) -> Any: ...

    @property
    def item(self) -> str | None:
        """The id of its item; None if it belongs to no batch."""

    @property
    def is_stale(self) -> bool:
        """Whether it can no longer be settled, as the broker delivers its message elsewhere, or again."""

    def settle(self, outcome: Outcome) -> None:
        """Called once, from any thread; must not block."""


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
        settle: Callable[[Sequence[D], Outcome], None] = settle_each,
    ) -> None:
        """`settle` gets deliveries whose items one call to Lastbit has resolved; it must not block."""
        self._handle = handle
        self._settle = settle
        completed = marking_errors(on_completed)
        self._acker = Acker(client.driver, completed, linger=LINGER, gathered=gathered, report=self._answered)
        self._inbox: SimpleQueue[D | None] = SimpleQueue()
        self._stopping = False
        self._again = DelayedCalls("lastbit-again", PAUSE)
        """Acks to send again."""
        self.failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"lastbit-worker-{number}", daemon=True) for number in range(count)
        ]
        try:
            self._again.start()
            for thread in self._threads:
                thread.start()
        except BaseException:  # such as a thread that can't be started
            self.close()
            raise

    def put(self, delivery: D) -> None:
        self._inbox.put(delivery)

    def close(self) -> None:
        """Start no more handlers, and wait until the running ones have ended and their items are resolved or the client
        has given up."""
        self._stopping = True
        for _ in self._threads:
            self._inbox.put(None)
        join_started(self._threads)
        if count := self._again.close():
            log.warning("%d acks are not sent again, and their messages return", count)
        self._acker.close()

    def _work(self) -> None:
        while (delivery := self._inbox.get()) is not None:
            if self._stopping:
                continue
            try:
                self._process(delivery)
            except BaseException as error:  # noqa: BLE001  # the consumer raises it; the message returns
                self._end(error)

    def _process(self, delivery: D) -> None:
        if delivery.is_stale:
            delivery.settle(Outcome.STALE)
            return
        try:
            failure = self._handled(delivery)
        except _Raised:
            delivery.settle(Outcome.ERROR)
        else:
            self._resolve(delivery, failure)

    def _handled(self, delivery: D) -> Failed | None:
        """Handle the message. Returns its failure, if it has failed for good; raises `_Raised` if the handler has
        raised something else."""
        try:
            self._handle(delivery.message)
        except Failed as failure:
            log.warning("a message has failed for good (item %s): %s", delivery.item, failure.reason)
            return failure
        except LeftToRedelivery as left:
            raise _Raised from left
        except Exception as error:
            log.exception("a message could not be handled (item %s)", delivery.item)
            raise _Raised from error
        return None

    def _resolve(self, delivery: D, failure: Failed | None) -> None:
        item = delivery.item
        if item is None:
            delivery.settle(_outcome(failure))
            return
        try:
            if failure is None:
                # The acker passes it to `_answered`, and calls no method of it.
                self._acker.ack_for(delivery, item)  # type: ignore[arg-type]
            else:
                self._acker.fail_for(_Failing(delivery, failure), item, reason_of(failure))  # type: ignore[arg-type]
        except errors.MalformedItem as error:
            log.error("the message was handled, but no item was resolved: its header %s: %s", ITEM, error)
            delivery.settle(_outcome(failure))
        except errors.AckerClosed:
            pass  # it was to be sent again; the message returns

    def _answered(self, receivers: list[D | _Failing[D]], outcome: ItemResult | BaseException) -> None:
        """Called in the acker's thread."""
        acked = [receiver for receiver in receivers if not isinstance(receiver, _Failing)]
        failed = [receiver for receiver in receivers if isinstance(receiver, _Failing)]
        if isinstance(outcome, BaseException):
            for delivery in acked:
                self._not_resolved(delivery, None, outcome)
            for failing in failed:
                self._not_resolved(failing.delivery, failing.failure, outcome)
            return
        if acked:
            self._settle(acked, Outcome.DONE)
        if failed:
            self._settle([failing.delivery for failing in failed], Outcome.FAILED)

    def _not_resolved(self, delivery: D, failure: Failed | None, error: BaseException) -> None:
        if is_rejection(error, delivery.item or ""):
            log.log(level_of(error), "%s; its message is removed", error)
            settle_each([delivery], Outcome.DONE)
        elif not isinstance(error, errors.LastbitError):
            log.error("on_completed raised; the message of item %s is handled again", delivery.item, exc_info=error)
            settle_each([delivery], Outcome.AGAIN)
        elif not error.is_temporary:
            self._end(error)
        elif not self._stopping:
            is_first = self._again.add(partial(self._resolve, delivery, failure))
            if is_first:
                log.warning("acks are sent again, and their messages stay unacked until then: %s", error)

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error


@dataclass(frozen=True, slots=True)
class _Failing(Generic[D]):
    """A delivery whose item is being failed. Those whose items are being acked are passed to the acker as they are: one
    more object for each message would cost more than all that is done with it."""

    delivery: D
    failure: Failed


class LeftToRedelivery(Exception):
    """Raised instead of handling a message, which is delivered again, or elsewhere. It is no error."""


class _Raised(Exception):
    """The handler has raised."""


def _outcome(failure: Failed | None) -> Outcome:
    return Outcome.DONE if failure is None else Outcome.FAILED
