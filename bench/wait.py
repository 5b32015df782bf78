"""How long after its batch ended is a long poll answered? 1,000 waiters on 1,000 batches, which end at a steady pace or
all at once (acked over eight connections without a pause), and 1,000 waiters on one batch.

The commit precedes the ack's answer by little, and can't be seen from outside. So there are two figures a waiter: from
when the last ack's answer arrived, which is a little too short (it can even be negative: waiters are told when the ack
is, and may be read first), and from when that ack was sent, which is too long by the ack itself. The true one lies
between.

Idle, the waiters cost no query each: what the database hears while they wait is printed too.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from bench import load, measure
from bench.measure import Scale
from lastbit.ids import item_id
from tests.servers import MariaDB

PACE = 200
"""Batches that end a second, where the pace is steady."""
ACKING = 8
"""Connections that ack."""
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class Heard:
    """What a database server has heard so far, over all sessions."""

    def __init__(self, server: MariaDB) -> None:
        self._connection = server.connect()

    def so_far(self) -> tuple[int, int]:
        """Statements, and of them selects. To ask is a statement too, but no select."""
        with self._connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS WHERE Variable_name IN ('Questions', 'Com_select')")
            counters = dict(cursor.fetchall())
        return int(counters["Questions"]), int(counters["Com_select"])

    def wait_for_selects(self, count: int) -> None:
        while self.so_far()[1] < count:
            time.sleep(0.05)

    def rates(self, seconds: float) -> tuple[float, float]:
        """Statements and selects a second from now on."""
        begun, before = time.perf_counter(), self.so_far()
        time.sleep(seconds)
        after = self.so_far()
        seconds = time.perf_counter() - begun
        return (after[0] - before[0] - 1) / seconds, (after[1] - before[1]) / seconds

    def close(self) -> None:
        self._connection.close()


class Connections:
    """Plain sockets and epoll: a request each, whose answers are taken as they come."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._parts: dict[int, bytes] = {}

    def connect(self) -> int:
        made = socket.create_connection(("127.0.0.1", self._port))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[made.fileno()] = made
        self._poll.register(made, select.EPOLLIN)
        return made.fileno()

    def send(self, number: int, request: bytes) -> None:
        self._parts[number] = b""
        self._sockets[number].sendall(request)

    def answers(self, seconds: float | None) -> Iterable[tuple[int, float, bytes]]:
        """(connection, when, answer) of what has come whole after at most so many seconds."""
        for number, _ in self._poll.poll(seconds):
            data = self._sockets[number].recv(65_536)
            if not data:
                raise RuntimeError("the service closed a connection")
            self._parts[number] += data
            head, found, body = self._parts[number].partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if found and length and len(body) >= int(length[1]):
                if not head.startswith(b"HTTP/1.1 2"):
                    raise RuntimeError(f"answered: {self._parts[number].decode()}")
                yield number, time.perf_counter(), body

    def close(self) -> None:
        self._poll.close()
        for each in self._sockets.values():
            each.close()


class Waiters:
    """Long polls under way, one a connection: one for each of `batches`, which may name a batch several times. Each
    batch has one item and is sealed."""

    def __init__(self, heard: Heard, port: int, batches: Sequence[int]) -> None:
        self._connections = Connections(port)
        self._batch_of: dict[int, int] = {}
        looks = heard.so_far()[1] + len(batches)
        for batch in batches:
            number = self._connections.connect()
            self._batch_of[number] = batch
            self._connections.send(number, load.encoded(f"/v1/batches/{batch}?wait=60", None, "GET"))
        heard.wait_for_selects(looks)  # each waiter looks once before it waits
        time.sleep(0.5)

    def end(self, pace: float | None) -> list[tuple[float, float]]:
        """Ack the item of each batch, so many a second or as fast as they are answered: for each waiter, seconds from
        the ack's sending and from its answer until its own answer."""
        waiting = deque(dict.fromkeys(self._batch_of.values()))
        requests = {batch: load.encoded("/v1/acks", {"items": [item_id(batch, 0)]}) for batch in waiting}
        free = [self._connections.connect() for _ in range(min(ACKING, len(waiting)))]
        acking: dict[int, int] = {}
        sent: dict[int, float] = {}
        answered: dict[int, float] = {}
        woken: list[tuple[int, float, bytes]] = []
        due = time.perf_counter()
        while waiting or acking or len(woken) < len(self._batch_of):
            while waiting and free and (pace is None or due <= time.perf_counter()):
                number, batch = free.pop(), waiting.popleft()
                acking[number] = batch
                sent[batch] = time.perf_counter()
                self._connections.send(number, requests[batch])
                due += 1 / pace if pace else 0
            sleep = max(due - time.perf_counter(), 0) if pace and waiting and free else None
            for number, now, body in self._connections.answers(sleep):
                if number in acking:
                    answered[acking[number]] = now
                    free.append(number)
                    if not json.loads(body)["completed"][0]["newly"]:
                        raise RuntimeError(f"the last ack of {acking[number]} was answered {body.decode()}")
                    del acking[number]
                else:
                    woken.append((self._batch_of[number], now, body))
        for batch, _, body in woken:
            told: dict[str, Any] = json.loads(body)
            if not (told["id"] == batch and told["state"] == "complete" and told["acked"] == told["items"] == 1):
                raise RuntimeError(f"who waited for {batch} was answered {told}")
        return [(now - sent[batch], now - answered[batch]) for batch, now, _ in woken]

    def close(self) -> None:
        self._connections.close()


