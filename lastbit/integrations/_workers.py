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
* A stop loses work. It waits for running handlers and for their acks; messages that no handler has begun are left to
  their redelivery.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from lastbit import errors
from lastbit.acker import Told
from lastbit.client import Client
from lastbit.integrations._failed import Failed
from lastbit.integrations._resolving import reason_of
from lastbit.models import Completed

log = logging.getLogger("lastbit.integrations")

ITEM: Final = "lastbit-item"
"""The name of the header with the item's id."""
LINGER: Final = 0.01
"""Seconds that an ack may wait for others; no handler waits for it."""
PAUSE: Final = 1.0
"""Seconds before acks are sent again that failed, in addition to the client's own retries."""
GRACE: Final = 30.0
"""Seconds that a stop waits for running handlers."""


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


class Delivery(Protocol):
    """A message that was received and is not settled yet."""

    @property
    def message(self) -> Any: ...

    @property
    def item(self) -> str | None:
        """The id of its item; None if it belongs to no batch."""

    def settle(self, outcome: Outcome) -> None:
        """Called once, from any thread; must not block."""


D = TypeVar("D", bound=Delivery)


def passes(error: BaseException) -> bool:
    """Whether the same ack may succeed later."""
    if isinstance(error, errors.ServiceError):
        return error.status >= 500 or isinstance(error, errors.RateLimited)
    return isinstance(error, errors.ServiceUnreachable | errors.UnexpectedAnswer)


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
    ) -> None:
        self._handle = handle
        self._acker = client.acker(on_completed, linger=LINGER)
        self._inbox: SimpleQueue[D | None] = SimpleQueue()
        self._stopping = False
        self._again: list[Callable[[], None]] = []
        """Acks to send again."""
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"lastbit-worker-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, delivery: D) -> None:
        self._inbox.put(delivery)

    def close(self, grace: float = GRACE) -> None:
        """Start no more handlers, wait up to `grace` seconds for running ones, and until their items are resolved or
        the client has given up."""
        self._stopping = True
        for _ in self._threads:
            self._inbox.put(None)
        until = time.monotonic() + grace
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        running = sum(thread.is_alive() for thread in self._threads)
        if running:
            log.warning("%d handlers did not end within %g seconds; their messages return", running, grace)
        self._acker.close()

    def _work(self) -> None:
        while (delivery := self._inbox.get()) is not None:
            if self._stopping:
                continue
            try:
                failure = self._handled(delivery)
                self._resolve(delivery, failure)
            except _Raised:
                delivery.settle(Outcome.ERROR)
            except BaseException as error:  # noqa: BLE001  # the consumer raises it; the message returns
                self._end(error)

    def _handled(self, delivery: D) -> Failed | None:
        """Handle the message. Returns its failure, if it has failed for good; raises `_Raised` if the handler has
        raised something else."""
        try:
            self._handle(delivery.message)
        except Failed as failure:
            log.warning("a message has failed for good (item %s): %s", delivery.item, failure.reason)
            return failure
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
                self._acker.ack_for(_Receipt(self, delivery, None), item)
            else:
                self._acker.fail_for(_Receipt(self, delivery, failure), item, reason_of(failure))
        except errors.MalformedItem as error:
            log.error("the message was handled, but no item was resolved: its header %s: %s", ITEM, error)
            delivery.settle(_outcome(failure))
        except errors.AckerClosed:
            pass  # the handler outlived the stop; the message returns

    def _not_resolved(self, delivery: D, failure: Failed | None, error: BaseException) -> None:
        """Called in the acker's thread."""
        if isinstance(error, errors.ItemRejected):
            log.warning("%s; its message is removed", error)
            delivery.settle(Outcome.DONE)
        elif passes(error):
            if not self._stopping:
                self._send_later(partial(self._resolve, delivery, failure), error)
        elif isinstance(error, errors.LastbitError):
            self._end(error)
        else:
            log.error("on_completed raised; the message of item %s is handled again", delivery.item, exc_info=error)
            delivery.settle(Outcome.AGAIN)

    def _send_later(self, send: Callable[[], None], error: BaseException) -> None:
        with self._lock:
            self._again.append(send)
            if len(self._again) > 1:
                return  # a timer runs
        log.warning("acks are sent again, and their messages stay unacked until then: %s", error)
        timer = threading.Timer(PAUSE, self._send_again)
        timer.daemon = True
        timer.start()

    def _send_again(self) -> None:
        with self._lock:
            sends, self._again = self._again, []
        for send in sends:
            send()

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error


class _Receipt(Generic[D]):
    """Gets the outcome of a delivery's item. A future in its place doubles the processor time of a message."""

    __slots__ = ("_delivery", "_failure", "_workers")

    def __init__(self, workers: Workers[D], delivery: D, failure: Failed | None) -> None:
        self._workers = workers
        self._delivery = delivery
        self._failure = failure

    def set_result(self, _told: Told) -> None:
        self._delivery.settle(_outcome(self._failure))

    def set_exception(self, error: BaseException) -> None:
        self._workers._not_resolved(self._delivery, self._failure, error)


class _Raised(Exception):
    """The handler has raised."""


def _outcome(failure: Failed | None) -> Outcome:
    return Outcome.DONE if failure is None else Outcome.FAILED
