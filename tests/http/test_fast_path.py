"""The fast path of the ack routes gives the same answers as the ordinary path, whatever bytes a client sends."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.mutants import mutant
from tests.support.servers import running_service, sqlite_file

JSON = "Content-Type: application/json\r\n"


class Wire:
    """One connection, byte by byte."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.received = b""

    def send(self, *parts: bytes) -> None:
        """Send each part in its own packet, so that the server usually reads one before the next arrives."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            self.socket.sendall(part)

    def answer(self) -> tuple[int, dict[str, str], Any]:
        while b"\r\n\r\n" not in self.received:
            self._receive()
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        length = int(headers["content-length"])
        while len(self.received) < length:
            self._receive()
        content, self.received = self.received[:length], self.received[length:]
        return int(lines[0].split()[1]), headers, json.loads(content)

    def closed(self) -> bool:
        return self.socket.recv(1) == b""

    def _receive(self) -> None:
        data = self.socket.recv(65536)
        assert data, f"the service closed the connection after {self.received!r}"
        self.received += data

    def close(self) -> None:
        self.socket.close()


def request(items: list[str], *, path: str = "/v1/acks", headers: str = JSON, version: str = "1.1") -> bytes:
    content = json.dumps({"items": items}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: lastbit\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with sqlite_file() as url, running_service(url) as running:
        yield running.port


@pytest.fixture
def batch(port: int) -> int:
    batch_id: int = httpx.post(f"http://127.0.0.1:{port}/v1/batches", json={"items": 1000}).json()["id"]
    return batch_id


@pytest.fixture
def wire(port: int) -> Iterator[Wire]:
    connection = Wire(port)
    yield connection
    connection.close()


def test_one_connection_serves_many_requests(wire: Wire, batch: int) -> None:
    """The server recognizes the second request's head; its body is different."""
    for index in (*range(100, 105), 104):
        wire.send(request([f"{batch}:0:{index}"]))
        status, headers, content = wire.answer()
        assert (status, headers["content-type"]) == (200, "application/json")
        assert "date" in headers
        is_repeat = index == 104 and content["repeated"] == 1
        assert content == {"applied": int(not is_repeat), "repeated": int(is_repeat), "completed": [], "rejected": []}


@pytest.mark.parametrize("offset", [1, 10, 60, 100, -1])
def test_a_request_may_come_in_pieces(wire: Wire, batch: int, offset: int) -> None:
    """Wherever it is split, even if the server recognizes the whole request's head."""
    whole_request = request([f"{batch}:0:{300 + offset % 50}"])
    for _ in range(2):
        wire.send(whole_request)
        assert wire.answer()[2]["rejected"] == []
        wire.send(whole_request[:offset], whole_request[offset:])
        assert wire.answer()[2]["repeated"] == 1


def test_pipelined_requests_are_answered_in_their_order(wire: Wire, batch: int) -> None:
    """Acks and other requests, all sent before the first one is answered."""
    status = f"GET /v1/batches/{batch} HTTP/1.1\r\nHost: lastbit\r\n\r\n".encode()
    first, second = request([f"{batch}:0:1"]), request([f"{batch}:0:2", f"{batch}:0:1"])
    wire.send(first)  # from here on the server recognizes its head
    wire.answer()
    wire.send(first + second + status + request(["x"]) + first)
    assert wire.answer()[2]["repeated"] == 1
    assert wire.answer()[2]["applied"] == 1
    assert wire.answer()[2]["acked"] == 2
    assert wire.answer()[0] == 422
    assert wire.answer()[2]["repeated"] == 1


