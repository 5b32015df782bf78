"""Resolve an item by the outcome of a block of code: for tasks of queues without an adapter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from lastbit.integrations._current import handling
from lastbit.integrations._failed import Failed
from lastbit.integrations._reasons import reason_of
from lastbit.integrations._skipped import Skipped
from lastbit.integrations._verdicts import log_rejections

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client


@contextmanager
def resolving(client: Client, item: str, *, final: bool = True) -> Iterator[None]:
    """Ack the item when the block ends, and return only after the commit.

    If the block raises an exception in the `final` attempt, or `Failed` in any, the item fails with that reason.
    Otherwise it stays pending for the next attempt. The exception continues. `Skipped` skips the item, and only ends
    the block. A KeyboardInterrupt, SystemExit or cancellation leaves the item pending. An item that is rejected,
    because its batch was cancelled, is logged. An item under which the block has opened a nested batch is left to that
    batch.

    Raises `ServiceError`, `ServiceUnreachable`: then the task should be run again.
    """
    try:
        with handling(item):
            yield
    except Skipped as skip:
        log_rejections(client.skip(item, reason_of(skip)))
        return
    except Exception as error:
        if final or isinstance(error, Failed):
            log_rejections(client.fail(item, reason_of(error)))
        raise
    log_rejections(client.ack(item))


@asynccontextmanager
async def resolving_async(client: AsyncClient, item: str, *, final: bool = True) -> AsyncIterator[None]:
    """`resolving`, for coroutines."""
    try:
        with handling(item):
            yield
    except Skipped as skip:
        log_rejections(await client.skip(item, reason_of(skip)))
        return
    except Exception as error:
        if final or isinstance(error, Failed):
            log_rejections(await client.fail(item, reason_of(error)))
        raise
    log_rejections(await client.ack(item))
