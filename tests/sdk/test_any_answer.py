"""For any answer, both clients return a usable value or raise an error of this package."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lastbit import (
    AckResult,
    AsyncClient,
    Client,
    InvalidRequest,
    LastbitError,
    NotFound,
    Retry,
    ServiceError,
    UnexpectedAnswer,
)
from lastbit.groups import Commit
from lastbit.retry import retry_after_seconds
from tests.mutants import mutant

EXAMPLES = 400 * (20 if os.environ.get("LASTBIT_SOAK") == "1" or os.environ.get("LASTBIT_FUZZ") else 1)
HASTY = Retry(attempts=2, deadline=0.001, base=0)

TIME = "2026-05-04T10:00:00Z"
BATCH = {
    "id": 7,
    "key": "k",
    "labels": {"a": "b"},
    "state": "open",
    "group_size": 8192,
    "items": 3,
    "acked": 1,
    "failed": 1,
    "pending": 1,
    "complete": False,
    "succeeded": False,
    "parent": None,
    "seal_at": 9,
    "expires_in": 5,
    "deadline": TIME,
    "tolerated_failures": 1,
    "tolerated_failure_percentage": 2,
    "on_exceeded": "cancel",
    "exceeded": True,
    "created_at": TIME,
    "updated_at": TIME,
    "sealed_at": TIME,
    "ended_at": None,
}
RANGE = {"start": 1, "end": 3, "first": "7:0:1", "last": "7:0:2", "reasons": {"7:0:1": "late"}}
GROUP = {"name": "g", "partitions": 2, "partition_of": "crc32", "ttl": 10, "release": 30.5, "created_at": TIME}
INSTANCE = {
    "process": "p",
    "instance": "i",
    "status": "running",
    "version": 1,
    "state": {"n": 1},
    "parked": 0,
    "created_at": TIME,
    "updated_at": TIME,
    "finished_at": None,
}
DONE = {"batch": 7, "key": None, "newly": True, "succeeded": True, "newly_succeeded": True}
EVENT = {"position": 4, "id": "e", "type": "t", "batch": None, "key": "k", "data": {"n": 1}, "at": TIME}
COUNTER = {"topic": "t", "partition": 0, "generation": 0, "offset": 1, "child": 0, "value": 3}
WEBHOOK = {
    "id": 1,
    "url": "https://a.example",
    "types": ["t"],
    "label": None,
    "state": "active",
    "position": 0,
    "created_at": TIME,
    "secret": "whsec_",
}

CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "ack": (
        lambda client: client.ack(["7:0:0", "7:0:1"]),
        {"applied": 1, "repeated": 0, "completed": [DONE], "rejected": [{"item": "7:0:1", "reason": "expired"}]},
    ),
    "open": (lambda client: client.open(items=3), {**BATCH, "start": 0, "count": 3, "newly": False}),
    "extend": (
        lambda client: client.batch(7).extend(2),
        {"batch": 7, "group_size": 8192, "start": 3, "count": 2, "items": 5},
    ),
    "update": (lambda client: client.batch(7).update(deadline=None), BATCH),
    "seal": (lambda client: client.batch(7).seal(), {**BATCH, "newly": False, "newly_succeeded": False}),
    "wait": (lambda client: client.batch(7).wait(timeout=0), BATCH),
    "batches": (lambda client: client.batches(), {"batches": [BATCH], "next": "c"}),
    "counts": (lambda client: client.counts(), {"states": {"open": 1, "sealed": 0}, "total": 1, "exact": True}),
    "pending": (lambda client: client.batch(7).pending(), {"ranges": [RANGE], "next": None}),
    "failed": (lambda client: client.batch(7).failed(), {"ranges": [RANGE, RANGE], "next": None}),
    "verify": (
        lambda client: client.batch(7).verify(),
        {
            "ok": True,
            "items": 3,
            "acked": 1,
            "failed": 1,
            "pending": 1,
            "faults": ["text"],
            "counted": {"acked": 1, "failed": 1},
        },
    ),
    "explain": (
        lambda client: client.batch(7).explain(),
        {"batch": 7, "state": "open", "done": False, "reasons": [{"code": "open", "text": "It is open.", "n": 1}]},
    ),
    "events": (lambda client: client.events(), {"events": [EVENT], "next": 4, "last": 4}),
    "append": (
        lambda client: client.append_event(id="e", type="t"),
        {"events": [{"id": "e", "position": 4, "repeated": False}]},
    ),
    "sync": (
        lambda client: client.groups.sync("g", "w", "s"),
        {
            "ttl": 10,
            "release": [1],
            "release_within": 30,
            "assigned": [{"partition": 0, "epoch": 1, "floor": 1, "high": 2, "outstanding": "AQAA", "token": None}],
        },
    ),
    "commits": (
        lambda client: client.groups.commit_many("g", [Commit(0, 1, b"")], worker="w"),
        {"results": [{"partition": 0, "code": None}]},
    ),
    "groups": (lambda client: client.groups.list(), {"groups": [{**GROUP, "workers": 1, "owned": 2}], "next": None}),
    "processes": (
        lambda client: client.processes.get("p", "i"),
        {
            **INSTANCE,
            "history": [{"event": "e", "position": 1, "status": "handled", "error": None, "at": TIME}],
            "timers": [{"timer": "t", "due_at": TIME, "data": None}],
            "commands": [],
        },
    ),
    "retry": (lambda client: client.processes.retry("p", "i"), {"retrying": 1}),
    "tally": (lambda client: client.tally("t").get("k"), {"key": "k", "value": 3, "sources": [COUNTER]}),
    "webhook": (lambda client: client.webhooks.create("https://a.example"), WEBHOOK),
    "redeliver": (lambda client: client.webhooks.redeliver(1), {"redelivered": 1}),
}

HUGE, DEEP = "@huge@", "@deep@"
"""Values that Python's json module does not write."""


