"""Verbs that share transactions, as the event loop sees them: awaited, without a thread for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic

from starlette.concurrency import run_in_threadpool

from api.metrics import REFUSED
from api.server.wakeups import Wakeups, settle
from core import errors, writes
from core.commits.lanes import Pending
from core.commits.operation import Done
from core.service import Service
from core.service.reads import Question, Read, SharedReads, Value


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

    async def run_all(self, operations: Sequence[writes.Operation]) -> list[Done]:
        """Run operations that need no transaction of their own. Each has a result or an error of its own."""
        future: asyncio.Future[list[Done]] = self._loop.create_future()
        self.submit_all(operations, lambda results: settle(future, None, results))
        return await future

    def submit_all(self, operations: Sequence[writes.Operation], receive: Callable[[list[Done]], object]) -> None:
        """Queue operations that need no transaction of their own. `receive` is called once, in the event loop, with a
        result or an error for each."""
        results: list[Any] = [None] * len(operations)
        left = len(operations)

        def add(place: int, value: Any, error: Exception | None) -> None:
            nonlocal left
            results[place] = Done(value, error)
            left -= 1
            if not left:
                receive(results)

        def receiver(place: int) -> Callable[[Pending], None]:
            return lambda pending: add(place, pending.answer.value, pending.error)

        for place, operation in enumerate(operations):
            try:
                self.submit(operation, receiver(place))
            except errors.Overloaded as error:
                add(place, None, error)
        if not operations:
            receive([])

    def submit(self, operation: writes.Operation, receive: Callable[[Pending], object]) -> None:
        """Queue an operation that needs no transaction of its own. `receive` is called in the event loop. Raises
        `errors.Overloaded`."""
        try:
            self._service.submit(operation, self._wakeups.deliver, receive)
        except errors.Overloaded:
            REFUSED.labels("writes").inc()
            raise


class Shared(Generic[Question, Value]):
    """Reads of one kind."""

    def __init__(self, reads: SharedReads[Question, Value], wakeups: Wakeups, loop: asyncio.AbstractEventLoop) -> None:
        self._reads = reads
        self._wakeups = wakeups
        self._loop = loop

    async def get(self, question: Question) -> Value:
        """The value as it is now. Raises the errors of this kind of read, `errors.Overloaded`, `errors.Unavailable`."""
        future: asyncio.Future[Value] = self._loop.create_future()
        self.submit(question, lambda read: settle(future, read.error, read.value))
        return await future

    def submit(self, question: Question, receive: Callable[[Read[Question, Value]], object]) -> None:
        """Queue a read. `receive` is called in the event loop. Raises `errors.Overloaded`."""
        try:
            self._reads.submit(Read(question, receive), self._wakeups.deliver)
        except errors.Overloaded:
            REFUSED.labels("requests").inc()
            raise


class Reads:
    """The kinds of shared reads (see `core.service.reads`). One per event loop."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        wakeups = Wakeups(loop)
        self.batches = Shared(service.reads.batches, wakeups, loop)
        self.watermarks = Shared(service.reads.watermarks, wakeups, loop)
        self.pages = Shared(service.reads.pages, wakeups, loop)
