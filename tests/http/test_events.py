"""The feed over HTTP: appending, reading, waiting, following, and invalid requests."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from api.routes import fields
from core import feed
from core.storage import schema, tables
from core.storage.database import Database
from tests.http.test_batches import ack, code, open_batch
from tests.support import templates
from tests.support.servers import ROOT, running_service

MANY = 400


def end(http: httpx.Client) -> int:
    """The feed's last position."""
    last: int = http.get("/v1/events?limit=1").json()["last"]
    return last


def append(http: httpx.Client, *events: dict[str, Any]) -> list[dict[str, Any]]:
    response = http.post("/v1/events", json={"events": list(events)})
    assert response.status_code == 200, response.text
    reply: list[dict[str, Any]] = response.json()["events"]
    return reply


def new(type: str = "card.charged", **extra: Any) -> dict[str, Any]:
    return {"id": uuid.uuid4().hex, "type": type, **extra}


def read(http: httpx.Client, **params: Any) -> dict[str, Any]:
    response = http.get("/v1/events", params=params)
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    return page


@contextlib.contextmanager
def stream(http: httpx.Client, resume: int | None = None, **params: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Its events, once it is open: by then it has answered."""
    headers = {} if resume is None else {"Last-Event-ID": str(resume)}
    with http.stream("GET", "/v1/events/stream", params=params, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        assert next(lines) == "retry: 1000"
        assert next(lines) == ""

        def messages() -> Iterator[dict[str, Any]]:
            id = None
            for line in lines:
                name, _, value = line.partition(": ")
                if name == "id":
                    id = int(value)
                elif name == "data":
                    event = json.loads(value)
                    assert event["position"] == id
                    yield event

        yield messages()


# -- appending and reading


def test_events_are_read_as_they_were_appended(http: httpx.Client) -> None:
    """With any JSON as data, in the order of the call, at consecutive positions."""
    before = end(http)
    data = [None, 0, "ü\u2028\0\n", [1, {"deep": [True, None]}], {}, 2**60, "😀"]
    events = [new(data=entry, key=f"order-{place} ü") for place, entry in enumerate(data)]
    reply = append(http, *events)
    assert reply == [
        {"id": event["id"], "position": before + place, "repeated": False} for place, event in enumerate(events, 1)
    ]
    page = read(http, after=before)
    assert (page["next"], page["last"]) == (before + len(data), before + len(data))
    for place, (event, document) in enumerate(zip(events, page["events"], strict=True), 1):
        assert list(document) == ["position", "id", "type", "batch", "key", "data", "at"]
        assert document["position"] == before + place
        assert (document["id"], document["type"], document["key"], document["data"], document["batch"]) == (
            *(event["id"], "card.charged", event["key"], event["data"]),
            None,
        )
        assert document["at"].endswith("Z")


def test_a_repeated_append_is_answered_with_the_first_position(http: httpx.Client) -> None:
    """Also with other content, and within one call; the call's other events are appended."""
    first, second = new(data=1), new()
    (appended_at,) = append(http, first)
    before = end(http)
    answers = append(http, {**first, "data": 2, "type": "other"}, second, second)
    assert answers == [
        {"id": first["id"], "position": appended_at["position"], "repeated": True},
        {"id": second["id"], "position": before + 1, "repeated": False},
        {"id": second["id"], "position": before + 1, "repeated": True},
    ]
    page = read(http, after=appended_at["position"] - 1)
    assert [(event["id"], event["data"]) for event in page["events"]] == [(first["id"], 1), (second["id"], None)]
    assert append(http) == []


def test_every_transition_of_a_batch_is_an_event(http: httpx.Client) -> None:
    """Once, with the batch's key, labels and counts; there are no other events."""
    batch = open_batch(http, key="nightly", labels={"team": "search"}, items=2)["id"]
    http.post(f"/v1/batches/{batch}/items", json={"count": 1})
    http.post(f"/v1/batches/{batch}/seal")
    http.post(f"/v1/batches/{batch}/seal")
    ack(http, f"{batch}:0:0")
    http.post("/v1/failures", json={"items": [f"{batch}:0:1", f"{batch}:0:2"]})
    ack(http, f"{batch}:0:1", f"{batch}:0:2")
    ack(http, f"{batch}:0:2")
    events = read(http, batch=batch)["events"]
    assert [event["type"] for event in events] == [
        *("batch.opened", "batch.sealed", "batch.completed", "batch.succeeded")
    ]
    assert [event["id"] for event in events] == [
        f"batch:{batch}:{name}" for name in ("opened", "sealed", "completed", "succeeded")
    ]
    assert {(event["batch"], event["key"]) for event in events} == {(batch, "nightly")}
    assert [(event["data"]["acked"], event["data"]["failed"]) for event in events] == [(0, 0), (0, 0), (1, 2), (3, 0)]
    assert events[0]["data"]["labels"] == {"team": "search"}


def test_filters_by_type_and_batch_continue_after_events_that_do_not_match(http: httpx.Client) -> None:
    """Several types are alternatives; `next` is after every event that was checked, whether or not it matched."""
    before = end(http)
    batch_ids = [open_batch(http, items=1, sealed=True)["id"] for _ in range(2)]
    append(http, new("a.b"), new("c.d"), new("a.bc"))
    for batch in batch_ids:
        ack(http, f"{batch}:0:0")
    last = end(http)

    def types(**params: Any) -> list[str]:
        page = read(http, after=before, **params)
        assert page["next"] == last
        return [event["type"] for event in page["events"]]

    assert types(type="a.b") == ["a.b"]
    assert types(type=["a.b", "c.d", "batch.completed"]) == ["a.b", "c.d", "batch.completed", "batch.completed"]
    assert types(batch=batch_ids[0]) == [f"batch.{name}" for name in ("opened", "sealed", "completed", "succeeded")]
    assert types(batch=batch_ids[1], type="batch.sealed") == ["batch.sealed"]
    assert types(type="A.B") == types(type="a.b ") == types(type="none") == []
    # A full page ends at its last event.
    first = read(http, after=before, type="batch.completed", limit=1)
    second = read(http, after=first["next"], type="batch.completed", limit=1)
    assert [page["events"][0]["batch"] for page in (first, second)] == batch_ids
    assert first["next"] == first["events"][0]["position"] < last


def test_consecutive_pages_have_no_gap_and_no_overlap(http: httpx.Client) -> None:
    """Read one by one or in pages of any size, the feed is the same from 1 to the end."""
    append(http, *[new() for _ in range(20)])
    positions = [event["position"] for limit in (1000,) for event in read(http, limit=limit)["events"]]
    assert positions == list(range(1, len(positions) + 1))
    result: list[int] = []
    after = 0
    while after < positions[-1]:
        page = read(http, after=after, limit=7)
        result += [event["position"] for event in page["events"]]
        after = page["next"]
    assert result == positions
    assert read(http, after=after) == {"events": [], "next": after, "last": after}


# -- bad input


BAD_EVENTS: list[tuple[Any, str]] = [
    ({"type": "a"}, "body.events[1].id"),
    ({"id": "", "type": "a"}, "body.events[1].id"),
    ({"id": None, "type": "a"}, "body.events[1].id"),
    ({"id": 7, "type": "a"}, "body.events[1].id"),
    ({"id": "two words", "type": "a"}, "body.events[1].id"),
    ({"id": "ü", "type": "a"}, "body.events[1].id"),
    ({"id": "x" * 256, "type": "a"}, "body.events[1].id"),
    ({"id": "x\n", "type": "a"}, "body.events[1].id"),
    ({"id": "batch:7:completed", "type": "a"}, "body.events[1].id"),
    ({"id": "batch:", "type": "a"}, "body.events[1].id"),
    ({"id": "x"}, "body.events[1].type"),
    ({"id": "x", "type": ""}, "body.events[1].type"),
    ({"id": "x", "type": "batch.completed"}, "body.events[1].type"),
    ({"id": "x", "type": "batch.mine"}, "body.events[1].type"),
    ({"id": "x", "type": "a" * 256}, "body.events[1].type"),
    ({"id": "x", "type": "a", "key": "k" * 256}, "body.events[1].key"),
    ({"id": "x", "type": "a", "key": 7}, "body.events[1].key"),
    ({"id": "x", "type": "a", "data": "x" * 65_535}, "body.events[1].data"),
    ({"id": "x", "type": "a", "data": "ü" * 32_768}, "body.events[1].data"),
    ({"id": "x", "type": "a", "position": 1}, "body.events[1].position"),
    ({"id": "x", "type": "a", "batch": 7}, "body.events[1].batch"),
    ("x", "body.events[1]"),
    (None, "body.events[1]"),
]


@pytest.mark.parametrize(("event", "place"), BAD_EVENTS, ids=[str(bad[0])[:50] for bad in BAD_EVENTS])
def test_a_bad_event_is_named_and_rejects_the_whole_call(sqlite_http: httpx.Client, event: Any, place: str) -> None:
    """Reserved names, missing, wide or unknown fields; none of the other events is appended."""
    before = end(sqlite_http)
    response = sqlite_http.post("/v1/events", json={"events": [new(), event]})
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == place
    assert end(sqlite_http) == before


@pytest.mark.parametrize(
    "data",
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "[1e999]", '"\\ud800"', '{"\\udfff": 1}'),
        *("[" * depth + "]" * depth for depth in (900, 10_000, 30_000)),
    ],
    ids=lambda text: text[:12] + str(len(text)),
)
def test_data_that_some_parsers_refuse_is_refused(sqlite_http: httpx.Client, data: str) -> None:
    """It would make the feed unreadable for every client; deep JSON is either refused or returned unchanged."""
    before = end(sqlite_http)
    body = '{"events": [{"id": "' + uuid.uuid4().hex + '", "type": "a", "data": ' + data + "}]}"
    response = sqlite_http.post("/v1/events", content=body, headers={"Content-Type": "application/json"})
    if data.startswith("[[") and response.status_code == 200:
        assert data in sqlite_http.get("/v1/events", params={"after": before}).text
        return
    assert code(response) == (422, "invalid_request")
    assert read(sqlite_http, after=before)["events"] == []


