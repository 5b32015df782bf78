"""What `tests.integrations.test_outcomes` needs of an adapter: a module with a class `Driver` for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import httpx
import pytest

from lastbit import AsyncClient, BatchHandle, Client, Completed, Retry
from lastbit.client import HasClients
from lastbit.embedded import Lastbit
from lastbit.failures import Redrive
from lastbit.integrations import Skipped
from lastbit.integrations._untracked import WhenUntracked
from tests.integrations.workers import wait_until

Handle = Callable[[str], None]
OnCompleted = Callable[[Completed], object]
Until = Callable[[], object]


class Driver(Protocol):
    """A queue of the adapter's library, and workers in this process."""

    pauses: ClassVar[bool]
    """Whether a worker in this process can't be ended, and pauses instead."""
    holds: ClassVar[bool]
    """Whether a worker holds a message while the service is away, so that its handler doesn't run again."""
    reports: ClassVar[bool]
    """Whether the adapter has `on_completed`."""
    handlers: ClassVar[int]
    """How many handlers run at a time, or between two acks."""
    follows: ClassVar[bool]
    """Whether a worker reads the feed."""
    questions: ClassVar[int]
    """Maximum number of questions whether a batch has ended that thirty of its messages lead to."""
    loses_ids: ClassVar[bool]
    """Whether the item's id is beside the message's body, and gets lost if only that is moved."""
    skipped: ClassVar[type[Skipped]]
    """The exception of this adapter with which a handler skips its item."""
    skip_ended: bool
    untracked: WhenUntracked
    """The options of the worker; `untracked` where ids can get lost."""

    def __init__(self, request: pytest.FixtureRequest) -> None: ...

    def send(self, link: Link, bodies: Sequence[str], *, seal: bool = True) -> BatchHandle:
        """Fan out a message for each body."""

    def resend(self, link: Link, redrive: Redrive, bodies: Sequence[str]) -> int:
        """Send the messages of the redrive's items again; `bodies` are those of `send`. Returns how many."""

    def work(self, link: Link, handle: Handle, until: Until, on_completed: OnCompleted | None = None) -> object:
        """Run a worker that calls `handle` with bodies, until `until()` is true or the worker has ended itself; then it
        is stopped in order. Returns the error with which it has ended itself, else None. A message whose handler has
        raised `Failed` has failed for good; after a `ConnectionError` it is tried once more at once."""

    def left(self) -> int:
        """The number of messages that the broker would deliver again."""

    def send_body(self, body: str, item: str | None) -> None:
        """Send a message by hand, which has this item's id. Only where ids can get lost; and so is `refused`."""

    def refused(self) -> int:
        """The number of messages that a worker has refused, wherever they are."""


class Link:
    """The way to the service, of a producer or a worker. A test cuts it."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.is_cut = False
        self.url, self.token = url, token
        self._options: dict[str, Any] = {"url": url, "token": token, "retry": Retry(attempts=1)}

    @cached_property
    def client(self) -> Client:
        return Client(**self._options, transport=_Cuttable(self))

    @property
    def given(self) -> Client | HasClients:
        """The client, or the `Lastbit`, that an adapter gets."""
        return self.client

    def given_async(self, client: AsyncClient) -> AsyncClient | HasClients:
        """The same for an adapter that awaits."""
        return client

    @property
    def for_celery(self) -> dict[str, Any]:
        """The arguments of its adapter."""
        return {"url": self.url, "token": self.token}

    def async_client(self) -> AsyncClient:
        return AsyncClient(**self._options, transport=_AsyncCuttable(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def check(self) -> None:
        if self.is_cut:
            raise httpx.ConnectError("the link is cut")


class EmbeddedLink(Link):
    """The way to a database without a service. It can't be cut."""

    def __init__(self, lastbit: Lastbit) -> None:
        super().__init__(lastbit.url)
        self._lastbit = lastbit

    @cached_property
    def client(self) -> Client:
        return self._lastbit.client()

    def async_client(self) -> AsyncClient:
        return self._lastbit.async_client()

    @property
    def given(self) -> HasClients:
        return self._lastbit

    def given_async(self, client: AsyncClient) -> HasClients:
        return self._lastbit

    @property
    def for_celery(self) -> dict[str, Any]:
        return {"database": self._lastbit}


def consumed(consume: Callable[..., None], link: Link, until: Until, **options: Any) -> BaseException | None:
    """Run the `consume` of an adapter in a thread until `until()` is true, or it ends; returns its error."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(consume, stop=stop, lastbit=link.given, **options)
        try:
            wait_until(lambda: future.done() or until(), "the messages are handled")
        finally:
            stop.set()
        return future.exception(60)


def repeated(work: Callable[[], object], until: Until, seconds: float = 60) -> None:
    """Call `work` until `until()` is true."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: the messages are handled"
        work()


class _Cuttable(httpx.HTTPTransport):
    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._link.check()
        return super().handle_request(request)


class _AsyncCuttable(httpx.AsyncHTTPTransport):
    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._link.check()
        return await super().handle_async_request(request)
