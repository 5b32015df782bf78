"""Many, slow, silent or endless clients, and clients that never read: acks go on, and abusive clients are cut off."""

from __future__ import annotations

import asyncio
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

from api.limits import connections
from api.limits.connections import IDLE_IN_CROWD, SILENT, Connections, raise_open_files
from api.limits.sizes import DISCARDED, HEAD
from api.server.wakeups import Wakeups
from core.commits.pending import Pending
from core.storage import schema
from core.storage.database import Database
from tests.mutants import mutant
from tests.support.proxies import proxied
from tests.support.servers import MariaDB, ServiceProcess, running_service

SOAK = "LASTBIT_SOAK" in os.environ
IDLE = 5000 if SOAK else 400
SLOW = 500 if SOAK else 60
ACKS = 2000 if SOAK else 200

pytestmark = pytest.mark.timeout(600)


def connect(running: ServiceProcess, data: bytes = b"", *, receive: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", running.port))
    connection.sendall(data)
    return connection


def head(path: str, length: int, extra: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{extra}\r\n"
    ).encode()


def everything(connection: socket.socket) -> bytes:
    """Everything that is received until the other end closes."""
    lines = b""
    with contextlib.suppress(ConnectionResetError):  # it closed while this end was still sending
        while part := connection.recv(65536):
            lines += part
    return lines


def refused(lines: bytes) -> tuple[int, str]:
    """The status and code of a problem, from its bytes."""
    start, _, body = lines.partition(b"\r\n\r\n")
    assert b"connection: close" in start.lower()
    return int(start.split(b" ", 2)[1]), json.loads(body)["code"]


def open_batch(client: httpx.Client, items: int = 10**6) -> int:
    batch: int = client.post("/v1/batches", json={"items": items}).json()["id"]
    return batch


@contextlib.contextmanager
def dribbling(slow: list[socket.socket]) -> Iterator[None]:
    """Keep sending one byte on each connection."""
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
    """Heads and bodies that dribble in are ended in time; connections that are only idle may stay."""
    raise_open_files()
    limits = {"LASTBIT_HEAD_TIMEOUT": "1.5", "LASTBIT_REQUEST_TIMEOUT": "3"}
    with (
        running_service(sqlite_url, **limits) as running,
        httpx.Client(base_url=running.url, timeout=30) as client,
        contextlib.ExitStack() as stack,
    ):
        batch = open_batch(client)
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
                everything(entry)  # returns when the connection is closed
        for entry in (idle[0], idle[-1]):
            entry.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert everything(entry).startswith(b"HTTP/1.1 200")
        refused_total = client.get("/metrics").text.partition('lastbit_refused_total{cause="slow"} ')[2]
        assert float(refused_total.split("\n", 1)[0]) == SLOW


def test_connections_beyond_the_bound_are_refused_with_retry_after(sqlite_url: str) -> None:
    """503 with Retry-After; and once a client has left, there is room again."""
    with running_service(sqlite_url, LASTBIT_MAX_CONNECTIONS="5") as running, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(running)) for _ in range(4)]
        with httpx.Client(base_url=running.url) as client:
            assert client.get("/healthz").status_code == 200
            with connect(running) as extra_connection:
                lines = everything(extra_connection)
            assert refused(lines) == (503, "unavailable")
            assert b"retry-after: 1" in lines
            connections[0].close()
            while True:  # the service notices it after a while
                with connect(
                    running, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                ) as new_connection:
                    if everything(new_connection).startswith(b"HTTP/1.1 200"):
                        break


class Peer:
    """A connection as the limits see it."""

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


ADDRESS = "127.0.0.1", 8000


def test_idle_slow_and_unread_connections_are_closed_in_time() -> None:
    """Idle connections late, and early if there are many; slow heads before slow bodies; clients that don't read at
    once."""
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
            assert watch.add(entry, ADDRESS)
        watch.check(1000)
        end_state = {name: peer.ended for name, peer in peers.items() if peer.ended}
        assert end_state == {"too idle": "end", "slow head": "end", "slow body": "end", "deaf": "abort"}


@mutant(
    "a-check-of-connections-that-raises-is-the-last",
    "api.limits.connections:Connections.watching",
    "timer = loop.call_later(CHECK_EVERY, check)\nself.check(loop.time())",
    "self.check(loop.time())\ntimer = loop.call_later(CHECK_EVERY, check)",
)
def test_a_check_of_connections_that_raises_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Peer):
        def end(self) -> None:
            raise ZeroDivisionError

    async def check_twice() -> None:
        reported = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda *_: reported.set())
        watch = Connections(100, head_timeout=10, request_timeout=60)
        with watch.watching():
            for _ in range(2):
                peer = Broken(idle=-SILENT)
                watch.add(peer, ADDRESS)
                await asyncio.wait_for(reported.wait(), 10)
                reported.clear()
                watch.remove(peer)

    monkeypatch.setattr(connections, "CHECK_EVERY", 0.01)
    asyncio.run(check_twice())


