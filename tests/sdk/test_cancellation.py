"""Calls of an `AsyncClient` that are cancelled at any moment: their connections return to the pool."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest

from lastbit import AsyncClient, LastbitError, Retry, ServiceUnreachable
from lastbit._in_flight import CONNECTIONS
from tests.mutants import mutant

ONCE = Retry(attempts=1)
ACKED = json.dumps({"applied": 1, "repeated": 0, "completed": [], "rejected": []}).encode()
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(ACKED), ACKED)
LARGE = "x" * 3_000_000
"""Larger than the buffers of a connection."""


class SlowService:
    """A real HTTP server in this event loop. While it is `slow`, it stops within each request, at the next of these
    places each time, until `go_on` is called; then it waits for the client to disconnect. Afterwards it answers once
    `together` requests have come."""

    stops = ("the body", "the answer", "the answer's head", "the answer's body", "nothing")

    def __init__(self) -> None:
        self.slow = True
        self.together = 1
        self.all_closed = asyncio.Event()
        self._requests = 0
        self._stop = itertools.cycle(self.stops)
        self._going_on = asyncio.Event()
        self._enough = asyncio.Event()
        self.handlers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SlowService:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for handler in self.handlers:
            handler.cancel()

    def go_on(self) -> None:
        self._going_on.set()
        self._going_on = asyncio.Event()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.all_closed.clear()
        handler = asyncio.create_task(self._serve(reader, writer))
        self.handlers.add(handler)
        handler.add_done_callback(self._ended)

    def _ended(self, handler: asyncio.Task[None]) -> None:
        self.handlers.discard(handler)
        if not self.handlers:
            self.all_closed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        stop = next(self._stop) if self.slow else "nothing"
        if stop != "the body" and b"content-length: " in head:
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        if stop != "nothing":
            writer.write({"the answer's head": ANSWER[:20], "the answer's body": ANSWER[:-5]}.get(stop, b""))
            await self._going_on.wait()
            return False
        self._requests += 1
        if self._requests >= self.together or self.slow:
            self._enough.set()
        await self._enough.wait()
        writer.write(ANSWER)
        return True

    def gather(self, count: int) -> None:
        self.slow, self.together, self._requests = False, count, 0
        self._enough.clear()


async def ack(client: AsyncClient, number: int) -> None:
    # Every 25th call has a body too large to be sent at once.
    await (client.ack("1:0:0") if number % 25 else client.fail("1:0:0", LARGE))


async def follow(client: AsyncClient, number: int) -> None:
    async for _ in client.follow():
        pass


async def iterations(count: int) -> None:
    """Let the event loop run `count` iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_after(count: int, call: Awaitable[None]) -> None:
    task = asyncio.ensure_future(call)
    await iterations(count)
    task.cancel()
    with suppress(asyncio.CancelledError, LastbitError):
        await task


@mutant("a-request-is-cancelled-wherever-it-is", "lastbit._in_flight:_Exit.leave", "self._safe", "True")
@mutant("a-request-outlives-its-caller", "lastbit._in_flight:_Exit.leave", "self._safe", "False")
@pytest.mark.parametrize(
    ("call", "times", "transport"),
    [
        (ack, 2_000, None),
        pytest.param(ack, 10_000, None, marks=pytest.mark.slow),
        pytest.param(
            *(ack, 2_000, lambda: httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=CONNECTIONS))),
            marks=pytest.mark.slow,
        ),
        pytest.param(follow, 2_000, None, marks=pytest.mark.slow),
    ],
    ids=["ack", "ten thousand acks", "through a custom transport", "follow"],
)
def test_calls_cancelled_at_any_moment_cost_no_connection(
    call: Callable[[AsyncClient, int], Awaitable[None]], times: int, transport: Callable[[], Any] | None
) -> None:
    """Before connecting and during it, while sending, waiting and reading: afterwards all connections can be used at
    once, and neither a connection nor a task is left when the client is closed."""

    async def run() -> None:
        async with SlowService() as service:
            client = AsyncClient(service.url, timeout=5, retry=ONCE, transport=transport and transport())
            for first in range(0, times, 50):
                # Each moment is combined with each of the service's stops.
                calls = (
                    cancelled_after((number + number // 50) % 50, call(client, number))
                    for number in range(first, first + 50)
                )
                await asyncio.gather(*calls)
                service.go_on()
            service.gather(CONNECTIONS)
            results = await asyncio.gather(*(client.ack("1:0:0") for _ in range(CONNECTIONS)))
            assert [result.applied for result in results] == [1] * CONNECTIONS
            await client.close()
            assert asyncio.all_tasks() - service.handlers == {asyncio.current_task()}
            async with asyncio.timeout(30):
                await service.all_closed.wait()

    asyncio.run(run())


@mutant(
    "a-handshake-is-cancelled-and-its-connection-forgotten",
    "lastbit._in_flight:InFlight.close",
    "way_out.stream is not None",
    "False",
)
def test_calls_cancelled_while_connecting_hold_a_bounded_number_of_connections() -> None:
    """A handshake isn't cancelled: it keeps its place until it ends, and a call without a place fails. Closing the
    client ends all handshakes."""

    async def run() -> None:
        connections: list[asyncio.StreamWriter] = []
        all_connected = asyncio.Event()
        disconnects: asyncio.Queue[None] = asyncio.Queue()

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            if len(connections) >= CONNECTIONS:
                all_connected.set()
            with suppress(ConnectionError):
                await reader.read()
            writer.transport.abort()
            disconnects.put_nowait(None)

        async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            client = AsyncClient(f"https://127.0.0.1:{port}", retry=ONCE)
            calls = [asyncio.create_task(client.ack("1:0:0")) for _ in range(CONNECTIONS + 50)]
            await all_connected.wait()
            for call in calls:
                call.cancel()
            assert len(await asyncio.gather(*calls, return_exceptions=True)) == len(calls)
            assert all(call.cancelled() for call in calls)
            requests = [task for task in asyncio.all_tasks() if task.get_name() == "lastbit-request"]
            assert len(requests) == CONNECTIONS

            client.driver.service = replace(client.driver.service, timeout=0.05)
            with pytest.raises(ServiceUnreachable, match=r"no connection within 0\.05 s"):
                await client.ack("1:0:0")
            # One handshake ends on its own, and its place is free.
            connections[0].transport.abort()
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(ServiceUnreachable):
                await client.ack("1:0:0")
            assert len(connections) == CONNECTIONS + 1

            await client.close()
            assert all(task.done() for task in requests)
            async with asyncio.timeout(30):
                for _ in connections:
                    await disconnects.get()

    asyncio.run(run())