def test_data_of_the_documented_size_is_accepted(http: httpx.Client) -> None:
    """65,536 bytes of JSON."""
    before = end(http)
    append(http, new(data="x" * 65_534))
    assert len(read(http, after=before)["events"][0]["data"]) == 65_534


@pytest.mark.parametrize(
    ("body", "status", "place"),
    [
        ({}, 422, "body.events"),
        ({"events": None}, 422, "body.events"),
        ({"events": {}}, 422, "body.events"),
        ([], 422, "body"),
        ({"events": [], "more": 1}, 422, "body.more"),
        ({"events": [{"id": str(n), "type": "a"} for n in range(1001)]}, 422, "body.events"),
    ],
    ids=["none", "null", "object", "list", "unknown", "1001"],
)
def test_a_bad_call_is_refused(sqlite_http: httpx.Client, body: Any, status: int, place: str) -> None:
    """With the location of the error."""
    response = sqlite_http.post("/v1/events", json=body)
    assert response.status_code == status
    assert response.json()["errors"][0]["place"] == place


@pytest.mark.parametrize(
    ("query", "place"),
    [
        *((f"wait={value}", "query.wait") for value in ("-1", "1000000000", "60.1", "x", "nan", "inf", "", "1_0")),
        *((f"limit={value}", "query.limit") for value in ("0", "-1", "1001", "1.5", "x", "")),
        *(
            (f"after={value}", "query.after")
            for value in ("-1", "x", "1.0", "01", "%201", "9007199254740992", "9" * 30)
        ),
        *((f"batch={value}", "query.batch") for value in ("-1", "x", "07")),
        ("after=9007199254740991", "query.after"),
        ("after=9007199254740991&wait=60", "query.after"),
    ],
)
def test_a_bad_query_is_named(sqlite_http: httpx.Client, query: str, place: str) -> None:
    """At once; also a position beyond the feed's end."""
    response = sqlite_http.get(f"/v1/events?{query}")
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == place
    if place in ("query.after", "query.batch") and "wait" not in query:
        response = sqlite_http.get(f"/v1/events/stream?{query}")
        assert code(response) == (422, "invalid_request")
        assert response.json()["errors"][0]["place"] == place


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "01", "9007199254740991", "9007199254740992", "batch:7:completed"])
def test_a_bad_last_event_id_is_named(sqlite_http: httpx.Client, value: str) -> None:
    """Whether it isn't a number or is beyond the feed's end."""
    response = sqlite_http.get("/v1/events/stream", headers={"Last-Event-ID": value})
    assert code(response) == (422, "invalid_request")
    assert response.json()["errors"][0]["place"] == "header Last-Event-ID"


