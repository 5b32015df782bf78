"""The clients: they send requests and wait. `_calls` defines what the bytes mean, `_protocol` when to retry.

A client has a connection pool: make one per process and share it, a `Client` between threads, an `AsyncClient` between
the tasks of one event loop. Neither works across a fork.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import timedelta
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from lastbit import __version__, _calls, _masks
from lastbit._calls import Ids
from lastbit._in_flight import LIMITS, InFlight, Trace
from lastbit._protocol import (
    Answer,
    Emit,
    Failure,
    Flow,
    Outcome,
    Pause,
    Request,
    Service,
)
from lastbit.acker import DEFAULT_MAX_PENDING, Acker, AsyncAcker
from lastbit.batch import AsyncBatchHandle, BatchHandle
from lastbit.groups import AsyncGroups, Groups
from lastbit.ids import ItemId
from lastbit.models import AckResult, Appended, Batch, Completed, Event, EventPage, Fence
from lastbit.processes.calls import AsyncProcesses, Processes
from lastbit.retry import Retry
from lastbit.tallies.tally import AsyncTally, Tally
from lastbit.webhooks import AsyncWebhooks, Webhooks

T = TypeVar("T")

_AGENT = {"user-agent": f"lastbit/{__version__}"}


def _no_cookies() -> CookieJar:
    """Reject all cookies. The service sets none, and an invalid one from a gateway would make every later request
    fail."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


def _answer(response: httpx.Response) -> Answer:
    return Answer(response.status_code, dict(response.headers), response.content)


def _failure(error: httpx.HTTPError | httpx.InvalidURL, request: Request) -> Failure:
    message = str(error)
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return Failure(f"no connection within {request.timeout:g} s")
    if isinstance(error, httpx.TimeoutException):
        return Failure(f"nothing came within {request.timeout:g} s")
    lasting = isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.InvalidURL)
    return Failure(message or type(error).__name__, lasting or "CERTIFICATE_VERIFY_FAILED" in message)


