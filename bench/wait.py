"""The delay between the end of a batch and the answer of a long poll. Cases: 1,000 waiters on 1,000 batches, which end
at a steady rate or all at once (acked over eight connections without a pause); 1,000 waiters on one batch; and both
with 200 followers of the feed, each of which receives every end.

The commit happens shortly before the ack's response, and can't be seen from outside. So there are two figures per
waiter. The first counts from the arrival of the last ack's response, which is slightly too short; it can be negative,
since both responses are sent at once and the waiter's may be read first. The second counts from the sending of that
ack, which is too long by the ack itself. The true latency lies between them.

Idle waiters cost no queries: the number of statements that the database receives while they wait is printed too.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from bench import load, measure
from bench.measure import Scale
from lastbit.ids import item_id
from tests.support.servers import MariaDB

PACE = 200
"""Batches that end per second at the steady rate."""
FOLLOWED = 20
"""The same with followers, each of which receives every end."""
ACKING = 8
"""Connections that send acks."""
_ENDED = re.compile(rb'"batch:(\d+):completed"')
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


class StatementCounter:
    """The number of statements that a database server has received so far, over all sessions."""

    def __init__(self, server: MariaDB) -> None:
        self._connection = server.connect()

    def so_far(self) -> tuple[int, int]:
        """The number of statements, and of selects among them. This query is a statement, but no select."""
        with self._connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS WHERE Variable_name IN ('Questions', 'Com_select')")
            counters = dict(cursor.fetchall())
        return int(counters["Questions"]), int(counters["Com_select"])

    def wait_for_selects(self, count: int) -> None:
        while self.so_far()[1] < count:
            time.sleep(0.05)  # the server has no notification for a counter

    def rates(self, seconds: float) -> tuple[float, float]:
        """Statements and selects per second, over the next `seconds`."""
        start, before = time.perf_counter(), self.so_far()
        time.sleep(seconds)  # part of the measurement: the statements in that time
        after = self.so_far()
        seconds = time.perf_counter() - start
        return (after[0] - before[0] - 1) / seconds, (after[1] - before[1]) / seconds

    def close(self) -> None:
        self._connection.close()


class Streams:
    """Followers of the feed, all read by one thread, and when each of them received each batch's end."""

    def __init__(self, port: int, count: int) -> None:
        self.told: dict[int, list[float]] = {}
        self._count = count
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        request = load.encoded("/v1/events/stream?type=batch.completed", None, "GET")
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(request)
            data = b""
            while b"retry: " not in data:
                data += connection.recv(65_536)
            self._sockets[connection.fileno()] = connection
            self._poll.register(connection, select.EPOLLIN)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._stop = threading.Event()
        self._thread.start()

    def _listen(self) -> None:
        parts = dict.fromkeys(self._sockets, b"")
        while not self._stop.is_set():
            for number, _ in self._poll.poll(0.1):
                data = self._sockets[number].recv(1_048_576)
                now = time.perf_counter()
                *messages, parts[number] = (parts[number] + data).split(b"\n\n")
                for message in messages:
                    batch = _ENDED.search(message)
                    if batch:
                        self.told.setdefault(int(batch[1]), []).append(now)

    def wait_for(self, batches: Sequence[int]) -> None:
        """Wait until each follower has received the end of each of these batches."""
        until = time.monotonic() + 60
        while any(len(self.told.get(batch, ())) < self._count for batch in batches):
            if time.monotonic() > until:
                raise RuntimeError("a stream did not get a batch's end within a minute")
            time.sleep(0.05)  # the latencies are taken where the messages arrive, so this adds nothing to them
        if any(len(self.told[batch]) > self._count for batch in batches):
            raise RuntimeError("a stream got an end twice")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._poll.close()
        for connection in self._sockets.values():
            connection.close()


