"""The bytes of connections: the fast path reads them as uvicorn does, and no two parsers may read different
requests."""

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

from api.fast_path.protocol import FastProtocol
from api.server.connection import HEAD
from api.server.upgrades import Http1Protocol
from core.acks.call import AckResult
from tests.fuzz.sizes import examples
from tests.fuzz.wire import Served, served

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fuzz-wire"), pytest.mark.timeout(3600)]


class Seen(list[tuple[str, bytes]]):
    """The requests that were read: path or verb, and body."""


class Done:
    error = None
    answer = AckResult()


@pytest.fixture(scope="module")
def recording() -> Iterator[tuple[Served, Seen]]:
    """A server whose acks are recorded and answered at once, so that everything is done in order."""
    requests = Seen()
    with served() as running:
        app: Any = running.app
        acks: Any = app.state.acks
        parse, inner = acks.parse, app.app

        def record_call(verb: Any, key: Any, content: bytes, caller: Any) -> Any:
            requests.append((f"{verb} {key!r}", content))
            return parse(verb, key, content, caller)

        async def record_request(scope: Any, receive: Any, send: Any) -> None:
            requests.append((f"{scope['method']} {scope['path']}", b""))
            await inner(scope, receive, send)

        acks.parse, app.app = record_call, record_request
        acks.submit = lambda call, receiver: receiver(Done())
        yield running, requests


def requests_and_answers(
    recording: tuple[Served, Seen], kind: Any, parts: list[bytes]
) -> tuple[list[tuple[str, bytes]], list[Any]]:
    """The requests that the protocol read from the bytes, and its answers: statuses and bodies."""
    running, requests = recording
    requests.clear()
    connection = running.connect(kind)
    refusals: list[int] = []
    try:
        connection.feed(*parts)
    except LocalProtocolError:
        # h11 has announced the close, and uvicorn would answer 400 to later bytes that are no request.
        refusals = [400]
        connection.transport.close()
    # uvicorn answers 400 to an unknown transfer coding and to HTTP/2.0; Lastbit answers 501 and 505.
    output = re.sub(rb"HTTP/1\.1 50[15] ", b"HTTP/1.1 400 ", connection.transport.written)
    statuses = re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", output)
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
"""Header lines: plain ones, and those that parsers have interpreted differently."""
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
    """A request with at most a few unusual things."""
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
    prefix = draw(st.sampled_from([b""] * 8 + [b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b" "]))
    return prefix + assembled(lines, end, body)


