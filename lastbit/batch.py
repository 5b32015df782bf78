"""A batch in the hands of a producer: `client.open(...)` and `client.batch(7)` give one.

A handle keeps what the service said last (`info`); only the methods ask again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lastbit import _calls, errors, progress
from lastbit.ids import DEFAULT_GROUP_SIZE, ItemIds
from lastbit.models import (
    Batch,
    Explanation,
    FailedRange,
    Opened,
    PendingRange,
    Repair,
    Sealed,
    Verification,
    Watermark,
)

if TYPE_CHECKING:
    from lastbit.client import AsyncClient, Client

Watcher = Callable[[Batch], object]
"""What is called with the batch each time that a wait has seen it."""


class _Handle:
    __slots__ = ("_info", "id", "ids", "newly", "replayed")

    def __init__(self, batch: int, opened: Opened | None = None, replayed: bool = False) -> None:
        self.id = batch
        self.ids = ItemIds(batch, DEFAULT_GROUP_SIZE, range(0)) if opened is None else opened.ids
        """What the open itself issued: `open(items=n)`."""
        self.newly = opened is not None and opened.newly
        """The open completed the batch: it was opened sealed and empty."""
        self.replayed = replayed
        """The open repeated an earlier one with the same idempotency key, and this is that one's batch."""
        self._info: Batch | None = opened

    @property
    def info(self) -> Batch:
        """The batch as open, seal, cancel, refresh or wait saw it last. Raises `NotRefreshed` where none did."""
        if self._info is None:
            raise errors.NotRefreshed(self.id)
        return self._info

    @property
    def key(self) -> str | None:
        return self.info.key

    @property
    def state(self) -> str:
        return self.info.state

    @property
    def items(self) -> int:
        return self.info.items

    @property
    def complete(self) -> bool:
        return self.info.complete

    @property
    def succeeded(self) -> bool:
        return self.info.succeeded

    def __repr__(self) -> str:
        seen = self._info
        if seen is None:
            return f"<{type(self).__name__} {self.id}>"
        return f"<{type(self).__name__} {self.id}: {seen.state}, {seen.resolved:,} of {seen.items:,} resolved>"

    def _saw(self, watcher: Watcher | None) -> Watcher:
        def saw(batch: Batch) -> None:
            self._info = batch
            if watcher is not None:
                watcher(batch)

        return saw


def _watching(wanted: bool | Watcher) -> AbstractContextManager[Watcher | None]:
    if callable(wanted):
        return nullcontext(wanted)
    return progress.bar() if wanted else nullcontext()


class BatchHandle(_Handle):
    """A batch and what can be done with it. All methods raise `ServiceError` (mostly `BatchNotFound` or `Conflict`) and
    `ServiceUnreachable`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client, batch: int, opened: Opened | None = None, replayed: bool = False) -> None:
        super().__init__(batch, opened, replayed)
        self._client = client

    def extend(self, count: int, *, idempotency_key: str | None = None) -> ItemIds:
        """Issue `count` more ids. With the same key it issues the same ids again, as long as the batch lives."""
        return self._client._run(_calls.extend(self._client._service, self.id, count, idempotency_key)).ids

    def seal(self) -> Sealed:
        """Promise that no more items will come. An answer with `newly` says that this seal completed the batch."""
        sealed = self._client._run(_calls.seal(self._client._service, self.id))
        self._info = sealed
        return sealed

    def cancel(self) -> Batch:
        """End the batch without its items; what is acked afterwards is rejected."""
        self._info = self._client._run(_calls.cancel(self._client._service, self.id))
        return self._info

    def delete(self) -> None:
        """Remove the batch altogether, after cancelling it if it is live."""
        self._client._run(_calls.delete(self._client._service, self.id))

    def refresh(self) -> Batch:
        """The batch as it is now."""
        self._info = self._client._run(_calls.get(self._client._service, self.id))
        return self._info

    status = refresh

    def wait(self, timeout: float | None = None, *, progress: bool | Watcher = False) -> Batch:
        """Wait until the batch is complete, expired or cancelled, for `timeout` seconds or for ever.

        `progress=True` draws a bar with rate and estimate on standard error (needs `lastbit[cli]`); a function is
        called with the batch about each second instead. Raises `WaitTimeout`.
        """
        with _watching(progress) as watcher:
            hold = _calls.LONGEST_HOLD if watcher is None else 1
            return self._client._run(_calls.wait(self._client._service, self.id, timeout, hold), self._saw(watcher))

    def pending(self, *, page_size: int = 1000) -> Iterator[PendingRange]:
        """The ranges of items that nobody resolved yet, ascending, fetched as they are asked for."""
        return self._client._iterate(_calls.pending(self._client._service, self.id, page_size))

    def failed(self, *, page_size: int = 1000) -> Iterator[FailedRange]:
        """The ranges of failed items with the reasons that were given, ascending, fetched as they are asked for."""
        return self._client._iterate(_calls.failed(self._client._service, self.id, page_size))

    def explain(self) -> Explanation:
        """Why the batch is not done."""
        return self._client._run(_calls.explain(self._client._service, self.id))

    def verify(self) -> Verification:
        """Have the service recount the batch's bits and compare them with its counts."""
        return self._client._run(_calls.verify(self._client._service, self.id))

    def repair(self, *, dry_run: bool = False) -> Repair:
        """Restore the counts and the state of the batch from its bits, where `verify` finds that they disagree. Items
        whose bits were lost are pending then: have them redelivered. `dry_run` changes nothing. Needs the role admin.
        """
        return self._client._run(_calls.repair(self._client._service, self.id, dry_run))

    def watermark(self) -> Watermark:
        """The smallest pending number."""
        return self._client._run(_calls.watermark(self._client._service, self.id))