def test_trimmed_positions_are_gone_and_not_a_silent_gap(database_url: str) -> None:
    """A position below is a 410 for a reader, a waiter and a stream; without a position they start with the kept
    events."""
    with Database(database_url) as database:
        schema.migrate(database)
        with running_service(database_url) as running, httpx.Client(base_url=running.url, timeout=70) as http:
            append(http, *[new() for _ in range(5)])
            assert feed.trim(database, timedelta(0)) == 5
            assert read(http) == {"events": [], "next": 5, "last": 5}
            append(http, new())
            for after in range(5):
                for response in (
                    http.get(f"/v1/events?after={after}"),
                    http.get(f"/v1/events?after={after}&wait=60"),
                    http.get(f"/v1/events/stream?after={after}"),
                    http.get("/v1/events/stream", headers={"Last-Event-ID": str(after)}),
                ):
                    assert code(response) == (410, "position_trimmed")
                    assert "trimmed up to 5" in response.json()["detail"]
            assert [event["position"] for event in read(http)["events"]] == [6]
            assert read(http, after=5) == read(http)
            with stream(http, resume=5) as messages:
                assert next(messages)["position"] == 6


# -- waiting


def behind(http: httpx.Client, ask: Callable[[httpx.Client], httpx.Response], react: Callable[[], object]) -> Any:
    """The answer to `ask`, where `react` runs once the request is under way."""
    sending = threading.Event()

    def asking() -> httpx.Response:
        hooks: Any = {"request": [lambda _: sending.set()]}
        with httpx.Client(base_url=http.base_url, timeout=70, event_hooks=hooks) as waiter:
            return ask(waiter)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asking)
        assert sending.wait(30)
        assert http.get("/healthz").status_code == 200  # a round trip after the waiter's request
        react()
        return waiting.result(70).json()


