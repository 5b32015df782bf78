"""Redis: a bitmap for a batch, SETBIT for an item, BITCOUNT to detect the last one.

Users send both in a MULTI through their client library: SETBIT returns the previous bit, BITCOUNT the number of set
bits, and exactly one call turns a 0 into a 1 and finds the count full. Redis is as durable as a 2xx of Lastbit only
with `appendfsync always`; with its default on Debian, and with `everysec`, it may lose its last answers.

Single acks use plain sockets, as Lastbit's do, so that no client library is measured. Calls with many ids use redis-py,
as its users do.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence

import redis

from bench.load import Load
from tests.support.brokers import RedisServer

ANSWERED = 6
"""Lines in the answer to a MULTI with two commands: +OK, +QUEUED twice, *2, the previous bit, the count."""


def encoded(key: str, number: int) -> bytes:
    """The bytes of one ack."""
    return b"".join(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)
        for command in (
            [b"MULTI"],
            [b"SETBIT", key.encode(), str(number).encode(), b"1"],
            [b"BITCOUNT", key.encode()],
            [b"EXEC"],
        )
    )


def drive(port: int, requests: Sequence[bytes], connections: int) -> tuple[Load, int]:
    """Send each request once, with one under way on each connection; return the load and the number of requests that
    set a bit."""
    waiting = deque(requests)
    latencies: list[float] = []
    applied = 0
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(min(connections, len(waiting)))]
    by_number = {connection.fileno(): connection for connection in sockets}
    starts: dict[int, float] = {}
    parts = dict.fromkeys(by_number, b"")
    with select.epoll() as poll:
        try:
            for connection in sockets:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                poll.register(connection, select.EPOLLIN)
            start = time.perf_counter()
            for number, connection in by_number.items():
                starts[number] = time.perf_counter()
                connection.sendall(waiting.popleft())
            while len(latencies) < len(requests):
                for number, _ in poll.poll():
                    data = by_number[number].recv(4096)
                    if not data:
                        raise RuntimeError("the server closed a connection")
                    data = parts[number] + data
                    if data.count(b"\r\n") < ANSWERED:
                        parts[number] = data
                        continue
                    parts[number] = b""
                    if b"-" in data:
                        raise RuntimeError(f"answered: {data.decode()}")
                    now = time.perf_counter()
                    latencies.append(now - starts[number])
                    applied += data.split(b"\r\n", 5)[4] == b":0"
                    if waiting:
                        starts[number] = now
                        by_number[number].sendall(waiting.popleft())
            seconds = time.perf_counter() - start
        finally:
            for connection in sockets:
                connection.close()
    latencies.sort()
    return Load(
        len(latencies) / seconds, latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
    ), applied


class RedisBits:
    """Many ids a call: a MULTI with a SETBIT for each and one BITCOUNT."""

    def __init__(self, server: RedisServer, key: str) -> None:
        self._server = server
        self._key = key

    def writer(self) -> RedisWriter:
        return RedisWriter(redis.Redis(port=self._server.port), self._key)

    def acked(self) -> int:
        with redis.Redis(port=self._server.port) as client:
            return int(client.bitcount(self._key))

    def close(self) -> None: ...


class RedisWriter:
    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        self._key = key

    def ack(self, numbers: Sequence[int]) -> None:
        with self._client.pipeline(transaction=True) as pipe:
            for number in numbers:
                pipe.setbit(self._key, number, 1)
            pipe.bitcount(self._key)
            *before, _ = pipe.execute()
        if any(before):
            raise RuntimeError(f"{sum(before)} of {len(numbers)} bits were already set")

    def close(self) -> None:
        self._client.close()
