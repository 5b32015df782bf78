"""The load: requests over many keep-alive connections, as cheap to send as Python allows.

The generator shares two cores with what it measures, so what it costs is taken from the service. Hence plain sockets
and epoll, and requests that are encoded before the clock starts; a client library costs more than the service does.
Each connection has one request under way: it is a closed loop, like consumers that wait for their answer.
"""

from __future__ import annotations

import gc
import json
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """The result of a load: requests a second, and latencies in seconds."""

    rate: float
    p50: float
    p99: float


def encoded(path: str, body: Any, method: str = "POST") -> bytes:
    """A request as it travels."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def drive(port: int, requests: Sequence[bytes], connections: int) -> tuple[Load, list[bytes]]:
    """Send each request once; the answers' bodies come back in the order of their coming. Raises `RuntimeError` for an
    answer that is not 2xx."""
    waiting = deque(requests)
    latencies: list[float] = []
    answers: list[bytes] = []
    poll = select.epoll()
    open_sockets: dict[int, socket.socket] = {}
    starts: dict[int, float] = {}
    parts: dict[int, bytes] = {}
    clock = time.perf_counter
    try:
        for _ in range(min(connections, len(waiting))):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            open_sockets[connection.fileno()] = connection
            poll.register(connection, select.EPOLLIN)
        gc.disable()
        start = clock()
        for number, connection in open_sockets.items():
            starts[number] = clock()
            connection.sendall(waiting.popleft())
        remaining = len(requests)
        while remaining:
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
                answers.append(body)
                remaining -= 1
                if waiting:
                    starts[number] = now
                    connection.sendall(waiting.popleft())
        seconds = clock() - start
    finally:
        gc.enable()
        poll.close()
        for connection in open_sockets.values():
            connection.close()
    latencies.sort()
    return Load(
        len(latencies) / seconds, latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
    ), answers


def _body(data: bytes) -> bytes | None:
    """The body of a whole answer; None where some of it is still to come."""
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
