"""The load generator: requests over many keep-alive connections, as cheap to send as Python allows.

The generator shares two cores with the service under test, so its cost slows the service. It therefore uses plain
sockets and epoll, and requests that are encoded before the clock starts; a client library costs more than the service
does. Each connection has one request under way: a closed loop, like consumers that wait for their answer.
"""

from __future__ import annotations

import gc
import itertools
import json
import select
import socket
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """The result of a load: requests a second, and latencies in seconds."""

    rate: float
    p50: float
    p99: float


def encoded(path: str, body: Any, method: str = "POST", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


Flow = Generator[bytes, bytes, None]
"""Yields requests, and is sent the body of each answer before it yields the next request."""


def drive(port: int, requests: Sequence[bytes], connections: int) -> tuple[Load, list[bytes]]:
    """Send each request once; return the load, and the answers' bodies in the order of arrival. Raises `RuntimeError`
    for an answer that is not 2xx."""
    answers: list[bytes] = []

    def flow(request: bytes) -> Flow:
        answers.append((yield request))

    seconds, latencies = converse(port, map(flow, requests), connections)
    latencies.sort()
    return Load(
        len(latencies) / seconds, latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
    ), answers


def converse(port: int, flows: Iterable[Flow], connections: int) -> tuple[float, list[float]]:
    """Run each flow to its end; a connection runs one after the other. Returns the seconds that all of them took, and
    the latency of each request. Raises `RuntimeError` for an answer that is not 2xx."""
    waiting = iter(flows)
    latencies: list[float] = []
    poll = select.epoll()
    open_sockets: dict[int, socket.socket] = {}
    running: dict[int, Flow] = {}
    starts: dict[int, float] = {}
    parts: dict[int, bytes] = {}
    clock = time.perf_counter
    try:
        for flow in itertools.islice(waiting, connections):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            open_sockets[connection.fileno()] = connection
            running[connection.fileno()] = flow
            poll.register(connection, select.EPOLLIN)
        gc.disable()
        start = clock()
        for number, connection in open_sockets.items():
            starts[number] = clock()
            connection.sendall(next(running[number]))
        while running:
            for number, _ in poll.poll():
                connection = open_sockets[number]
                data = connection.recv(262_144)
                if not data:
                    raise RuntimeError("the service closed a connection")
                if number in parts:
                    data = parts.pop(number) + data
                body = _body(data)
                if body is None:
                    parts[number] = data
                    continue
                now = clock()
                latencies.append(now - starts[number])
                try:
                    request = running[number].send(body)
                except StopIteration:
                    next_flow = next(waiting, None)
                    if next_flow is None:
                        del running[number]
                        continue
                    running[number] = next_flow
                    request = next(next_flow)
                starts[number] = now
                connection.sendall(request)
        seconds = clock() - start
    finally:
        gc.enable()
        poll.close()
        for connection in open_sockets.values():
            connection.close()
    return seconds, latencies


def _body(data: bytes) -> bytes | None:
    """The body of a complete answer; None if some of it is missing."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    if not data.startswith(b"HTTP/1.1 2"):
        raise RuntimeError(f"answered: {data.decode(errors='replace')[:1000]}")
    place = data.find(b"ontent-", 0, end)
    while data[place : place + 15].lower() != b"ontent-length: ":
        if place < 0:
            raise RuntimeError(f"an answer without Content-Length: {data[:end].decode()}")
        place = data.find(b"ontent-", place + 1, end)
    length = int(data[place + 15 : data.index(b"\r\n", place)])
    body = data[end + 4 :]
    return body if len(body) >= length else None


def total(answers: Iterable[bytes], name: str) -> int:
    """The sum of one number over all answers."""
    return sum(json.loads(answer)[name] for answer in answers)
