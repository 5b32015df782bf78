"""What the questions share: how large they are asked, a load over plain sockets, servers, medians, tables.

The load generator speaks HTTP/1.1 over asyncio streams: a client library would cost more than what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from core import schema
from core.db import Database
from tests.servers import ROOT, MariaDB, ServiceProcess, free_port, running_service


@dataclass(frozen=True)
class Scale:
    """How large a question is asked: rounds, requests of a round, connections, items of a large batch."""

    rounds: int
    requests: int
    connections: int
    items: int

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=5, requests=20_000, connections=64, items=2_000_000)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=2, requests=400, connections=16, items=20_000)


@contextlib.contextmanager
def mariadb() -> Iterator[MariaDB]:
    """A server of our own, durable: innodb_flush_log_at_trx_commit is 1 by default."""
    server = MariaDB(in_memory=False)
    try:
        server.install()
        server.start()
        yield server
    finally:
        server.remove()


@contextlib.contextmanager
def lastbit_on(server: MariaDB, *, workers: int = 1) -> Iterator[ServiceProcess]:
    url = server.new_database()
    with Database(url) as database:
        schema.migrate(database)
    with running_service(url, workers=workers) as service:
        yield service


@contextlib.contextmanager
def empty_endpoint() -> Iterator[int]:
    """The peer: an empty FastAPI endpoint of the same shape; its port."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "bench.empty:app", "--port", str(port), "--no-access-log"]
    with subprocess.Popen([*command, "--log-level", "warning"], cwd=ROOT) as process:
        try:
            asyncio.run(_until_it_listens(port))
            yield port
        finally:
            process.terminate()


async def _until_it_listens(port: int) -> None:
    for _ in range(600):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise TimeoutError(f"nothing listens on port {port}")


class Connection:
    """One keep-alive connection; a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self._writer.write(head.encode() + content)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        lower = answer.lower()
        start = lower.index(b"content-length:") + len(b"content-length:")
        length = int(lower[start : lower.index(b"\r\n", start)])
        payload = await self._reader.readexactly(length)
        status = int(answer[9:12])
        if status >= 300:
            raise RuntimeError(f"{method} {path} was answered {status}: {payload.decode()}")
        return json.loads(payload) if payload else None


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@dataclass(frozen=True)
class Load:
    """What a load came to: requests a second, and latencies in seconds."""

    rate: float
    p50: float
    p99: float


async def load(port: int, path: str, bodies: Iterable[Any], connections: int) -> tuple[Load, list[Any]]:
    """POST each body once, over so many connections at a time."""
    waiting = iter(bodies)
    took: list[float] = []
    answers: list[Any] = []

    async def work() -> None:
        async with connected(port) as connection:
            for body in waiting:
                begun = time.perf_counter()
                answers.append(await connection.call("POST", path, body))
                took.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(connections)))
    seconds = time.perf_counter() - begun
    took.sort()
    return Load(len(took) / seconds, took[len(took) // 2], took[len(took) * 99 // 100]), answers


async def seconds_of(repeat: int, work: Callable[[], Awaitable[Any]]) -> float:
    """The median of single runs."""
    took = []
    for _ in range(repeat):
        begun = time.perf_counter()
        await work()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def show(title: str, columns: list[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