def encoded(data: Any) -> bytes:
    text = json.dumps(data)
    text = text.replace(f'"{HUGE}"', "9" * 5000).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.encode()


JUNK = st.one_of(
    st.sampled_from([HUGE, DEEP, "9999-12-31T23:59:59-23:59", "7:0:9", "\ud800", {}, [], [[]], {"a": [1]}, None]),
    st.integers(),
    st.sampled_from([0, -1, 1 << 63, 10**300, 0.5, float("nan"), float("inf")]),
    st.booleans(),
    st.text(max_size=5),
)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, name))


@st.composite
def wrong_answers(draw: st.DrawFn) -> tuple[str, bytes]:
    """A call and its answer with one or two values replaced or removed."""
    name = draw(st.sampled_from(sorted(CALLS)))
    answer = [copy.deepcopy(CALLS[name][1])]
    for _ in range(draw(st.integers(1, 2))):
        *outer, last = draw(st.sampled_from(list(places(answer))[1:]))
        inner: Any = answer
        for key in outer:
            inner = inner[key]
        if isinstance(inner, dict) and draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = copy.deepcopy(draw(JUNK))
    return name, encoded(answer[0])


def use(value: Any) -> None:
    """Use the result as a caller would."""
    repr(value)
    for name in ("ids", "ended", "resolved", "count", "rejected_count"):
        repr(getattr(value, name, None))
    if isinstance(value, AckResult):
        use(value.merged(value).completed)


def take(call: Callable[[Any], Any], client: Client) -> None:
    value = call(client)
    for element in itertools.islice(value, 3) if isinstance(value, Iterator) else [value]:
        use(element)


async def take_awaited(call: Callable[[Any], Any], client: AsyncClient) -> None:
    value = call(client)
    if inspect.isawaitable(value):
        use(await value)
        return
    count = 0
    async for element in value:
        use(element)
        count += 1
        if count == 3:
            break
    await value.aclose()