@mutant(
    "a-page-of-another-site-may-ack",
    "api.fast_path.acks:AckVerb.exchange",
    "head.names_site and digest is None",
    "False",
)
def test_another_sites_page_cannot_ack(wire: Wire, batch: int) -> None:
    """Repeatedly, on a connection that has acked before; a request with a token is always accepted."""
    plain = request([f"{batch}:0:20"])
    other_origin = request([f"{batch}:0:21"], headers=f"{JSON}Origin: https://elsewhere.example\r\n")
    other_site = request([f"{batch}:0:21"], headers=f"{JSON}Sec-Fetch-Site: cross-site\r\n")
    same_origin = request([f"{batch}:0:22"], headers=f"{JSON}Origin: http://lastbit\r\n")
    with_token = request(
        [f"{batch}:0:23"], headers=f"{JSON}Origin: https://elsewhere.example\r\nAuthorization: Bearer x\r\n"
    )
    for number in range(2):
        for accepted in (plain, same_origin, with_token):
            wire.send(accepted)
            assert wire.answer()[2]["repeated"] == number
        for answer in (other_origin, other_site):
            wire.send(answer)
            status, _, content = wire.answer()
            assert (status, content["code"]) == (403, "forbidden")
    wire.send(request([f"{batch}:0:21"]))
    assert wire.answer()[2]["applied"] == 1


def chunked(path: str, body: Any, *, headers: str = JSON, trailers: str = "", coding: str = "chunked") -> bytes:
    content = json.dumps(body)
    return (
        f"POST {path} HTTP/1.1\r\nHost: lastbit\r\n{headers}Transfer-Encoding: {coding}\r\n\r\n"
        f"{len(content):x}\r\n{content}\r\n0\r\n{trailers}\r\n"
    ).encode()


def test_trailers_are_not_headers(wire: Wire, batch: int) -> None:
    """They come after the body, which was accepted because of the headers."""
    trailers = (
        "Idempotency-Key: trailer\r\nX-Request-Id: trailer\r\nContent-Type: text/plain\r\nExpect: 100-continue\r\n"
    )
    batch_ids = set()
    for _ in range(2):
        wire.send(chunked("/v1/batches", {}, trailers=trailers))
        status, headers, content = wire.answer()
        assert (status, "idempotency-replayed" in headers) == (201, False)
        assert headers["x-request-id"] != "trailer"
        batch_ids.add(content["id"])
        wire.send(chunked("/v1/acks", {"items": []}, trailers=trailers))
        assert wire.answer()[0] == 200
    assert len(batch_ids) == 2
    wire.send(chunked("/v1/acks", {"items": []}, headers="", trailers=JSON))
    assert wire.answer()[0] == 415
    wire.send(chunked("/v1/batches", {}, trailers="Host: x\r\n"), request([f"{batch}:0:30"]))
    assert [wire.answer()[0] for _ in range(2)] == [201, 200]


@mutant("a-transfer-coding-is-ignored", "api.server.upgrades:Http1Protocol._is_coding_known", "not codings", "True")
@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches"])
@pytest.mark.parametrize(
    "coding", ["gzip, chunked", "gzip,chunked", "identity, chunked", "x\r\nTransfer-Encoding: chunked"]
)
def test_an_unknown_transfer_coding_is_refused(wire: Wire, batch: int, path: str, coding: str) -> None:
    """501, and the connection is closed, since the start of the next request is unknown. The request has no effect."""
    body: dict[str, Any] = {"items": [f"{batch}:0:31"]} if path == "/v1/acks" else {"key": coding}
    wire.send(request([f"{batch}:0:32"]))
    assert wire.answer()[2]["applied"] == 1
    wire.send(chunked(path, body, coding=" , Chunked"))
    assert wire.answer()[0] in (200, 201)
    wire.send(chunked(path, body, coding=coding))
    status, headers, content = wire.answer()
    assert (status, content["code"]) == (501, "not_implemented")
    assert headers["connection"] == "close"
    assert wire.closed()


CONNECTIONS = [
    *("Upgrade", "close, Upgrade", "Upgrade, close", "keep-alive, Upgrade"),
    *("Upgrade, HTTP2-Settings", "Upgrade\r\nConnection: close"),
]
OFFERS = list(itertools.product(CONNECTIONS, ["h2c", "websocket"], ["1.0", "1.1"], ["/v1/acks", "/v1/acks?"]))
"""What a client may combine: Connection, Upgrade, the version, and a target on the fast path or the ordinary one."""