class Connections:
    """Plain sockets and epoll: one request per connection, with responses read as they arrive."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._parts: dict[int, bytes] = {}

    def connect(self) -> int:
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[connection.fileno()] = connection
        self._poll.register(connection, select.EPOLLIN)
        return connection.fileno()

    def send(self, number: int, request: bytes) -> None:
        self._parts[number] = b""
        self._sockets[number].sendall(request)

    def answers(self, seconds: float | None) -> Iterable[tuple[int, float, bytes]]:
        """(connection, time, response) of each complete response that arrives within this many seconds."""
        for number, _ in self._poll.poll(seconds):
            data = self._sockets[number].recv(65_536)
            if not data:
                raise RuntimeError("the service closed a connection")
            self._parts[number] += data
            head, separator, body = self._parts[number].partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if separator and length and len(body) >= int(length[1]):
                if not head.startswith(b"HTTP/1.1 2"):
                    raise RuntimeError(f"answered: {self._parts[number].decode()}")
                yield number, time.perf_counter(), body

    def close(self) -> None:
        self._poll.close()
        for connection in self._sockets.values():
            connection.close()


class Waiters:
    """Long polls under way, one per connection: one for each of `batches`, which may name a batch several times. Each
    batch has one item and is sealed."""

    def __init__(self, counters: StatementCounter, port: int, batches: Sequence[int]) -> None:
        self._connections = Connections(port)
        self._batch_of: dict[int, int] = {}
        expected_selects = counters.so_far()[1] + len(batches)
        for batch in batches:
            number = self._connections.connect()
            self._batch_of[number] = batch
            self._connections.send(number, load.encoded(f"/v1/batches/{batch}?wait=60", None, "GET"))
        counters.wait_for_selects(expected_selects)  # each waiter queries once before it waits
        time.sleep(0.5)  # a waiter that has queried and starts to wait is not visible from outside

    def end(self, pace: float | None, streams: Streams | None = None) -> list[tuple[float, float]]:
        """Ack the item of each batch, at a rate per second or without a pause. Returns the seconds from the sending of
        the ack, and from its response, to the response of each waiter; with `streams`, of each follower too."""
        waiting = deque(dict.fromkeys(self._batch_of.values()))
        requests = {batch: load.encoded("/v1/acks", {"items": [item_id(batch, 0)]}) for batch in waiting}
        free = [self._connections.connect() for _ in range(min(ACKING, len(waiting)))]
        acking: dict[int, int] = {}
        sent_at: dict[int, float] = {}
        answered_at: dict[int, float] = {}
        responses: list[tuple[int, float, bytes]] = []
        due = time.perf_counter()
        while waiting or acking or len(responses) < len(self._batch_of):
            while waiting and free and (pace is None or due <= time.perf_counter()):
                number, batch = free.pop(), waiting.popleft()
                acking[number] = batch
                sent_at[batch] = time.perf_counter()
                self._connections.send(number, requests[batch])
                due += 1 / pace if pace else 0
            sleep = max(due - time.perf_counter(), 0) if pace and waiting and free else None
            for number, now, body in self._connections.answers(sleep):
                if number in acking:
                    answered_at[acking[number]] = now
                    free.append(number)
                    if not json.loads(body)["completed"][0]["newly"]:
                        raise RuntimeError(f"the last ack of {acking[number]} was answered {body.decode()}")
                    del acking[number]
                else:
                    responses.append((self._batch_of[number], now, body))
        for batch, _, body in responses:
            response: dict[str, Any] = json.loads(body)
            if not (
                response["id"] == batch
                and response["state"] == "complete"
                and response["acked"] == response["items"] == 1
            ):
                raise RuntimeError(f"the waiter for {batch} got {response}")
        response_times = [(batch, now) for batch, now, _ in responses]
        if streams is not None:
            streams.wait_for(list(sent_at))
            response_times += [(batch, now) for batch in sent_at for now in streams.told[batch]]
        return [(now - sent_at[batch], now - answered_at[batch]) for batch, now in response_times]

    def close(self) -> None:
        self._connections.close()


def _open(port: int, batches: int) -> list[int]:
    request = load.encoded("/v1/batches", {"items": 1, "sealed": True})
    return [json.loads(response)["id"] for response in load.drive(port, [request] * batches, ACKING)[1]]


def _check(port: int, batches: list[int]) -> None:
    """Raise `RuntimeError` unless the bits of each batch show it complete."""
    requests = [load.encoded(f"/v1/batches/{batch}/verify", None, "GET") for batch in batches]
    for answer in load.drive(port, requests, ACKING)[1]:
        verification = json.loads(answer)
        if not (verification["ok"] and verification["counted"]["acked"] == verification["items"] == 1):
            raise RuntimeError(f"a batch whose only item was acked has {verification}")


def _round(
    counters: StatementCounter,
    port: int,
    batches: int,
    waiters: int,
    pace: float | None,
    idle: list[tuple[float, float]],
    follow: int,
) -> dict[str, float]:
    """Quantiles by name, in seconds."""
    batch_ids = _open(port, batches)
    waiting = Waiters(counters, port, batch_ids * (waiters // batches))
    streams = Streams(port, follow) if follow else None
    try:
        if batches > 1 or waiters == 1:
            idle.append(counters.rates(1))
        latencies = waiting.end(pace, streams)
    finally:
        waiting.close()
        if streams is not None:
            streams.close()
    _check(port, batch_ids)
    since_sent, since_answer = (sorted(latency[place] for latency in latencies) for place in (0, 1))
    return {
        "answer p50": since_answer[len(latencies) // 2],
        "answer p99": since_answer[len(latencies) * 99 // 100],
        "sent p50": since_sent[len(latencies) // 2],
        "sent p99": since_sent[len(latencies) * 99 // 100],
    }


def run(scale: Scale) -> None:
    waiters = scale.requests // 20
    measure.allow_files(2 * waiters + 512)
    streams = waiters // 5
    ways: dict[str, tuple[int, int, float | None, int]] = {
        f"{waiters:,} on {waiters:,} batches, {PACE} end a second": (waiters, waiters, PACE, 0),
        f"{waiters:,} on {waiters:,} batches, all at once": (waiters, waiters, None, 0),
        f"{waiters:,} on {waiters:,} batches and {streams:,} streams, {FOLLOWED} end a second": (
            *(waiters, waiters, FOLLOWED),
            streams,
        ),
        f"{waiters:,} on one batch": (1, waiters, None, 0),
    }
    results: dict[str, list[dict[str, float]]] = {}
    idle: dict[int, list[tuple[float, float]]] = {0: [], 1: [], waiters: []}
    with (
        measure.mariadb() as server,
        measure.lastbit_on(server) as service,
        contextlib.closing(StatementCounter(server)) as counters,
    ):
        for _ in range(scale.rounds):
            idle[0].append(counters.rates(1))
            _round(counters, service.port, 1, 1, None, idle[1], 0)
            for name, (batches, count, pace, follow) in ways.items():
                results.setdefault(name, []).append(
                    _round(counters, service.port, batches, count, pace, idle[waiters], follow)
                )
    measure.show(
        f"wait: from the last ack to the long poll's answer, MariaDB, one worker (medians of {scale.rounds} rounds)",
        ["waiters", "from its answer: p50 ms", "p99 ms", "from its sending: p50 ms", "p99 ms"],
        [
            [name, *(f"{statistics.median(figures[q] for figures in rounds) * 1e3:.1f}" for q in rounds[0])]
            for name, rounds in results.items()
        ],
    )
    measure.show(
        "wait: statements that the database receives while they wait",
        ["waiters", "statements/s", "of them selects/s"],
        [
            [f"{count:,}", *(f"{statistics.median(figures[place] for figures in rates):.0f}" for place in (0, 1))]
            for count, rates in idle.items()
        ],
    )


if __name__ == "__main__":
    measure.alone(run)
