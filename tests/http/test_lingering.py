"""Refusals reach clients that read only after they have sent everything, and nobody holds the service with that."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from api.limits.connections import LINGERING, LINGERING_SILENT, MOST_LINGERING, Connections
from api.limits.sizes import DISCARDED
from lastbit import errors, tokens
from lastbit._protocol import Service
from lastbit._urllib import Connection
from lastbit.tokens import Role
from tests.http.test_limits import connect, everything, head, refused
from tests.mutants import mutant
from tests.support.servers import ServiceProcess, running_service, sqlite_file

MIB = 2**20
LARGE = 24 * MIB
"""More than the buffers of both sockets, and more than a body may have."""

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with sqlite_file() as url, running_service(url) as running:
        yield running


def post(url: str, body: Any, **headers: str) -> tuple[int, str]:
    """Status and code of the refusal. urllib sends the whole body before it reads."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **headers})
    with pytest.raises(urllib.error.HTTPError) as refusal, urllib.request.urlopen(request, timeout=60):
        pass
    with refusal.value as response:
        return response.status, json.load(response)["code"]


def pieces() -> Iterator[bytes]:
    """A body that is sent in chunks."""
    for _ in range(LARGE // MIB):
        yield b" " * MIB


BODIES = [pytest.param(lambda: b" " * LARGE, id="length"), pytest.param(pieces, id="chunks")]


@mutant(
    "a-refusal-is-lost-in-a-reset",
    "api.server.lingering:LingeringTransport.close",
    "not self._owner.is_client_sending",
    "True",
)
@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches", "/v1/batches/1/seal"])
@pytest.mark.parametrize("body", BODIES)
def test_a_client_that_reads_late_gets_the_413(service: ServiceProcess, path: str, body: Callable[[], Any]) -> None:
    assert post(service.url + path, body()) == (413, "too_large")


@pytest.mark.parametrize("body", BODIES)
def test_it_gets_other_refusals_that_come_before_its_body(body: Callable[[], Any]) -> None:
    line = tokens.known(tokens.new(), "consumer", [Role.CONSUME]).line()
    with sqlite_file() as url, running_service(url, LASTBIT_TOKENS=line) as running:
        assert post(f"{running.url}/v1/acks", body()) == (401, "unauthorized")
        assert post(f"{running.url}/v1/batches", body()) == (401, "unauthorized")
        assert post(f"{running.url}/nowhere", body()) == (404, "not_found")
        assert post(f"{running.url}/healthz", body()) == (405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches"])
def test_it_gets_the_503_if_there_is_no_room_for_its_body(path: str) -> None:
    """On the fast path, which a kept connection with a known length takes, and on the ordinary one."""
    with (
        sqlite_file() as url,
        running_service(url, LASTBIT_MAX_WAITING_BYTES=str(2 * MIB)) as running,
        connect(running, head(path, 2 * MIB) + b" " * (2 * MIB - 1)),
    ):
        # A part of the first body has been read when the second arrives: it is a round trip ahead.
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        for body in (b" " * (7 * MIB), iter([b" " * MIB] * 7)):
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)) as client:
                client.request("POST", path, body, {"Content-Type": "application/json"})
                response = client.getresponse()
                assert (response.status, json.load(response)["code"]) == (503, "unavailable")