def test_a_request_that_offers_another_protocol_is_answered(port: int, batch: int) -> None:
    """As it would be without the offer: then the connection goes on, or it ends if the client said so."""
    wrong = []
    for connection, upgrade, version, path in OFFERS:
        wire = Wire(port)
        wire.socket.settimeout(5)
        offer = f"{JSON}Connection: {connection}\r\nUpgrade: {upgrade}\r\n"
        try:
            wire.send(request([f"{batch}:0:40"], path=path, headers=offer, version=version))
            assert wire.answer()[0] == 200
            if version == "1.0" or "close" in connection:
                assert wire.closed()
            else:
                wire.send(request([f"{batch}:0:40"]))
                assert wire.answer()[0] == 200
        except (AssertionError, TimeoutError) as error:
            wrong.append((connection, upgrade, version, path, repr(error)))
        wire.close()
    assert wrong == []


@pytest.mark.parametrize(
    ("start", "status"),
    [
        *((b"GET /healthz HTTP/0.9", 400), (b"POST /v1/acks HTTP/0.9", 400), (b"GET /healthz", 400)),
        *((b"GET /healthz HTTP/2.0", 505), (b"POST /v1/acks HTTP/2.0", 505), (b"GET /healthz HTTP/1.2", 400)),
        (b"PRI * HTTP/2.0", 400),
    ],
)
@pytest.mark.parametrize("offer", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_other_versions_of_http_are_refused(wire: Wire, start: bytes, status: int, offer: bytes) -> None:
    """The parser would read them as HTTP/1.1."""
    wire.send(start + b"\r\nHost: lastbit\r\n" + offer + b"\r\n")
    answer = b"".join(iter(lambda: wire.socket.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert (b'"code":"http_version_not_supported"' in answer) == (status == 505)


@mutant(
    "a-half-closed-connection-counts-as-closed",
    "api.server.connection:WatchedProtocol.eof_received",
    "not self.between",
    "True",
)
def test_a_half_closed_connection_gets_its_answers(wire: Wire, port: int) -> None:
    """All of them, in order, including slow ones; then the connection is closed."""
    url = f"http://127.0.0.1:{port}/v1/batches"
    batch = httpx.post(url, json={"items": 1}).json()["id"]
    poll = f"GET /v1/batches/{batch}?wait=60 HTTP/1.1\r\nHost: lastbit\r\n\r\n".encode()
    wire.send(poll, request([f"{batch}:0:0"]), chunked("/v1/batches", {}))
    wire.socket.shutdown(socket.SHUT_WR)
    other = Wire(port)  # usually answered after the service has seen the end of the first connection
    other.send(request([f"{batch}:0:0"]))
    assert other.answer()[2]["applied"] == 1
    other.socket.shutdown(socket.SHUT_WR)
    assert other.closed()
    other.close()
    assert httpx.post(f"{url}/{batch}/seal").json()["newly"] is True
    assert wire.answer()[2]["state"] == "complete"
    assert wire.answer()[2]["repeated"] == 1
    status, headers, _ = wire.answer()
    assert (status, headers["connection"]) == (201, "close")
    assert wire.closed()


@pytest.mark.parametrize("path", ["/v1/acks", "/v1/batches"])
def test_the_last_request_of_a_half_closed_connection_is_answered(port: int, batch: int, path: str) -> None:
    """On both paths, whether the answer or the end comes first."""
    for index in range(50):
        wire = Wire(port)
        body: dict[str, Any] = {"items": [f"{batch}:0:{index}"]} if path == "/v1/acks" else {}
        content = json.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: lastbit\r\n{JSON}Content-Length: {len(content)}\r\n\r\n"
        wire.send((head + content).encode())
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.answer()[0] in (200, 201)
        assert wire.closed()
        wire.close()


def test_a_half_close_ends_an_incomplete_request_and_a_stream(wire: Wire, port: int, batch: int) -> None:
    """An incomplete request gets no more bytes, and a stream's client may have left."""
    wire.send(request([f"{batch}:0:33"])[:-1])
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.closed()
    stream = Wire(port)
    stream.send(b"GET /v1/events/stream HTTP/1.1\r\nHost: lastbit\r\n\r\n")
    while b"retry: 1000" not in stream.received:
        stream._receive()
    stream.socket.shutdown(socket.SHUT_WR)
    while stream.socket.recv(65536):
        pass
    stream.close()


def test_unusual_requests_are_answered(wire: Wire, batch: int) -> None:
    """A chunked body, Expect: 100-continue, an empty query in the URL, a parameter of the media type."""
    content = json.dumps({"items": [f"{batch}:0:9"]}).encode()
    chunked_request = f"POST /v1/acks HTTP/1.1\r\nHost: lastbit\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
    wire.send(
        chunked_request,
        b"%x\r\n" % 5,
        content[:5] + b"\r\n",
        b"%x\r\n" % len(content[5:]),
        content[5:] + b"\r\n0\r\n\r\n",
    )
    assert wire.answer()[2]["applied"] == 1
    asking = request([f"{batch}:0:9"], headers=JSON + "Expect: 100-continue\r\n")
    end = asking.index(b"\r\n\r\n") + 4
    wire.send(asking[:end])
    assert wire.socket.recv(100).startswith(b"HTTP/1.1 100")
    wire.send(asking[end:])
    assert wire.answer()[2]["repeated"] == 1
    wire.send(request([f"{batch}:0:9"], path="/v1/acks?"))
    assert wire.answer()[2]["repeated"] == 1
    wire.send(request([f"{batch}:0:9"], headers="content-type: Application/JSON; charset=utf-8\r\n"))
    assert wire.answer()[2]["repeated"] == 1


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ("", 415, "unsupported_media_type"),
        ("Content-Type: text/plain\r\n", 415, "unsupported_media_type"),
        (JSON + "Idempotency-Key: a b\r\n", 422, "invalid_request"),
        (JSON + f"Idempotency-Key: {'x' * 256}\r\n", 422, "invalid_request"),
    ],
)
def test_bad_headers_are_refused_and_the_connection_lives(
    wire: Wire, batch: int, headers: str, status: int, code: str
) -> None:
    """With a problem, and nothing is applied."""
    wire.send(request([f"{batch}:0:0"], headers=headers))
    reply = wire.answer()
    assert (reply[0], reply[1]["content-type"]) == (status, "application/problem+json")
    assert reply[2]["code"] == code
    wire.send(request([f"{batch}:0:0"]))
    assert wire.answer()[2]["applied"] == 1


@pytest.mark.parametrize("headers", [JSON + "Connection: close\r\n", ""])
def test_a_connection_is_closed_when_the_client_wants_it(wire: Wire, batch: int, headers: str) -> None:
    """If its header asks for it, or if it uses HTTP/1.0."""
    version = "1.1" if headers else "1.0"
    wire.send(request([f"{batch}:0:0"], headers=headers or JSON, version=version))
    assert wire.answer()[2]["applied"] == 1
    assert wire.closed()


def test_an_idempotency_key_belongs_to_its_own_request(port: int, wire: Wire) -> None:
    """A head with a key is not cached for other requests; the completing request gets `newly` again with its own
    key."""
    batch = httpx.post(f"http://127.0.0.1:{port}/v1/batches", json={"items": 1, "sealed": True}).json()["id"]
    newly = []
    for key in ("mine", "mine", "other", None):
        wire.send(request([f"{batch}:0:0"], headers=JSON + (f"Idempotency-Key: {key}\r\n" if key else "")))
        newly.append(wire.answer()[2]["completed"][0]["newly"])
    assert newly == [True, True, False, False]


def test_a_body_that_is_too_large_ends_the_connection(wire: Wire) -> None:
    """The body is not read to its end."""
    head = f"POST /v1/acks HTTP/1.1\r\nHost: lastbit\r\n{JSON}Content-Length: {9 * 2**20}\r\n\r\n"
    wire.send(head.encode())
    status, _, content = wire.answer()
    assert (status, content["code"]) == (413, "too_large")


def test_a_client_that_leaves_before_its_answer_does_no_harm(port: int, wire: Wire, batch: int) -> None:
    """Its ack counts, and the service continues."""
    for index in range(20, 30):
        leaver = Wire(port)
        leaver.send(request([f"{batch}:0:{index}"]))
        leaver.close()
    wire.send(request([f"{batch}:0:{index}" for index in range(20, 30)]))
    reply = wire.answer()[2]
    assert reply["applied"] + reply["repeated"] == 10
    assert httpx.get(f"http://127.0.0.1:{port}/v1/batches/{batch}").json()["acked"] == 10
