"""Resolve an item by the outcome of a block of code: for tasks of queues without an adapter."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

from lastbit.errors import ItemRejected, LastbitError
from lastbit.integrations._failed import Failed
from lastbit.models import HELD

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client
    from lastbit.models import AckResult, Completed, Rejected

log = logging.getLogger("lastbit.integrations")

LONGEST_REASON: Final = 4000
"""Maximum characters of a reason; the service accepts no more."""


def reason_of(error: BaseException) -> str | None:
    """The reason of a failure, as the service accepts it: the one that a handler gave with `Failed`, else the exception
    as text."""
    if isinstance(error, Failed):
        text = None if error.reason is None else _text(error.reason)
    else:
        name, text = type(error).__name__, _text(error)
        text = f"{name}: {text}" if text and text != name else name
    # Without surrogates, which UTF-8 can't encode.
    return None if text is None else text.encode(errors="replace").decode()[:LONGEST_REASON]


def _text(value: object) -> str:
    """`str(value)`, or the name of its type if that raises, as it does for some exceptions that were unpickled: an item
    must fail whatever its exception is."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # any error of foreign code
        return type(value).__name__


def is_rejection(error: BaseException | None, item: str) -> bool:
    """Whether the service has rejected this item. `on_completed` may raise the rejection of another one; then this item
    is resolved, but its batch's completion isn't processed."""
    return isinstance(error, ItemRejected) and error.item == item


def level_of(rejection: BaseException | Rejected) -> int:
    """The level at which a rejection is logged. A held item is no cause for a warning: its nested batch resolves it."""
    return logging.DEBUG if getattr(rejection, "reason", None) == HELD else logging.WARNING


class CompletionError(Exception):
    """An error of Lastbit that `on_completed` raised. It concerns the complete batch; the same error of an ack would
    concern all."""


def marking_errors(on_completed: Callable[[Completed], object] | None) -> Callable[[Completed], object] | None:
    """`on_completed`, whose errors can be told from those of acks. Temporary ones are left: both are tried again."""
    if on_completed is None:
        return None

    def call(completion: Completed) -> None:
        try:
            on_completed(completion)
        except LastbitError as error:
            if error.is_temporary:
                raise
            raise CompletionError(str(error)) from error

    return call


@contextmanager
def resolving(client: Client, item: str, *, final: bool = True) -> Iterator[None]:
    """Ack the item when the block ends, and return only after the commit.

    If the block raises an exception in the `final` attempt, or `Failed` in any, the item fails with that reason.
    Otherwise it stays pending for the next attempt. The exception continues. A KeyboardInterrupt, SystemExit or
    cancellation leaves the item pending. An item that is rejected, because its batch was cancelled, is logged. An item
    under which the block has opened a nested batch is left to that batch.

    Raises `ServiceError`, `ServiceUnreachable`: then the task should be run again.
    """
    try:
        yield
    except Exception as error:
        if final or isinstance(error, Failed):
            _warn(client.fail(item, reason_of(error)))
        raise
    _warn(client.ack(item))


@asynccontextmanager
async def resolving_async(client: AsyncClient, item: str, *, final: bool = True) -> AsyncIterator[None]:
    """`resolving`, for coroutines."""
    try:
        yield
    except Exception as error:
        if final or isinstance(error, Failed):
            _warn(await client.fail(item, reason_of(error)))
        raise
    _warn(await client.ack(item))


def _warn(result: AckResult) -> None:
    for rejection in result.rejected:
        log.log(level_of(rejection), "item %s was rejected: %s", rejection.item, rejection.reason)
