"""Workers of a consumer group that consume, in threads or in tasks, behind one class, so that a test runs on each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from lastbit import AsyncClient, Client
from lastbit.streams import AsyncConsumerGroup, ConsumerGroup

PATIENCE = 30
"""Seconds to wait for an expected event before the test fails."""


class Worker:
    """It begins with the context, and ends with it at the latest. `error` ended it."""

    def __init__(
        self,
        url: str,
        group: str,
        name: str,
        source_of: Callable[[Any], Iterable[Any]],
        handle: Callable[[Any], object],
        **options: Any,
    ) -> None:
        self.url = url
        self.group = group
        self.name = name
        self.source_of = source_of
        self.handle = handle
        self.options = {"every": 0.1} | options
        self.error: BaseException | None = None
        self.partitions: Callable[[], int] = lambda: 0
        self._stop: Callable[[bool], object] = lambda leave: None
        self._joined = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"worker-{name}", daemon=True)

    def __enter__(self) -> Worker:
        self._thread.start()
        assert self._joined.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, leave: bool = True) -> None:
        with suppress(RuntimeError):  # its event loop has ended
            self._stop(leave)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._consume()
        except BaseException as error:  # noqa: BLE001  # checked by the test
            self.error = error
        finally:
            self._joined.set()

    def _consume(self) -> None:
        with Client(self.url) as client:
            worker = ConsumerGroup(client, self.group, self.name)
            self.partitions = lambda: len(worker.assignments)
            self._stop = lambda leave: worker.stop(leave=leave)
            self._joined.set()
            worker.consume(self.source_of, self.handle, **self.options)


class TaskWorker(Worker):
    """Its handler runs in a thread, so it may block."""

    def _consume(self) -> None:
        asyncio.run(self._consume_in_tasks())

    async def _consume_in_tasks(self) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(32) as pool:
            async with AsyncClient(self.url) as client:
                worker = AsyncConsumerGroup(client, self.group, self.name)
                self.partitions = lambda: len(worker.assignments)
                self._stop = lambda leave: loop.call_soon_threadsafe(lambda: worker.stop(leave=leave))
                self._joined.set()

                async def handle(record: Any) -> object:
                    return await loop.run_in_executor(pool, self.handle, record)

                await worker.consume(self.source_of, handle, **self.options)


class Records:
    """A topic: `count` records (partition, offset) in each partition, and those that were handled, in order."""

    def __init__(self, partitions: int, count: int) -> None:
        self.partitions = partitions
        self.count = count
        self.handled: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def read(self, assignment: Any) -> Iterator[tuple[int, tuple[int, int]] | None]:
        for offset in range(assignment.floor + 1, self.count):
            yield offset, (assignment.partition, offset)
        while True:
            yield None

    def done(self, record: tuple[int, int]) -> None:
        with self._changed:
            self.handled.append(record)
            self._changed.notify_all()

    def until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE), len(self.handled)

    def until_all_are_handled(self) -> None:
        self.until(lambda: len(self.handled) >= self.partitions * self.count)


on_both_workers = pytest.mark.parametrize("kind", [Worker, TaskWorker])