def test_a_malformed_body_occupies_no_room_while_its_connection_lingers() -> None:
    start = b"POST /v1/events HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % MIB
    with (
        sqlite_file() as url,
        running_service(url, LASTBIT_MAX_WAITING_BYTES=str(2 * MIB)) as running,
        connect(running, start + b" " * MIB + b"\r\nno number") as connection,
    ):
        assert everything(connection).startswith(b"HTTP/1.1 400 ")
        body = b'{"events": [%s]}' % (b" " * MIB)
        answer = httpx.post(f"{running.url}/v1/events", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200
        connection.sendall(b" ")  # it lingers


@pytest.mark.parametrize(
    ("start", "status"),
    [
        pytest.param(b"POST /v1/acks HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501, id="coding"),
        pytest.param(b"NO HTTP AT ALL\r\n\r\n", 400, id="no HTTP"),
        pytest.param(b"GET / HTTP/1.1\r\nX-Endless: ", 413, id="endless head"),
    ],
)
def test_it_gets_the_refusal_of_a_head(service: ServiceProcess, start: bytes, status: int) -> None:
    with connect(service, start) as connection:
        connection.sendall(b"x" * LARGE)
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection).startswith(b"HTTP/1.1 %d " % status)


def test_it_gets_the_503_of_too_many_connections() -> None:
    with sqlite_file() as url, running_service(url, LASTBIT_MAX_CONNECTIONS="1") as running, connect(running) as first:
        first.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert first.recv(65536).startswith(b"HTTP/1.1 200")
        with connect(running) as second:
            second.sendall(head("/v1/acks", LARGE) + b" " * LARGE)
            assert refused(everything(second)) == (503, "unavailable")


def test_the_urllib_client_of_the_sdk_gets_the_413(service: ServiceProcess) -> None:
    with pytest.raises(errors.TooLarge):
        Connection.named(service.url).driver().run(Service.call, "POST", "/v1/acks", body={"items": ["x" * LARGE]})


@mutant(
    "an-endless-body-is-discarded-without-end",
    "api.server.lingering:Discarding.data_received",
    "self._discarded > DISCARDED",
    "False",
)
def test_an_endless_body_is_cut_off(service: ServiceProcess) -> None:
    """A client that doesn't stop sending after the refusal can send a limited number of bytes."""
    with connect(service, head("/v1/acks", 2**40)) as connection:
        sent = 0
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while sent < 4 * DISCARDED:
                sent += connection.send(b" " * MIB)
        assert DISCARDED // 2 < sent < 2 * DISCARDED


def test_a_stopping_service_still_delivers_the_refusal() -> None:
    """It waits for a client that sends, and then ends."""
    with sqlite_file() as url, running_service(url) as running, connect(running) as connection:
        connection.sendall(head("/v1/acks", LARGE))
        while not connection.recv(65536, socket.MSG_PEEK):  # the refusal is on its way, and stays unread
            pass
        codes: list[int] = []
        stopping = threading.Thread(target=lambda: codes.append(running.stop(signal.SIGTERM)))
        stopping.start()
        while True:  # until the service stops to listen
            with contextlib.suppress(ConnectionRefusedError, ConnectionResetError), connect(running):
                continue
            break
        connection.sendall(b" " * LARGE)
        assert refused(everything(connection)) == (413, "too_large")
        connection.close()
        stopping.join()
        assert codes == [-signal.SIGTERM]


class Lingerer:
    """A connection that lingers, as the limits see it."""

    def __init__(self, began: float, last_read: float) -> None:
        self.began = began
        self.last_read = last_read
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True


@mutant(
    "any-number-of-connections-lingers",
    "api.limits.connections:Connections.add_lingering",
    "len(self._lingering) >= MOST_LINGERING",
    "False",
)
def test_few_connections_linger_and_not_for_long() -> None:
    watch = Connections(100, head_timeout=10, request_timeout=60)
    entries = [
        Lingerer(1000 - LINGERING + 1, 1000),
        Lingerer(1000 - LINGERING - 1, 1000),
        Lingerer(990, 1000 - LINGERING_SILENT + 1),
        Lingerer(990, 1000 - LINGERING_SILENT - 1),
    ]
    others = [Lingerer(1000, 1000) for _ in range(MOST_LINGERING - len(entries))]
    assert all(watch.add_lingering(entry) for entry in (*entries, *others))
    assert not watch.add_lingering(Lingerer(1000, 1000))
    watch.check(1000)
    assert [entry.is_ended for entry in entries] == [False, True, False, True]
    watch.remove_lingering(entries[1])
    assert watch.add_lingering(Lingerer(1000, 1000))


def test_beyond_the_bound_a_connection_is_closed_at_once() -> None:
    with sqlite_file() as url, running_service(url) as running, contextlib.ExitStack() as stack:
        start = head("/v1/acks", LARGE)
        clients = [stack.enter_context(connect(running, start)) for _ in range(MOST_LINGERING + 1)]
        assert {refused(everything(client)) for client in clients} == {(413, "too_large")}
        cut: list[socket.socket] = []
        while not cut:
            for client in clients:
                try:
                    client.send(b" ")
                except (ConnectionResetError, BrokenPipeError):
                    cut.append(client)
        assert len(cut) == 1
