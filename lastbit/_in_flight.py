"""Runs each request of an `AsyncClient` in a separate task, which continues when its caller is cancelled.

httpcore loses a connection when a request is cancelled at the wrong point, for instance after connecting and before
sending: the pool keeps counting the connection and never closes or reuses it. After enough time-outs, all connections
are lost, and every call fails. Therefore a cancelled call returns at once, and its request is *abandoned*: it ends at
the next point where httpcore closes the connection properly. httpcore's `trace` extension reports these points. With a
transport that reports none, or uses other names for them, the request runs to its end.

The resources of abandoned requests are limited. At most `CONNECTIONS` requests run at a time, including abandoned ones.
The others wait here, where a cancellation is safe, and never in httpcore's own queue. Only a request that is still
connecting may continue for a noticeable time after the cancellation, and no longer than its time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import httpx

CONNECTIONS: Final = 100
"""Maximum concurrent requests, each on its own connection."""
IDLE_CONNECTIONS: Final = 20
"""Maximum idle connections that stay open."""

LIMITS: Final = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=IDLE_CONNECTIONS)

Trace = Callable[[str, Mapping[str, Any]], Awaitable[None]]

_SAFE: Final = frozenset(
    f"http11.{step}.started"
    for step in ("send_request_headers", "send_request_body", "receive_response_headers", "receive_response_body")
)
"""The events after which httpcore closes the connection of a request that is cancelled, until the next event."""


class _Exit:
    """Cancels one request safely."""

    def __init__(self) -> None:
        self.stream: Any = None
        """httpcore's stream of the connection, if the request opened one."""
        self._wanted = False
        self._safe = False

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Cancel the request now if that is safe, otherwise at the next safe point. Call it only once: a second
        cancellation would interrupt the closing of the connection."""
        self._wanted = True
        if self._safe:
            task.cancel()

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self.stream = info["return_value"]
        self._safe = event in _SAFE
        if self._safe and self._wanted:
            raise asyncio.CancelledError


class InFlight:
    """The requests in progress in one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._abandoned: dict[asyncio.Task[httpx.Response], _Exit] = {}

    async def run(self, send: Callable[[Trace], Coroutine[Any, Any, httpx.Response]], timeout: float) -> httpx.Response:
        """The response of `send(trace)`. `timeout`: seconds to wait for a place. Raises `httpx.HTTPError`."""
        try:
            async with asyncio.timeout(timeout):
                await self._places.acquire()
        except TimeoutError:
            raise httpx.PoolTimeout("no connection was free") from None
        way_out = _Exit()
        task = asyncio.create_task(send(way_out.trace), name="lastbit-request")
        task.add_done_callback(self._ended)
        try:
            # Unlike awaiting the task, this does not cancel it with the caller.
            await asyncio.wait([task])
        except asyncio.CancelledError:
            if not task.done():
                self._abandoned[task] = way_out
                way_out.leave(task)
            raise
        return task.result()

    async def close(self) -> None:
        """End the abandoned requests at once. The pool must be closed next: it may have lost their connections."""
        requests = dict(self._abandoned)
        for task in requests:
            task.cancel()
        if requests:
            await asyncio.wait(requests)
        for way_out in requests.values():
            if way_out.stream is not None:
                # httpcore leaves the stream open if the TLS handshake was cancelled.
                await way_out.stream.aclose()

    def _ended(self, task: asyncio.Task[httpx.Response]) -> None:
        self._places.release()
        self._abandoned.pop(task, None)
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved
