"""A small message broker that delivers at least once, in random order, with duplicates.

It keeps a message until its consumer confirms it. When a connection ends, its unconfirmed messages return to the queue
and go to other consumers. One message in ten is queued twice, and deliveries are drawn at random from the queue.
Publishing blocks while the queue is long, so a producer is never far ahead.

The protocol is JSON lines over TCP; `Publisher` and `Subscription` are its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

from examples.speech import say

DUPLICATED = 0.1
MOST_WAITING = 250
"""Messages that may wait before publishing blocks."""


@dataclass(frozen=True, slots=True)
class Message:
    """`tag` identifies the message; the two copies of a duplicated item have different tags."""

    tag: int
    item: str
    path: str


@dataclass
class Statistics:
    published: int = 0
    """Messages from the producer, without duplicates."""
    duplicated: int = 0
    deliveries: int = 0
    given_back: int = 0
    """Unconfirmed messages of connections that ended."""
    left: int = 0
    """Messages that are not confirmed yet."""
    items_done: int = 0
    """Distinct items with at least one confirmed message."""
    held: dict[str, int] = field(default_factory=dict)


class Broker:
    def __init__(self, dice: random.Random) -> None:
        self._chance = dice
        self._changed = asyncio.Condition()
        self._waiting: list[Message] = []
        self._held: dict[str, dict[int, Message]] = {}
        self._done: set[str] = set()
        self._closed = False
        self._statistics = Statistics()
        self._tags = 0

    @property
    def left(self) -> int:
        return len(self._waiting) + sum(map(len, self._held.values()))

    def statistics(self) -> Statistics:
        now = self._statistics
        now.left, now.items_done = self.left, len(self._done)
        now.held = {name: len(messages) for name, messages in self._held.items()}
        return now

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        name, pushing = "", None
        try:
            while line := await reader.readline():
                request: dict[str, Any] = json.loads(line)
                if "consume" in request:
                    name = request["name"]
                    self._held[name] = {}
                    pushing = asyncio.create_task(self._push(name, request["consume"], writer))
                elif "done" in request:
                    await self._finish(name, request["done"])
                else:
                    writer.write(json.dumps(await self._answer(request)).encode() + b"\n")
                    await writer.drain()
        except ConnectionError:
            pass  # the other side was killed
        finally:
            if pushing is not None:
                pushing.cancel()
                await self._give_back(name)
            writer.close()

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "publish" in request:
            await self._publish(request["publish"])
        elif "until_left" in request:
            async with self._changed:
                await self._changed.wait_for(lambda: self.left <= request["until_left"])
        elif "close" in request:
            async with self._changed:
                self._closed = True
                self._changed.notify_all()
        return asdict(self.statistics())

    async def _publish(self, messages: list[list[str]]) -> None:
        for item, path in messages:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._waiting) < MOST_WAITING)
                copies = 2 if self._chance.random() < DUPLICATED else 1
                for _ in range(copies):
                    self._tags += 1
                    self._waiting.append(Message(self._tags, item, path))
                self._statistics.published += 1
                self._statistics.duplicated += copies - 1
                self._changed.notify_all()

    async def _push(self, name: str, limit: int, writer: asyncio.StreamWriter) -> None:
        """Keep a consumer supplied with at most `limit` unconfirmed messages."""
        messages = self._held[name]
        with contextlib.suppress(ConnectionError):  # `serve` notices the end too, and returns the messages
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._over() or bool(self._waiting and len(messages) < limit))
                    if self._over():
                        break
                    place = self._chance.randrange(len(self._waiting))
                    self._waiting[place], self._waiting[-1] = self._waiting[-1], self._waiting[place]
                    message = self._waiting.pop()
                    messages[message.tag] = message
                    self._statistics.deliveries += 1
                    self._changed.notify_all()
                writer.write(json.dumps(asdict(message)).encode() + b"\n")
                await writer.drain()
            writer.write_eof()

    def _over(self) -> bool:
        return self._closed and not self.left

    async def _finish(self, name: str, tag: int) -> None:
        async with self._changed:
            self._done.add(self._held[name].pop(tag).item)
            self._changed.notify_all()

    async def _give_back(self, name: str) -> None:
        async with self._changed:
            messages = self._held.pop(name).values()
            self._waiting += messages
            self._statistics.given_back += len(messages)
            self._changed.notify_all()


class _Connection:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._sending = threading.Lock()

    def _send(self, request: dict[str, Any]) -> None:
        with self._sending:
            self._socket.sendall(json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Publisher(_Connection):
    """A producer's connection, and an operator's."""

    def _ask(self, request: dict[str, Any]) -> Statistics:
        self._send(request)
        return Statistics(**json.loads(self._lines.readline()))

    def publish(self, messages: list[tuple[str, str]]) -> None:
        """Publish (item id, path) pairs; returns when the broker has all of them."""
        self._ask({"publish": messages})

    def until_left(self, count: int) -> None:
        """Returns when at most `count` messages are unconfirmed."""
        self._ask({"until_left": count})

    def statistics(self) -> Statistics:
        return self._ask({"statistics": True})

    def drain(self) -> None:
        """From now on, subscriptions end when every message is confirmed."""
        self._ask({"close": True})


class Subscription(_Connection):
    """A consumer's connection: iterate over it, and call `done` for each message."""

    def __init__(self, address: str, name: str, limit: int) -> None:
        super().__init__(address)
        self._send({"consume": limit, "name": name})

    def __iter__(self) -> Iterator[Message]:
        for line in self._lines:
            yield Message(**json.loads(line))

    def done(self, message: Message) -> None:
        """Confirm a message, so that the broker deletes it. Callable from any thread."""
        self._send({"done": message.tag})


async def main() -> None:
    broker = Broker(random.Random())  # noqa: S311
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    say(address=f"{host}:{port}")
    # Standard input closes when the parent process ends, for any reason.
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