class Client:
    """A connection to a service.

    `url`: by default LASTBIT_URL, else http://127.0.0.1:8000. `token`: sent as `Authorization: Bearer`, by default
    LASTBIT_TOKEN. `timeout`: seconds for each of connecting, sending and the response. `retry`: when to retry.
    `transport`: an httpx transport of your own, for other certificates or proxies. Raises `InvalidArgument`.

    Its methods raise `ServiceError` where the service refuses, `ServiceUnreachable` where it does not answer.
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
        self._service = Service.named(url, token, timeout, retry)
        self._http = httpx.Client(transport=transport, headers=_AGENT, cookies=_no_cookies())

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def groups(self) -> Groups:
        """Consumer groups: their workers, partitions and positions; see `Groups`."""
        return Groups(self)

    @property
    def processes(self) -> Processes:
        """Process managers, their instances and commands; see `lastbit.processes`."""
        return Processes(self)

    @property
    def webhooks(self) -> Webhooks:
        """Webhooks and their deliveries; see `Webhooks`."""
        return Webhooks(self)

    def open(
        self,
        *,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        group_size: int | None = None,
        items: int | None = None,
        sealed: bool = False,
        parent: str | ItemId | None = None,
        expires_in: int | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> BatchHandle:
        """Open a batch and return its handle. `items`: number of ids to issue at once (`.ids`). `sealed`: also seal the
        batch, in the same transaction. `parent`: the item of another batch that this batch resolves. `expires_in`:
        seconds of idleness after which it expires. With the same `idempotency_key`, the call returns the same batch
        with the same ids (`.replayed`)."""
        flow = _calls.open_batch(
            self._service, key, labels, group_size, items, sealed, parent, expires_in, idempotency_key
        )
        answer, is_replay = self._run(flow)
        return BatchHandle(self, answer.id, answer, is_replay)

    def batch(self, batch: int) -> BatchHandle:
        """A handle for an existing batch. Sends no request."""
        return BatchHandle(self, batch)

    def batches(
        self,
        *,
        state: str | None = None,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        page_size: int = 100,
    ) -> Iterator[Batch]:
        """The batches, newest first, fetched page by page. A batch must have all of `labels`."""
        return self._iterate(_calls.batches(self._service, state, key, labels, page_size))

    def ack(self, ids: Ids) -> AckResult:
        """Ack items: one id, an iterable of ids, or `ItemIds` (sent as bitfields, any number).

        Large calls are split and the results merged. If a later part fails, earlier ones are applied (`error.partial`);
        it is safe to send all of it again. A collection is checked before anything is sent, and each id counts once. An
        iterator is read, checked and deduplicated 10,000 ids at a time. Raises `MalformedItem`.
        """
        return self._run(_calls.resolve(self._service, "acks", _masks.pieces(ids), None))

    def fail(self, ids: Ids, reason: str | None = None) -> AckResult:
        """Mark items as failed; otherwise like `ack`. An acked item stays acked; a failed item can still be acked."""
        return self._run(_calls.resolve(self._service, "failures", _masks.pieces(ids), reason))

    def events(
        self,
        *,
        after: int | None = None,
        types: str | Iterable[str] = (),
        batch: int | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> EventPage:
        """One page of the feed in commit order: the events above the position `after`, or all that are stored. `types`:
        one or several event types; default all. `wait`: seconds to wait, up to 60, if there is no event yet. Raises
        `PositionTrimmed`."""
        return self._run(_calls.events(self._service, after, types, batch, wait, limit))

    def follow(
        self, *, after: int | None = None, types: str | Iterable[str] = (), batch: int | None = None
    ) -> Iterator[Event]:
        """The events above the position `after`, or all that are stored, and then new ones as they arrive, without end.
        It continues where it was after the service was unreachable. Store the `position` of the last event you
        finished, and pass it as `after` next time. Raises `PositionTrimmed`."""
        return self._iterate(_calls.follow(self._service, after, types, batch))

    def append(self, events: Iterable[Mapping[str, Any]], *, fence: Fence | None = None) -> tuple[Appended, ...]:
        """Append up to 1,000 events of your own in one transaction: mappings with `id`, `type` and optionally `key` and
        `data` (any JSON). An id that exists already is a repeat, whatever its content. With the `fence` of an
        assignment, the events are written only while the worker owns the partition; otherwise raises `StaleEpoch`."""
        return self._run(_calls.append(self._service, events, fence))

    def append_event(
        self, *, id: str, type: str, key: str | None = None, data: Any = None, fence: Fence | None = None
    ) -> Appended:
        """Append one event of your own; see `append`."""
        return self.append([{"id": id, "type": type, "key": key, "data": data}], fence=fence)[0]

    def tally(self, name: str) -> Tally:
        """A tally: sums that count each message once, however often it is replayed. Sends no request."""
        return Tally(self, name)

    def acker(
        self,
        on_completed: Callable[[Completed], object] | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
    ) -> Acker:
        """A context manager that gathers single acks into few calls; see `Acker`."""
        return Acker(self, on_completed, max_pending)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    def _run(self, flow: Flow[T], emit: Callable[[Any], object] | None = None) -> T:
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = None
            if isinstance(step, Request):
                outcome = self._send(step)
            elif isinstance(step, Pause):
                time.sleep(step.seconds)
            elif emit is not None:
                emit(step.value)

    def _iterate(self, flow: Flow[None]) -> Iterator[Any]:
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration:
                return
            outcome = None
            if isinstance(step, Request):
                outcome = self._send(step)
            elif isinstance(step, Pause):
                time.sleep(step.seconds)
            else:
                assert isinstance(step, Emit)
                yield step.value

    def _send(self, request: Request) -> Answer | Failure:
        try:
            return _answer(
                self._http.request(
                    request.method,
                    request.url,
                    params=request.params,
                    headers=dict(request.headers),
                    content=request.body,
                    timeout=request.timeout,
                )
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _failure(error, request)


class AsyncClient:
    """`Client`, awaited: same names, same arguments, same errors.

    A call that is cancelled, for example by `asyncio.wait_for`, ends at once and closes its connection. The request may
    or may not have been carried out; sending it again is safe.
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
        self._service = Service.named(url, token, timeout, retry)
        self._http = httpx.AsyncClient(transport=transport, headers=_AGENT, cookies=_no_cookies(), limits=LIMITS)
        self._in_flight = InFlight()

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def groups(self) -> AsyncGroups:
        """Consumer groups: their workers, partitions and positions; see `Groups`."""
        return AsyncGroups(self)

    @property
    def processes(self) -> AsyncProcesses:
        """Process managers, their instances and commands; see `lastbit.processes`."""
        return AsyncProcesses(self)

    @property
    def webhooks(self) -> AsyncWebhooks:
        """Webhooks and their deliveries; see `Webhooks`."""
        return AsyncWebhooks(self)

    async def open(
        self,
        *,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        group_size: int | None = None,
        items: int | None = None,
        sealed: bool = False,
        parent: str | ItemId | None = None,
        expires_in: int | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncBatchHandle:
        """Open a batch; see `Client.open`."""
        flow = _calls.open_batch(
            self._service, key, labels, group_size, items, sealed, parent, expires_in, idempotency_key
        )
        answer, is_replay = await self._run(flow)
        return AsyncBatchHandle(self, answer.id, answer, is_replay)

    def batch(self, batch: int) -> AsyncBatchHandle:
        """A handle for an existing batch. Sends no request; not awaited."""
        return AsyncBatchHandle(self, batch)

    def batches(
        self,
        *,
        state: str | None = None,
        key: str | None = None,
        labels: Mapping[str, str] | None = None,
        page_size: int = 100,
    ) -> AsyncIterator[Batch]:
        """The batches, newest first, fetched page by page. A batch must have all of `labels`."""
        return self._iterate(_calls.batches(self._service, state, key, labels, page_size))

    async def ack(self, ids: Ids) -> AckResult:
        """Resolve items as done; see `Client.ack`."""
        return await self._run(_calls.resolve(self._service, "acks", _masks.pieces(ids), None))

    async def fail(self, ids: Ids, reason: str | None = None) -> AckResult:
        """Resolve items as given up; see `Client.fail`."""
        return await self._run(_calls.resolve(self._service, "failures", _masks.pieces(ids), reason))

    async def events(
        self,
        *,
        after: int | None = None,
        types: str | Iterable[str] = (),
        batch: int | None = None,
        wait: float = 0,
        limit: int | None = None,
    ) -> EventPage:
        """One page of the feed; see `Client.events`."""
        return await self._run(_calls.events(self._service, after, types, batch, wait, limit))

    def follow(
        self, *, after: int | None = None, types: str | Iterable[str] = (), batch: int | None = None
    ) -> AsyncIterator[Event]:
        """The events, as they arrive, without end; see `Client.follow`."""
        return self._iterate(_calls.follow(self._service, after, types, batch))

    async def append(self, events: Iterable[Mapping[str, Any]], *, fence: Fence | None = None) -> tuple[Appended, ...]:
        """Append events of your own; see `Client.append`."""
        return await self._run(_calls.append(self._service, events, fence))

    async def append_event(
        self, *, id: str, type: str, key: str | None = None, data: Any = None, fence: Fence | None = None
    ) -> Appended:
        """Append one event of your own; see `append`."""
        return (await self.append([{"id": id, "type": type, "key": key, "data": data}], fence=fence))[0]

    def tally(self, name: str) -> AsyncTally:
        """A tally; see `Client.tally`. Nothing is awaited."""
        return AsyncTally(self, name)

    def acker(
        self,
        on_completed: Callable[[Completed], Awaitable[object] | object] | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
    ) -> AsyncAcker:
        """A context manager that gathers single acks into few calls; see `AsyncAcker`."""
        return AsyncAcker(self, on_completed, max_pending)

    async def close(self) -> None:
        """Close the connections, and end the requests whose callers were cancelled."""
        try:
            await self._in_flight.close()
        finally:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient {self.url}>"

    async def _run(self, flow: Flow[T], emit: Callable[[Any], object] | None = None) -> T:
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = None
            if isinstance(step, Request):
                outcome = await self._send(step)
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif emit is not None:
                emit(step.value)

    async def _iterate(self, flow: Flow[None]) -> AsyncIterator[Any]:
        outcome: Outcome = None
        while True:
            try:
                step = flow.send(outcome)
            except StopIteration:
                return
            outcome = None
            if isinstance(step, Request):
                outcome = await self._send(step)
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            else:
                assert isinstance(step, Emit)
                yield step.value

    async def _send(self, request: Request) -> Answer | Failure:
        def send(trace: Trace) -> Coroutine[Any, Any, httpx.Response]:
            return self._http.request(
                request.method,
                request.url,
                params=request.params,
                headers=dict(request.headers),
                content=request.body,
                timeout=request.timeout,
                extensions={"trace": trace},
            )

        try:
            return _answer(await self._in_flight.run(send, request.timeout))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _failure(error, request)