@mutant(
    "a-receiver-that-raises-keeps-the-answers-of-others", "core.commits.pending:call_receiver", "Exception", "KeyError"
)
def test_a_receiver_that_raises_costs_no_other_request_its_answer() -> None:
    """Results are handed to the event loop together."""

    async def receive() -> None:
        loop = asyncio.get_running_loop()
        received: asyncio.Future[object] = loop.create_future()
        broken: asyncio.Future[object] = loop.create_future()
        broken.cancel()
        wakeups = Wakeups(loop)
        results = [Pending(None, None, 1, future.set_result, wakeups) for future in (broken, received)]
        wakeups.put(results)
        assert await asyncio.wait_for(received, 10) is results[1]

    asyncio.run(receive())


def test_a_head_without_an_end_is_refused(sqlite_url: str) -> None:
    """413, and the connection is closed long before memory runs short."""
    with running_service(sqlite_url) as running:
        for start in (b"GET /v1/batches HTTP/1.1\r\nX-Endless: ", b"GET /", b"GET / HTTP/1.1\r\nX: y\r\n"):
            with connect(running, start) as endless:
                sending = 0
                try:
                    while sending < 200 * 2**20:
                        sending += endless.send(b"X: y\r\n" * 2000 if start.endswith(b"\n") else b"x" * 12_000)
                except (ConnectionResetError, BrokenPipeError):
                    pass
                assert sending < DISCARDED + 50 * 2**20  # it discards some before it closes
        assert httpx.get(f"{running.url}/readyz").status_code == 200
        with connect(running, b"GET / HTTP/1.1\r\nX-Long: ") as long:
            # The service has read the header so far once it answers this; the next byte exceeds the limit.
            assert httpx.get(f"{running.url}/healthz").status_code == 200
            long.sendall(b"x" * (HEAD + 1))
            assert refused(everything(long)) == (413, "too_large")


@pytest.mark.parametrize("path", ["/v1/acks", "/v1/events"])
def test_large_bodies_find_room_or_are_refused_with_retry_after(sqlite_url: str, path: str) -> None:
    """On the fast path and the ordinary one; and a client that has left frees its room."""
    field = b"items" if path == "/v1/acks" else b"events"
    body, end = b'{"%b": %b' % (field, b" " * 700_000), b"[]}"
    with running_service(sqlite_url, LASTBIT_MAX_WAITING_BYTES=str(2**20)) as running:
        length = len(body) + len(end)
        with connect(running, head(path, length) + body) as first:
            # The first body has been read when the second arrives: it is a round trip ahead.
            assert httpx.get(f"{running.url}/healthz").status_code == 200
            with connect(running, head(path, length)) as second:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    second.sendall(body)
                assert refused(everything(second)) == (503, "unavailable")
            first.sendall(end)
            assert first.recv(65536).startswith(b"HTTP/1.1 20")
        with connect(running, head(path, length) + body):
            assert httpx.get(f"{running.url}/healthz").status_code == 200
        # It left in the middle of its body, and nothing of it stays.
        for _ in range(3):
            with connect(running, head(path, length) + body + end) as repeat:
                assert repeat.recv(65536).startswith(b"HTTP/1.1 20")


def test_a_request_cut_off_before_its_body_has_no_effect(sqlite_url: str) -> None:
    """A call without a body equals one with `{}`; a call whose body never arrived has no effect."""
    with running_service(sqlite_url) as running, httpx.Client(base_url=running.url) as client:
        batch = open_batch(client)
        for path in ("/v1/batches", f"/v1/batches/{batch}/cancel"):
            connect(running, head(path, 20, "Idempotency-Key: once\r\n")).close()
        second = client.post("/v1/batches", json={"key": "mine"}, headers={"Idempotency-Key": "once"})
        assert (second.status_code, second.json()["key"]) == (201, "mine")
        states = [entry["state"] for entry in client.get("/v1/batches").json()["batches"]]
        assert states == ["open", "open"]


