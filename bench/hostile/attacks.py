"""A tenant that tries to take the service from the others within the rate of its token, and a stranger without a token.
Each attack is a coroutine that goes on until it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bench import measure

PREFIX: Final = "hostile-"
LARGE: Final = 8 * 2**20 - 1024
"""Bytes of a body just below the service's limit."""
EVENTS: Final = 20
"""Events in an append, each with almost 64 KiB of data."""
_REFUSED: Final = {b"", b"401", b"413", b"429", b"503"}


def text(length: int) -> str:
    """Characters of four bytes each in UTF-8, at random, so that no database compresses them."""
    return "".join(map(chr, random.choices(range(0x20000, 0x2A000), k=length)))


def labels(count: int) -> dict[str, str]:
    """This many labels of the largest size."""
    return {text(255): text(1024) for _ in range(count)}


def encoded(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


@dataclass(slots=True)
class Attacker:
    """Sends requests at a rate per second, each over a connection of its own."""

    port: int
    token: str | None
    rate: float
    batch: int
    labels: dict[str, str]
    """The largest that the service accepts."""
    sent: int = 0
    refused: int = 0
    """Requests with the status 401, 413, 429 or 503, or without one."""
    next_turn: float = 0.0
    names: itertools.count[int] = field(default_factory=itertools.count)

    async def turn(self) -> None:
        """Wait until the rate allows a request."""
        now = asyncio.get_running_loop().time()
        self.next_turn = max(self.next_turn + 1 / self.rate, now)
        await asyncio.sleep(self.next_turn - now)

    async def request(self, method: str, path: str, body: bytes = b"", head: str = "") -> socket.socket:
        """Send a request, and read no more than the status. Return its connection."""
        loop = asyncio.get_running_loop()
        credentials = "" if self.token is None else f"Authorization: Bearer {self.token}\r\n"
        lines = f"Host: lastbit\r\n{credentials}{head}Content-Type: application/json\r\nContent-Length: {len(body)}"
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sent += 1
        status = b""
        try:
            with contextlib.suppress(OSError):
                await loop.sock_connect(connection, ("127.0.0.1", self.port))
                await loop.sock_sendall(connection, f"{method} {path} HTTP/1.1\r\n{lines}\r\n\r\n".encode() + body)
                status = (await loop.sock_recv(connection, 12))[9:]
        except asyncio.CancelledError:
            connection.close()
            raise
        self.refused += status in _REFUSED
        return connection

    async def call(self, method: str, path: str, body: bytes = b"", head: str = "") -> None:
        (await self.request(method, path, body, head)).close()

    async def hold(self, path: str) -> None:
        """Ask for this, and never read it."""
        connection = await self.request("GET", path)
        try:
            await asyncio.Event().wait()
        finally:
            connection.close()


def large_events() -> bytes:
    """The body of an append."""
    events = [
        {"id": f"{PREFIX}{random.getrandbits(64)}", "type": "noise", "key": PREFIX, "data": text(15_000)}
        for _ in range(EVENTS)
    ]
    return encoded({"events": events})


Attack = Callable[[Attacker], Awaitable[None]]


def _bodies() -> list[bytes]:
    """Objects that no route takes: many visitor fields, and one visitor field with many values."""
    fields = LARGE // len('"f1000000":0,')
    members = ",".join(f'"f{number}":0' for number in range(1_000_000, 1_000_000 + fields))
    values = ",".join(["[{}]"] * (LARGE // len("[{}],")))
    return [f"{{{members}}}".encode(), f'{{"events":[{values}]}}'.encode()]


async def bodies(attacker: Attacker) -> None:
    """Bodies of 8 MiB that are no requests, for each route in turn."""
    of_batch = f"/v1/batches/{attacker.batch}"
    routes = [
        ("POST", "/v1/batches"),
        ("POST", f"{of_batch}/items"),
        ("POST", f"{of_batch}/redrive"),
        ("PATCH", of_batch),
        ("POST", "/v1/events"),
    ]
    async with asyncio.TaskGroup() as group:
        for (method, path), body in itertools.cycle(itertools.product(routes, _bodies())):
            await attacker.turn()
            group.create_task(attacker.call(method, path, body))


def names(connections: int) -> Attack:
    """Opens whose callback is at a name that resolves slowly."""

    async def repeat(attacker: Attacker) -> None:
        while True:
            await attacker.turn()
            url = f"http://n{next(attacker.names)}.slow.test/"
            await attacker.call("POST", "/v1/batches", encoded({"key": PREFIX, "callback": {"url": url}}))

    async def attack(attacker: Attacker) -> None:
        await asyncio.gather(*(repeat(attacker) for _ in range(connections)))

    return attack


def unread(path: str, connections: int) -> Attack:
    """Responses that are never read, while events are appended."""

    async def attack(attacker: Attacker) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                await attacker.turn()
                group.create_task(attacker.hold(path))
            while True:
                await attacker.turn()
                await attacker.call("POST", "/v1/events", large_events())

    return attack


async def connections(attacker: Attacker) -> None:
    """Streams and long polls that stay."""

    paths = (f"/v1/batches/{attacker.batch}?wait=60", "/v1/events/stream")
    async with asyncio.TaskGroup() as group:
        for path in itertools.cycle(paths):
            await attacker.turn()
            group.create_task(attacker.hold(path))


async def open_with_labels(attacker: Attacker) -> None:
    await attacker.call("POST", "/v1/batches", encoded({"key": PREFIX, "labels": attacker.labels}))


async def patch_one_label(attacker: Attacker) -> None:
    """The attacker's batch has the largest labels."""
    patch = {next(iter(attacker.labels)): str(next(attacker.names))}
    await attacker.call("PATCH", f"/v1/batches/{attacker.batch}", encoded({"labels": patch}))


async def storage(attacker: Attacker) -> None:
    """Opens with the largest labels, and patches of one label of such a batch."""
    for write in itertools.cycle((open_with_labels, patch_one_label)):
        await attacker.turn()
        await write(attacker)


_BODY: Final = b"[" + b"0," * (LARGE // 2) + b"0]"
STRANGERS: Final[dict[str, Attack]] = {
    "a wrong token": lambda a: a.call("GET", "/v1/batches", head="Authorization: Bearer lastbit_wrong\r\n"),
    "a head of 60 KB": lambda a: a.call("GET", "/v1/batches", head=f"X-Large: {'x' * 60_000}\r\n"),
    "a path of 60 KB": lambda a: a.call("GET", f"/v1/{'x' * 60_000}"),
    "a body of 8 MiB": lambda a: a.call("POST", "/v1/batches", _BODY),
    "an ack of 8 MiB": lambda a: a.call("POST", "/v1/acks", _BODY),
    "a connection": lambda a: a.call("GET", "/healthz"),
}
"""Requests of somebody without a token."""


async def stranger(attacker: Attacker) -> None:
    """Requests without a token, on more and more connections."""
    visitor = Attacker(attacker.port, None, 10 * attacker.rate, attacker.batch, {})
    try:
        async with asyncio.TaskGroup() as group:
            for request in itertools.cycle((*STRANGERS.values(), lambda stranger: stranger.hold("/healthz"))):
                await visitor.turn()
                group.create_task(request(visitor))
    finally:
        attacker.sent += visitor.sent
        attacker.refused += visitor.refused


def everything(attacks: list[Attack]) -> Attack:
    """All attacks at once, which share the token's rate."""

    async def together(attacker: Attacker) -> None:
        await asyncio.gather(*(attack(attacker) for attack in attacks))

    return together


ALONE: Final[dict[str, Attack]] = {
    "bodies": bodies,
    "names 60": names(60),
    "names 200": names(200),
    "pages": everything([unread("/v1/batches?limit=1000", 75), unread("/v1/events?limit=1000", 75)]),
    "streams": unread("/v1/events/stream?after=0", 200),
    "connections": connections,
    "storage": storage,
    "stranger": stranger,
}
ATTACKS: Final = {**ALONE, "all": everything(list(ALONE.values()))}


def run(name: str, attacker: Attacker, seconds: float) -> Attacker:
    """Attack for this time, in a separate process. Returns the attacker with its counts."""
    measure.allow_files(10_000)

    async def attack() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ATTACKS[name](attacker), seconds)

    asyncio.run(attack())
    return attacker


def repeat(request: Attack, attacker: Attacker, times: int) -> None:
    """Make the request, one after the other."""

    async def repeated() -> None:
        for _ in range(times):
            await request(attacker)

    asyncio.run(repeated())
