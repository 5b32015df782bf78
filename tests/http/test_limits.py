"""Clients that are many, slow, silent, endless or never listen: acks go on, and who overdoes it is sent away."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice

import httpx
import pytest

from api.server.connection import HEAD
from api.server.watchdog import IDLE_IN_CROWD, SILENT, Connections, raise_open_files
from core.storage import schema
from core.storage.database import Database
from tests.support.proxies import proxied
from tests.support.servers import MariaDB, ServiceProcess, running_service

SOAK = "LASTBIT_SOAK" in os.environ
IDLE = 5000 if SOAK else 400
SLOW = 500 if SOAK else 60
ACKS = 2000 if SOAK else 200

pytestmark = pytest.mark.timeout(600)


def connect(running: ServiceProcess, output: bytes = b"", *, receive: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", running.port))
    connection.sendall(output)
    return connection


def head(path: str, length: int, extra: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{extra}\r\n"
    ).encode()


def everything(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    lines = b""
    with contextlib.suppress(ConnectionResetError):  # it closed while we were still talking
        while part := connection.recv(65536):
            lines += part
    return lines


def refused(lines: bytes) -> tuple[int, str]:
    """Status and code of a problem as it came over the wire."""
    start, _, body = lines.partition(b"\r\n\r\n")
    assert b"connection: close" in start.lower()
    return int(start.split(b" ", 2)[1]), json.loads(body)["code"]


def opened(client: httpx.Client, items: int = 10**6) -> int:
    batch: int = client.post("/v1/batches", json={"items": items}).json()["id"]
    return batch


@contextlib.contextmanager
def dribbling(slow: list[socket.socket]) -> Iterator[None]:
    """A byte of each, again and again."""
    stop = threading.Event()

    def dribble() -> None:
        while not stop.wait(0.2):
            for entry in slow:
                with contextlib.suppress(OSError):
                    entry.send(b"x")

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_crowd_of_idle_and_slow_connections_does_not_stop_acks(sqlite_url: str) -> None:
    """Heads and bodies that dribble in are ended in time; whoever is only idle may stay."""
    raise_open_files()
    limits = {"LASTBIT_HEAD_TIMEOUT": "1.5", "LASTBIT_REQUEST_TIMEOUT": "3"}
    with (
        running_service(sqlite_url, **limits) as running,
        httpx.Client(base_url=running.url, timeout=30) as client,
        contextlib.ExitStack() as stack,
    ):
        batch = opened(client)
        idle = [stack.enter_context(connect(running)) for _ in range(IDLE)]
        start = (
            b"GET /v1/batches HTTP/1.1\r\nHost: x\r\nX-Slow: ",
            head("/v1/acks", 1000),
            head("/v1/batches", 1000),
            b"POST /v1/acks HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n300\r\n",
        )
        slow = [stack.enter_context(connect(running, start[number % len(start)])) for number in range(SLOW)]
        slowest = 0.0
        with dribbling(slow):
            for number in range(ACKS):
                before = time.monotonic()
                answer = client.post("/v1/acks", json={"items": [f"{batch}:0:{number}"]}).json()
                slowest = max(slowest, time.monotonic() - before)
                assert answer["applied"] == 1
            print(f"{IDLE} idle, {SLOW} slow: {ACKS} acks, the slowest in {slowest * 1000:.0f} ms")
            assert slowest < 5
            for entry in slow:
                everything(entry)  # which ends when it is closed
        for entry in (idle[0], idle[-1]):
            entry.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert everything(entry).startswith(b"HTTP/1.1 200")
        refused_total = client.get("/metrics").text.partition('lastbit_refused_total{cause="slow"} ')[2]
        assert float(refused_total.split("\n", 1)[0]) == SLOW


def test_connections_beyond_the_bound_are_told_to_come_back(sqlite_url: str) -> None:
    """503 with Retry-After; and when somebody has left there is room again."""
    with running_service(sqlite_url, LASTBIT_MAX_CONNECTIONS="5") as running, contextlib.ExitStack() as stack:
        lease = [stack.enter_context(connect(running)) for _ in range(4)]
        with httpx.Client(base_url=running.url) as client:
            assert client.get("/healthz").status_code == 200
            with connect(running) as one_more:
                lines = everything(one_more)
            assert refused(lines) == (503, "unavailable")
            assert b"retry-after: 1" in lines
            lease[0].close()
            while True:  # the service hears of it in its own time
                with connect(running, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") as next_one:
                    if everything(next_one).startswith(b"HTTP/1.1 200"):
                        break


class Peer:
    """A connection as the watch sees it."""

    def __init__(self, **since: float) -> None:
        self.idle_since = since.get("idle")
        self.head_since = since.get("head")
        self.body_since = since.get("body")
        self.stuck_since = since.get("stuck")
        self.ended = ""

    def end(self) -> None:
        self.ended = "end"

    def abort(self) -> None:
        self.ended = "abort"


def test_who_has_to_leave() -> None:
    """Idle ones late, and early in a crowd; slow heads before slow bodies; who doesn't listen at once."""
    for crowd, patience in ((1, SILENT), (90, IDLE_IN_CROWD)):
        watch = Connections(100, head_timeout=10, request_timeout=60)
        peers = {
            "busy": Peer(),
            "idle": Peer(idle=1000 - patience + 1),
            "too idle": Peer(idle=1000 - patience - 1),
            "head": Peer(head=991),
            "slow head": Peer(head=989),
            "body": Peer(body=941),
            "slow body": Peer(body=939),
            "deaf": Peer(stuck=939),
        }
        for entry in (*peers.values(), *(Peer() for _ in range(crowd))):
            assert watch.made(entry)
        watch.look(1000)
        end_state = {name: peer.ended for name, peer in peers.items() if peer.ended}
        assert end_state == {"too idle": "end", "slow head": "end", "slow body": "end", "deaf": "abort"}