@mutant(
    "pipelined-requests-are-read-without-end",
    "api.server.connection:WatchedProtocol.on_response_complete",
    "self.pipeline",
    "False",
)
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(head("/v1/acks", 2) + b"{}", id="acks"),
        pytest.param(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", id="ordinary path"),
    ],
)
def test_a_client_that_never_reads_answers_is_disconnected(sqlite_url: str, request_: bytes) -> None:
    """The service stops reading from it and hangs up after a while; neither answers nor requests pile up."""
    with (
        running_service(sqlite_url, LASTBIT_REQUEST_TIMEOUT="1") as running,
        connect(running, receive=4096) as deaf,
    ):
        deaf.settimeout(120)  # for all of `sendall`: some ten thousand answers, perhaps on a slow machine
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            deaf.sendall(request_ * (2**26 // len(request_)))
        assert httpx.get(f"{running.url}/readyz").status_code == 200


@pytest.mark.mariadb
@pytest.mark.parametrize("path", ["/pending", "/watermark", ""])
def test_while_the_database_is_silent_requests_wait_up_to_a_bound(
    mariadb: MariaDB, mariadb_url: str, path: str
) -> None:
    """Calls above the bound are refused; the process stays live, and waiting calls are answered."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with proxied(mariadb.port) as proxy, contextlib.ExitStack() as stack:
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        running = stack.enter_context(running_service(url, LASTBIT_MAX_WAITING_REQUESTS="5"))
        everybody = httpx.Limits(max_connections=100)
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=60, limits=everybody))
        pool = stack.enter_context(ThreadPoolExecutor(60))
        batch = open_batch(client)

        def look(_: int) -> httpx.Response:
            return client.get(f"/v1/batches/{batch}{path}")

        proxy.fall_silent()
        try:
            waiting = [pool.submit(look, number) for number in range(50)]
            # Forty have a thread and five wait for one, so five are refused. Batches themselves and their watermarks
            # have one thread each, for which five wait.
            refused = 5 if path == "/pending" else 40
            refusals = [future.result() for future in islice(as_completed(waiting, 30), refused)]
            assert client.get("/healthz").status_code == 200
        finally:
            proxy.speak()
        for entry in refusals:
            assert (entry.status_code, entry.json()["code"]) == (503, "unavailable")
            assert entry.json()["detail"] == "too many requests are waiting"
            assert entry.headers["Retry-After"] == "1"
            assert "X-Request-Id" in entry.headers
        statuses = [future.result().status_code for future in waiting]
        assert statuses.count(200) == 45 if path == "/pending" else 5 < statuses.count(200) <= 10


@pytest.mark.mariadb
def test_while_the_database_is_silent_long_polls_wait_up_to_a_bound(mariadb: MariaDB, mariadb_url: str) -> None:
    """A poll for events that are not in memory reads the database in a thread."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with proxied(mariadb.port) as proxy, contextlib.ExitStack() as stack:
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        running = stack.enter_context(running_service(url, LASTBIT_MAX_WAITING_REQUESTS="5"))
        everybody = httpx.Limits(max_connections=100)
        client = stack.enter_context(httpx.Client(base_url=running.url, timeout=60, limits=everybody))
        pool = stack.enter_context(ThreadPoolExecutor(60))
        open_batch(client)
        # While it waits, the feed is read.
        follower = pool.submit(client.get, "/v1/events", params={"after": 0, "type": "last", "wait": 60})
        for known in range(1, 5):  # by the end of these calls it waits
            open_batch(client)
            page = client.get("/v1/events", params={"after": known, "wait": 60}).json()
            assert [event["position"] for event in page["events"]] == [known + 1]

        def poll(_: int) -> httpx.Response:
            return client.get("/v1/events", params={"after": 0, "wait": 1})

        proxy.fall_silent()
        try:
            waiting = [pool.submit(poll, number) for number in range(50)]
            # Forty threads, of which the reader may have one, and five that wait for one.
            refusals = [future.result() for future in islice(as_completed(waiting, 30), 5)]
        finally:
            proxy.speak()
        assert {(entry.status_code, entry.json()["detail"]) for entry in refusals} == {
            (503, "too many requests are waiting")
        }
        assert [future.result().status_code for future in waiting].count(200) >= 44
        client.post("/v1/events", json={"events": [{"id": "last", "type": "last"}]})
        assert follower.result().status_code == 200


@pytest.mark.mariadb
def test_masks_that_wait_for_a_read_of_their_batch_count_as_memory(mariadb: MariaDB, mariadb_url: str) -> None:
    """They are decoded but not queued yet: without a bound, a silent database would make them fill the memory."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with proxied(mariadb.port) as proxy, contextlib.ExitStack() as stack:
        url = mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/")
        running = stack.enter_context(running_service(url, LASTBIT_MAX_WAITING_BYTES=str(2**20)))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        with httpx.Client(base_url=running.url) as client:
            batch = open_batch(client, 8192 * 600)
        bits = base64.b64encode(b"\xff" * 1024).decode()
        masks = [{"batch": batch, "group": group, "bits": bits} for group in range(500)]

        def post(_: int) -> httpx.Response:
            return httpx.post(f"{running.url}/v1/acks", json={"groups": masks}, timeout=60)

        proxy.fall_silent()
        try:
            futures = [pool.submit(post, number) for number in range(2)]
            refusal = next(as_completed(futures, 30)).result()
        finally:
            proxy.speak()
        assert (refusal.status_code, refusal.json()["code"]) == (503, "unavailable")
        assert sorted(entry.result().status_code for entry in futures) == [200, 503]
        assert post(0).json()["repeated"] == 500 * 8192