def test_a_long_poll_is_woken_by_a_commit(http: httpx.Client) -> None:
    """At once, repeatedly, by events that it asked for and by no others."""
    batch = open_batch(http, items=1)["id"]
    start = time.monotonic()
    for _ in range(10):
        after = end(http)
        page = behind(
            http,
            lambda http_client, position=after: http_client.get(f"/v1/events?after={position}&wait=60"),
            lambda: append(http, new()),
        )
        assert [event["position"] for event in page["events"]] == [after + 1]
        assert page["next"] == after + 1
    after = end(http)

    def noise_then_seal() -> None:
        append(http, new(), new("batchless"))
        http.post(f"/v1/batches/{batch}/seal")

    page = behind(
        http, lambda http_client: http_client.get(f"/v1/events?after={after}&wait=60&batch={batch}"), noise_then_seal
    )
    assert [event["id"] for event in page["events"]] == [f"batch:{batch}:sealed"]
    # A poll that waited for its time-out would have taken longer.
    assert time.monotonic() - start < 55


def test_a_long_poll_ends_with_its_time(http: httpx.Client) -> None:
    """With no events, and the position up to which none matched."""
    after = end(http)
    page = behind(
        http,
        lambda http_client: http_client.get(f"/v1/events?after={after}&wait=0.5&type=none"),
        lambda: append(http, new(), new()),
    )
    assert page["events"] == []
    assert after <= page["next"] <= after + 2
    assert read(http, after=page["next"], type="none")["events"] == []


def test_a_long_poll_and_a_stream_get_events_of_another_process(mariadb_url: str) -> None:
    """Two services on one database: the shared poll of one finds the other's events."""
    with Database(mariadb_url) as database:
        schema.migrate(database)
    with (
        running_service(mariadb_url) as service,
        running_service(mariadb_url) as other,
        httpx.Client(base_url=service.url, timeout=70) as local,
        httpx.Client(base_url=other.url, timeout=70) as remote,
        stream(local) as messages,
    ):
        start = time.monotonic()
        for position in range(1, 6):
            page = behind(
                local,
                lambda http_client, at=position: http_client.get(f"/v1/events?after={at - 1}&wait=60"),
                lambda: append(remote, new()),
            )
            assert [event["position"] for event in page["events"]] == [position]
            assert next(messages)["position"] == position
        assert time.monotonic() - start < 55


