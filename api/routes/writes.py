"""Verbs that share transactions or statements, as the event loop sees them: awaited, without a thread for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.metrics import REFUSED
from api.server.wakeups import Wakeups, settle
from core import errors, writes
from core.batches.batch import Batch
from core.commits.lanes import Pending
from core.service import Service
from core.service.reads import BatchRead


class Writes:
    """Queues operations. One per event loop."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service.writes
        self._loop = loop
        self._wakeups = Wakeups(loop)

    async def run(self, operation: writes.Operation) -> Any:
        """The operation's result, after its commit. Cancelling the caller doesn't cancel the operation. Raises its
        error, `errors.Overloaded`, `errors.Unavailable`."""
        if operation.must_be_alone:
            return await run_in_threadpool(self._service.run, operation)
        future: asyncio.Future[Any] = self._loop.create_future()
        self.submit(operation, lambda pending: settle(future, pending.error, pending.answer.value))
        return await future

    def submit(self, operation: writes.Operation, receive: Callable[[Pending], object]) -> None:
        """Queue an operation that needs no transaction of its own. `receive` is called in the event loop. Raises
        `errors.Overloaded`."""
        try:
            self._service.submit(operation, self._wakeups.deliver, receive)
        except errors.Overloaded:
            REFUSED.labels("writes").inc()
            raise


class Reads:
    """Reads batches. One per event loop."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service.reads
        self._loop = loop
        self._wakeups = Wakeups(loop)

    async def get(self, batch: int) -> Batch:
        """The batch, as it is now. Raises `errors.BatchNotFound`, `errors.Unavailable`."""
        future: asyncio.Future[Batch] = self._loop.create_future()
        self.submit(batch, lambda result: settle(future, result.error, result.state))
        return await future

    def submit(self, batch: int, receive: Callable[[BatchRead], object]) -> None:
        """Read the batch. `receive` is called in the event loop. Raises `errors.Overloaded`."""
        try:
            self._service.submit(BatchRead(batch, receive), self._wakeups.deliver)
        except errors.Overloaded:
            REFUSED.labels("requests").inc()
            raise
