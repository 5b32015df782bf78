"""The fast path of opens, extends, seals, appends, tally entries, positions and reads gives the same responses as the
ordinary path."""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from lastbit.streams.snapshot import Snapshot
from tests.http.test_fast_path import JSON, Wire
from tests.mutants import mutant
from tests.support.servers import ServiceProcess, running_service, sqlite_file

KEY = "Idempotency-Key: k\r\n"
UNSEEN = 10**9
CHANGING = ("date", "connection", "content-length")
"""Headers that differ between two calls, or between a connection that stays and one that doesn't."""
TIMES = ("created_at", "updated_at", "sealed_at", "ended_at", "finished_at")


def request(method: str, path: str, body: Any = None, headers: str = JSON) -> bytes:
    """`body` is sent as JSON; bytes are sent as they are, and None has no length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    length = "" if body is None else f"Content-Length: {len(content)}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: lastbit\r\n{headers}{length}\r\n"
    return head.encode() + (b"" if body is None else content)


@pytest.fixture(scope="module")
def service_() -> Iterator[ServiceProcess]:
    with sqlite_file() as url, running_service(url, LASTBIT_DISPATCHER_EVERY="0", LASTBIT_JANITOR_EVERY="0") as running:
        # Ids that are part of no other number in a response.
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
            file.execute("INSERT INTO sqlite_sequence VALUES ('batches', 7000000)")
        for path, body in (
            (GROUP, {"partitions": 4, "ttl": 3600}),
            (f"{GROUP}/sync", {"worker": "w", "session": "s"}),
            (PROCESS, {"partitions": 1, "ttl": 3600}),
            ("/v1/consumer-groups/process.p/sync", {"worker": "w", "session": "s"}),
        ):
            status, _, _ = ask(running.port, request("POST" if path.endswith("/sync") else "PUT", path, body))
            assert status in (200, 201)
        for _ in range(2):  # the events that both paths read, whichever case runs first
            ask(running.port, request("POST", OPEN, {}))
        yield running


def ask(port: int, sent: bytes, *, ordinary: bool = False) -> tuple[int, dict[str, str], Any]:
    """The response on a new connection. A request that closes its connection takes the ordinary path."""
    wire = Wire(port)
    try:
        wire.send(
            sent.replace(b"Host: lastbit\r\n", b"Host: lastbit\r\nConnection: close\r\n", 1) if ordinary else sent
        )
        return wire.answer()
    finally:
        wire.close()


def took_the_fast_path(headers: dict[str, str]) -> bool:
    """The fast path writes its own headers first, Starlette those of the body."""
    names = list(headers)
    return names.index("cache-control") < names.index("content-type")


def without_numbers(document: Any, ids: dict[int, str]) -> Any:
    """A document without times, positions and ids, which differ between two calls."""
    if isinstance(document, dict):
        return {
            name: without_numbers(value, ids)
            for name, value in document.items()
            if name not in (*TIMES, "position", "last", "request_id")
        }
    if isinstance(document, list):
        return [without_numbers(value, ids) for value in document]
    if isinstance(document, int) and document in ids:
        return ids[document]
    if isinstance(document, str):
        for number, name in ids.items():
            document = document.replace(str(number), name)
    return document


OPEN, APPEND, GET = "/v1/batches", "/v1/events", "/v1/batches/{b}"
EXTEND, SEAL, WATERMARK = f"{GET}/items", f"{GET}/seal", f"{GET}/watermark"
PAGE = "/v1/events?after="
EVENT = {"id": "e{b}", "type": "t"}
GROUP = "/v1/consumer-groups/g"
APPLY, POSITION = "/v1/tallies/t-{b}/apply", f"{GROUP}/partitions/0/position"
SOURCE = {"topic": "ß", "partition": 0, "offset": 7}
ENTRY = {"key": "ü", "delta": -2, "source": SOURCE}
COMMIT = {"worker": "w", "epoch": 1, "snapshot": base64.b64encode(Snapshot(3, 8, (4, 6)).encode()).decode()}
POSITIONS = f"{GROUP}/positions"
ENTRY_0 = {name: value for name, value in COMMIT.items() if name != "worker"} | {"partition": 0, "head": 12}
PROCESS = "/v1/processes/p"
HANDLE = f"{PROCESS}/handle"
HANDLING = {
    "instance": "o{b}",
    "event": {"id": "e{b}", "position": 1},
    "fence": {"worker": "w", "epoch": 1},
    "version": 0,
    "state": {"ü": [1.5, None]},
}
TIMER = {"timers": [{"timer": "t", "after": 9}]}
FAST: list[tuple[str, str, Any, str]] = [
    ("POST", OPEN, {}, JSON),
    ("POST", OPEN, {"key": "ü", "labels": {"a": "ß"}, "items": 3, "sealed": True, "expires_in": 60}, JSON),
    ("POST", OPEN, {"items": 0, "sealed": True, "group_size": 64}, "Content-Type: application/json; charset=utf-8\r\n"),
    ("POST", OPEN, {"key": None, "parent": None}, JSON + "X-Request-Id: mine\r\n"),
    ("POST", OPEN, {"items": 2, "seal_at": 3}, JSON),
    ("POST", OPEN, {"items": 2, "tolerated_failures": 1, "on_exceeded": "cancel"}, JSON),
    ("POST", OPEN, {"items": 2, "deadline": "2999-05-04T08:00:00+02:00"}, JSON),
    ("POST", EXTEND, {"count": 5}, JSON),
    ("POST", EXTEND, {"count": 5, "digest": "a"}, JSON + "Idempotency-Key: digested\r\n"),
    ("POST", EXTEND, {"count": 5, "digest": "b"}, JSON + "Idempotency-Key: digested\r\n"),
    ("POST", EXTEND, {"count": 5, "digest": "a"}, JSON),
    ("POST", EXTEND.replace("{b}", str(UNSEEN)), {"count": 5}, JSON),
    ("POST", EXTEND, {"count": 5, "by": "{b}:0:0"}, JSON),
    ("POST", EXTEND, {"count": 5, "by": "{b}:0:8192"}, JSON),
    ("POST", EXTEND, {"count": 10**12}, JSON),
    ("POST", SEAL, {}, JSON),
    ("POST", SEAL, None, ""),
    ("POST", SEAL.replace("{b}", str(UNSEEN)), {}, JSON),
    ("GET", GET, None, ""),
    ("GET", GET.replace("{b}", str(UNSEEN)), None, ""),
    ("GET", WATERMARK, None, ""),
    ("GET", WATERMARK.replace("{b}", str(UNSEEN)), None, "X-Request-Id: mine\r\n"),
    ("GET", PAGE + "0&limit=1", None, ""),
    ("GET", PAGE + "1&limit=1", None, "X-Request-Id: mine\r\n"),
    ("POST", APPEND, {"events": [{**EVENT, "key": "ü", "data": {"a": ["ß", 1.5, None]}}]}, JSON),
    ("POST", APPEND, {"events": []}, JSON),
    ("POST", APPEND, {"events": [EVENT, EVENT]}, JSON),
]
FAST += [
    ("POST", APPLY, {"entries": [ENTRY, ENTRY, {**ENTRY, "key": "l"}]}, JSON),
    ("POST", APPLY, {"entries": []}, JSON),
    ("POST", APPLY, {"entries": [{**ENTRY, "key": "."}]}, JSON),
    ("POST", APPLY, {"entries": [{**ENTRY, "source": {**SOURCE, "offset": offset}} for offset in (1, 3, 2)]}, JSON),
    ("POST", APPLY, {"entries": [ENTRY], "fence": {"group": "g", "partition": 0, "worker": "w", "epoch": 1}}, JSON),
    ("POST", APPLY, {"entries": [ENTRY], "fence": {"group": "g", "partition": 0, "worker": "w", "epoch": 9}}, JSON),
    ("PUT", POSITION, COMMIT, JSON),
    ("PUT", POSITION, {**COMMIT, "token": "ü", "head": 2**63 - 1}, JSON),
    ("PUT", POSITION, {**COMMIT, "epoch": 9}, JSON),
    ("PUT", POSITION.replace("/g/", "/absent/"), COMMIT, JSON),
    ("PUT", POSITIONS, {"worker": "w", "positions": [ENTRY_0, {**ENTRY_0, "epoch": 9}, ENTRY_0]}, JSON),
    ("PUT", POSITIONS, {"worker": "v", "positions": [ENTRY_0]}, JSON),
    ("POST", HANDLE, {"handlings": [{**HANDLING, **TIMER}]}, JSON),
    ("POST", HANDLE, {"handlings": [HANDLING, HANDLING, {**HANDLING, "event": {"id": "f{b}", "position": 1}}]}, JSON),
    (
        "POST",
        HANDLE,
        {"handlings": [{**HANDLING, "fence": {"worker": "w", "epoch": 9}}, {**HANDLING, "finish": True}]},
        JSON,
    ),
    ("POST", HANDLE, {"handlings": [{**HANDLING, "version": "0"}, HANDLING, {**HANDLING, "error": "ü"}, 7]}, JSON),
    ("POST", HANDLE, {"handlings": [{}]}, JSON),
    ("POST", HANDLE.replace("/p/", "/absent/"), {"handlings": [HANDLING]}, JSON),
    ("PUT", POSITIONS.replace("/g/", "/absent/"), {"worker": "w", "positions": [ENTRY_0]}, JSON),
]
ORDINARY: list[tuple[str, str, Any, str]] = [
    ("POST", OPEN, {"items": "3"}, JSON),
    ("POST", OPEN, {"items": True}, JSON),
    ("POST", OPEN, {"items": -1}, JSON),
    ("POST", OPEN, {"itmes": 1}, JSON),
    ("POST", OPEN, {"labels": {"a:b": "c"}}, JSON),
    ("POST", OPEN, {"parent": "{b}:0:0"}, JSON),
    ("POST", OPEN, {"parent": "nothing"}, JSON),
    ("POST", OPEN, b"{", JSON),
    ("POST", OPEN, b"\xff\xfe", JSON),
    ("POST", OPEN, b"[" * 2000, JSON),
    ("POST", OPEN, {}, ""),
    ("POST", OPEN, {}, "Content-Type: text/plain\r\n"),
    ("POST", OPEN, {}, JSON + f"Idempotency-Key: {'k' * 256}\r\n"),
    ("POST", OPEN, {}, JSON + "Origin: http://elsewhere.example\r\n"),
    ("POST", OPEN, {}, JSON + "Authorization: Basic abc\r\n"),
    ("POST", OPEN + "?items=1", {}, JSON),
    ("POST", EXTEND, {}, JSON),
    ("POST", EXTEND, {"count": 1.0}, JSON),
    ("POST", EXTEND.replace("{b}", "007"), {"count": 1}, JSON),
    ("POST", EXTEND.replace("{b}", str(10**16 - 1)), {"count": 1}, JSON),
    ("POST", SEAL, {"really": True}, JSON),
    ("GET", GET + "?wait=0", None, ""),
    ("GET", GET + "?wait=x", None, ""),
    ("GET", GET + "/", None, ""),
    ("GET", WATERMARK + "?x=1", None, ""),
    ("GET", WATERMARK.replace("{b}", "007"), None, ""),
    ("GET", WATERMARK, {}, JSON),
    ("GET", PAGE + "01&limit=1", None, ""),
    ("GET", PAGE + "0&limit=0", None, ""),
    ("GET", PAGE + "0&limit=1001", None, ""),
    ("GET", PAGE + "0&limit=1&limit=2", None, ""),
    ("GET", PAGE + "0&limit=1&wait=0", None, ""),
    ("GET", PAGE + "0&limit=1&type=batch.opened", None, ""),
    ("GET", PAGE + "0&wait=61", None, ""),
    ("GET", PAGE + "0&wait=-1", None, ""),
    ("GET", PAGE + "0&wait=1&wait=1", None, ""),
    ("GET", PAGE + "0&wait=1&after=0", None, ""),
    ("GET", PAGE + "0&wait=1&limit=1001", None, ""),
    ("GET", PAGE + "0&wait=1&type=batch.openend", None, ""),
    ("GET", PAGE + "0&wait=1&batch={b}&kind=t", None, ""),
    ("GET", "/v1/events?limit=1&wait=1", None, ""),
    ("GET", PAGE + "0&limit=1&batch=x", None, ""),
    ("GET", PAGE + str(10**16 - 1), None, ""),
    ("GET", PAGE + "-1", None, ""),
    ("GET", "/v1/events?limit=1&after=0", None, ""),
    ("GET", "/v1/events?limit=1", None, ""),
    ("DELETE", OPEN, None, ""),
    ("POST", APPLY, {"entries": [{**ENTRY, "delta": "1"}]}, JSON),
    ("POST", APPLY, {"entries": [{**ENTRY, "key": ""}]}, JSON),
    ("POST", APPLY, {"entries": [ENTRY] * 10_001}, JSON),
    ("POST", APPLY.replace("t-", ".."), {"entries": [ENTRY]}, JSON),
    ("PUT", POSITION, {**COMMIT, "snapshot": "!"}, JSON),
    ("PUT", POSITION, {**COMMIT, "snapshot": "AAAA"}, JSON),
    ("PUT", POSITION, {**COMMIT, "epoch": "1"}, JSON),
    ("PUT", POSITION.replace("/0/", "/4096/"), COMMIT, JSON),
    ("PUT", POSITION.replace("/0/", "/00/"), COMMIT, JSON),
    ("PUT", POSITION.replace("/g/", "/lastbit.g/"), COMMIT, JSON),
    ("PUT", POSITIONS, {"worker": "w", "positions": []}, JSON),
    ("POST", HANDLE, {"handlings": []}, JSON),
    ("POST", HANDLE, {"handlings": [HANDLING] * 101}, JSON),
    ("POST", HANDLE, {"handlings": 7}, JSON),
    ("POST", HANDLE.replace("/p/", "/%70/"), {"handlings": [HANDLING]}, JSON),
    ("PUT", POSITIONS, {"worker": "w", "positions": [ENTRY_0] * 1001}, JSON),
    ("PUT", POSITIONS, {"worker": "w", "positions": [ENTRY_0, {**ENTRY_0, "snapshot": "AAAA"}]}, JSON),
    ("PUT", POSITIONS, {"worker": "w", "positions": [{**ENTRY_0, "partition": 4096}]}, JSON),
    ("PUT", POSITIONS, {"worker": "w", "positions": [{**ENTRY_0, "worker": "w"}]}, JSON),
    ("PUT", POSITIONS.replace("/g/", "/lastbit.g/"), {"worker": "w", "positions": [ENTRY_0]}, JSON),
    ("POST", APPEND, {"events": [{"id": "e", "type": "batch.opened"}]}, JSON),
    ("POST", APPEND, {"events": [{"id": "batch:1:opened", "type": "t"}]}, JSON),
    ("POST", APPEND, {"events": [EVENT], "fence": {"group": "g", "partition": 0, "worker": "w", "epoch": 1}}, JSON),
]


@mutant(
    "a-page-of-another-site-may-open-a-batch",
    "api.fast_path.verbs:RouteVerb.exchange",
    "head.names_site or number >= INTEGER_LIMIT or (head.length and not bodies.is_json(head.content_type))",
    "number >= INTEGER_LIMIT or (head.length and not bodies.is_json(head.content_type))",
)
@pytest.mark.parametrize(
    ("case", "is_fast"), [*((case, True) for case in FAST), *((case, False) for case in ORDINARY)], ids=str
)
def test_both_paths_give_the_same_response(
    service_: ServiceProcess, case: tuple[str, str, Any, str], is_fast: bool
) -> None:
    """Each is asked about a new batch of its own."""
    method, path, body, headers = case
    responses = []
    for ordinary in (False, True):
        _, _, batch_document = ask(service_.port, request("POST", OPEN, {"items": 1}))
        batch = batch_document["id"]
        text = json.dumps(body) if body is not None and not isinstance(body, bytes) else body
        own_body = text.replace("{b}", str(batch)).encode() if isinstance(text, str) else text
        message = request(method, path.replace("{b}", str(batch)), own_body, headers)
        status, received, document = ask(service_.port, message, ordinary=ordinary)
        if not ordinary:
            assert took_the_fast_path(received) is is_fast
        assert received.pop("x-request-id") == "mine" or "mine" not in headers
        ids = {batch: "B"} | ({document["id"]: "NEW"} if path.partition("?")[0] == OPEN and status == 201 else {})
        facts = {name: value for name, value in received.items() if name not in CHANGING}
        responses.append((status, without_numbers(facts, ids), without_numbers(document, ids)))
    assert responses[0] == responses[1]


def test_both_paths_give_the_same_pages(service_: ServiceProcess) -> None:
    """Also with a position that the feed hasn't reached."""
    events = [{"id": f"page:{number}", "type": "t", "key": "ü", "data": {"n": number}} for number in range(300)]
    _, _, appended = ask(service_.port, request("POST", APPEND, {"events": events}))
    last = appended["events"][-1]["position"]
    for query, is_fast in (
        (str(last - 300), True),
        (f"{last - 300}&limit=128", True),
        (f"{last - 300}&limit=129", False),
        (f"{last - 3}&limit=7", True),
        (str(last), True),
        (str(last + 1), True),
    ):
        (_, headers, fast), (_, _, ordinary) = (
            ask(service_.port, request("GET", PAGE + query), ordinary=ordinary) for ordinary in (False, True)
        )
        assert took_the_fast_path(headers) is is_fast
        fast.pop("request_id", None), ordinary.pop("request_id", None)
        assert fast == ordinary
        if "events" in fast:
            assert [event["id"] for event in fast["events"]] == [
                f"page:{event['position'] - last + 299}" for event in fast["events"]
            ]