def fitting(before: bytes, line: bytes) -> bytes:
    """A head whose length covers everything after the first head, as if that were the first one's body."""
    body_length = len(before) - before.find(b"\r\n\r\n") - 4
    head = assembled([*PLAIN_HEAD[:3], line, b"Content-Length: 0000"], b"\r\n", b"")
    return head.replace(b"0000", b"%04d" % (body_length + len(head)))


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The bytes that a client sends: one request after the other, split anywhere, sometimes with a byte changed."""
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

# A poisoned head: blank lines before a request, followed by as many bytes as its body is long.
POISON = assembled([*PLAIN_HEAD[:3], b"Content-Length: 200"], b"\r\n", b" " * 200)
BLANK = [[b"\r\n\r\n" + POISON[:200], POISON[200:]], [b"\r\n\r\n" + PLAIN + b" " * (200 - len(PLAIN))]]


UPGRADE = [b"Connection: upgrade", b"Upgrade: websocket"]
UPGRADED = assembled([STARTS[0], *UPGRADE, *PLAIN_HEAD[1:]], b"\r\n", BODY)


@given(streams())
@example(BLANK[0] + BLANK[1])
@example([UPGRADED + PLAIN])
@example([UPGRADED[: -len(BODY)], BODY])
@examples(800, 40_000)
def test_the_fast_path_reads_the_bytes_as_the_server_does(recording: tuple[Served, Seen], parts: list[bytes]) -> None:
    """The same requests with the same bodies, the same answers and the same end, however they are split and whatever
    heads are cached."""
    requests, statuses = requests_and_answers(recording, Http1Protocol, parts)
    for _ in range(2):  # the second time with cached heads
        fast_requests, fast_statuses = requests_and_answers(recording, FastProtocol, parts)
        if statuses[-2:] == REFUSED:
            # On invalid input the server drops earlier requests that wait for their answers, and answers 400 instead.
            # The fast path has answered more of them by then, or answers nothing.
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
def test_two_parsers_never_read_different_requests(recording: tuple[Served, Seen], parts: list[bytes]) -> None:
    """A proxy that reads like another server could be made to pass on bytes that Lastbit reads as a second request. So
    where h11, which is strict, continues, both must read the same; and where Lastbit reads more, h11 has refused."""
    fast_requests, (*_, _) = requests_and_answers(recording, FastProtocol, parts)
    h11_requests, (*h11_statuses, _) = requests_and_answers(recording, H11Protocol, parts)
    absolute_places = [place for place, (target, _) in enumerate(h11_requests) if ABSOLUTE.match(target)]
    if absolute_places:
        # Lastbit reads a proxy's form of a path as that path, as a server must; uvicorn on h11 has no such path.
        fast_requests, h11_requests = fast_requests[: absolute_places[0]], h11_requests[: absolute_places[0]]
    common_count = min(len(fast_requests), len(h11_requests))
    assert fast_requests[:common_count] == h11_requests[:common_count]
    if len(fast_requests) > common_count:
        assert 400 in h11_statuses, "h11 waits for more bytes where Lastbit has continued"


@pytest.mark.parametrize("start", STARTS[:3])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_offer_of_another_protocol_changes_nothing(
    recording: tuple[Served, Seen], start: bytes, is_chunked: bool
) -> None:
    """Neither the meaning of the request nor the start of the next one, however both are split and whatever is under
    way."""
    length = b"Transfer-Encoding: chunked" if is_chunked else PLAIN_HEAD[-1]
    body = BODIES[3] if is_chunked else BODY
    lines = [start, *PLAIN_HEAD[1:3], length]
    stream = assembled([*lines, *UPGRADE], b"\r\n", body) * 2 + PLAIN
    expected_result = requests_and_answers(recording, FastProtocol, [assembled(lines, b"\r\n", body) * 2 + PLAIN])
    assert len(expected_result[0]) == 3
    assert requests_and_answers(recording, FastProtocol, [bytes([byte]) for byte in stream]) == expected_result
    for place in range(len(stream) + 1):
        assert requests_and_answers(recording, FastProtocol, [stream[:place], stream[place:]]) == expected_result, place
    running, _ = recording
    running.app.state.acks.submit, submit = lambda call, receiver: None, running.app.state.acks.submit
    try:
        requests, statuses = requests_and_answers(recording, FastProtocol, [PLAIN, stream])
    finally:
        running.app.state.acks.submit = submit
    assert (requests, statuses) == ([("ack None", BODY)], [False])


def test_an_upgrade_offer_does_not_slow_an_ack(recording: tuple[Served, Seen]) -> None:
    """Its head is cached like others, and not parsed again."""
    assert requests_and_answers(recording, FastProtocol, [UPGRADED]) == ([("ack None", BODY)], [200, False])
    running, requests = recording
    requests.clear()
    connection = running.connect(FastProtocol)
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
def test_the_answer_to_junk_is_not_taken_for_an_earlier_requests_answer(
    recording: tuple[Served, Seen], junk: bytes
) -> None:
    """The first of two requests on a connection is done, whatever the second is: its client gets that answer, or
    none."""
    assert requests_and_answers(recording, FastProtocol, [junk[:1], junk[1:]])[1] in ([400, True], [413, True])
    running, _ = recording
    running.app.state.acks.submit, submit = lambda call, receiver: None, running.app.state.acks.submit
    try:
        for parts in ([PLAIN + junk[:1], junk[1:]], [PLAIN, junk[:1], junk[1:]], [PLAIN + PLAIN + junk[:1], junk[1:]]):
            requests, statuses = requests_and_answers(recording, FastProtocol, parts)
            assert (requests, statuses) == ([("ack None", BODY)], [True])
    finally:
        running.app.state.acks.submit = submit


def test_an_answered_request_gets_no_second_answer(recording: tuple[Served, Seen]) -> None:
    """Nor half of one with another in its middle: junk after an answer ends the connection."""
    first = assembled([b"POST /nowhere HTTP/1.1", LINES[0], CHUNKED], b"\r\n", b"")
    assert requests_and_answers(recording, FastProtocol, [first, b"no length"])[1] == [404, True]
    running, _ = recording
    app: Any = running.app

    async def half_answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"400")]})
        while (await receive())["type"] != "http.disconnect":
            pass

    app.app, inner = half_answer, app.app
    try:
        assert requests_and_answers(recording, FastProtocol, [first, b"no length"])[1] == [200, True]
    finally:
        app.app = inner


@pytest.mark.parametrize("head", [b"CONNECT x:443 HTTP/1.1", b"CONNECT /v1/acks HTTP/1.1"])
def test_no_tunnel_is_opened(recording: tuple[Served, Seen], head: bytes) -> None:
    stream = assembled([head, *PLAIN_HEAD[1:]], b"\r\n", BODY) + PLAIN
    for parts in ([stream], [stream[: -len(PLAIN)], PLAIN]):
        assert requests_and_answers(recording, FastProtocol, parts) == ([], REFUSED)


def test_requests_may_be_split_at_every_byte(recording: tuple[Served, Seen]) -> None:
    """In a plain request, a chunked one, and between pipelined ones, before and after the head is cached."""
    chunked_head = assembled([*PLAIN_HEAD[:3], b"Transfer-Encoding: chunked"], b"\r\n", BODIES[3])
    stream = PLAIN + chunked_head + PLAIN
    expected_result = [("ack None", BODY)] * 3, [200, 200, 200, False]
    for place in range(len(stream) + 1):
        assert requests_and_answers(recording, FastProtocol, [stream[:place], stream[place:]]) == expected_result, place
    for place in range(len(PLAIN)):
        assert (
            requests_and_answers(recording, FastProtocol, [PLAIN, PLAIN[:place], PLAIN[place:]])[0]
            == [("ack None", BODY)] * 2
        )
    assert requests_and_answers(recording, FastProtocol, [bytes([byte]) for byte in stream]) == expected_result


def test_a_head_is_cached_only_with_its_own_length(recording: tuple[Served, Seen]) -> None:
    """Not with the content of the next request in the same packet, if the first was refused at once."""
    second = fitting(MALFORMED, b"X: 2")
    requests, statuses = requests_and_answers(recording, FastProtocol, [MALFORMED + second])
    assert (requests, statuses) == ([("ack None", MALFORMED[-len(BODY) :])], [422, False])
    requests, statuses = requests_and_answers(recording, FastProtocol, [PLAIN + PLAIN[: len(second)]])
    assert (requests[0], statuses[0]) == (("ack None", BODY), 200)