class Answers(httpx.MockTransport):
    """The same answer to the first five requests: pages may never end."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        numbers = iter(range(5))

        def answer(_: httpx.Request) -> httpx.Response:
            if next(numbers, None) is None:
                return httpx.Response(404, json={"code": "batch_not_found", "detail": "it ended"})
            return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))

        super().__init__(answer)


def ask_both(call: Callable[[Any], Any], status: int, headers: Any, body: bytes) -> None:
    """Run the call with both clients; any exception but a LastbitError fails the test."""
    with Client(retry=HASTY, transport=Answers(status, headers, body)) as client, suppress(LastbitError):
        take(call, client)

    async def run() -> None:
        async with AsyncClient(retry=HASTY, transport=Answers(status, headers, body)) as client:
            with suppress(LastbitError):
                await take_awaited(call, client)

    asyncio.run(run())


def ask_once(call: Callable[[Any], Any], status: int, body: bytes) -> None:
    with Client(retry=HASTY, transport=Answers(status, [], body)) as client:
        take(call, client)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_unchanged_answers_are_valid(name: str) -> None:
    """The tests below start from these valid answers. A wait with a timeout of zero ends without the batch."""
    call, answer = CALLS[name]
    with suppress(TimeoutError if name == "wait" else NotFound):
        ask_once(call, 200, encoded(answer))


@mutant("the-types-of-an-answer-are-trusted", "lastbit._protocol:Service.decoded", "_shapes.check(value)", "pass")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_one_wrong_value_anywhere_is_a_lastbit_error_or_harmless(name: str) -> None:
    """Each value in turn is replaced by one of each type."""
    call, answer = CALLS[name]
    for *outer, last in list(places([answer]))[1:]:
        for wrong in (None, True, 0.5, "x", [], {"a": [1]}, HUGE):
            changed: Any = [copy.deepcopy(answer)]
            inner = changed
            for key in outer:
                inner = inner[key]
            inner[last] = wrong
            with suppress(LastbitError, TimeoutError):
                ask_once(call, 200, encoded(changed[0]))


@settings(max_examples=EXAMPLES)
@given(wrong_answers())
def test_an_answer_of_any_shape_is_a_value_or_a_lastbit_error(wrong: tuple[str, bytes]) -> None:
    """Any value may be replaced or missing."""
    name, body = wrong
    ask_both(CALLS[name][0], 200, [], body)


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *(b"retry-after", b"date", b"content-encoding", b"location", b"set-cookie", b"content-type"),
                *(b"idempotency-replayed", b"x"),
            ]
        ),
        st.one_of(
            st.sampled_from(
                [
                    *(b"gzip", b"br, deflate", b"1" * 400, b"1e9", b"-1", b"http://[::1", b"//\xff", b"a=b; expires=x"),
                    b"Fri, 31 Dec 99999 23:59:59 GMT",
                    b"Fri, 31 Dec 99999999999999999999 23:59:59 GMT",
                    b"Fri, 31 Dec 9999 23:59:59 -9999999999999999999",
                    b"Fri, 01 Jan 0001 00:00:00 +2359",
                    b"text/html; charset=nonsense",
                ]
            ),
            st.binary(max_size=20).map(lambda value: value.translate(None, b"\0\r\n")),
        ),
    ),
    max_size=4,
)
PROBLEMS = st.fixed_dictionaries(
    {},
    optional={
        "code": st.one_of(st.sampled_from(["invalid_request", "batch_not_found", "news"]), JUNK),
        "detail": JUNK,
        "title": JUNK,
        "errors": st.one_of(JUNK, st.lists(st.one_of(JUNK, st.just({"loc": ["body"], "msg": "wrong"})), max_size=3)),
    },
)
BODIES = st.one_of(
    st.binary(max_size=50),
    PROBLEMS.map(encoded),
    JUNK.map(encoded),
    st.sampled_from([b"<html>", b"", b"\xff\xfe", b"[" * 100_000, b'{"code": "a", "detail": ' + b"9" * 5000 + b"}"]),
)


@mutant(
    "the-places-of-a-problem-are-trusted",
    "lastbit._protocol:Service.error",
    "[place for place in places if isinstance(place, dict)] if isinstance(places, list) else []",
    "places or []",
)
@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(sorted(CALLS)),
    st.one_of(st.integers(100, 999), st.sampled_from([204, 301, 400, 404, 409, 422, 429, 500, 503])),
    HEADERS,
    BODIES,
)
@example("ack", 503, [(b"retry-after", b"Fri, 31 Dec 99999999999999999999 23:59:59 GMT")], b"{}")
@example("ack", 422, [], b'{"code": "invalid_request", "errors": 5}')
@example("open", 422, [], b'{"code": "invalid_request", "errors": [5], "detail": {"a": 1}}')
@example("batches", 200, [(b"set-cookie", "é=é".encode())], encoded(CALLS["batches"][1]))
def test_an_answer_with_any_status_headers_and_body_is_a_value_or_a_lastbit_error(
    name: str, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """The service's own body, a gateway's, or noise."""
    ask_both(CALLS[name][0], status, headers, body)


@pytest.fixture(scope="module")
def noise() -> Iterator[tuple[str, list[bytes]]]:
    """A port that answers each request with the bytes in the list, and closes."""
    content = [b""]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        while b"\r\n\r\n" not in connection.recv(65536, socket.MSG_PEEK):
                            pass
                        connection.recv(65536)
                        connection.sendall(content[0])

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", content
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@settings(max_examples=EXAMPLES // 10)
@given(
    st.one_of(
        st.binary(max_size=100),
        st.builds(
            lambda status, headers, body: b"HTTP/1.1 %d X\r\n%s\r\n\r\n%s" % (status, headers, body),
            st.integers(0, 1200),
            st.one_of(
                st.binary(max_size=30),
                st.sampled_from(
                    [
                        *(b"Content-Length: 5", b"Content-Length: x", b"Transfer-Encoding: chunked"),
                        *(b"Content-Encoding: gzip", b"Location: http://[", b"Retry-After: \xff"),
                    ]
                ),
            ),
            st.one_of(st.binary(max_size=30), st.sampled_from([b"5\r\nab", b"ffffffffffffffffff\r\n"])),
        ),
    )
)
def test_any_received_bytes_are_a_value_or_a_lastbit_error(noise: tuple[str, list[bytes]], answer: bytes) -> None:
    """Another program, without HTTP, may listen there."""
    url, content = noise
    content[0] = answer
    with Client(url, retry=HASTY) as client, suppress(LastbitError):
        use(client.ack("7:0:0"))

    async def run() -> None:
        async with AsyncClient(url, retry=HASTY) as client:
            with suppress(LastbitError):
                use(await client.ack("7:0:0"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("places", "errors"),
    [("5", ()), ("[5, null]", ()), ('{"a": 1}', ()), ('[{"msg": "wrong"}, 5]', ({"msg": "wrong"},))],
)
def test_the_errors_of_a_problem_are_objects(places: str, errors: tuple[Any, ...]) -> None:
    """Entries that aren't objects are left out; the problem itself is kept."""
    with pytest.raises(InvalidRequest, match="no good") as excinfo:
        ask_once(
            CALLS["ack"][0], 422, f'{{"code": "invalid_request", "detail": "no good", "errors": {places}}}'.encode()
        )
    assert excinfo.value.errors == errors