def test_both_paths_give_the_same_polls(service_: ServiceProcess) -> None:
    """With and without events, with all filters, beyond the feed's end."""
    events = [{"id": f"poll:{number}", "type": f"t{number % 2}"} for number in range(10)]
    _, _, appended = ask(service_.port, request("POST", APPEND, {"events": events}))
    first, last = (appended["events"][place]["position"] for place in (0, -1))
    for query, is_fast, expected in (
        (f"{first - 1}&limit=2&wait=5", True, ["poll:0", "poll:1"]),
        (f"{first - 1}&wait=30.0", True, [f"poll:{number}" for number in range(10)]),
        (f"{first - 1}&type=t1&type=batch.opened&limit=2&wait=5", True, ["poll:1", "poll:3"]),
        ("0&batch=7000001&wait=5", True, ["batch:7000001:opened"]),
        (f"{last}&wait=0.01", True, []),
        ("0&batch=7000001&type=t1&wait=0.01", True, []),
        (f"{last + 1}&wait=5", True, None),
        (f"{2**53 - 1}&wait=5", True, None),
        (f"{2**53}&wait=5", False, None),
        (f"{first - 1}&limit=2&wait=0", False, ["poll:0", "poll:1"]),
    ):
        (status, headers, fast), (_, _, ordinary) = (
            ask(service_.port, request("GET", PAGE + query), ordinary=ordinary) for ordinary in (False, True)
        )
        assert took_the_fast_path(headers) is is_fast
        assert status == (422 if expected is None else 200)
        fast.pop("request_id", None), ordinary.pop("request_id", None)
        assert fast == ordinary
        assert [event["id"] for event in fast.get("events", ())] == (expected or [])


