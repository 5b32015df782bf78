"""A call in progress, and the way of its answer to the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias

import structlog

from core.commits.operation import Answer, UnitOutcome

log = structlog.get_logger(__name__)


class Mailbox:
    """Where finished calls go, many at a time: a flush finishes a thousand calls, and waking another thread for each
    would cost more than the flush. This mailbox calls the receiver of each in the thread that has finished them."""

    def put(self, finished: Sequence[Pending[Any]]) -> None:
        """Called from the combiner's threads; it must not block or raise."""
        for pending in finished:
            call_receiver(pending.receiver, pending)


HERE: Final = Mailbox()


class Pending(Generic[Answer]):
    """A call in progress. It is finished when its last unit is, or when the first unit fails: then `answer` is
    complete, or `error` is set. Units of one call may be in several queues, so calls are settled under the combiner's
    lock."""

    __slots__ = ("answer", "call", "error", "left", "mailbox", "queued", "receiver")

    def __init__(self, call: Any, answer: Answer, units: int, receiver: Receiver[Answer], mailbox: Mailbox) -> None:
        """`answer`: the answer without outcomes."""
        self.call = call
        self.answer = answer
        self.error: Exception | None = None
        self.left = units
        """The number of units and pieces that are not settled yet."""
        self.queued = 0
        """The number of those that wait in the main lane."""
        self.receiver = receiver
        self.mailbox = mailbox

    def settle(self, outcome: UnitOutcome) -> bool:
        """Add the outcome of a unit. Returns whether the call is finished now."""
        if self.error is not None:
            return False
        if outcome.error is not None:
            return self.fail(outcome.error)
        self.answer = self.call.add(self.answer, outcome)
        self.left -= 1
        return not self.left

    def fail(self, error: Exception) -> bool:
        """Fail the call. Returns whether it was still in progress."""
        if self.error is not None:
            return False
        self.error = error
        return True


Receiver: TypeAlias = Callable[[Pending[Answer]], object]
"""Gets the finished call. Where it is called depends on the mailbox; it must not block."""


def deliver(finished: Sequence[Pending[Any]]) -> None:
    """Put finished calls into their mailboxes, once into each."""
    by_mailbox: dict[Mailbox, list[Pending[Any]]] = {}
    for pending in finished:
        by_mailbox.setdefault(pending.mailbox, []).append(pending)
    for mailbox, calls in by_mailbox.items():
        mailbox.put(calls)


def call_receiver(receiver: Callable[[Any], object], result: Any, results: int = 1) -> None:
    """Call the receiver of `results` calls. If it raises, it has a bug: only its own results are lost, and the thread
    goes on."""
    try:
        receiver(result)
    except Exception:  # a bug of the receiver
        log.exception("receiver_failed", results=results)


def settle(future: Any, pending: Pending[Any]) -> None:
    """End the future, of asyncio or of `concurrent.futures`, unless its caller has left."""
    if future.done():
        return
    if pending.error is not None:
        future.set_exception(pending.error)
    else:
        future.set_result(pending.answer)
