"""A fast receiver of webhooks in a separate process: it verifies each signature with the official library, answers 204,
and counts the deliveries of each event. Senders may keep their connections or open one for each request.

`Receiver` is its client in the benchmark's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from standardwebhooks import Webhook


@dataclass(frozen=True)
class Received:
    """The deliveries of all expected events: the seconds between the first and the last new event, and the number of
    requests in between that repeated an event."""

    events: int
    seconds: float
    repeats: int

    @property
    def rate(self) -> float:
        """Events per second; the clock starts with the first one."""
        return (self.events - 1) / self.seconds


class _Handler(asyncio.Protocol):
    def __init__(self, log: _Log) -> None:
        self._log = log
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        fields = (line.partition(b":") for line in self._data[:end].split(b"\r\n")[1:])
        headers = {name.decode().lower(): value.strip().decode() for name, _, value in fields}
        whole = end + 4 + int(headers["content-length"])
        if len(self._data) < whole:
            return
        body, self._data = self._data[end + 4 : whole], self._data[whole:]
        self._log.webhook.verify(body, headers)  # if it raises, the connection is closed without an answer
        self._log.note(headers["webhook-id"])
        self._transport.write(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")
        if headers.get("connection") == "close":
            self._transport.close()


class _Log:
    """Sends the figures once all expected events have come."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._missing: set[str] = set()
        self._events = self._repeats = 0
        self._first = 0.0

    def instruct(self) -> None:
        """Read the secret of the next requests, and the events to wait for."""
        secret, self._missing = self._pipe.recv()
        self.webhook = Webhook(secret)
        self._events = self._repeats = 0

    def note(self, event: str) -> None:
        if event not in self._missing:
            self._repeats += 1
            return
        now = time.perf_counter()
        if not self._events:
            self._first = now
        self._events += 1
        self._missing.remove(event)
        if not self._missing:
            self._pipe.send(Received(self._events, now - self._first, self._repeats))


async def _serve(pipe: Connection) -> None:
    log = _Log(pipe)
    loop = asyncio.get_running_loop()
    loop.add_reader(pipe.fileno(), log.instruct)
    server = await loop.create_server(lambda: _Handler(log), "127.0.0.1", 0, backlog=1024)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _run(pipe: Connection) -> None:
    asyncio.run(_serve(pipe))


class Receiver:
    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.port: int = pipe.recv()

    def expect(self, secret: str, events: Iterable[str]) -> None:
        """Start again: these ids will come, signed with this secret. Other ids count as repeats."""
        self._pipe.send((secret, set(events)))

    def wait(self, seconds: float = 120) -> Received:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"the events didn't come within {seconds} s")
        received: Received = self._pipe.recv()
        return received


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    context = multiprocessing.get_context("spawn")
    local_end, remote_end = context.Pipe()
    process = context.Process(target=_run, args=(remote_end,), daemon=True)
    process.start()
    try:
        yield Receiver(local_end)
    finally:
        process.terminate()
        process.join()