def test_requests_behind_a_poll_wait_for_it(service_: ServiceProcess) -> None:
    """The event that ends the poll is appended by another client. One that leaves while it polls disturbs nobody."""
    _, _, page = ask(service_.port, request("GET", PAGE + "0&limit=1"))
    poll = request("GET", f"{PAGE}{page['last']}&type=wanted&wait=30")
    gone, wire = Wire(service_.port), Wire(service_.port)
    try:
        gone.send(poll)
        wire.send(poll + request("GET", PAGE + "0&limit=1"))
        gone.close()
        for name in ("unwanted", "wanted"):
            ask(service_.port, request("POST", APPEND, {"events": [{"id": f"poll:{name}", "type": name}]}))
        answers = [wire.answer()[2] for _ in range(2)]
    finally:
        wire.close()
    assert [[event["id"] for event in answer["events"]] for answer in answers] == [
        ["poll:wanted"],
        ["batch:7000001:opened"],
    ]


def test_a_repeat_on_either_path_is_replayed(service_: ServiceProcess) -> None:
    """The paths share their keys."""
    documents = []
    for place, ordinary in enumerate((False, True, False)):
        message = request("POST", OPEN, {"items": 7}, JSON + "Idempotency-Key: shared\r\n")
        status, headers, document = ask(service_.port, message, ordinary=ordinary)
        assert status == 201
        assert headers.get("idempotency-replayed") == ("true" if place else None)
        documents.append(document)
    assert documents[0] == documents[1] == documents[2]