def _open(port: int, batches: int) -> list[int]:
    request = load.encoded("/v1/batches", {"items": 1, "sealed": True})
    return [json.loads(each)["id"] for each in load.drive(port, [request] * batches, ACKING)[1]]


def _check(port: int, batches: list[int]) -> None:
    """The bits of each batch say that it is complete."""
    requests = [load.encoded(f"/v1/batches/{batch}/verify", None, "GET") for batch in batches]
    for answer in load.drive(port, requests, ACKING)[1]:
        found = json.loads(answer)
        if not (found["ok"] and found["counted"]["acked"] == found["items"] == 1):
            raise RuntimeError(f"a batch whose only item was acked says {found}")


def _round(
    heard: Heard, port: int, batches: int, waiters: int, pace: float | None, idle: list[tuple[float, float]]
) -> dict[str, float]:
    """Quantiles by name, in seconds."""
    opened = _open(port, batches)
    waiting = Waiters(heard, port, opened * (waiters // batches))
    try:
        if batches > 1 or waiters == 1:
            idle.append(heard.rates(1))
        took = waiting.end(pace)
    finally:
        waiting.close()
    _check(port, opened)
    since_sent, since_answer = (sorted(each[place] for each in took) for place in (0, 1))
    return {
        "answer p50": since_answer[len(took) // 2],
        "answer p99": since_answer[len(took) * 99 // 100],
        "sent p50": since_sent[len(took) // 2],
        "sent p99": since_sent[len(took) * 99 // 100],
    }


def allow_files(wanted: int) -> None:
    """A connection is a file here and in the service, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


def run(scale: Scale) -> None:
    waiters = scale.requests // 20
    allow_files(2 * waiters + 512)
    ways: dict[str, tuple[int, int, float | None]] = {
        f"{waiters:,} on {waiters:,} batches, {PACE} end a second": (waiters, waiters, PACE),
        f"{waiters:,} on {waiters:,} batches, all at once": (waiters, waiters, None),
        f"{waiters:,} on one batch": (1, waiters, None),
    }
    found: dict[str, list[dict[str, float]]] = {}
    idle: dict[int, list[tuple[float, float]]] = {0: [], 1: [], waiters: []}
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        contextlib.closing(Heard(server)) as heard,
    ):
        for _ in range(scale.rounds):
            idle[0].append(heard.rates(1))
            _round(heard, service.port, 1, 1, None, idle[1])
            for name, (batches, count, pace) in ways.items():
                found.setdefault(name, []).append(_round(heard, service.port, batches, count, pace, idle[waiters]))
    measure.show(
        f"wait: from the last ack to the long poll's answer, MariaDB, one worker (medians of {scale.rounds} rounds)",
        ["waiters", "from its answer: p50 ms", "p99 ms", "from its sending: p50 ms", "p99 ms"],
        [
            [name, *(f"{statistics.median(each[q] for each in rounds) * 1e3:.1f}" for q in rounds[0])]
            for name, rounds in found.items()
        ],
    )
    measure.show(
        "wait: what the database hears while they wait",
        ["waiters", "statements/s", "of them selects/s"],
        [
            [f"{count:,}", *(f"{statistics.median(each[place] for each in rates):.0f}" for place in (0, 1))]
            for count, rates in idle.items()
        ],
    )


if __name__ == "__main__":
    measure.alone(run)