# -- following


def test_a_stream_that_breaks_resumes_without_loss_or_repeat(http: httpx.Client) -> None:
    """By Last-Event-ID, while a writer appends; it may break anywhere."""
    start = end(http)
    ids = [f"{uuid.uuid4().hex}-{number}" for number in range(MANY)]

    def write() -> None:
        with httpx.Client(base_url=http.base_url, timeout=70) as writer:
            for number in range(0, MANY, 4):
                append(writer, *({"id": id, "type": "step"} for id in ids[number : number + 4]))

    received: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        connections = 0
        while len(received) < MANY:
            connections += 1
            resume = received[-1]["position"] if received else start
            with stream(http, resume) as messages:
                for event, _ in zip(messages, range(1 + 13 * connections % 50), strict=False):
                    received.append(event)
                    if len(received) == MANY:
                        break
        writing.result(60)
    assert connections > 5
    assert [event["position"] for event in received] == list(range(start + 1, start + MANY + 1))
    assert [event["id"] for event in received] == ids


def test_a_stream_is_filtered_by_type_and_batch(http: httpx.Client) -> None:
    """By type and batch, as the page does; from the feed's end if no position is given."""
    batch = open_batch(http, items=1)["id"]
    with (
        stream(http) as all_events,
        stream(http, type=["batch.sealed", "mine"]) as by_type,
        stream(http, batch=batch) as by_batch,
        stream(http, after=0, batch=batch) as from_the_start,
    ):
        after = end(http)
        append(http, new("mine"), new("other"))
        http.post(f"/v1/batches/{batch}/seal")
        last = end(http)
        page = read(http, after=after)["events"]
        assert [next(all_events) for _ in range(last - after)] == page
        assert [next(by_type)["type"] for _ in range(2)] == ["mine", "batch.sealed"]
        assert next(by_batch)["type"] == "batch.sealed"
        assert [next(from_the_start)["type"] for _ in range(2)] == ["batch.opened", "batch.sealed"]


def test_last_event_id_comes_before_after(http: httpx.Client) -> None:
    """A browser that reconnects repeats the address, with the original `after`."""
    first, second = append(http, new(), new())
    with stream(http, resume=first["position"], after=0) as messages:
        assert next(messages)["position"] == second["position"]


def test_a_stop_ends_streams_and_long_polls_at_once(sqlite_url: str) -> None:
    """SIGTERM: a stream ends properly, a poll gets an empty answer, and the process waits for neither."""
    with (
        running_service(sqlite_url) as running,
        httpx.Client(base_url=running.url, timeout=70) as http,
        ThreadPoolExecutor(6) as pool,
    ):
        sending = threading.Semaphore(0)

        def poll() -> Any:
            hooks: Any = {"request": [lambda _: sending.release()]}
            with httpx.Client(base_url=running.url, timeout=70, event_hooks=hooks) as waiter:
                return waiter.get("/v1/events?wait=60").json()

        def follow() -> list[Any]:
            with httpx.Client(base_url=running.url, timeout=70) as follower, stream(follower) as messages:
                sending.release()
                return list(messages)

        polls = [pool.submit(poll) for _ in range(3)]
        streams = [pool.submit(follow) for _ in range(3)]
        for _ in range(6):
            assert sending.acquire(timeout=30)
        assert http.get("/healthz").status_code == 200
        http.close()
        start = time.monotonic()
        assert running.stop(signal.SIGTERM) == -signal.SIGTERM
        # Requests under way have 15 s to end.
        assert time.monotonic() - start < 10
        assert [entry.result(10) for entry in polls] == [{"events": [], "next": 0, "last": 0}] * 3
        assert [entry.result(10) for entry in streams] == [[]] * 3