def test_requests_that_arrive_together_are_answered_in_their_order(service_: ServiceProcess) -> None:
    """The later ones wait, whichever path each of them takes."""
    _, _, document = ask(service_.port, request("POST", OPEN, {}))
    batch = document["id"]
    extend = f"/v1/batches/{batch}/items"
    wire = Wire(service_.port)
    try:
        wire.send(
            request("POST", extend, {"count": 1})
            + request("POST", extend, {"count": "many"})
            + request("POST", extend, {"count": 2})
            + request("GET", f"/v1/batches/{batch}")
        )
        answers = [wire.answer() for _ in range(4)]
    finally:
        wire.close()
    assert [status for status, _, _ in answers] == [201, 422, 201, 200]
    assert [answers[0][2]["items"], answers[2][2]["items"], answers[3][2]["items"]] == [1, 3, 3]


def test_a_request_whose_body_comes_slowly_is_answered(service_: ServiceProcess) -> None:
    """In many pieces, valid and invalid: the second one is handed to the ordinary path once it is complete."""
    for body, expected in (({"items": 3}, 201), ({"items": "3"}, 422)):
        wire = Wire(service_.port)
        try:
            wire.send(*(bytes([byte]) for byte in request("POST", OPEN, body)))
            status, _, document = wire.answer()
        finally:
            wire.close()
        assert status == expected, document
