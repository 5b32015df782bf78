"""taskiq: its receiver, and a broker in memory that keeps messages until they are acked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import ClassVar

import pytest
from taskiq import AckableMessage, AsyncBroker, BrokerMessage, SimpleRetryMiddleware
from taskiq.receiver import Receiver

from lastbit import BatchHandle
from lastbit.failures import Redrive
from lastbit.integrations.taskiq import LastbitMiddleware, Skipped, fan_out, resend
from tests.integrations.drivers import Handle, Link, OnCompleted, Until
from tests.integrations.workers import wait_until


class KeepingBroker(AsyncBroker):
    """Delivers the messages that are not acked, again in each event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.unacked: list[bytes] = []
        self._delivered: asyncio.Queue[bytes] = asyncio.Queue()

    async def kick(self, message: BrokerMessage) -> None:
        self.unacked.append(message.message)
        self._delivered.put_nowait(message.message)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        self._delivered = asyncio.Queue()
        for data in self.unacked:
            self._delivered.put_nowait(data)
        while True:
            data = await self._delivered.get()
            yield AckableMessage(data=data, ack=partial(self.unacked.remove, data))


class Driver:
    pauses: ClassVar = True
    holds: ClassVar = True
    reports: ClassVar = True
    handlers: ClassVar = 10
    follows: ClassVar = True
    questions: ClassVar = 15
    loses_ids: ClassVar = False
    skipped: ClassVar = Skipped
    skip_ended = True

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._broker = KeepingBroker()
        self._handle: Handle = lambda body: None

        async def task(body: str) -> None:
            await asyncio.to_thread(self._handle, body)

        self._task = self._broker.task(task, retry_on_error=True, max_retries=2)

    def _use(self, lastbit: LastbitMiddleware) -> None:
        """The broker is that of producer and worker, so its middleware changes."""
        self._broker.middlewares.clear()
        self._broker.add_middlewares(SimpleRetryMiddleware(), lastbit)

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        async def sending() -> int:
            async with link.async_client() as client:
                self._use(LastbitMiddleware(client=link.given_async(client)))
                batch = await fan_out(self._task, [(body,) for body in bodies], seal=seal)
                return batch.id

        return link.client.batch(asyncio.run(sending()))

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        async def sending() -> int:
            async with link.async_client() as client:
                self._use(LastbitMiddleware(client=link.given_async(client)))
                return await resend(self._task, redrive, [(body,) for body in bodies])

        return asyncio.run(sending())

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        async def working() -> None:
            async with link.async_client() as client:
                self._use(
                    LastbitMiddleware(
                        client=link.given_async(client), on_completed=on_completed, skip_ended=self.skip_ended
                    )
                )
                self._broker.is_worker_process = True
                stop = asyncio.Event()
                receiver = Receiver(self._broker, max_async_tasks=10, wait_tasks_timeout=1)
                listening = asyncio.create_task(receiver.listen(stop))
                await asyncio.to_thread(wait_until, until, "the messages are handled")
                stop.set()
                await listening

        self._handle = handle
        asyncio.run(working())
        self._broker.is_worker_process = False
        return None

    def left(self) -> int:
        return len(self._broker.unacked)
