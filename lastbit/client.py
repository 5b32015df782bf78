"""The clients: they send requests and wait. `_calls` defines the requests and responses, `_protocol` the retries, and
`_httpx` sends.

A client has a connection pool: make one per process and share it, a `Client` between threads, an `AsyncClient` between
the tasks of one event loop. Neither works across a fork.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

import httpx

from lastbit import _calls, _httpx, _masks
from lastbit._calls import Ids
from lastbit._drivers import AsyncDriver, Driver, unpicklable
from lastbit._in_flight import InFlight
from lastbit._protocol import Service
from lastbit.acker import DEFAULT_MAX_PENDING, Acker, AsyncAcker
from lastbit.batch import AsyncBatchHandle, BatchHandle
from lastbit.failures import Failure, Redrive
from lastbit.groups import AsyncGroups, Groups
from lastbit.models import AckResult, Appended, Batch, Completed, Event, EventPage, Fence, OpenOptions
from lastbit.processes.calls import AsyncProcesses, Processes
from lastbit.retry import Retry
from lastbit.search import Filters, StateCounts, query
from lastbit.tallies.tally import AsyncTally, Tally
from lastbit.webhooks import AsyncWebhooks, Webhooks


class HasClients(Protocol):
    """A `lastbit.embedded.Lastbit`. Wherever a client may be passed to an adapter, so may this."""

    def client(self) -> Client: ...

    def async_client(self) -> AsyncClient: ...


def client_of(given: Client | HasClients | None) -> Client:
    """The client that a caller has given; by default a new one for LASTBIT_URL and LASTBIT_TOKEN."""
    if given is None:
        return Client()
    return given if isinstance(given, Client) else given.client()


class Client:
    """A connection to a service.

    `url`: by default LASTBIT_URL, else http://127.0.0.1:8000. `token`: sent as `Authorization: Bearer`, by default
    LASTBIT_TOKEN. `timeout`: seconds for each of connecting, sending and the response. `retry`: when to retry.
    `transport`: an httpx transport of your own, for other certificates or proxies. Raises `InvalidArgument`.

    Its methods raise `ServiceError` if the service refuses a request, and `ServiceUnreachable` if it doesn't respond.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        retry: Retry | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        service = Service.named(url, token, timeout, retry)
        http = _httpx.pool(transport)
        self._driver = Driver(service, partial(_httpx.send, http))
        self._close: Callable[[], None] = http.close

    @classmethod
    def over(cls, driver: Driver, close: Callable[[], None]) -> Self:
        """A client whose requests are sent by `driver`. It is for lastbit's own modules."""
        client = cls.__new__(cls)
        client._driver = driver
        client._close = close
        return client

    __reduce__ = unpicklable

    @property
    def url(self) -> str:
        return self._driver.service.url

    @property
    def driver(self) -> Driver:
        """Sends the requests of this client and of its handles. It is for lastbit's own modules."""
        return self._driver

    @property
    def groups(self) -> Groups:
        """Consumer groups: their workers, partitions and positions; see `Groups`."""
        return Groups(self._driver)

    @property
    def processes(self) -> Processes:
        """Process managers, their instances and commands; see `lastbit.processes`."""
        return Processes(self._driver)

    @property
    def webhooks(self) -> Webhooks:
        """Webhooks and their deliveries; see `Webhooks`."""
        return Webhooks(self._driver)

    def open(self, *, idempotency_key: str | None = None, **options: Unpack[OpenOptions]) -> BatchHandle:
        """Open a batch and return its handle. `key`: your name for it, up to 255 characters, which need not be unique.
        `group_size`: items per bitfield, a multiple of 8 from 64 to 32,768; by default 8,192. `items`: number of ids to
        issue at once (`.ids`). `sealed`: also seal the batch, in the same transaction. `seal_at`: the number of items
        with which it seals itself, and which it can't exceed. `parent`: the item of another batch that this batch
        resolves. `expires_in`: seconds of idleness, or a timedelta, after which it expires. With the same
        `idempotency_key`, the call returns the same batch with the same ids (`.replayed`).

        `tolerated_failures` and `tolerated_failure_percentage` (0 to 100) are the tolerance: the failed items with
        which the batch succeeds; by default none. `on_exceeded`: whether the batch continues or is cancelled when its
        failures exceed the tolerance.

        `callback`: a URL that gets a signed webhook with each event that tells how the batch ended, or a `Callback`
        with other types. The handle's `callback` has its secret.

        `deadline`: when the batch expires if it is unfinished, however busy it is. A timedelta counts from now, by this
        machine's clock; with an `idempotency_key` that another process repeats, give both the same datetime.

        Raises `InvalidRequest`, `IdempotencyKeyReused`, `BatchEnded` (of the parent).
        """
        opened, replayed = self._driver.run(_calls.open_batch, options, idempotency_key)
        return BatchHandle(self._driver, opened.id, opened, replayed)

    def batch(self, batch: int) -> BatchHandle:
        """A handle for an existing batch. Sends no request."""
        return BatchHandle(self._driver, batch)

    def batches(self, *, state: str | None = None, page_size: int = 100, **filters: Unpack[Filters]) -> Iterator[Batch]:
        """The batches, newest first, fetched page by page. Filters: `key`, `key_prefix`, `labels`, `opened_after`,
        `opened_before`, `outcome`, `parent`, `unchanged_for`, `failed`; see `lastbit.search.Filters`. Raises
        `InvalidRequest` if they contradict each other."""
        return self._driver.iterate(_calls.batches, query(filters, state), page_size)

    def failures(
        self, text: str | None = None, *, state: str | None = None, page_size: int = 100, **filters: Unpack[Filters]
    ) -> Iterator[Failure]:
        """The failed items whose reason has this text, in upper or lower case, or all that have a reason: the newest
        batch first. `state` and the filters choose batches as in `batches`. The service has no index of reasons, so
        this reads all failures of these batches, some thousands per request."""
        return self._driver.iterate(_calls.find_failures, text, query(filters, state), page_size)

    def counts(self, **filters: Unpack[Filters]) -> StateCounts:
        """The number of batches in each state, with the filters of `batches`."""
        return self._driver.run(_calls.counts, query(filters))

    def ack(self, ids: Ids) -> AckResult:
        """Ack items: one id, an iterable of ids, or `ItemIds` (sent as bitfields, any number).

        Large calls are split and the results merged. If a later part fails, earlier ones are applied (`error.partial`);
        it is safe to send all of it again. A collection is checked before anything is sent, and each id counts once. An
        iterator is read, checked and deduplicated 10,000 ids at a time. Raises `MalformedItem`.
        """
        return self._driver.run(_calls.resolve, "acks", _masks.pieces(ids), None)

    def fail(self, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as failed; otherwise like `ack`. An acked item stays acked; a failed item can still be acked."""
        return self._driver.run(_calls.resolve, "failures", _masks.pieces(ids), reason)

    def skip(self, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as not needed: deliberately not done, and no failures. Otherwise like `ack`. A failed item becomes
        skipped; an acked item stays acked, and a skipped item can still be acked."""
        return self._driver.run(_calls.resolve, "skips", _masks.pieces(ids), reason)

    def events(
        self,
        *,
        after: int | None = None,
        types: str | Iterable[str] = (),
        batch: int | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> EventPage:
        """One page of the feed in commit order: the events after the position `after`, or all that are stored. `types`:
        one or several event types; default all. `wait`: seconds to wait, up to 60, if there is no event yet. `limit`:
        maximum number of events, up to 1,000; by default 100. Raises `PositionTrimmed`."""
        return self._driver.run(_calls.events, after, types, batch, wait, limit)

    def follow(
        self, *, after: int | None = None, types: str | Iterable[str] = (), batch: int | None = None
    ) -> Iterator[Event]:
        """The events after the position `after`, or all that are stored, and then new ones as they arrive, without end.
        If the service is unreachable for up to a minute, it continues at the same position. Store the `position` of the
        last event you finished, and pass it as `after` next time. Raises `PositionTrimmed`."""
        return self._driver.iterate(_calls.follow, after, types, batch)

    def redrives(self, *, after: int | None = None, batch: int | None = None) -> Iterator[Redrive]:
        """The redrives after the position `after`, or all that are stored, and then new ones as they arrive, without
        end. Send the items of each again, with the ids that `BatchHandle.redriven` gives, then store its `position` for
        the next `after`. `batch`: only those of this one. Raises `PositionTrimmed`."""
        return self._driver.iterate(_calls.redrives, after, batch)

    def append(self, events: Iterable[Mapping[str, Any]], *, fence: Fence | None = None) -> tuple[Appended, ...]:
        """Append up to 1,000 events of your own in one transaction: mappings with `id`, `type` and optionally `key` and
        `data` (any JSON). An event whose id exists is a repeat, even if its content differs. With the `fence` of an
        assignment, the events are written only while the worker owns the partition; otherwise raises `StaleEpoch`."""
        return self._driver.run(_calls.append, events, fence)

    def append_event(
        self, *, id: str, type: str, key: str | None = None, data: Any = None, fence: Fence | None = None
    ) -> Appended:
        """Append one event of your own; see `append`."""
        return self.append([{"id": id, "type": type, "key": key, "data": data}], fence=fence)[0]

    def tally(self, name: str) -> Tally:
        """A tally: sums that count each message once, however often it is replayed. Sends no request."""
        return Tally(self._driver, name)

    def acker(
        self,
        on_completed: Callable[[Completed], object] | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        linger: float = 0.0,
    ) -> Acker:
        """A context manager that combines single acks into few calls; see `Acker`."""
        return Acker(self._driver, on_completed, max_pending, linger)

    def close(self) -> None:
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._driver.service.address}>"


class AsyncClient:
    """`Client`, awaited: same names, same arguments, same errors.

    A call that is cancelled, for example by `asyncio.wait_for`, ends at once and closes its connection. The request may
    or may not have been carried out. To be able to send an open, extend or redrive again, give it an idempotency key
    from the start.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout: float = 30.0,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        service = Service.named(url, token, timeout, retry)
        http, in_flight = _httpx.async_pool(transport), InFlight()
        self._driver = AsyncDriver(service, partial(_httpx.send_async, http, in_flight))
        self._close: Callable[[], Awaitable[None]] = partial(_httpx.close_async, http, in_flight)

    @classmethod
    def over(cls, driver: AsyncDriver, close: Callable[[], Awaitable[None]]) -> Self:
        """A client whose requests are sent by `driver`. It is for lastbit's own modules."""
        client = cls.__new__(cls)
        client._driver = driver
        client._close = close
        return client

    __reduce__ = unpicklable

    @property
    def url(self) -> str:
        return self._driver.service.url

    @property
    def driver(self) -> AsyncDriver:
        """Sends the requests of this client and of its handles. It is for lastbit's own modules."""
        return self._driver

    @property
    def groups(self) -> AsyncGroups:
        """Consumer groups: their workers, partitions and positions; see `Groups`."""
        return AsyncGroups(self._driver)

    @property
    def processes(self) -> AsyncProcesses:
        """Process managers, their instances and commands; see `lastbit.processes`."""
        return AsyncProcesses(self._driver)

    @property
    def webhooks(self) -> AsyncWebhooks:
        """Webhooks and their deliveries; see `Webhooks`."""
        return AsyncWebhooks(self._driver)

    async def open(self, *, idempotency_key: str | None = None, **options: Unpack[OpenOptions]) -> AsyncBatchHandle:
        """Open a batch and return its handle. `key`: your name for it, up to 255 characters, which need not be unique.
        `group_size`: items per bitfield, a multiple of 8 from 64 to 32,768; by default 8,192. `items`: number of ids to
        issue at once (`.ids`). `sealed`: also seal the batch, in the same transaction. `seal_at`: the number of items
        with which it seals itself, and which it can't exceed. `parent`: the item of another batch that this batch
        resolves. `expires_in`: seconds of idleness, or a timedelta, after which it expires. With the same
        `idempotency_key`, the call returns the same batch with the same ids (`.replayed`).

        `tolerated_failures` and `tolerated_failure_percentage` (0 to 100) are the tolerance: the failed items with
        which the batch succeeds; by default none. `on_exceeded`: whether the batch continues or is cancelled when its
        failures exceed the tolerance.

        `callback`: a URL that gets a signed webhook with each event that tells how the batch ended, or a `Callback`
        with other types. The handle's `callback` has its secret.

        `deadline`: when the batch expires if it is unfinished, however busy it is. A timedelta counts from now, by this
        machine's clock; with an `idempotency_key` that another process repeats, give both the same datetime.

        Raises `InvalidRequest`, `IdempotencyKeyReused`, `BatchEnded` (of the parent).
        """
        opened, replayed = await self._driver.run(_calls.open_batch, options, idempotency_key)
        return AsyncBatchHandle(self._driver, opened.id, opened, replayed)

    def batch(self, batch: int) -> AsyncBatchHandle:
        """A handle for an existing batch. Sends no request."""
        return AsyncBatchHandle(self._driver, batch)

    def batches(
        self, *, state: str | None = None, page_size: int = 100, **filters: Unpack[Filters]
    ) -> AsyncIterator[Batch]:
        """The batches, newest first, fetched page by page. Filters: `key`, `key_prefix`, `labels`, `opened_after`,
        `opened_before`, `outcome`, `parent`, `unchanged_for`, `failed`; see `lastbit.search.Filters`. Raises
        `InvalidRequest` if they contradict each other."""
        return self._driver.iterate(_calls.batches, query(filters, state), page_size)

    def failures(
        self, text: str | None = None, *, state: str | None = None, page_size: int = 100, **filters: Unpack[Filters]
    ) -> AsyncIterator[Failure]:
        """The failed items whose reason has this text, in upper or lower case, or all that have a reason: the newest
        batch first. `state` and the filters choose batches as in `batches`. The service has no index of reasons, so
        this reads all failures of these batches, some thousands per request."""
        return self._driver.iterate(_calls.find_failures, text, query(filters, state), page_size)

    async def counts(self, **filters: Unpack[Filters]) -> StateCounts:
        """The number of batches in each state, with the filters of `batches`."""
        return await self._driver.run(_calls.counts, query(filters))

    async def ack(self, ids: Ids) -> AckResult:
        """Ack items: one id, an iterable of ids, or `ItemIds` (sent as bitfields, any number).

        Large calls are split and the results merged. If a later part fails, earlier ones are applied (`error.partial`);
        it is safe to send all of it again. A collection is checked before anything is sent, and each id counts once. An
        iterator is read, checked and deduplicated 10,000 ids at a time. Raises `MalformedItem`.
        """
        return await self._driver.run(_calls.resolve, "acks", _masks.pieces(ids), None)

    async def fail(self, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as failed; otherwise like `ack`. An acked item stays acked; a failed item can still be acked."""
        return await self._driver.run(_calls.resolve, "failures", _masks.pieces(ids), reason)

    async def skip(self, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as not needed: deliberately not done, and no failures. Otherwise like `ack`. A failed item becomes
        skipped; an acked item stays acked, and a skipped item can still be acked."""
        return await self._driver.run(_calls.resolve, "skips", _masks.pieces(ids), reason)

    async def events(
        self,
        *,
        after: int | None = None,
        types: str | Iterable[str] = (),
        batch: int | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> EventPage:
        """One page of the feed in commit order: the events after the position `after`, or all that are stored. `types`:
        one or several event types; default all. `wait`: seconds to wait, up to 60, if there is no event yet. `limit`:
        maximum number of events, up to 1,000; by default 100. Raises `PositionTrimmed`."""
        return await self._driver.run(_calls.events, after, types, batch, wait, limit)

    def follow(
        self, *, after: int | None = None, types: str | Iterable[str] = (), batch: int | None = None
    ) -> AsyncIterator[Event]:
        """The events after the position `after`, or all that are stored, and then new ones as they arrive, without end.
        If the service is unreachable for up to a minute, it continues at the same position. Store the `position` of the
        last event you finished, and pass it as `after` next time. Raises `PositionTrimmed`."""
        return self._driver.iterate(_calls.follow, after, types, batch)

    def redrives(self, *, after: int | None = None, batch: int | None = None) -> AsyncIterator[Redrive]:
        """The redrives after the position `after`, or all that are stored, and then new ones as they arrive, without
        end. Send the items of each again, with the ids that `BatchHandle.redriven` gives, then store its `position` for
        the next `after`. `batch`: only those of this one. Raises `PositionTrimmed`."""
        return self._driver.iterate(_calls.redrives, after, batch)

    async def append(self, events: Iterable[Mapping[str, Any]], *, fence: Fence | None = None) -> tuple[Appended, ...]:
        """Append up to 1,000 events of your own in one transaction: mappings with `id`, `type` and optionally `key` and
        `data` (any JSON). An event whose id exists is a repeat, even if its content differs. With the `fence` of an
        assignment, the events are written only while the worker owns the partition; otherwise raises `StaleEpoch`."""
        return await self._driver.run(_calls.append, events, fence)

    async def append_event(
        self, *, id: str, type: str, key: str | None = None, data: Any = None, fence: Fence | None = None
    ) -> Appended:
        """Append one event of your own; see `append`."""
        return (await self.append([{"id": id, "type": type, "key": key, "data": data}], fence=fence))[0]

    def tally(self, name: str) -> AsyncTally:
        """A tally: sums that count each message once, however often it is replayed. Sends no request."""
        return AsyncTally(self._driver, name)

    def acker(
        self,
        on_completed: Callable[[Completed], Awaitable[object] | object] | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        linger: float = 0.0,
    ) -> AsyncAcker:
        """A context manager that combines single acks into few calls; see `AsyncAcker`."""
        return AsyncAcker(self._driver, on_completed, max_pending, linger)

    async def close(self) -> None:
        """Close the connections, and end the requests whose callers were cancelled."""
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._driver.service.address}>"