def test_a_page_is_bounded_in_bytes_and_no_follower_misses_an_event(http: httpx.Client) -> None:
    """When paging, when waiting, and in a stream, including where the stream reads events that are ready."""
    begin = end(http)
    with stream(http, after=begin) as events:
        sending: list[str] = []
        for _ in range(2):
            part = [new(data="x" * 65_000) for _ in range(100)]
            append(http, *part)
            sending += [event["id"] for event in part]
        assert [next(events)["id"] for _ in sending] == sending
    with stream(http, after=begin) as events:
        assert [next(events)["id"] for _ in sending] == sending
    for wait in (0, 5):
        result, after, pages = [], begin, 0
        while after < begin + len(sending):
            response = http.get("/v1/events", params={"after": after, "limit": 1000, "wait": wait})
            assert len(response.content) < 1.1 * 2**20
            result += [event["id"] for event in response.json()["events"]]
            after, pages = response.json()["next"], pages + 1
        assert result == sending
        assert pages == 13  # of 16 events each


def test_a_rare_event_is_found_page_by_page_or_by_one_wait(sqlite_url: str) -> None:
    """A page with a filter ends after 20,000 positions, and `next` tells where. A long poll and a stream read on. The
    same holds for the commands of processes."""
    with Database(sqlite_url) as database:
        templates.migrate(database)
        now = database.read(tables.clock)
        event = {"event_id": "rare", "type": "rare", "position": 45_000, "event_key": "rare-1", "appended_at": now}
        command = {"command_id": "rare", "type": "rare", "position": 45_000, "created_at": now}

        def fill(tx: Connection) -> None:  # other events need not be there, as positions are examined
            tx.execute(sa.insert(tables.feed).values(event))
            tx.execute(sa.insert(tables.outbox).values(**command, name="p", instance="i", step="s"))
            tx.execute(sa.update(tables.feed_head).values(position=50_000))

        database.write(fill)
    with running_service(sqlite_url) as running, httpx.Client(base_url=running.url, timeout=70) as http:
        for path, name in (("/v1/events", "events"), ("/v1/commands", "commands")):
            pages = []
            after = 0
            while after < 50_000:
                page = http.get(path, params={"type": "rare", "after": after}).json()
                pages.append((len(page[name]), page["next"], page["last"]))
                after = page["next"]
            assert pages == [(0, 20_000, 50_000), (0, 40_000, 50_000), (1, 50_000, 50_000)]
            for wait in (
                {"type": "rare", "wait": 60},
                {"type": "rare", "wait": 60, "after": 0},
                {"type": ["rare", "x/y"], "wait": 60, "after": 0},  # not on the fast path
            ):
                page = http.get(path, params=wait).json()
                assert [found["id"] for found in page[name]] == ["rare"]
        with http.stream("GET", "/v1/events/stream", params={"type": "rare", "after": 0}) as stream:
            assert next(line for line in stream.iter_lines() if line.startswith("id:")) == "id: 45000"


@pytest.mark.parametrize("name", ["batch.complete", "batch.Completed", "batch."])
def test_a_misspelled_type_of_the_services_own_is_refused(sqlite_http: httpx.Client, name: str) -> None:
    """By a read, a stream, a webhook and a callback: nobody can append such an event, so they would wait forever."""
    subscription = {"url": "https://192.0.2.1/", "types": [name]}
    for method, path, content, place in (
        ("GET", "/v1/events", {"params": {"type": ["paid", name]}}, "query.type"),
        ("POST", "/v1/webhooks", {"json": subscription}, "body.types"),
        ("POST", "/v1/batches", {"json": {"callback": subscription}}, "body.callback.types"),
        ("GET", "/v1/events/stream", {"params": {"type": name}}, "query.type"),
    ):
        response = sqlite_http.request(method, path, **content)  # type: ignore[arg-type]
        assert code(response) == (422, "invalid_request")
        (error,) = response.json()["errors"]
        assert error["place"] == place
        assert error["expected"].startswith(f"no event has the type {name!r}: expected one of batch.opened, ")


def test_each_documented_type_is_accepted() -> None:
    """And there is no other."""
    page = (ROOT / "docs/events.md").read_text()
    assert set(re.findall(r"^\| `(batch\.\w+)` \|", page, re.MULTILINE)) == set(fields.BATCH_EVENTS)
    assert fields.of_events([*fields.BATCH_EVENTS, "paid"]) == [*fields.BATCH_EVENTS, "paid"]