class AsyncBatchHandle(_Handle):
    """`BatchHandle`, awaited."""

    __slots__ = ("_client",)

    def __init__(self, client: AsyncClient, batch: int, opened: Opened | None = None, replayed: bool = False) -> None:
        super().__init__(batch, opened, replayed)
        self._client = client

    async def extend(self, count: int, *, idempotency_key: str | None = None) -> ItemIds:
        """Issue `count` more ids. With the same key it issues the same ids again, as long as the batch lives."""
        return (await self._client._run(_calls.extend(self._client._service, self.id, count, idempotency_key))).ids

    async def seal(self) -> Sealed:
        """Promise that no more items will come. An answer with `newly` says that this seal completed the batch."""
        sealed = await self._client._run(_calls.seal(self._client._service, self.id))
        self._info = sealed
        return sealed

    async def cancel(self) -> Batch:
        """End the batch without its items; what is acked afterwards is rejected."""
        self._info = await self._client._run(_calls.cancel(self._client._service, self.id))
        return self._info

    async def delete(self) -> None:
        """Remove the batch altogether, after cancelling it if it is live."""
        await self._client._run(_calls.delete(self._client._service, self.id))

    async def refresh(self) -> Batch:
        """The batch as it is now."""
        self._info = await self._client._run(_calls.get(self._client._service, self.id))
        return self._info

    status = refresh

    async def wait(self, timeout: float | None = None, *, progress: bool | Watcher = False) -> Batch:
        """Wait until the batch is complete, expired or cancelled; see `BatchHandle.wait`."""
        with _watching(progress) as watcher:
            hold = _calls.LONGEST_HOLD if watcher is None else 1
            flow = _calls.wait(self._client._service, self.id, timeout, hold)
            return await self._client._run(flow, self._saw(watcher))

    def pending(self, *, page_size: int = 1000) -> AsyncIterator[PendingRange]:
        """The ranges of items that nobody resolved yet, ascending, fetched as they are asked for."""
        return self._client._iterate(_calls.pending(self._client._service, self.id, page_size))

    def failed(self, *, page_size: int = 1000) -> AsyncIterator[FailedRange]:
        """The ranges of failed items with the reasons that were given, ascending, fetched as they are asked for."""
        return self._client._iterate(_calls.failed(self._client._service, self.id, page_size))

    async def explain(self) -> Explanation:
        """Why the batch is not done."""
        return await self._client._run(_calls.explain(self._client._service, self.id))

    async def verify(self) -> Verification:
        """Have the service recount the batch's bits and compare them with its counts."""
        return await self._client._run(_calls.verify(self._client._service, self.id))

    async def repair(self, *, dry_run: bool = False) -> Repair:
        """Restore the counts and the state of the batch from its bits; see `BatchHandle.repair`."""
        return await self._client._run(_calls.repair(self._client._service, self.id, dry_run))

    async def watermark(self) -> Watermark:
        """The smallest pending number."""
        return await self._client._run(_calls.watermark(self._client._service, self.id))