def test_a_head_without_an_end_is_refused(sqlite_url: str) -> None:
    """413, and the connection is closed, long before memory is of concern."""
    with running_service(sqlite_url) as running:
        for start in (b"GET /v1/batches HTTP/1.1\r\nX-Endless: ", b"GET /", b"GET / HTTP/1.1\r\nX: y\r\n"):
            with connect(running, start) as endless:
                sending = 0
                try:
                    while sending < 200 * 2**20:
                        sending += endless.send(b"X: y\r\n" * 2000 if start.endswith(b"\n") else b"x" * 12_000)
                except (ConnectionResetError, BrokenPipeError):
                    pass
                assert sending < 50 * 2**20
        assert httpx.get(f"{running.url}/readyz").status_code == 200
        with connect(running, b"GET / HTTP/1.1\r\nX-Long: ") as long:
            # That much is read when this is answered; then one byte more than may be.
            assert httpx.get(f"{running.url}/healthz").status_code == 200
            long.sendall(b"x" * (HEAD + 1))
            assert refused(everything(long)) == (413, "too_large")


@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches"])
def test_large_bodies_find_room_or_are_told_to_come_back(sqlite_url: str, path: str) -> None:
    """On the short way and on the ordinary one; and the room of one that has left is free again."""
    content = b'{"items": %s' % (b" " * 700_000)
    body, end = (content, b"[]}") if path == "/v1/acks" else (content, b"1}")
    with running_service(sqlite_url, LASTBIT_MAX_WAITING_BYTES=str(2**20)) as running:
        length = len(body) + len(end)
        with connect(running, head(path, length) + body) as first:
            # The first is read when the second is: it is a round trip ahead.
            assert httpx.get(f"{running.url}/healthz").status_code == 200
            with connect(running, head(path, length)) as second:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    second.sendall(body)
                assert refused(everything(second)) == (503, "unavailable")
            first.sendall(end)
            assert first.recv(65536).startswith(b"HTTP/1.1 20")
        with connect(running, head(path, length) + body):
            assert httpx.get(f"{running.url}/healthz").status_code == 200
        # It has left in the middle of its body; nothing of it stays.
        for _ in range(3):
            with connect(running, head(path, length) + body + end) as repeat:
                assert repeat.recv(65536).startswith(b"HTTP/1.1 20")


