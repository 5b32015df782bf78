"""The bytes of connections: the short way reads them as uvicorn does, and no two parsers may see two things in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from h11 import LocalProtocolError
from hypothesis import example, given
from hypothesis import strategies as st
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.acks.fast_path import AckProtocol
from api.server.connection import HEAD
from api.server.upgrades import Http1Protocol
from core.acks.call import AckResult
from tests.fuzz.sizes import examples
from tests.fuzz.wire import Served, served

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fuzz-wire"), pytest.mark.timeout(3600)]


class Seen(list[tuple[str, bytes]]):
    """The requests that came through: path or verb, and body."""


class Done:
    error = None
    answer = AckResult()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Served, Seen]]:
    """Its acks are noted and answered at once, so that all is done in turn."""
    requests = Seen()
    with served() as running:
        app: Any = running.app
        parse, inner = app.parse, app.app

        def noted(verb: Any, key: Any, content: bytes, caller: Any) -> Any:
            requests.append((f"{verb} {key!r}", content))
            return parse(verb, key, content, caller)

        async def passed_on(scope: Any, receive: Any, send: Any) -> None:
            requests.append((f"{scope['method']} {scope['path']}", b""))
            await inner(scope, receive, send)

        app.parse, app.app = noted, passed_on
        app.submit = lambda call, future: future(Done())
        yield running, requests


def heard(server: tuple[Served, Seen], kind: Any, parts: list[bytes]) -> tuple[list[tuple[str, bytes]], list[Any]]:
    """The requests that the protocol made of the bytes, and the answers: statuses and bodies."""
    running, requests = server
    requests.clear()
    connection = running.connect(kind)
    refusals: list[int] = []
    try:
        connection.feed(*parts)
    except LocalProtocolError:
        # Of h11: it has said that it closes, and uvicorn would say 400 to what comes then and is no request.
        refusals = [400]
        connection.transport.close()
    # uvicorn says 400 to a transfer coding that it does not know; we say 501.
    statuses = re.findall(
        rb"HTTP/1\.1 ([2-5]\d\d) ", connection.transport.written.replace(b"HTTP/1.1 501 ", b"HTTP/1.1 400 ")
    )
    is_closed = connection.transport.closed
    connection.lose()
    return list(requests), [*map(int, statuses), *refusals, is_closed]


BODY = b'{"items":["7:0:1"]}'
OTHER = b'{"items":["7:0:2"],"reason":"x"}'
LINES = [
    *(b"Host: x", b"host: y", b"Content-Type: application/json", b"Content-Type: application/json; charset=utf-8"),
    *(b"content-type: text/plain", b"Content-Length: %d" % len(BODY), b"Content-Length: %d" % len(OTHER)),
    *(b"Content-Length: 0", b"Content-Length: +19", b"Content-Length: 0x13", b"Content-Length: 19, 19"),
    *(b"Content-Length : 19", b" Content-Length: 19", b"Content-Length: -1", b"Content-Length: 19 "),
    *(b"Content-Length:", b"Content-Length: 19;x", b"content-length: 019", b"Content-Length: 99999999999999999999"),
    *(b"Content_Length: 19", b"Content-Length\t: 19", b"Content-Length: 1 9", b"Content-Length: \x0b19"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"transfer-encoding: gzip, chunked"),
    *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding: chunked, identity"),
    *(b"Transfer-Encoding: \x0bchunked", b"Transfer-Encoding:\tchunked", b"X: y\r\n Transfer-Encoding: chunked"),
    *(b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: websocket"),
    *(b"Expect: 100-continue", b"Idempotency-Key: k", b"Idempotency-Key: k2", b"X-Request-Id: r", b"X: \x00"),
    *(b"X: y\nZ: w", b"X: y\rZ: w", b": nameless", b"no colon", b"X\x80: y", b"X: \xff", b"X: y\r\n\tfolded", b""),
]
"""Of heads: plain ones and those over which parsers have disagreed."""
STARTS = [
    *(b"POST /v1/acks HTTP/1.1", b"POST /v1/failures HTTP/1.1", b"GET /healthz HTTP/1.1", b"POST /v1/acks HTTP/1.0"),
    *(
        b"post /v1/acks HTTP/1.1",
        b"POST  /v1/acks HTTP/1.1",
        b"POST /v1/acks?x=1 HTTP/1.1",
        b"POST /v1/%61cks HTTP/1.1",
    ),
    *(b"POST /v1/acks HTTP/1.1 ", b"POST /v1/acks  HTTP/1.1", b"POST\t/v1/acks HTTP/1.1", b"POST /v1/acks HTTP/2.0"),
    *(b"POST http://x/v1/acks HTTP/1.1", b"POST /v1/acks", b"GET /v1/acks HTTP/1.1", b" POST /v1/acks HTTP/1.1"),
    *(b"POST /v1/acks HTTP/1.1\r\n", b"POST //v1/acks HTTP/1.1", b"POST /v1/acks HTTP/1.10", b"OPTIONS * HTTP/1.1"),
]
BODIES = [
    *(BODY, OTHER, b"", b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), b"13;x=y\r\n" + BODY + b"\r\n0\r\nT: r\r\n\r\n"),
    *(b"0\r\n\r\n", b"13\n" + BODY + b"\n0\n\n", b"+13\r\n" + BODY + b"\r\n0\r\n\r\n", b"0x13\r\n" + BODY),
    *(b"13 \r\n" + BODY + b"\r\n0\r\n\r\n", b"00000000000000000013\r\n" + BODY + b"\r\n0\r\n\r\n", b"\r\n\r\n" + BODY),
]
PLAIN_HEAD = [STARTS[0], LINES[0], LINES[2], LINES[5]]


def assembled(lines: list[bytes], end: bytes, body: bytes) -> bytes:
    return end.join(lines) + end + end + body


PLAIN = assembled(PLAIN_HEAD, b"\r\n", BODY)
MALFORMED = assembled(PLAIN_HEAD, b"\r\n", b"{" * len(BODY))
TWO_LENGTHS = assembled([STARTS[-1], b"Transfer-Encoding: chunked", *PLAIN_HEAD[1:]], b"\r\n", BODY)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request in which at most a few things are not plain."""
    lines = list(PLAIN_HEAD)
    body = draw(st.sampled_from(BODIES)) if draw(st.booleans()) else BODY
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(lines)))
        if place == 0:
            lines[0] = draw(st.sampled_from(STARTS))
        elif place < len(lines) and draw(st.booleans()):
            lines[place] = draw(st.sampled_from(LINES))
        else:
            lines.insert(place, draw(st.sampled_from(LINES)))
    end = draw(st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\r\n"]))
    before = draw(st.sampled_from([b""] * 8 + [b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b" "]))
    return before + assembled(lines, end, body)


def fitting(before: bytes, line: bytes) -> bytes:
    """A head whose length is of all that comes behind the first one, as if that one's body were so long."""
    body_length = len(before) - before.find(b"\r\n\r\n") - 4
    head = assembled([*PLAIN_HEAD[:3], line, b"Content-Length: 0000"], b"\r\n", b"")
    return head.replace(b"0000", b"%04d" % (body_length + len(head)))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The bytes that a client sends: requests one after the other, cut anywhere, sometimes with a byte of it
    changed."""
    parts = draw(st.lists(st.one_of(requests(), st.just(PLAIN), st.just(MALFORMED)), min_size=1, max_size=4))
    if draw(st.booleans()):
        parts.append(fitting(b"".join(parts), draw(st.sampled_from(LINES))))
    stream = b"".join(parts)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        place = draw(st.integers(0, len(stream) - 1))
        kind = draw(st.integers(0, 2))
        new = draw(st.sampled_from([b"\r", b"\n", b" ", b"\t", b"\x00", b":", b"0", b"\xff", b"\r\n", b"\x0b", b"A"]))
        stream = stream[:place] + (b"" if kind == 1 else new) + stream[place + (kind != 2) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=3)))
    edges = [0, *cuts, len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges) if start < end]


REFUSED = [400, True]
ABSOLUTE = re.compile(r"\S+ https?:", re.IGNORECASE)

# A head that was poisoned: blank lines before a request, of which as much came as its body would be long.
POISON = assembled([*PLAIN_HEAD[:3], b"Content-Length: 200"], b"\r\n", b" " * 200)
BLANK = [[b"\r\n\r\n" + POISON[:200], POISON[200:]], [b"\r\n\r\n" + PLAIN + b" " * (200 - len(PLAIN))]]


UPGRADE = [b"Connection: upgrade", b"Upgrade: websocket"]
UPGRADED = assembled([STARTS[0], *UPGRADE, *PLAIN_HEAD[1:]], b"\r\n", BODY)


@given(streams())
@example(BLANK[0] + BLANK[1])
@example([UPGRADED + PLAIN])
@example([UPGRADED[: -len(BODY)], BODY])
@examples(800, 40_000)
def test_the_short_way_reads_the_bytes_as_the_server_does(server: tuple[Served, Seen], parts: list[bytes]) -> None:
    """The same requests with the same bodies, the same answers and the same end, however they are cut and whatever was
    remembered of earlier heads."""
    requests, statuses = heard(server, Http1Protocol, parts)
    for _ in range(2):  # with what it has remembered by then
        fast_requests, fast_statuses = heard(server, AckProtocol, parts)
        if statuses[-2:] == REFUSED:
            # When it meets what is no request the server drops those that wait for an answer before them, and says 400
            # in the place of the answer that it owes. We have done and answered more of them by then, or say nothing.
            assert fast_statuses[-1]
            assert fast_requests[: len(requests)] == requests
        else:
            assert (fast_requests, fast_statuses) == (requests, statuses)


@given(streams())
@example([PLAIN.replace(b" /", b" http://x/", 1)])
@example([TWO_LENGTHS[: -len(BODY)], BODY + PLAIN])
@example([UPGRADED])
@example([UPGRADED[: -len(BODY)], PLAIN])
@examples(800, 40_000)
def test_two_parsers_never_see_two_things_in_the_same_bytes(server: tuple[Served, Seen], parts: list[bytes]) -> None:
    """A proxy that reads as another server does could be made to pass on what we take for a second request. So where
    h11, which is strict, goes on, we see what it sees; and where we see more than it, it has refused."""
    fast_requests, (*_, _) = heard(server, AckProtocol, parts)
    h11_requests, (*h11_statuses, _) = heard(server, H11Protocol, parts)
    absolute = [place for place, (target, _) in enumerate(h11_requests) if ABSOLUTE.match(target)]
    if absolute:
        # We take a proxy's form of a path for that path, as a server has to; uvicorn on h11 knows no such path.
        fast_requests, h11_requests = fast_requests[: absolute[0]], h11_requests[: absolute[0]]
    common = min(len(fast_requests), len(h11_requests))
    assert fast_requests[:common] == h11_requests[:common]
    if len(fast_requests) > common:
        assert 400 in h11_statuses, "h11 waits for more where we have gone on"


@pytest.mark.parametrize("start", STARTS[:3])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_offer_of_another_protocol_changes_nothing(
    server: tuple[Served, Seen], start: bytes, is_chunked: bool
) -> None:
    """Not what the request says, nor where the next one begins, however both come and whatever is still under way."""
    length = b"Transfer-Encoding: chunked" if is_chunked else PLAIN_HEAD[-1]
    body = BODIES[3] if is_chunked else BODY
    lines = [start, *PLAIN_HEAD[1:3], length]
    stream = assembled([*lines, *UPGRADE], b"\r\n", body) * 2 + PLAIN
    expected_result = heard(server, AckProtocol, [assembled(lines, b"\r\n", body) * 2 + PLAIN])
    assert len(expected_result[0]) == 3
    assert heard(server, AckProtocol, [bytes([byte]) for byte in stream]) == expected_result
    for place in range(len(stream) + 1):
        assert heard(server, AckProtocol, [stream[:place], stream[place:]]) == expected_result, place
    running, _ = server
    running.app.submit, submit = lambda call, future: None, running.app.submit
    try:
        requests, statuses = heard(server, AckProtocol, [PLAIN, stream])
    finally:
        running.app.submit = submit
    assert (requests, statuses) == ([("ack None", BODY)], [False])


def test_an_offer_costs_an_ack_nothing(server: tuple[Served, Seen]) -> None:
    """Its head is remembered as others are, and not read again."""
    assert heard(server, AckProtocol, [UPGRADED]) == ([("ack None", BODY)], [200, False])
    running, requests = server
    requests.clear()
    connection = running.connect(AckProtocol)
    connection.protocol.parser = None
    connection.feed(UPGRADED)
    assert requests == [("ack None", BODY)]
    connection.lose()


CHUNKED = b"Transfer-Encoding: chunked"
NO_REQUESTS = [
    *(b"\x00", b"POST /v1/acks HTTP/1.1\r\n:\r\n", b"POST http://: HTTP/1.1\r\n\r\n"),
    *(b"CONNECT x:443 HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * (HEAD + 2)),
    assembled([*PLAIN_HEAD[:3], CHUNKED], b"\r\n", b"no length"),
    assembled([*PLAIN_HEAD[:3], CHUNKED, *UPGRADE], b"\r\n", b"no length"),
]


@pytest.mark.parametrize("junk", NO_REQUESTS, ids=range(len(NO_REQUESTS)))
def test_what_is_said_to_junk_is_no_answer_to_what_came_before_it(server: tuple[Served, Seen], junk: bytes) -> None:
    """Of two requests on a connection the first is done, whatever the second is: its caller is told so, or nothing."""
    assert heard(server, AckProtocol, [junk[:1], junk[1:]])[1] in ([400, True], [413, True])
    running, _ = server
    running.app.submit, submit = lambda call, future: None, running.app.submit
    try:
        for parts in ([PLAIN + junk[:1], junk[1:]], [PLAIN, junk[:1], junk[1:]], [PLAIN + PLAIN + junk[:1], junk[1:]]):
            requests, statuses = heard(server, AckProtocol, parts)
            assert (requests, statuses) == ([("ack None", BODY)], [True])
    finally:
        running.app.submit = submit


def test_a_request_that_has_its_answer_gets_no_second_one(server: tuple[Served, Seen]) -> None:
    """Nor half of one and another in its middle: what is junk behind an answer ends the connection."""
    first = assembled([b"POST /nowhere HTTP/1.1", LINES[0], CHUNKED], b"\r\n", b"")
    assert heard(server, AckProtocol, [first, b"no length"])[1] == [404, True]
    running, _ = server
    app: Any = running.app

    async def half(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"400")]})
        while (await receive())["type"] != "http.disconnect":
            pass

    app.app, inner = half, app.app
    try:
        assert heard(server, AckProtocol, [first, b"no length"])[1] == [200, True]
    finally:
        app.app = inner


@pytest.mark.parametrize("head", [b"CONNECT x:443 HTTP/1.1", b"CONNECT /v1/acks HTTP/1.1"])
def test_no_tunnel_is_opened(server: tuple[Served, Seen], head: bytes) -> None:
    stream = assembled([head, *PLAIN_HEAD[1:]], b"\r\n", BODY) + PLAIN
    for parts in ([stream], [stream[: -len(PLAIN)], PLAIN]):
        assert heard(server, AckProtocol, parts) == ([], REFUSED)


def test_every_byte_is_a_place_to_cut_at(server: tuple[Served, Seen]) -> None:
    """In a plain request, one in chunks, and between pipelined ones, before and after the head is known."""
    chunked_head = assembled([*PLAIN_HEAD[:3], b"Transfer-Encoding: chunked"], b"\r\n", BODIES[3])
    stream = PLAIN + chunked_head + PLAIN
    expected_result = [("ack None", BODY)] * 3, [200, 200, 200, False]
    for place in range(len(stream) + 1):
        assert heard(server, AckProtocol, [stream[:place], stream[place:]]) == expected_result, place
    for place in range(len(PLAIN)):
        assert heard(server, AckProtocol, [PLAIN, PLAIN[:place], PLAIN[place:]])[0] == [("ack None", BODY)] * 2
    assert heard(server, AckProtocol, [bytes([byte]) for byte in stream]) == expected_result


def test_a_head_is_remembered_with_its_own_body_alone(server: tuple[Served, Seen]) -> None:
    """Not with what the next one in the same packet says, where the first was refused at once."""
    second = fitting(MALFORMED, b"X: 2")
    requests, statuses = heard(server, AckProtocol, [MALFORMED + second])
    assert (requests, statuses) == ([("ack None", MALFORMED[-len(BODY) :])], [422, False])
    requests, statuses = heard(server, AckProtocol, [PLAIN + PLAIN[: len(second)]])
    assert (requests[0], statuses[0]) == (("ack None", BODY), 200)