@pytest.mark.parametrize("body", ["[]", '{"code": 5}', '{"code": "a", "detail": [1]}', f'{{"code": {"9" * 5000}}}'])
def test_a_body_that_is_not_a_problem_is_a_gateways_answer(body: str) -> None:
    """The status determines the error."""
    with pytest.raises(ServiceError, match="without the error document") as excinfo:
        ask_once(CALLS["ack"][0], 500, body.encode())
    assert excinfo.value.code == "http_500"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("open", ("group_size",), 0),
        ("open", ("count",), -1),
        ("open", ("count",), (1 << 63) - 1),
        ("append", ("events",), []),
        ("append", ("events",), ""),
        ("extend", ("start",), "3"),
        ("wait", ("state",), ["open"]),
        ("wait", ("created_at",), "9999-12-31T23:59:59-23:59"),
        ("ack", ("applied",), None),
        ("ack", ("applied",), True),
        ("ack", ("completed", 0, "batch"), [7]),
        ("pending", ("next",), 5),
        ("pending", ("ranges", 0, "last"), "7:0:x"),
        ("pending", ("ranges", 0, "end"), 9),
        ("sync", ("ttl",), float("nan")),
        ("retry", ("retrying",), "1"),
    ],
)
def test_an_answer_with_a_wrong_value_is_unexpected(name: str, path: tuple[Any, ...], value: Any) -> None:
    """The call itself raises the error, not a later use of its result."""
    answer = copy.deepcopy(CALLS[name][1])
    *outer, last = path
    inner = answer
    for key in outer:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(UnexpectedAnswer):
        ask_once(CALLS[name][0], 200, encoded(answer))


@mutant(
    "a-date-beyond-all-years-is-raised",
    "lastbit.retry:_http_date",
    "(ValueError, OverflowError, TypeError, IndexError)",
    "ValueError",
)
@pytest.mark.parametrize(
    "text",
    [
        "Fri, 31 Dec 99999 23:59:59 GMT",
        "Fri, 31 Dec 99999999999999999999 23:59:59 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999999999999999999",
    ],
)
def test_a_retry_after_that_is_not_a_date_is_ignored(text: str) -> None:
    """An invalid Date to compare it with is ignored too."""
    assert retry_after_seconds({"retry-after": text}) is None
    assert retry_after_seconds({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT", "date": text}) == 0
