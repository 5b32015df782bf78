"""Shared by all benchmarks: scales, servers, single calls, medians, tables. The load generator is in `load`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from core.storage import schema
from core.storage.database import Database
from tests.support.postgresql import PostgreSQL, running_postgresql
from tests.support.servers import ROOT, MariaDB, ServiceProcess, free_port, running_service


@dataclass(frozen=True)
class Scale:
    """The size of a run: rounds, requests in a round, connections, items of a large batch."""

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
def mariadb(options: Sequence[str] = ()) -> Iterator[MariaDB]:
    """A private, durable server: innodb_flush_log_at_trx_commit is 1 by default. `options` go on its command line."""
    server = MariaDB(in_memory=False, options=options)
    try:
        server.install()
        server.start()
        yield server
    finally:
        server.remove()


def postgresql() -> contextlib.AbstractContextManager[PostgreSQL]:
    """A private, durable server: fsync and synchronous_commit are on by default."""
    return running_postgresql(in_memory=False)


@contextlib.contextmanager
def lastbit_on(server: MariaDB | PostgreSQL, *, workers: int = 1, **environment: str) -> Iterator[ServiceProcess]:
    url = server.new_database()
    with Database(url) as database:
        schema.migrate(database)
    with running_service(url, workers=workers, **environment) as service:
        yield service


@contextlib.contextmanager
def uvicorn(app: str, **environment: str) -> Iterator[int]:
    """Run the app that `module:factory` returns, in one uvicorn process; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--factory", app, "--port", str(port), "--no-access-log"]
    environment = {**os.environ, **environment}
    with subprocess.Popen([*command, "--log-level", "warning"], cwd=ROOT, env=environment) as process:
        try:
            asyncio.run(_until_it_listens(port))
            yield port
        finally:
            process.terminate()


def empty_endpoint() -> contextlib.AbstractContextManager[int]:
    """Run an empty FastAPI endpoint of the same form; yield its port."""
    return uvicorn("bench.empty:create")


async def _until_it_listens(port: int) -> None:
    for _ in range(600):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)  # a listener sends no signal
        else:
            writer.close()
            return
    raise TimeoutError(f"nothing listens on port {port}")


class Connection:
    """A keep-alive connection for one request at a time."""

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


def call(port: int, method: str, path: str, body: Any = None) -> Any:
    """Make a single call on its own connection, outside of what is measured."""

    async def one() -> Any:
        async with connected(port) as connection:
            return await connection.call(method, path, body)

    return asyncio.run(one())


def memory(process: int, line: str = "VmRSS") -> float:
    """A process's resident memory in MB, now or (`VmHWM`) at its peak, as the kernel counts it."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{line}:")[2].split()[0]) / 1024


def processor_time(process: int) -> float:
    """Seconds of processor time that a process and its children have used, living ones and those that have ended."""
    ticks, processes = 0, [process]
    for number in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            folder = Path(f"/proc/{number}")
            processes += map(int, (folder / f"task/{number}/children").read_text().split())
            ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def compared(base: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """One row for each name: both medians in ms, and the median of the rounds' own ratios, as the machine's speed
    drifts. Each element is a round: seconds by name."""
    lines = []
    for name in base[0]:
        ratio = statistics.median(
            other_round[name] / base_round[name] for base_round, other_round in zip(base, other, strict=True)
        )
        first, second = (statistics.median(times[name] for times in rounds) for rounds in (base, other))
        lines.append([name, f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{ratio:.2f}"])
    return lines


def allow_files(count: int) -> int:
    """Raise the file limit of this process and its children, since a connection is a file at both ends; return the
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        soft = count if hard < 0 else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def show(title: str, columns: list[str], rows: Iterable[Iterable[str]], note: str | None = None) -> None:
    """Print a table; `note` explains its ratios below."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def alone(run: Callable[..., None], parts: Iterable[str] = ()) -> None:
    """Run `python -m bench.NAME [--quick] [--rounds N]`; with `parts`, some of these may follow, and `run` gets
    them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a small run, to check that everything works")
    parser.add_argument("--rounds", type=int, help="instead of five, or two with --quick")
    if parts:
        parser.add_argument("part", nargs="*", choices=[[], *parts], default=[], help=", ".join(parts))
    options = parser.parse_args()
    scale = Scale.quick() if options.quick else Scale.full()
    if options.rounds is not None:
        scale = dataclasses.replace(scale, rounds=options.rounds)
    run(scale, *([options.part or list(parts)] if parts else []))
