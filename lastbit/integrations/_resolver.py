"""Resolves the items of messages, and lets each message be removed after its item's commit: for all adapters.

A handler's thread does not wait for the service. It passes the message to a resolver and takes the next one; an acker
gathers the items. What could go wrong, and why it can't:

*A message is removed and its item stays pending.* Only an answer of the service removes a message. If the process dies
before that, the broker delivers the message again, and its item counts once.

*The service is away.* The message must not stay unacked in a worker that lives and does nothing about it, as most
brokers redeliver only the messages of dead workers. So the ack is sent again until there is an answer. Meanwhile the
broker's limit of unacked messages stops the worker.

*A message comes back forever because its batch was cancelled.* A rejection is final: it is logged, and the message is
removed. So is the message of an item that a nested batch holds. Other messages of an ended batch are removed without
being handled.

*A wrong token looks like an idle queue.* After an error that no repetition can mend, nothing more is sent. The adapter
ends its worker with that error, and the messages return to the broker.

*`on_completed` raises.* Its message is held and it is called again; no handler runs again. If it raises for `PATIENCE`,
its message is removed, so that the queue goes on. It is still called until it returns or the process ends.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Generic, Literal, Protocol, TypeVar, cast, get_args

from lastbit.acker import GATHERED, Acker, ItemResult, Receiver
from lastbit.client import Client
from lastbit.errors import AckerClosed, ItemRejected, MalformedItem
from lastbit.integrations import _verdicts
from lastbit.integrations._delayed import DelayedCalls
from lastbit.integrations._ended import EndedBatches, watch_of
from lastbit.integrations._failed import Failed
from lastbit.integrations._reasons import accepted, reason_of
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._tracking import announce
from lastbit.integrations._verdicts import (
    Verdict,
    log_raising,
    log_refusal,
    log_rejection,
    log_removal,
    marking_errors,
    verdict_of,
)
from lastbit.integrations._versions import warn_of_unknown
from lastbit.models import Completed, Rejected

log = logging.getLogger("lastbit.integrations")

PAUSE: Final = 1.0
"""Seconds until an ack is sent again, in addition to the client's own retries."""


class Tracked(Protocol):
    """A message with an item."""

    @property
    def item(self) -> str | None: ...


M = TypeVar("M", bound=Tracked)
Verb = Literal["ack", "fail", "skip"]
VERBS: Final = get_args(Verb)


@dataclass(frozen=True, slots=True)
class _Attempt(Generic[M]):
    """A message whose item is failed or skipped, or which is sent again. The others are passed to the acker as they
    are: one more object for each message would cost more than all that is done with it."""

    message: M
    verb: Verb = "ack"
    reason: str | None = None
    raises_since: float | None = None
    """The time at which `on_completed` raised first."""
    is_removed: bool = False

    @property
    def item(self) -> str | None:
        return self.message.item