def test_a_request_that_breaks_off_before_its_body_is_not_done(sqlite_url: str) -> None:
    """A call without a body is one with `{}`; a call whose body never came is none."""
    with running_service(sqlite_url) as running, httpx.Client(base_url=running.url) as client:
        kept = opened(client)
        for path in ("/v1/batches", f"/v1/batches/{kept}/cancel"):
            connect(running, head(path, 20, "Idempotency-Key: once\r\n")).close()
        second = client.post("/v1/batches", json={"key": "mine"}, headers={"Idempotency-Key": "once"})
        assert (second.status_code, second.json()["key"]) == (201, "mine")
        states = [entry["state"] for entry in client.get("/v1/batches").json()["batches"]]
        assert states == ["open", "open"]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(head("/v1/acks", 2) + b"{}", id="acks"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", id="ordinary path"),
    ],
)
def test_who_never_takes_answers_is_sent_away(sqlite_url: str, request_: bytes) -> None:
    """The service stops reading from it and after a while hangs up; neither answers nor requests pile up."""
    with (
        running_service(sqlite_url, LASTBIT_REQUEST_TIMEOUT="1") as running,
        connect(running, receive=4096) as deaf,
    ):
        deaf.settimeout(120)  # for the whole of `sendall`: some ten thousand answers, on a machine that may be busy
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            deaf.sendall(request_ * (2**26 // len(request_)))
        assert httpx.get(f"{running.url}/readyz").status_code == 200


@pytest.mark.mariadb
def test_while_the_database_is_silent_requests_wait_up_to_a_bound(mariadb: MariaDB, mariadb_url: str) -> None:
    """Beyond it they are told to come back; the process is alive all the time, and those that wait are answered."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with proxied(mariadb.port) as proxy, contextlib.ExitStack() as stack:
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        running = stack.enter_context(running_service(url, LASTBIT_MAX_WAITING_REQUESTS="5"))
        everybody = httpx.Limits(max_connections=100)
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=60, limits=everybody))
        pool = stack.enter_context(ThreadPoolExecutor(60))
        batch = opened(client)

        def look(_: int) -> httpx.Response:
            return client.get(f"/v1/batches/{batch}")

        proxy.fall_silent()
        try:
            waiting = [pool.submit(look, number) for number in range(50)]
            # Forty have a thread, five wait for one, so five are sent away at once.
            sent_away = [process.result() for process in islice(as_completed(waiting, 30), 5)]
            assert client.get("/healthz").status_code == 200
        finally:
            proxy.speak()
        for entry in sent_away:
            assert (entry.status_code, entry.json()["code"]) == (503, "unavailable")
            assert entry.json()["detail"] == "too many requests are waiting"
            assert entry.headers["Retry-After"] == "1"
            assert "X-Request-Id" in entry.headers
        reply = [process.result().status_code for process in waiting]
        assert reply.count(200) == 45


@pytest.mark.mariadb
def test_masks_that_wait_for_a_look_at_their_batch_take_room(mariadb: MariaDB, mariadb_url: str) -> None:
    """They are decoded, and not queued yet: without a bound a silent database would fill the memory with them."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with proxied(mariadb.port) as proxy, contextlib.ExitStack() as stack:
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        running = stack.enter_context(running_service(url, LASTBIT_MAX_WAITING_BYTES=str(2**20)))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        with httpx.Client(base_url=running.url) as client:
            batch = opened(client, 8192 * 600)
        bits = base64.b64encode(b"\xff" * 1024).decode()
        masks = [{"batch": batch, "group": group, "bits": bits} for group in range(500)]

        def post(_: int) -> httpx.Response:
            return httpx.post(f"{running.url}/v1/acks", json={"groups": masks}, timeout=60)

        proxy.fall_silent()
        try:
            both = [pool.submit(post, number) for number in range(2)]
            sent_away = next(as_completed(both, 30)).result()
        finally:
            proxy.speak()
        assert (sent_away.status_code, sent_away.json()["code"]) == (503, "unavailable")
        assert sorted(entry.result().status_code for entry in both) == [200, 503]
        assert post(0).json()["repeated"] == 500 * 8192
