"""Verbs that share transactions, as the event loop sees them: awaited, without a thread for each."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic

from starlette.concurrency import run_in_threadpool

from api.metrics import REFUSED
from api.server.wakeups import Wakeups
from core import errors
from core.commits.operation import Done, Operation
from core.commits.pending import Mailbox, Receiver, settle
from core.service import Service
from core.service.reads import Question, SharedReads, Value


class Writes:
    """Queues operations. One per event loop."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service.writes
        self._loop = loop
        self._finished = Wakeups(loop)

    async def run(self, operation: Operation) -> Any:
        """The operation's result, after its commit. Cancelling the caller doesn't cancel the operation. Raises its
        error, `errors.Overloaded`, `errors.Unavailable`."""
        if operation.must_be_alone:
            return await run_in_threadpool(self._service.run, operation)
        future: asyncio.Future[Any] = self._loop.create_future()
        self.submit(operation, functools.partial(settle, future))
        return await future

    async def run_all(self, operations: Sequence[Operation]) -> list[Done]:
        """Run operations that need no transaction of their own. Each has a result or an error of its own."""
        future: asyncio.Future[list[Done]] = self._loop.create_future()

        def receive(results: list[Done]) -> None:
            if not future.done():  # it is done if the caller was cancelled
                future.set_result(results)

        self.submit_all(operations, receive)
        return await future

    def submit_all(self, operations: Sequence[Operation], receive: Callable[[list[Done]], object]) -> None:
        """Queue operations that need no transaction of their own. `receive` is called once, in the event loop, with a
        result or an error for each."""
        results: dict[int, Done] = {}

        def add(index: int, result: Done) -> None:
            results[index] = result
            if len(results) == len(operations):
                receive([results[index] for index in range(len(operations))])

        def receiver(index: int) -> Receiver[Any]:
            return lambda pending: add(index, Done(pending.answer, pending.error))

        for index, operation in enumerate(operations):
            try:
                self.submit(operation, receiver(index))
            except errors.Overloaded as error:
                add(index, Done(error=error))
        if not operations:
            receive([])

    def submit(self, operation: Operation, receiver: Receiver[Any]) -> None:
        """Queue an operation that needs no transaction of its own. `receiver` is called in the event loop. Raises
        `errors.Overloaded`."""
        try:
            self._service.submit(operation, receiver, self._finished)
        except errors.Overloaded:
            REFUSED.labels("writes").inc()
            raise


class Shared(Generic[Question, Value]):
    """Reads of one kind."""

    def __init__(self, reads: SharedReads[Question, Value], finished: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        self._reads = reads
        self._finished = finished
        self._loop = loop

    async def get(self, question: Question) -> Value:
        """The value as it is now. Raises the errors of this kind of read, `errors.Overloaded`, `errors.Unavailable`."""
        future: asyncio.Future[Value] = self._loop.create_future()
        self.submit(question, functools.partial(settle, future))
        return await future

    def submit(self, question: Question, receiver: Receiver[Value]) -> None:
        """Queue a read. `receiver` is called in the event loop. Raises `errors.Overloaded`."""
        try:
            self._reads.submit(question, receiver, self._finished)
        except errors.Overloaded:
            REFUSED.labels("requests").inc()
            raise


class Reads:
    """The kinds of shared reads (see `core.service.reads`). One per event loop."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        finished = Wakeups(loop)
        self.batches = Shared(service.reads.batches, finished, loop)
        self.watermarks = Shared(service.reads.watermarks, finished, loop)
        self.pages = Shared(service.reads.pages, finished, loop)