class Resolver(Generic[M]):
    """Resolves items through an acker of its own. `settle` gets messages whose items are resolved, and whether they
    have failed; it is called in the acker's thread, and must not block. `end` is called once, with an error that no
    repetition can mend, which `refusal` holds from then on. `skip_ended`: whether messages of ended batches are
    skipped."""

    def __init__(
        self,
        client: Client,
        settle: Callable[[Sequence[M], bool], None],
        end: Callable[[BaseException], object],
        on_completed: Callable[[Completed], object] | None = None,
        *,
        linger: float,
        gathered: int = GATHERED,
        skip_ended: bool = True,
    ) -> None:
        self.refusal: BaseException | None = None
        self._settle = settle
        self._end = end
        self._lock = threading.Lock()
        # The broker limits the messages that are open. An acker that blocks would stop a worker's event loop.
        self._acker = Acker(
            client.driver,
            marking_errors(on_completed),
            max_pending=sys.maxsize,
            linger=linger,
            gathered=gathered,
            report=self._answered,
        )
        self._again = DelayedCalls("lastbit-again", PAUSE)
        self._driver = client.driver
        self._watch = watch_of(client.driver.service) if skip_ended else None

    def start(self) -> None:
        """Say that items are tracked, and start the thread that sends acks again, so that an outage needs no new one.
        Raises `RuntimeError` if the system allows no more."""
        announce(self._driver, log)
        self._again.start()
        warn_of_unknown(log)

    def follow(self) -> None:
        """Learn from the feed which batches end, from now on."""
        if self._watch is not None:
            self._watch.join(self._driver)

    @property
    def ended(self) -> EndedBatches | None:
        """The batches that are known to have ended; None if that doesn't matter."""
        return None if self._watch is None else self._watch.batches

    def skips(self, item: str, received: float | None = None) -> bool:
        """Whether the message of this item is to be removed without being handled, as its batch has ended. `received`:
        as for `Watch.is_ended`."""
        is_ended = self._watch is not None and self._watch.is_ended(self._driver, item, received)
        if is_ended:
            self.note_skipped(item)
        return is_ended

    def note_skipped(self, item: str) -> None:
        """A child process has skipped a message."""
        if self._watch is not None:
            self._watch.note(item)

    def learn(self, rejection: Rejected | ItemRejected) -> None:
        """The service has rejected an item. A batch that has ended is reported once."""
        if self._watch is None or not self._watch.learn(rejection):
            log_rejection(rejection)

    def resolve(self, message: M, ending: Failed | Skipped | None) -> None:
        """Resolve the message's item by what its handler has raised, if anything; returns at once."""
        if ending is None:
            self.ack(message)
        elif isinstance(ending, Skipped):
            self.skip(message, reason_of(ending))
        else:
            self.fail(message, reason_of(ending))

    def ack(self, message: M) -> None:
        """Ack the message's item; returns at once."""
        self._send(message)

    def fail(self, message: M, reason: str | None) -> None:
        """Fail the message's item; returns at once."""
        self._send(_Attempt(message, "fail", None if reason is None else accepted(reason)))

    def skip(self, message: M, reason: str | None) -> None:
        """Skip the message's item; returns at once."""
        self._send(_Attempt(message, "skip", None if reason is None else accepted(reason)))

    def stop_repeating(self) -> None:
        """Send nothing again from now on."""
        if count := self._again.close():
            log.warning("%d acks are not sent again; messages that are still held will be delivered again", count)

    def close(self) -> None:
        """Send what waits, and return when the service has answered or the client has given up. Messages that are not
        settled then are left to their redelivery."""
        self.leave()
        self.stop_repeating()
        self._acker.close()

    def leave(self) -> None:
        """Follow the feed no more."""
        if self._watch is not None:
            self._watch.leave(self._driver)

    def _send(self, receiver: M | _Attempt[M]) -> None:
        if self.refusal is not None:
            return
        item = cast(str, receiver.item)
        try:
            # The acker passes the receiver to `_answered`, and calls no method of it.
            if isinstance(receiver, _Attempt) and receiver.verb == "fail":
                self._acker.fail_for(cast(Receiver, receiver), item, receiver.reason)
            elif isinstance(receiver, _Attempt) and receiver.verb == "skip":
                self._acker.skip_for(cast(Receiver, receiver), item, receiver.reason)
            else:
                self._acker.ack_for(cast(Receiver, receiver), item)
        except MalformedItem as error:
            log.error("a message was handled, but no item was resolved: %s", error)
            self._remove([receiver])
        except AckerClosed:
            pass  # it was to be sent again; the message returns
        except Exception as error:  # noqa: BLE001  # such as an acker's thread that could not be started
            self._not_resolved([receiver], error)

    def _answered(self, receivers: list[M | _Attempt[M]], outcome: ItemResult | BaseException) -> None:
        """Called in the acker's thread, with receivers that have the same outcome."""
        if isinstance(outcome, BaseException):
            self._not_resolved(receivers, outcome)
        else:
            self._remove(receivers)

    def _remove(self, receivers: Sequence[M | _Attempt[M]]) -> None:
        acked: list[M] = []
        failed: list[M] = []
        for receiver in receivers:
            if not isinstance(receiver, _Attempt):
                acked.append(receiver)
            elif not receiver.is_removed:
                (failed if receiver.verb == "fail" else acked).append(receiver.message)
        if acked:
            self._settle(acked, False)
        if failed:
            self._settle(failed, True)

    def _not_resolved(self, receivers: Sequence[M | _Attempt[M]], error: BaseException) -> None:
        attempts = [receiver if isinstance(receiver, _Attempt) else _Attempt(receiver) for receiver in receivers]
        match verdict_of(error):
            case Verdict.REMOVE:
                self.learn(cast(ItemRejected, error))
                self._remove([replace(attempt, verb="ack") for attempt in attempts])
            case Verdict.CALL_AGAIN:
                self._call_again(attempts, error)
            case Verdict.SEND_AGAIN:
                if self._repeat(attempts):
                    log.warning("acks are sent again, and their messages stay in the broker until then: %s", error)
            case Verdict.END:
                self._refuse(error)

    def _call_again(self, attempts: Sequence[_Attempt[M]], error: BaseException) -> None:
        """Hold the messages of a batch whose completion was not processed, for as long as there is patience."""
        moment = time.monotonic()
        since = min((attempt.raises_since for attempt in attempts if attempt.raises_since), default=moment)
        if since == moment:
            log_raising(error)
        if moment - since >= _verdicts.PATIENCE:
            if not attempts[0].is_removed:
                log_removal(error)
            self._remove(attempts)
            attempts = [replace(attempts[0], is_removed=True)]
        self._repeat([replace(attempt, raises_since=since) for attempt in attempts])

    def _repeat(self, attempts: Sequence[_Attempt[M]]) -> bool:
        """Returns whether no other attempt waits."""
        is_first = False
        for attempt in attempts:
            is_first = self._again.add(partial(self._send, attempt)) or is_first
        return is_first

    def _refuse(self, error: BaseException) -> None:
        with self._lock:
            if self.refusal is not None:
                return
            self.refusal = error
        log_refusal(error)
        self._end(error)
