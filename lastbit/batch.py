"""A producer's handle for a batch: from `client.open(...)` or `client.batch(7)`.

A handle stores the last known state (`info`); only its methods send requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timedelta
from itertools import chain
from types import EllipsisType
from typing import Unpack

from lastbit import _arguments, _calls, errors, progress
from lastbit._calls import Ids
from lastbit._drivers import AsyncDriver, Driver
from lastbit.failures import FailureReasons, Redrive, Redriven
from lastbit.ids import DEFAULT_GROUP_SIZE, ItemId, ItemIds
from lastbit.models import (
    Batch,
    Changes,
    Explanation,
    FailedRange,
    HistoryPoint,
    Opened,
    PendingRange,
    Repair,
    Sealed,
    SkippedRange,
    TreeProgress,
    Verification,
    Watermark,
)

Watcher = Callable[[Batch], object]
"""A function that is called with the batch at each poll of a wait."""


class _Handle:
    __slots__ = ("_info", "callback", "id", "ids", "issued", "newly", "replayed")

    def __init__(self, batch: int, opened: Opened | None = None, replayed: bool = False) -> None:
        self.id = _arguments.batch_id(batch)
        self.ids = ItemIds(batch, DEFAULT_GROUP_SIZE, range(0)) if opened is None else opened.ids
        """The ids issued by `open(items=n)`."""
        self.issued: Sequence[ItemIds] = (self.ids,) if self.ids else ()
        """These, or those of the last fan-out that returned this handle, in the order of its messages: consecutive ids
        are one element. There are several if others have extended the batch meanwhile."""
        self.newly = opened is not None and opened.newly
        """Whether opening completed the batch, because it was sealed and empty."""
        self.callback = None if opened is None else opened.callback
        """The callback that the open made, with its secret."""
        self.replayed = replayed
        """Whether the open was a repeat: an earlier call with the same idempotency key opened this batch."""
        self._info: Batch | None = opened

    def item_ids(self) -> Iterator[str]:
        """The ids in `issued`, one by one: after `fan_out(client, messages, …)`, the nth is that of the nth message."""
        return chain.from_iterable(self.issued)

    @property
    def info(self) -> Batch:
        """The batch's last known state, from open, update, seal, cancel, refresh or wait. Raises `NotRefreshed` if
        there is none."""
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

    def _remember(self, batch: Batch, watcher: Watcher | None) -> Batch:
        self._info = batch
        if watcher is not None:
            watcher(batch)
        return batch


def _watching(option: bool | Watcher) -> AbstractContextManager[Watcher | None]:
    if callable(option):
        return nullcontext(option)
    return progress.bar() if option else nullcontext()


class BatchHandle(_Handle):
    """A handle for a batch. All methods raise `ServiceError` (mostly `BatchNotFound` or `Conflict`) and
    `ServiceUnreachable`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: Driver, batch: int, opened: Opened | None = None, replayed: bool = False) -> None:
        super().__init__(batch, opened, replayed)
        self._driver = driver

    def extend(
        self,
        count: int,
        *,
        by: str | ItemId | None = None,
        idempotency_key: str | None = None,
        digest: str | None = None,
    ) -> ItemIds:
        """Issue `count` more ids. With the same `idempotency_key` it returns the same ids while the batch exists.

        `by`: the item of this batch that adds them, in the handler of its message. As long as it is pending, the batch
        may be sealed. Its keys are its own: each item may have the same key. Give one, or a second delivery of the
        message adds other items.

        `digest`: up to 64 visible ASCII characters that stand for what the items are for; with the same key and another
        digest, nothing is issued. Raises `BatchSealed`, `BatchEnded`, `ItemResolved`, `IdempotencyKeyReused`."""
        return self._driver.run(_calls.extend, self.id, count, idempotency_key, digest, by).ids

    def seal(self) -> Sealed:
        """Promise that no more items will come. `newly` in the result means that this seal completed the batch."""
        sealed = self._driver.run(_calls.seal, self.id)
        self._info = sealed
        return sealed

    def update(self, *, idempotency_key: str | None = None, **changes: Unpack[Changes]) -> Batch:
        """Change the tolerance, deadline and labels of a batch that is open or sealed. What is left out stays as it is,
        and None removes it. `labels`: names to add or change, or to remove (with None); other labels stay. If its
        failures exceed the new tolerance, the batch is exceeded, and cancelled with `on_exceeded="cancel"`. A timedelta
        as deadline counts from now, by this machine's clock. Raises `InvalidRequest`, `BatchEnded`."""
        self._info = self._driver.run(_calls.update, self.id, changes, idempotency_key)
        return self._info

    def cancel(self, *, reason: str | None = None, children: bool = False, idempotency_key: str | None = None) -> Batch:
        """End the batch without its pending items. Later acks are rejected, until it is reopened. `reason`: why, for
        people; a repeat keeps the first one. `children`: also cancel the live batches that stand for its items, at any
        depth. Raises `BatchEnded` if it is complete or expired."""
        self._info = self._driver.run(_calls.cancel, self.id, reason, children, idempotency_key)
        return self._info

    def reopen(
        self,
        *,
        deadline: datetime | timedelta | EllipsisType | None = ...,
        reason: str | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Bring back a batch that was cancelled or has expired: it is open or sealed again, with all that was resolved.
        A `deadline` that has passed must be replaced, or removed with None. `reason`: why, for readers of the
        event. If its failures exceed its tolerance, it continues, whatever its `on_exceeded` was. Raises `BatchEnded`
        if it is complete, `Conflict` with the code `batch_live`, `InvalidRequest`."""
        self._info = self._driver.run(_calls.reopen, self.id, deadline, reason, idempotency_key)
        return self._info

    def delete(self, *, state: str | None = None) -> None:
        """Delete the batch. A live batch is cancelled first. `state`: only if it is in this state; else raises
        `Conflict` with the code `state_conflict`."""
        self._driver.run(_calls.delete, self.id, state)

    def refresh(self) -> Batch:
        """Fetch the current state of the batch."""
        self._info = self._driver.run(_calls.get, self.id)
        return self._info

    status = refresh

    def wait(self, timeout: float | None = None, *, progress: bool | Watcher = False) -> Batch:
        """Wait until the batch is complete, expired or cancelled, for `timeout` seconds or without limit. Goes on while
        the service is restarted.

        `progress=True` draws a bar with rate and estimate on standard error, or writes lines if that is no terminal
        (needs `lastbit[cli]`); a function is called with the batch about once a second instead. Raises `WaitTimeout`.
        """
        with _watching(progress) as watcher:
            hold = _calls.LONGEST_HOLD if watcher is None else 1
            for batch in self._driver.iterate(_calls.wait, self.id, timeout, hold):
                latest = self._remember(batch, watcher)
        return latest

    def pending(self, *, page_size: int = 1000) -> Iterator[PendingRange]:
        """The ranges of pending items, ascending, fetched page by page."""
        return self._driver.iterate(_calls.pending, self.id, page_size)

    def failed(self, *, page_size: int = 1000) -> Iterator[FailedRange]:
        """The ranges of failed items with their reasons, ascending, fetched page by page."""
        return self._driver.iterate(_calls.failed, self.id, page_size)

    def skipped(self, *, page_size: int = 1000) -> Iterator[SkippedRange]:
        """The ranges of skipped items with their reasons, ascending, fetched page by page."""
        return self._driver.iterate(_calls.skipped, self.id, page_size)

    def failure_reasons(self, *, limit: int = 100) -> FailureReasons:
        """Failures by reason: the `limit` most frequent reasons, at most 1,000. Of very many failures it is a
        sample."""
        return self._driver.run(_calls.failure_reasons, self.id, limit)

    def redrive(
        self,
        *,
        reason: str | None = None,
        items: Ids | None = None,
        note: str | None = None,
        pending: bool = False,
        unchanged_for: int | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> Redriven:
        """Ask the producer to send failed items again: all of them, those that failed for `reason`, or those of up to
        1,000 `items` that have failed. Followers of `Client.redrives` get the request; the acks of the items override
        their failures. `note`: a text for the followers. Raises `Conflict` with the code `nothing_failed`.

        `pending=True` asks for the pending items instead, except those of nested batches, for example when a queue has
        lost messages; with `unchanged_for`, only if the batch hasn't changed for these seconds. Raises `Conflict` with
        the code `nothing_pending`."""
        options = reason, items, note, pending, unchanged_for, idempotency_key
        return self._driver.run(_calls.redrive, self.id, *options)

    def redriven(self, redrive: Redrive) -> Iterator[str]:
        """The ids that a redrive of this batch asks for. Of more than 1,000 ranges, the later ones are fetched page by
        page: items that have been acked since are left out."""
        return self._driver.iterate(_calls.redriven, redrive)

    def progress(self) -> TreeProgress:
        """The sums of the batch and all of its descendants."""
        return self._driver.run(_calls.progress, self.id)

    def history(self) -> list[HistoryPoint]:
        """How the batch got on, from its open until it ended, or until now: at most 132 points, between which the
        counts changed steadily, as far as is known."""
        return self._driver.run(_calls.history, self.id)

    def explain(self) -> Explanation:
        """The reasons why the batch is not done."""
        return self._driver.run(_calls.explain, self.id)

    def verify(self) -> Verification:
        """Make the service recount the batch's bits and compare them with its counts."""
        return self._driver.run(_calls.verify, self.id)

    def repair(self, *, dry_run: bool = False) -> Repair:
        """Restore the counts and the state of the batch from its bits, if `verify` finds that they disagree. Items
        whose bits were lost become pending again and must be redelivered. `dry_run` changes nothing. Requires the role
        admin."""
        return self._driver.run(_calls.repair, self.id, dry_run)

    def watermark(self) -> Watermark:
        """The smallest pending item number: all items below it are resolved."""
        return self._driver.run(_calls.watermark, self.id)


class AsyncBatchHandle(_Handle):
    """`BatchHandle`, awaited."""

    __slots__ = ("_driver",)

    def __init__(self, driver: AsyncDriver, batch: int, opened: Opened | None = None, replayed: bool = False) -> None:
        super().__init__(batch, opened, replayed)
        self._driver = driver

    async def extend(
        self,
        count: int,
        *,
        by: str | ItemId | None = None,
        idempotency_key: str | None = None,
        digest: str | None = None,
    ) -> ItemIds:
        """Issue `count` more ids. With the same `idempotency_key` it returns the same ids while the batch exists.

        `by`: the item of this batch that adds them, in the handler of its message. As long as it is pending, the batch
        may be sealed. Its keys are its own: each item may have the same key. Give one, or a second delivery of the
        message adds other items.

        `digest`: up to 64 visible ASCII characters that stand for what the items are for; with the same key and another
        digest, nothing is issued. Raises `BatchSealed`, `BatchEnded`, `ItemResolved`, `IdempotencyKeyReused`."""
        return (await self._driver.run(_calls.extend, self.id, count, idempotency_key, digest, by)).ids

    async def seal(self) -> Sealed:
        """Promise that no more items will come. `newly` in the result means that this seal completed the batch."""
        sealed = await self._driver.run(_calls.seal, self.id)
        self._info = sealed
        return sealed

    async def update(self, *, idempotency_key: str | None = None, **changes: Unpack[Changes]) -> Batch:
        """Change the tolerance, deadline and labels of a batch that is open or sealed. What is left out stays as it is,
        and None removes it. `labels`: names to add or change, or to remove (with None); other labels stay. If its
        failures exceed the new tolerance, the batch is exceeded, and cancelled with `on_exceeded="cancel"`. A timedelta
        as deadline counts from now, by this machine's clock. Raises `InvalidRequest`, `BatchEnded`."""
        self._info = await self._driver.run(_calls.update, self.id, changes, idempotency_key)
        return self._info

    async def cancel(
        self, *, reason: str | None = None, children: bool = False, idempotency_key: str | None = None
    ) -> Batch:
        """End the batch without its pending items. Later acks are rejected, until it is reopened. `reason`: why, for
        people; a repeat keeps the first one. `children`: also cancel the live batches that stand for its items, at any
        depth. Raises `BatchEnded` if it is complete or expired."""
        self._info = await self._driver.run(_calls.cancel, self.id, reason, children, idempotency_key)
        return self._info

    async def reopen(
        self,
        *,
        deadline: datetime | timedelta | EllipsisType | None = ...,
        reason: str | None = None,
        idempotency_key: str | None = None,
    ) -> Batch:
        """Bring back a batch that was cancelled or has expired: it is open or sealed again, with all that was resolved.
        A `deadline` that has passed must be replaced, or removed with None. `reason`: why, for readers of the
        event. If its failures exceed its tolerance, it continues, whatever its `on_exceeded` was. Raises `BatchEnded`
        if it is complete, `Conflict` with the code `batch_live`, `InvalidRequest`."""
        self._info = await self._driver.run(_calls.reopen, self.id, deadline, reason, idempotency_key)
        return self._info

    async def delete(self, *, state: str | None = None) -> None:
        """Delete the batch. A live batch is cancelled first. `state`: only if it is in this state; else raises
        `Conflict` with the code `state_conflict`."""
        await self._driver.run(_calls.delete, self.id, state)

    async def refresh(self) -> Batch:
        """Fetch the current state of the batch."""
        self._info = await self._driver.run(_calls.get, self.id)
        return self._info

    status = refresh

    async def wait(self, timeout: float | None = None, *, progress: bool | Watcher = False) -> Batch:
        """Wait until the batch is complete, expired or cancelled, for `timeout` seconds or without limit. Goes on while
        the service is restarted.

        `progress=True` draws a bar with rate and estimate on standard error, or writes lines if that is no terminal
        (needs `lastbit[cli]`); a function is called with the batch about once a second instead. Raises `WaitTimeout`.
        """
        with _watching(progress) as watcher:
            hold = _calls.LONGEST_HOLD if watcher is None else 1
            async for batch in self._driver.iterate(_calls.wait, self.id, timeout, hold):
                latest = self._remember(batch, watcher)
        return latest

    def pending(self, *, page_size: int = 1000) -> AsyncIterator[PendingRange]:
        """The ranges of pending items, ascending, fetched page by page."""
        return self._driver.iterate(_calls.pending, self.id, page_size)

    def failed(self, *, page_size: int = 1000) -> AsyncIterator[FailedRange]:
        """The ranges of failed items with their reasons, ascending, fetched page by page."""
        return self._driver.iterate(_calls.failed, self.id, page_size)

    def skipped(self, *, page_size: int = 1000) -> AsyncIterator[SkippedRange]:
        """The ranges of skipped items with their reasons, ascending, fetched page by page."""
        return self._driver.iterate(_calls.skipped, self.id, page_size)

    async def failure_reasons(self, *, limit: int = 100) -> FailureReasons:
        """Failures by reason: the `limit` most frequent reasons, at most 1,000. Of very many failures it is a
        sample."""
        return await self._driver.run(_calls.failure_reasons, self.id, limit)

    async def redrive(
        self,
        *,
        reason: str | None = None,
        items: Ids | None = None,
        note: str | None = None,
        pending: bool = False,
        unchanged_for: int | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> Redriven:
        """Ask the producer to send failed items again: all of them, those that failed for `reason`, or those of up to
        1,000 `items` that have failed. Followers of `Client.redrives` get the request; the acks of the items override
        their failures. `note`: a text for the followers. Raises `Conflict` with the code `nothing_failed`.

        `pending=True` asks for the pending items instead, except those of nested batches, for example when a queue has
        lost messages; with `unchanged_for`, only if the batch hasn't changed for these seconds. Raises `Conflict` with
        the code `nothing_pending`."""
        options = reason, items, note, pending, unchanged_for, idempotency_key
        return await self._driver.run(_calls.redrive, self.id, *options)

    def redriven(self, redrive: Redrive) -> AsyncIterator[str]:
        """The ids that a redrive of this batch asks for. Of more than 1,000 ranges, the later ones are fetched page by
        page: items that have been acked since are left out."""
        return self._driver.iterate(_calls.redriven, redrive)

    async def progress(self) -> TreeProgress:
        """The sums of the batch and all of its descendants."""
        return await self._driver.run(_calls.progress, self.id)

    async def history(self) -> list[HistoryPoint]:
        """How the batch got on, from its open until it ended, or until now: at most 132 points, between which the
        counts changed steadily, as far as is known."""
        return await self._driver.run(_calls.history, self.id)

    async def explain(self) -> Explanation:
        """The reasons why the batch is not done."""
        return await self._driver.run(_calls.explain, self.id)

    async def verify(self) -> Verification:
        """Make the service recount the batch's bits and compare them with its counts."""
        return await self._driver.run(_calls.verify, self.id)

    async def repair(self, *, dry_run: bool = False) -> Repair:
        """Restore the counts and the state of the batch from its bits, if `verify` finds that they disagree. Items
        whose bits were lost become pending again and must be redelivered. `dry_run` changes nothing. Requires the role
        admin."""
        return await self._driver.run(_calls.repair, self.id, dry_run)

    async def watermark(self) -> Watermark:
        """The smallest pending item number: all items below it are resolved."""
        return await self._driver.run(_calls.watermark, self.id)
