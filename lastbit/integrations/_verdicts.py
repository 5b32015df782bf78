"""What an outcome of an item means for its message: the same in every adapter."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final

from lastbit.errors import ItemRejected, LastbitError
from lastbit.models import HELD, AckResult, Completed, Rejected

PATIENCE: Final = 600.0
"""Seconds for which a message is held while `on_completed` raises. Most brokers redeliver a message that is held for
longer, which would run its handler again."""

log = logging.getLogger("lastbit.integrations")


class Verdict(Enum):
    """What happens to the message."""

    REMOVE = "remove"
    """Its item is resolved, or was rejected and would be again: remove the message."""
    SEND_AGAIN = "send again"
    """The service is away or overloaded: hold the message, and send the ack again."""
    CALL_AGAIN = "call again"
    """The item is resolved, but `on_completed` raised: hold the message, and send the ack again, whose answer reports
    the completion again."""
    END = "end"
    """The service refuses the call for good, for example its token: end the worker, so that the broker delivers the
    message again."""


class CallbackError(Exception):
    """`on_completed` has raised its cause. That concerns one complete batch; the same error of an ack would concern
    all."""


def verdict_of(error: BaseException | None) -> Verdict:
    """`error`: what an acker has raised for an item; None if it is resolved."""
    if error is None or isinstance(error, ItemRejected):
        return Verdict.REMOVE
    if isinstance(error, CallbackError):
        return Verdict.CALL_AGAIN
    if isinstance(error, LastbitError) and not error.is_temporary:
        return Verdict.END
    return Verdict.SEND_AGAIN


def log_rejection(rejection: Rejected | ItemRejected) -> None:
    """A held item is no cause for a warning: its nested batch resolves it."""
    level = logging.DEBUG if rejection.reason == HELD else logging.WARNING
    log.log(level, "%s", ItemRejected(rejection.item or "", rejection.reason))


def log_refusal(error: BaseException) -> None:
    """Report an error for which a worker ends."""
    log.critical("the service refuses calls for good, so no more messages are handled: %s", error)


def log_raising(error: BaseException) -> None:
    """Report that `on_completed` has raised, once for each batch."""
    log.error("on_completed is called again, and its message is held until it returns", exc_info=error)


def log_removal(error: BaseException) -> None:
    """Report that `on_completed` has raised for as long as a message is held."""
    text = "on_completed has raised for %g s: its message is removed, and this process goes on to call it"
    log.error(text, PATIENCE, exc_info=error)


def log_rejections(result: AckResult) -> None:
    """`log_rejection` for each of a result."""
    for rejection in result.rejected:
        log_rejection(rejection)


def marking_errors(on_completed: Callable[[Completed], object] | None) -> Callable[[Completed], object] | None:
    """`on_completed`, whose errors can be told from those of acks."""
    if on_completed is None:
        return None

    def call(completion: Completed) -> None:
        try:
            on_completed(completion)
        except BaseException as error:
            raise CallbackError(completion.batch) from error

    return call


def marking_errors_async(
    on_completed: Callable[[Completed], Awaitable[object] | object] | None,
) -> Callable[[Completed], Awaitable[object]] | None:
    """`marking_errors`, for a function or coroutine function."""
    if on_completed is None:
        return None

    async def call(completion: Completed) -> None:
        try:
            result = on_completed(completion)
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            raise CallbackError(completion.batch) from error

    return call
